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

/// Counts the window bytes that one sender has taken and that were not given back yet. Subscriptions are not counted.
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

    #[allow(clippy::cast_precision_loss)] // a window at most
    pub(crate) fn sent(&self, amount: usize) {
        if let Some(gauge) = &self.gauge {
            self.outstanding.fetch_add(i64::try_from(amount).unwrap_or(i64::MAX), Ordering::Relaxed);
            gauge.increment(amount as f64);
        }
    }

    /// Credits that come after the sender has gone were given back by [`Self::sender_gone`] already.
    pub(crate) fn credited(&self, amount: usize) {
        if self.gauge.is_none() {
            return;
        }
        let amount = i64::try_from(amount).unwrap_or(i64::MAX);
        let less = |out: i64| Some((out - amount).max(0));
        let before = self.outstanding.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.give_back(before.unwrap_or(0).min(amount));
    }

    pub(crate) fn sender_gone(&self) {
        self.give_back(self.outstanding.swap(0, Ordering::Relaxed));
    }

    #[allow(clippy::cast_precision_loss)] // a window at most
    fn give_back(&self, amount: i64) {
        if let Some(gauge) = &self.gauge
            && amount > 0
        {
            gauge.decrement(amount as f64);
        }
    }
}

impl Drop for CreditCount {
    fn drop(&mut self) {
        self.sender_gone();
    }
}
