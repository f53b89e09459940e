//! Who is inside an endpoint: counts requests, lets no more in than agreed, and tells when the last one has left.
//!
//! Called around every handler; one gate for each endpoint, drained by [`super::ServedEndpoint`], and one for all of a
//! node, drained when it leaves. Bounds: `max` requests at a time.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::sync::Notify;

use crate::stream::{Fault, FaultKind};

/// When a refused asker may try again.
const RETRY_AFTER_MS: u64 = 100;

/// The door of one endpoint.
#[derive(Debug)]
pub(super) struct Gate {
    inside: AtomicUsize,
    closed: AtomicBool,
    left: Notify,
    max: usize,
}

/// One request inside. Leaves when dropped.
#[derive(Debug)]
pub(super) struct Pass(Arc<Gate>);

impl Gate {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            inside: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            left: Notify::new(),
            max: max.max(1),
        })
    }

    /// Lets one request in, or says why not.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Pass, Fault> {
        self.enter_from(false)
    }

    /// The same; one from `inside` of the node is let in while it drains, so that what runs can finish.
    pub(super) fn enter_from(self: &Arc<Self>, inside: bool) -> Result<Pass, Fault> {
        // Counted first, then looked at: a drain that begins between the two sees the count or is seen here.
        let before = self.inside.fetch_add(1, Ordering::SeqCst);
        let pass = Pass(self.clone());
        if !inside && self.is_closed() {
            return Err(Fault::new(FaultKind::Draining, "this instance takes nothing new"));
        }
        if before >= self.max {
            let fault = Fault::new(FaultKind::Overloaded, format!("{} requests are under way here", self.max));
            return Err(fault.retry_after_ms(RETRY_AFTER_MS));
        }
        Ok(pass)
    }

    /// Lets nobody in from now on.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Whether it lets nobody in.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Requests inside.
    pub(super) fn inside(&self) -> usize {
        self.inside.load(Ordering::SeqCst)
    }

    /// Resolves when nobody is inside.
    pub(super) async fn empty(&self) {
        loop {
            let left = self.left.notified();
            let mut left = std::pin::pin!(left);
            // Registered before the count is read, so that a leave in between is not missed.
            left.as_mut().enable();
            if self.inside() == 0 {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.0.inside.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_gate_refuses_a_closed_one_drains() {
        let gate = Gate::new(2);
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        assert_eq!(gate.enter().unwrap_err().kind, FaultKind::Overloaded);
        drop(one);
        let three = gate.enter().unwrap();
        gate.close();
        assert_eq!(gate.enter().unwrap_err().kind, FaultKind::Draining);
        let mut empty = Box::pin(gate.empty());
        assert!(futures::poll!(&mut empty).is_pending());
        drop((two, three));
        empty.await;
        assert_eq!(gate.inside(), 0);
    }
}
