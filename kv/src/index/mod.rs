//! The prefix index: for a chain of block hashes, how many of its leading blocks each worker holds, and on which tier.
//!
//! Called by the indexer: events change it, look-ups read it, from any thread. Hashes are chained, so a block stands for
//! all before it, and a walk along the request's chain gives exact depths: a worker's depth ends at the first block it
//! lacks, and comes back when that block does. Never: counts what a worker of an earlier life said.
//!
//! Workers are spread over shards of 64 lanes. A shard has one writer at a time, in sections that end within a
//! microsecond or two when a reader comes; readers look inline. Shards share nothing, so as many threads as there are shards
//! write at once, and a look-up asks each shard in turn.
//! Bounds: `memberships_max` (worker, block) pairs; beyond it the worker that holds most loses its oldest blocks that no
//! match went through lately. At most 61,440 ranks. 36 to 65 bytes for a pair that no other worker of the shard shares,
//! 10 to 23 for one that is shared; what is removed is given back.
//! Events are believed to be chains, as their contract says: a worker that sends others can spoil the depths of those chains.

mod blocks;
mod lock;
mod page;
mod place;
mod prefetch;
mod registry;
mod shard;
mod sync;
mod table;
#[cfg(test)]
mod tests;
mod upkeep;
mod walk;

use std::sync::{
    OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicUsize, Ordering},
};

use starling_ids::{BlockHash, Incarnation, WorkerId};
use thiserror::Error;

use crate::{
    events::KvEvent,
    hash::{BucketDigests, SetDigest},
};
use lock::ShortLock;
pub use place::{Cache, Holder, Match, Overlap, Tier};
use registry::Registry;
use shard::{LANES, Retired, Shard, Target};
pub use sync::Bucket;
use table::Print;

/// Shards at most.
const SHARDS_MAX: usize = 1024;
/// Lanes of a shard that workers are given; the others serve while a lane is replaced.
const LANES_GIVEN: usize = 60;
/// Shards that a look-up fetches the beginnings of at once.
const TOGETHER: usize = 8;
/// Upkeep goes as far as after a change of so many blocks.
const UPKEEP: usize = 256;

/// Bounds of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// (worker, block) pairs, at least 1.
    pub memberships_max: usize,
    /// Shards over which the first workers are spread: as many as threads that write. More come when these are full.
    pub shards: usize,
}

