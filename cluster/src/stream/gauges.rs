//! The numbers of one open stream, given back when its halves are dropped.
//!
//! Built with a stream, held by its halves. Gauges reach zero at rest whatever way the stream ended.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use metrics::Gauge;
use starling_ids::Metric;

use super::Context;

/// Counts one stream as open while one of its halves lives.
pub(crate) struct OpenGuard(Gauge);

impl std::fmt::Debug for OpenGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OpenGuard")
    }
}

impl OpenGuard {
    pub(crate) fn new(context: &Context) -> Arc<Self> {
        let name = if context.subscription { Metric::SubscriptionsOpen } else { Metric::StreamsOpen };
        let gauge = metrics::gauge!(name.name());
        gauge.increment(1.0);
        Arc::new(Self(gauge))
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

/// Counts the frames of one sender that were not credited back yet. Subscriptions are not counted.
pub(crate) struct CreditCount {
    gauge: Option<Gauge>,
    outstanding: AtomicI64,
}

impl std::fmt::Debug for CreditCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CreditCount({})", self.outstanding.load(Ordering::Relaxed))
    }
}

impl CreditCount {
    pub(crate) fn new(context: &Context) -> Self {
        let gauge = (!context.subscription).then(|| metrics::gauge!(Metric::StreamCreditsOut.name()));
        Self { gauge, outstanding: AtomicI64::new(0) }
    }

    pub(crate) fn sent(&self) {
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        if let Some(gauge) = &self.gauge {
            gauge.increment(1.0);
        }
    }

    /// Credits that come after the sender has gone were given back by [`Self::sender_gone`] already.
    pub(crate) fn credited(&self, frames: usize) {
        let frames = i64::try_from(frames).unwrap_or(i64::MAX);
        let less = |out: i64| Some((out - frames).max(0));
        let before = self.outstanding.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.give_back(before.unwrap_or(0).min(frames));
    }

    pub(crate) fn sender_gone(&self) {
        self.give_back(self.outstanding.swap(0, Ordering::Relaxed));
    }

    #[allow(clippy::cast_precision_loss)] // at most a window of frames
    fn give_back(&self, frames: i64) {
        if let Some(gauge) = &self.gauge
            && frames > 0
        {
            gauge.decrement(frames as f64);
        }
    }
}

impl Drop for CreditCount {
    fn drop(&mut self) {
        self.sender_gone();
    }
}
