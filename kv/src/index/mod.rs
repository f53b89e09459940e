//! The prefix index: for a chain of block hashes, how many of its leading blocks each worker holds.
//!
//! Called by the indexer, which owns it: events change it, matches read it. Hashes are chained, so a block stands for
//! all before it, and a walk along the request's chain gives exact depths: a worker's depth ends at the first block it
//! lacks, and comes back when that block does. Never: counts what a worker of an earlier life said.
//! Bounds: `memberships_max` (worker, block) pairs; beyond it the worker that holds most loses its oldest block that no
//! match went through lately. At most 65 535 workers. Below 100 bytes for each pair; what is removed is given back.

mod holders;
mod members;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::HashMap;

use starling_ids::{BlockHash, Incarnation, WorkerId};
use thiserror::Error;

use crate::{
    events::KvEvent,
    hash::{HashKeyed, SetDigest},
};
use holders::{Holders, Slot, ones};
use worker::Worker;

/// Bounds of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// (worker, block) pairs, at least 1.
    pub memberships_max: usize,
}

impl Default for IndexLimits {
    /// 20 million pairs, at most 2 GB.
    fn default() -> Self {
        Self { memberships_max: 20_000_000 }
    }
}

/// What an event changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Pairs added.
    pub added: usize,
    /// Pairs removed by the event.
    pub removed: usize,
    /// Blocks that were there already, or gone already.
    pub unchanged: usize,
    /// Pairs that left because the index was full.
    pub evicted: usize,
}

/// Why something about a worker is refused; nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IndexError {
    /// It was never added, or removed since.
    #[error("worker {0} is not in the index")]
    UnknownWorker(WorkerId),
    /// It comes from a life that has ended.
    #[error("worker {worker} is in incarnation {current}, this is of {given}")]
    StaleIncarnation {
        /// Which worker.
        worker: WorkerId,
        /// The life it comes from.
        given: Incarnation,
        /// The life the index knows.
        current: Incarnation,
    },
    /// It comes from a life that the index has not been told of: add the worker first.
    #[error("worker {worker} is in incarnation {current} here, this is of the later {given}")]
    NewIncarnation {
        /// Which worker.
        worker: WorkerId,
        /// The life it comes from.
        given: Incarnation,
        /// The life the index knows.
        current: Incarnation,
    },
    /// All numbers are taken.
    #[error("the index holds 65535 workers already")]
    TooManyWorkers,
}

/// One worker that holds the beginning of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Which.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Leading blocks it holds without a hole, at least 1.
    pub depth: usize,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex {
    limits: IndexLimits,
    holders: HashMap<BlockHash, Holders, HashKeyed>,
    slots: Vec<Option<Worker>>,
    free: Vec<Slot>,
    by_id: HashMap<WorkerId, Slot>,
    memberships: usize,
}