impl Default for IndexLimits {
    /// 20 million pairs, at most 1.2 GB, one shard.
    fn default() -> Self {
        Self { memberships_max: 20_000_000, shards: 1 }
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
    /// All lanes are taken.
    #[error("the index holds 61440 ranks already")]
    TooManyWorkers,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex {
    limits: IndexLimits,
    registry: RwLock<Registry>,
    /// The first `used` are there.
    shards: Box<[OnceLock<Box<ShortLock<Shard>>>]>,
    used: AtomicUsize,
    memberships: AtomicUsize,
}

impl PrefixIndex {
    /// An index of no worker.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        let shards = limits.shards.clamp(1, SHARDS_MAX);
        Self {
            limits: IndexLimits { memberships_max: limits.memberships_max.max(1), shards },
            registry: RwLock::default(),
            shards: (0..SHARDS_MAX).map(|_| OnceLock::new()).collect(),
            used: AtomicUsize::new(0),
            memberships: AtomicUsize::new(0),
        }
    }

    /// Makes a worker known, holding nothing. A later life of a known one replaces it; the same life changes nothing.
    pub fn add_worker(&self, id: WorkerId, incarnation: Incarnation) -> Result<(), IndexError> {
        let mut registry = self.registry_mut();
        if let Some(current) = registry.incarnation(&id) {
            if incarnation == current {
                return Ok(());
            }
            if incarnation < current {
                return Err(IndexError::StaleIncarnation { worker: id, given: incarnation, current });
            }
            self.retire_all(&mut registry, &id);
        }
        let holder = self.open_lane(&registry).ok_or(IndexError::TooManyWorkers)?;
        registry.add(id.clone(), incarnation);
        registry.name(&id, 0, holder);
        Ok(())
    }

    /// Forgets a worker and all it holds. False when it is not known. What it says later is refused.
    pub fn remove_worker(&self, id: &WorkerId) -> bool {
        self.retire_all(&mut self.registry_mut(), id)
    }

    /// Forgets every worker.
    pub fn clear(&self) {
        let mut registry = self.registry_mut();
        for id in registry.ids() {
            self.retire_all(&mut registry, &id);
        }
    }

    /// Applies one event of a worker's present life: rank 0, device.
    pub fn apply(&self, id: &WorkerId, given: Incarnation, event: &KvEvent) -> Result<Applied, IndexError> {
        self.apply_in(id, given, Cache::default(), event)
    }

    /// Applies one event of one cache of a worker's present life. A rank becomes known with its first event. An event that
    /// names a lower tier is of that tier of the cache's rank.
    pub fn apply_in(
        &self,
        id: &WorkerId,
        given: Incarnation,
        cache: Cache,
        event: &KvEvent,
    ) -> Result<Applied, IndexError> {
        let below = |tier| Cache { tier, ..cache };
        match event {
            KvEvent::StoredBelow { tier, parent, blocks } => {
                self.apply_stored(id, given, below(*tier), (*parent, blocks))
            }
            KvEvent::RemovedBelow { tier, blocks } => {
                let holder = self.holder(id, given, cache.rank)?;
                self.remove(holder, *tier, blocks).map_err(|Retired| sync::unknown(id))
            }
            KvEvent::ClearedBelow { tier } => self.apply_in(id, given, below(*tier), &KvEvent::Cleared),
            KvEvent::Stored { parent, blocks } => self.apply_stored(id, given, cache, (*parent, blocks)),
            KvEvent::Removed { blocks } => {
                let holder = self.holder(id, given, cache.rank)?;
                self.remove(holder, cache.tier, blocks).map_err(|Retired| sync::unknown(id))
            }
            KvEvent::Cleared => Ok(Applied { added: 0, unchanged: 0, ..self.reset_in(id, given, cache, &[])? }),
        }
    }

    fn apply_stored(
        &self,
        id: &WorkerId,
        given: Incarnation,
        cache: Cache,
        (parent, blocks): (Option<BlockHash>, &[BlockHash]),
    ) -> Result<Applied, IndexError> {
        let holder = self.holder(id, given, cache.rank)?;
        let mut applied = self.store(holder, cache.tier, parent, blocks).map_err(|Retired| sync::unknown(id))?;
        applied.evicted = self.enforce_limit();
        Ok(applied)
    }

    /// Upkeep for an index that is seldom changed: memory of workers that left is given back.
    pub fn tidy(&self) {
        self.cells().for_each(|cell| cell.write().tidy(UPKEEP));
    }

    /// How much of the chain's beginning each rank holds that holds any of it, in no order. `overlaps` is emptied first.
    pub fn overlaps(&self, chain: &[BlockHash], overlaps: &mut Vec<Overlap>) {
        overlaps.clear();
        let used = self.used.load(Ordering::Acquire);
        for (some, cells) in self.shards[..used].chunks(TOGETHER).enumerate() {
            fetch_ahead(cells, chain);
            for (at, cell) in cells.iter().enumerate() {
                let Some(shard) = cell.get().map(|cell| cell.read()) else { continue };
                let base = (some * TOGETHER + at) * LANES;
                shard.walk(chain, u64::MAX, |lane, share| {
                    let holder = Holder { lane: (base + lane) as u32, generation: shard.generations[lane] };
                    let walk::Share { device, reach, host, disk } = share;
                    overlaps.push(Overlap { holder, device, reach, host, disk });
                });
            }
        }
    }

    /// Whose an overlap is; none when it left since.
    #[must_use]
    pub fn who(&self, holder: Holder) -> Option<(WorkerId, Incarnation, u16)> {
        self.registry().who(holder).map(|name| (name.worker.clone(), name.incarnation, name.rank))
    }

    /// The ranks that hold most of the chain's beginning, at most `best` of them: deepest on their device first, then
    /// those that reach farthest, then by name.
    #[must_use]
    pub fn matches(&self, chain: &[BlockHash], best: usize) -> Vec<Match> {
        let mut overlaps = Vec::new();
        self.overlaps(chain, &mut overlaps);
        let registry = self.registry();
        let named = |overlap: Overlap| registry.who(overlap.holder).map(|name| (overlap, name));
        let mut found: Vec<_> = overlaps.into_iter().filter_map(named).collect();
        found.sort_unstable_by(|(a, one), (b, other)| {
            let depths = (b.device, b.reach).cmp(&(a.device, a.reach));
            depths.then_with(|| one.worker.cmp(&other.worker)).then(one.rank.cmp(&other.rank))
        });
        found.truncate(best);
        let full = |(overlap, name): (Overlap, &registry::Name)| Match {
            worker: name.worker.clone(),
            incarnation: name.incarnation,
            rank: name.rank,
            depth: overlap.device as usize,
            reach: overlap.reach as usize,
            host: overlap.host as usize,
            disk: overlap.disk as usize,
        };
        found.into_iter().map(full).collect()
    }

    /// Leading blocks of the chain, which begins with a first block, that this worker holds without a hole on the device
    /// of one of its ranks.
    #[must_use]
    pub fn depth(&self, id: &WorkerId, chain: &[BlockHash]) -> usize {
        let mut deepest = 0;
        for (_, holder) in self.registry().ranks(id) {
            let (shard, target) = at(*holder, Tier::Device);
            let Some(cell) = self.cell(shard) else { continue };
            cell.read().walk(chain, 1 << target.lane, |_, share| deepest = deepest.max(share.device));
        }
        deepest as usize
    }

    /// Blocks that a worker holds on the device of rank 0; 0 for an unknown one.
    #[must_use]
    pub fn blocks(&self, id: &WorkerId) -> usize {
        self.ledger(id, Cache::default(), |ledger| ledger.blocks).unwrap_or(0)
    }

    /// Digest of what a worker holds on the device of rank 0, to compare with [`crate::pool::BlockPool::digest`]; that of
    /// nothing for an unknown one.
    #[must_use]
    pub fn digest(&self, id: &WorkerId) -> SetDigest {
        self.ledger(id, Cache::default(), |ledger| ledger.digests.total()).unwrap_or_default()
    }

    /// Digests of what a cache holds, bucket by bucket; those of nothing for an unknown one.
    #[must_use]
    pub fn digests(&self, id: &WorkerId, cache: Cache) -> BucketDigests {
        self.ledger(id, cache, |ledger| ledger.digests.clone()).unwrap_or_default()
    }

    /// The life in which a worker is known.
    #[must_use]
    pub fn incarnation(&self, id: &WorkerId) -> Option<Incarnation> {
        self.registry().incarnation(id)
    }

    /// Workers known.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.registry().workers()
    }

