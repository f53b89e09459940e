//! How many requests are here, and whether one more may come.
//!
//! A [`Ticket`] is one request from accept to the end of its body: it goes from the handler into the body, and
//! its drop, wherever that happens, gives the permit back and counts the outcome. A ticket dropped
//! without a verdict is a client that left.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::{
    error::HttpFault,
    metrics::{GatewayMetrics, Outcome, Route},
};

/// The counts of one gateway.
#[derive(Debug)]
pub(crate) struct Admission {
    permits: Arc<Semaphore>,
    limit: usize,
    in_flight: watch::Sender<usize>,
    draining: AtomicBool,
    pub(crate) metrics: GatewayMetrics,
}

/// One request in this gateway.
#[derive(Debug)]
pub(crate) struct Ticket {
    admission: Arc<Admission>,
    route: Route,
    permit: Option<OwnedSemaphorePermit>,
    verdict: Option<Outcome>,
    since: Instant,
}

impl Admission {
    /// At most `limit` requests at once.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Arc::new(Semaphore::new(limit)),
            limit,
            in_flight: watch::Sender::new(0),
            draining: AtomicBool::new(false),
            metrics: GatewayMetrics::new(),
        })
    }

    /// Counts a request in. It needs [`Ticket::admit`] before it may use anything.
    pub(crate) fn arrive(self: &Arc<Self>, route: Route) -> Ticket {
        self.in_flight.send_modify(|count| *count += 1);
        self.metrics.in_flight.increment(1.0);
        Ticket { admission: self.clone(), route, permit: None, verdict: None, since: Instant::now() }
    }

    /// From now on nobody is admitted; who is here may finish.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// True after [`Self::drain`].
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Requests here now.
    pub(crate) fn in_flight(&self) -> usize {
        *self.in_flight.borrow()
    }

    /// Waits until no request is here.
    pub(crate) async fn idle(&self) {
        // The sender lives in `self`, so this cannot fail while it is borrowed.
        let _closed = self.in_flight.subscribe().wait_for(|count| *count == 0).await.is_err();
    }

    /// Permits not taken.
    #[cfg(test)]
    pub(crate) fn permits_free(&self) -> usize {
        self.permits.available_permits()
    }
}

impl Ticket {
    /// Takes a permit, or says at once that there is none.
    pub(crate) fn admit(&mut self) -> Result<(), HttpFault> {
        if self.admission.is_draining() {
            return Err(HttpFault::Draining);
        }
        let full = |_| HttpFault::Full { limit: self.admission.limit };
        self.permit = Some(self.admission.permits.clone().try_acquire_owned().map_err(full)?);
        self.admission.metrics.permits.increment(1.0);
        Ok(())
    }

    /// Says how the request ended.
    pub(crate) fn settle(&mut self, outcome: Outcome) {
        self.verdict = Some(outcome);
    }

    /// When it arrived.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// The handles to measure it with.
    pub(crate) fn metrics(&self) -> &GatewayMetrics {
        &self.admission.metrics
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let metrics = &self.admission.metrics;
        if self.permit.take().is_some() {
            metrics.permits.decrement(1.0);
        }
        let outcome = self.verdict.unwrap_or(Outcome::Cancelled);
        if outcome == Outcome::Cancelled {
            metrics.cancelled.increment(1);
        }
        metrics.count(self.route, outcome);
        metrics.in_flight.decrement(1.0);
        self.admission.in_flight.send_modify(|count| *count -= 1);
    }
}