impl PrefixIndex {
    /// An index of no worker.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        Self {
            limits: IndexLimits { memberships_max: limits.memberships_max.max(1) },
            holders: HashMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            by_id: HashMap::new(),
            memberships: 0,
        }
    }

    /// Makes a worker known, holding nothing. A later life of a known one replaces it; the same life changes nothing.
    pub fn add_worker(&mut self, id: WorkerId, incarnation: Incarnation) -> Result<(), IndexError> {
        if let Some(known) = self.worker(&id) {
            let current = known.incarnation;
            if incarnation == current {
                return Ok(());
            }
            if incarnation < current {
                return Err(IndexError::StaleIncarnation { worker: id, given: incarnation, current });
            }
            self.remove_worker(&id);
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let next = Slot::try_from(self.slots.len()).ok().filter(|slot| *slot < Slot::MAX);
                let next = next.ok_or(IndexError::TooManyWorkers)?;
                self.slots.push(None);
                next
            }
        };
        self.by_id.insert(id.clone(), slot);
        self.slots[usize::from(slot)] = Some(Worker::new(id, incarnation));
        Ok(())
    }

    /// Forgets a worker and all it holds. False when it is not known. What it says later is refused.
    pub fn remove_worker(&mut self, id: &WorkerId) -> bool {
        let Some(slot) = self.by_id.remove(id) else { return false };
        self.clear(slot);
        self.slots[usize::from(slot)] = None;
        self.free.push(slot);
        true
    }

    /// Applies one event of a worker's present life.
    pub fn apply(&mut self, id: &WorkerId, given: Incarnation, event: &KvEvent) -> Result<Applied, IndexError> {
        let slot = self.slot(id, given)?;
        let mut applied = Applied::default();
        match event {
            KvEvent::Stored { blocks, .. } => {
                for hash in blocks {
                    if self.insert(slot, *hash) { applied.added += 1 } else { applied.unchanged += 1 }
                }
                applied.evicted = self.enforce_limit();
                self.give_memory_back();
            }
            KvEvent::Removed { blocks } => {
                for hash in blocks {
                    if self.remove(slot, *hash) { applied.removed += 1 } else { applied.unchanged += 1 }
                }
                self.tidy(slot);
            }
            KvEvent::Cleared => applied.removed = self.clear(slot),
        }
        Ok(applied)
    }

    /// Replaces what a worker holds by its inventory: (hash before it, hash), in any order.
    pub fn reset(
        &mut self,
        id: &WorkerId,
        given: Incarnation,
        inventory: &[(Option<BlockHash>, BlockHash)],
    ) -> Result<Applied, IndexError> {
        let slot = self.slot(id, given)?;
        let mut applied = Applied { removed: self.clear(slot), ..Applied::default() };
        for (_, hash) in inventory {
            if self.insert(slot, *hash) { applied.added += 1 } else { applied.unchanged += 1 }
        }
        applied.evicted = self.enforce_limit();
        self.give_memory_back();
        Ok(applied)
    }

    /// The workers that hold most of the chain's beginning, at most `best` of them: deepest first, then by name.
    #[must_use]
    pub fn matches(&self, chain: &[BlockHash], best: usize) -> Vec<Match> {
        let mut depths: Vec<(usize, &Worker)> = Vec::new();
        self.walk(chain, |slot, depth| {
            if let Some(worker) = self.slots.get(usize::from(slot)).and_then(Option::as_ref) {
                depths.push((depth, worker));
            }
        });
        depths.sort_unstable_by(|(depth_a, a), (depth_b, b)| depth_b.cmp(depth_a).then_with(|| a.id.cmp(&b.id)));
        depths.truncate(best);
        let found = |(depth, worker): (usize, &Worker)| Match {
            worker: worker.id.clone(),
            incarnation: worker.incarnation,
            depth,
        };
        depths.into_iter().map(found).collect()
    }

    /// Leading blocks of the chain that this worker holds without a hole.
    #[must_use]
    pub fn depth(&self, id: &WorkerId, chain: &[BlockHash]) -> usize {
        let Some(slot) = self.by_id.get(id) else { return 0 };
        chain.iter().take_while(|hash| self.holders.get(hash).is_some_and(|holders| holders.contains(*slot))).count()
    }

    /// Calls back once for each worker that holds the first block, with its depth.
    fn walk(&self, chain: &[BlockHash], mut found: impl FnMut(Slot, usize)) {
        let words = self.slots.len().div_ceil(64);
        let (mut alive, mut mask) = (vec![u64::MAX; words], vec![0u64; words]);
        for (depth, hash) in chain.iter().enumerate() {
            match self.holders.get(hash) {
                Some(holders) => {
                    holders.touch();
                    holders.write_mask(&mut mask);
                }
                None => mask.fill(0),
            }
            let mut any = 0;
            for (at, (alive, mask)) in alive.iter_mut().zip(&mask).enumerate() {
                let left = *alive & !mask;
                *alive &= mask;
                any |= *alive;
                if depth > 0 && left != 0 {
                    ones(&[left]).for_each(|bit| found((at * 64) as Slot + bit, depth));
                }
            }
            if any == 0 {
                return;
            }
        }
        if !chain.is_empty() {
            ones(&alive).for_each(|slot| found(slot, chain.len()));
        }
    }

    /// Blocks a worker holds; 0 for an unknown one.
    #[must_use]
    pub fn blocks(&self, id: &WorkerId) -> usize {
        self.worker(id).map_or(0, |worker| worker.blocks)
    }

    /// Digest of what a worker holds, to compare with [`crate::pool::BlockPool::digest`]; that of nothing for an unknown one.
    #[must_use]
    pub fn digest(&self, id: &WorkerId) -> SetDigest {
        self.worker(id).map_or_else(SetDigest::default, |worker| worker.digest)
    }

    /// The life in which a worker is known.
    #[must_use]
    pub fn incarnation(&self, id: &WorkerId) -> Option<Incarnation> {
        self.worker(id).map(|worker| worker.incarnation)
    }

    /// Workers known.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.by_id.len()
    }

    /// (worker, block) pairs.
    #[must_use]
    pub fn memberships(&self) -> usize {
        self.memberships
    }

    /// Memory it holds, in bytes, reckoned from capacities.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let entry = std::mem::size_of::<(BlockHash, Holders)>() + 1;
        let buckets = self.holders.capacity() * 8 / 7;
        let sets: usize = self.holders.values().map(Holders::heap_bytes).sum();
        let orders: usize = self.slots.iter().flatten().map(|worker| worker.order.heap_bytes()).sum();
        buckets * entry + sets + orders + self.slots.capacity() * std::mem::size_of::<Option<Worker>>()
    }

    fn worker(&self, id: &WorkerId) -> Option<&Worker> {
        self.by_id.get(id).and_then(|slot| self.slots.get(usize::from(*slot))?.as_ref())
    }

    fn slot(&self, id: &WorkerId, given: Incarnation) -> Result<Slot, IndexError> {
        let unknown = || IndexError::UnknownWorker(id.clone());
        let slot = *self.by_id.get(id).ok_or_else(unknown)?;
        let current = self.worker(id).ok_or_else(unknown)?.incarnation;
        let worker = id.clone();
        match given.cmp(&current) {
            std::cmp::Ordering::Equal => Ok(slot),
            std::cmp::Ordering::Less => Err(IndexError::StaleIncarnation { worker, given, current }),
            std::cmp::Ordering::Greater => Err(IndexError::NewIncarnation { worker, given, current }),
        }
    }
}
