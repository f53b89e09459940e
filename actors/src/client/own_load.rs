//! What this client itself has in flight at each worker: the last resort when no shard answers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use starling_ids::{Incarnation, WorkerId};

type Counts = HashMap<(WorkerId, Incarnation), u32>;

/// Counts by worker and life. Bounds: one entry per worker with a request of ours in flight.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnLoad {
    counts: Arc<Mutex<Counts>>,
}

impl OwnLoad {
    /// Counts a request until the guard is dropped.
    pub(super) fn count(&self, worker: &WorkerId, incarnation: Incarnation) -> OwnGuard {
        let key = (worker.clone(), incarnation);
        *lock(&self.counts).entry(key.clone()).or_default() += 1;
        OwnGuard { counts: self.counts.clone(), key }
    }

    /// Requests of ours in flight there.
    pub(super) fn of(&self, worker: &WorkerId, incarnation: Incarnation) -> u32 {
        lock(&self.counts).get(&(worker.clone(), incarnation)).copied().unwrap_or(0)
    }
}

/// One request in flight.
#[derive(Debug)]
pub(super) struct OwnGuard {
    counts: Arc<Mutex<Counts>>,
    key: (WorkerId, Incarnation),
}

impl Drop for OwnGuard {
    fn drop(&mut self) {
        let mut counts = lock(&self.counts);
        if let Some(count) = counts.get_mut(&self.key) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    #[test]
    fn a_guard_gives_back_what_it_counted_and_empty_rows_go() {
        let own = OwnLoad::default();
        let worker = WorkerId { node: NodeId::new("n").expect("name"), index: 0 };
        let first = own.count(&worker, Incarnation(1));
        let second = own.count(&worker, Incarnation(1));
        assert_eq!(own.of(&worker, Incarnation(1)), 2);
        assert_eq!(own.of(&worker, Incarnation(2)), 0);
        drop((first, second));
        assert!(lock(&own.counts).is_empty());
    }
}