    /// (rank, block) pairs, on each tier.
    #[must_use]
    pub fn memberships(&self) -> usize {
        // An event is counted when it ends: one that is taken back while it comes is counted out first.
        (self.memberships.load(Ordering::Relaxed) as isize).max(0) as usize
    }

    /// Memory it holds, in bytes, reckoned from capacities.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let shard = |cell: &ShortLock<Shard>| {
            let shard = cell.read();
            let lane = std::mem::size_of::<shard::Lane>() + 3 * BucketDigests::HEAP_BYTES;
            let tables: usize = shard.lanes.iter().map(|lane| lane.table.heap_bytes()).sum();
            let lanes = shard.lanes.len() * lane + tables;
            std::mem::size_of::<Shard>() + shard.blocks.heap_bytes() + lanes + shard.oldest.capacity() * 8
        };
        let cells = self.shards.len() * std::mem::size_of::<OnceLock<Box<ShortLock<Shard>>>>();
        cells + self.registry().heap_bytes() + self.cells().map(shard).sum::<usize>()
    }

    /// Whether everything inside agrees.
    #[cfg(test)]
    fn check(&self) {
        self.cells().for_each(|cell| cell.read().check());
        assert_eq!(self.memberships(), self.cells().map(|cell| cell.read().pairs).sum::<usize>());
    }

    fn ledger<T>(&self, id: &WorkerId, cache: Cache, read: impl FnOnce(&shard::Ledger) -> T) -> Option<T> {
        let (_, holder) = *self.registry().ranks(id).iter().find(|(rank, _)| *rank == cache.rank)?;
        let (shard, target) = at(holder, cache.tier);
        let shard = self.cell(shard)?.read();
        let lane = shard.lane(target.lane, target.generation).ok()?;
        Some(read(&lane.ledgers[cache.tier as usize]))
    }

    fn registry(&self) -> RwLockReadGuard<'_, Registry> {
        self.registry.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn registry_mut(&self) -> RwLockWriteGuard<'_, Registry> {
        self.registry.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn cell(&self, shard: usize) -> Option<&ShortLock<Shard>> {
        self.shards.get(shard)?.get().map(|cell| &**cell)
    }

    fn cells(&self) -> impl Iterator<Item = &ShortLock<Shard>> {
        let used = self.used.load(Ordering::Acquire);
        self.shards[..used].iter().filter_map(|cell| cell.get().map(|cell| &**cell))
    }
}

/// Fetches what a walk through each of these shards reads first, so that their waits overlap. A shard that is being written
/// to is passed over.
fn fetch_ahead(cells: &[OnceLock<Box<ShortLock<Shard>>>], chain: &[BlockHash]) {
    let Some(first) = chain.first().filter(|_| cells.len() > 1) else { return };
    let print = Print::of(*first);
    let shards = || cells.iter().filter_map(|cell| cell.get()?.try_read());
    shards().for_each(|shard| shard.blocks.warm(print));
    shards().for_each(|shard| shard.blocks.warm_piece(*first, print));
}

/// Where a holder's blocks are.
fn at(holder: Holder, tier: Tier) -> (usize, Target) {
    let lane = holder.lane as usize;
    (lane / LANES, Target { lane: lane % LANES, generation: holder.generation, tier })
}
