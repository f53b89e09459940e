//! What this client has seen fail: which workers to leave alone without a shard's word, and how many second tries are left.
//!
//! Called by the generate loop. Shards keep breakers for all their clients; these here count while no shard answers. Bounds: one entry per
//! worker that failed and has not worked since, [`KEPT_MAX`] of them.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use starling_ids::{Incarnation, WorkerId};

use crate::route::{breaker::Breaker, retries::Retries};

/// Workers remembered; more, and it begins anew.
const KEPT_MAX: usize = 1_024;

#[derive(Debug, Default)]
struct Seen {
    breakers: HashMap<(WorkerId, Incarnation), Breaker>,
    retries: Retries,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Failures {
    began: Instant,
    seen: Mutex<Seen>,
}

impl Default for Failures {
    fn default() -> Self {
        Self { began: Instant::now(), seen: Mutex::default() }
    }
}

impl Failures {
    /// Whether a worker may be asked, as far as this client has seen.
    pub(super) fn allows(&self, worker: &WorkerId, incarnation: Incarnation) -> bool {
        let now = self.now();
        let seen = self.lock();
        seen.breakers.get(&(worker.clone(), incarnation)).is_none_or(|breaker| breaker.allows(now))
    }

    /// A worker failed a request before its first token.
    pub(super) fn failed(&self, worker: &WorkerId, incarnation: Incarnation) {
        let now = self.now();
        let mut seen = self.lock();
        if seen.breakers.len() >= KEPT_MAX {
            seen.breakers.clear();
        }
        seen.breakers.entry((worker.clone(), incarnation)).or_default().failed(now);
    }

    /// A worker gave a first token.
    pub(super) fn worked(&self, worker: &WorkerId, incarnation: Incarnation) {
        self.lock().breakers.remove(&(worker.clone(), incarnation));
    }

    /// A request begins.
    pub(super) fn request(&self) {
        let now = self.now();
        self.lock().retries.request(now);
    }

    /// Takes one more try for a request; false when there have been too many.
    pub(super) fn retry(&self) -> bool {
        let now = self.now();
        self.lock().retries.spend(now)
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;
    use crate::route::breaker::FAULTS;

    #[test]
    fn a_new_life_is_not_held_to_the_faults_of_the_last() {
        let failures = Failures::default();
        let worker = WorkerId { node: NodeId::new("n").expect("name"), index: 0 };
        (0..FAULTS).for_each(|_| failures.failed(&worker, Incarnation(1)));
        assert!(!failures.allows(&worker, Incarnation(1)) && failures.allows(&worker, Incarnation(2)));
        failures.worked(&worker, Incarnation(1));
        assert!(failures.allows(&worker, Incarnation(1)) && failures.lock().breakers.is_empty());
    }
}
