//! Writing to the index: quanta of events, lanes that are opened and replaced, inventories, repair, the bound.
//!
//! Called by the index. Locks are taken in one order: the registry, then a shard; none is held from one quantum to the next.

use std::{collections::HashSet, sync::atomic::Ordering};

use starling_ids::{BlockHash, Incarnation, WorkerId};

use super::{
    Applied, Cache, Holder, IndexError, LANES, LANES_GIVEN, PrefixIndex, Retired, SHARDS_MAX, Shard, ShortLock, Target,
    Tier, UPKEEP, at, page::Page, registry::Registry, shard::Written, upkeep::Wants,
};
use crate::hash::{BucketDigests, HashKeyed};

/// What one bucket of a cache holds by its worker's word.
#[derive(Debug, Clone, Copy)]
pub struct Bucket<'a> {
    /// Which, below [`BucketDigests::BUCKETS`].
    pub bucket: usize,
    /// All of its blocks, in any order; those of other buckets are passed over.
    pub blocks: &'a [BlockHash],
}

impl PrefixIndex {
    /// Replaces what a worker holds on the device of rank 0 by its inventory: (hash before it, hash), in any order.
    pub fn reset(
        &self,
        id: &WorkerId,
        given: Incarnation,
        inventory: &[(Option<BlockHash>, BlockHash)],
    ) -> Result<Applied, IndexError> {
        self.reset_in(id, given, Cache::default(), inventory)
    }

    /// Replaces what one cache of a worker holds by its inventory. Look-ups see the old or the new one, when the rank uses
    /// one tier alone.
    pub fn reset_in(
        &self,
        id: &WorkerId,
        given: Incarnation,
        cache: Cache,
        inventory: &[(Option<BlockHash>, BlockHash)],
    ) -> Result<Applied, IndexError> {
        let holder = self.holder(id, given, cache.rank)?;
        let (shard, target) = at(holder, cache.tier);
        let elsewhere = self.on(shard, |shard| {
            let lane = shard.lane(target.lane, target.generation)?;
            let others = Tier::ALL.into_iter().filter(|tier| *tier != cache.tier);
            Ok(others.map(|tier| lane.ledgers[tier as usize].blocks).sum::<usize>() > 0)
        });
        let mut applied = if elsewhere.map_err(|Retired| unknown(id))? {
            let old = self.list(holder, cache.tier, None).map_err(|Retired| unknown(id))?;
            let removed = self.remove(holder, cache.tier, &old).map_err(|Retired| unknown(id))?.removed;
            Applied { removed, ..self.fill(holder, cache.tier, inventory).map_err(|Retired| unknown(id))? }
        } else {
            self.replace(id, given, cache, inventory)?
        };
        applied.evicted = self.enforce_limit();
        Ok(applied)
    }

    /// Replaces what one bucket of a cache holds: the answer to digests that differ.
    pub fn repair(
        &self,
        id: &WorkerId,
        given: Incarnation,
        cache: Cache,
        right: Bucket<'_>,
    ) -> Result<Applied, IndexError> {
        let Bucket { bucket, blocks } = right;
        let holder = self.holder(id, given, cache.rank)?;
        let in_bucket = |hash: &&BlockHash| BucketDigests::bucket(**hash) == bucket;
        let wanted: HashSet<BlockHash, HashKeyed> = blocks.iter().filter(in_bucket).copied().collect();
        let mut gone = self.list(holder, cache.tier, Some(bucket)).map_err(|Retired| unknown(id))?;
        gone.retain(|hash| !wanted.contains(hash));
        let removed = self.remove(holder, cache.tier, &gone).map_err(|Retired| unknown(id))?.removed;
        let alone: Vec<(Option<BlockHash>, BlockHash)> = wanted.into_iter().map(|hash| (None, hash)).collect();
        let filled = self.fill(holder, cache.tier, &alone).map_err(|Retired| unknown(id))?;
        Ok(Applied { removed, evicted: self.enforce_limit(), ..filled })
    }

    /// The blocks that a cache holds, of one bucket or of all, in no order; none for an unknown one.
    #[must_use]
    pub fn held(&self, id: &WorkerId, cache: Cache, bucket: Option<usize>) -> Vec<BlockHash> {
        let holder = self.registry().ranks(id).iter().find(|(rank, _)| *rank == cache.rank).map(|(_, holder)| *holder);
        holder.and_then(|holder| self.list(holder, cache.tier, bucket).ok()).unwrap_or_default()
    }

    fn list(&self, holder: Holder, tier: Tier, bucket: Option<usize>) -> Result<Vec<BlockHash>, Retired> {
        let (shard, target) = at(holder, tier);
        self.cell(shard).ok_or(Retired)?.read().list(target, bucket)
    }

    /// Fills a lane that look-ups do not see, then puts it in the place of the rank's own.
    fn replace(
        &self,
        id: &WorkerId,
        given: Incarnation,
        cache: Cache,
        inventory: &[(Option<BlockHash>, BlockHash)],
    ) -> Result<Applied, IndexError> {
        let old = self.holder(id, given, cache.rank)?;
        let (shard, old_target) = at(old, cache.tier);
        let spare =
            if inventory.is_empty() { None } else { self.on(shard, |shard| Ok(shard.open_lane(false))).ok().flatten() };
        let Some((lane, generation)) = spare else {
            // Every lane is in use, or there is nothing to fill one with: the rank has none for a moment.
            let removed = self.swap(id, given, cache.rank, (old, None))?;
            let holder = self.holder(id, given, cache.rank)?;
            return Ok(Applied { removed, ..self.fill(holder, cache.tier, inventory).map_err(|Retired| unknown(id))? });
        };
        let new = Holder { lane: (shard * LANES + lane) as u32, generation };
        let filled = self.fill(new, cache.tier, inventory).map_err(|Retired| unknown(id));
        let swapped = filled.and_then(|filled| Ok((self.swap(id, given, cache.rank, (old, Some(new)))?, filled)));
        let (removed, filled) =
            swapped.inspect_err(|_| self.retire(shard, Target { lane, generation, ..old_target }))?;
        Ok(Applied { removed, ..filled })
    }

    /// Gives a rank a new lane, `new` or a fresh one, and retires the old one; how many pairs that had.
    fn swap(
        &self,
        id: &WorkerId,
        given: Incarnation,
        rank: u16,
        (old, new): (Holder, Option<Holder>),
    ) -> Result<usize, IndexError> {
        let mut registry = self.registry_mut();
        if registry.find(id, given, rank)? != Some(old) {
            return Err(unknown(id));
        }
        let (number, target) = at(old, Tier::Device);
        let cell = self.cell(number).ok_or_else(|| unknown(id))?;
        let mut shard = cell.write();
        let gone = shard.retire(target.lane);
        self.memberships.fetch_sub(gone, Ordering::Relaxed);
        let new = match new {
            Some(new) => {
                shard.show(new.lane as usize % LANES);
                new
            }
            None => {
                // The lane that was just retired is there in the worst case.
                let (lane, generation) = shard.open_lane(true).ok_or(IndexError::TooManyWorkers)?;
                Holder { lane: (number * LANES + lane) as u32, generation }
            }
        };
        drop(shard);
        registry.name(id, rank, new);
        Ok(gone)
    }

    /// Stores an inventory, chain by chain where it is in order.
    fn fill(
        &self,
        holder: Holder,
        tier: Tier,
        inventory: &[(Option<BlockHash>, BlockHash)],
    ) -> Result<Applied, Retired> {
        let mut applied = Applied::default();
        let mut hashes = Vec::new();
        for chain in inventory.chunk_by(|one, next| next.0 == Some(one.1)) {
            hashes.clear();
            hashes.extend(chain.iter().map(|(_, hash)| *hash));
            let stored = self.store(holder, tier, chain[0].0, &hashes)?;
            applied.added += stored.added;
            applied.unchanged += stored.unchanged;
        }
        Ok(applied)
    }

    pub(super) fn store(
        &self,
        holder: Holder,
        tier: Tier,
        mut parent: Option<BlockHash>,
        chain: &[BlockHash],
    ) -> Result<Applied, Retired> {
        let (shard, target) = at(holder, tier);
        let mut added = 0;
        let stored = self.sections(shard, chain, |shard, rest, wanted| {
            let written = shard.store(target, parent, rest, wanted)?;
            added += written.pairs;
            parent = rest[..written.blocks].last().copied();
            Ok(written)
        });
        // Once for all: writers of other shards count here too.
        self.memberships.fetch_add(added, Ordering::Relaxed);
        stored.map(|()| Applied { added, unchanged: chain.len() - added, ..Applied::default() })
    }

    pub(super) fn remove(&self, holder: Holder, tier: Tier, blocks: &[BlockHash]) -> Result<Applied, Retired> {
        let (shard, target) = at(holder, tier);
        let mut removed = 0;
        let gone = self.sections(shard, blocks, |shard, rest, wanted| {
            let written = shard.remove(target, rest, wanted)?;
            removed += written.pairs;
            Ok(written)
        });
        self.memberships.fetch_sub(removed, Ordering::Relaxed);
        gone.map(|()| Applied { removed, unchanged: blocks.len() - removed, ..Applied::default() })
    }

    /// Writes blocks in as many sections as it takes, each with the upkeep that the shard wants after it.
    fn sections(
        &self,
        shard: usize,
        mut blocks: &[BlockHash],
        mut write: impl FnMut(&mut Shard, &[BlockHash], &dyn Fn() -> bool) -> Result<Written, Retired>,
    ) -> Result<(), Retired> {
        let cell = self.cell(shard).ok_or(Retired)?;
        let wanted = || cell.is_wanted();
        while !blocks.is_empty() {
            let (written, wants) = self.on(shard, |shard| {
                let written = write(shard, blocks, &wanted)?;
                Ok((written, shard.wants()))
            })?;
            blocks = &blocks[written.blocks..];
            self.upkeep(shard, written.blocks, wants)?;
        }
        Ok(())
    }

    /// One section of writing.
    fn on<T>(&self, shard: usize, write: impl FnOnce(&mut Shard) -> Result<T, Retired>) -> Result<T, Retired> {
        let cell = self.cell(shard).ok_or(Retired)?;
        cell.let_readers_in();
        write(&mut cell.write())
    }

    /// What a shard wants after a change of so many blocks, each in a section of its own: look-ups get in before it.
    fn upkeep(&self, shard: usize, changed: usize, wants: Wants) -> Result<(), Retired> {
        if wants.memory {
            // Asked for while nobody waits.
            let memory = Page::some();
            self.on(shard, |shard| {
                shard.blocks.pages.keep(memory);
                Ok(())
            })?;
        }
        if wants.tidy {
            self.on(shard, |shard| {
                shard.tidy(changed);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The lane of a rank; it is opened at its first event.
    pub(super) fn holder(&self, id: &WorkerId, given: Incarnation, rank: u16) -> Result<Holder, IndexError> {
        if let Some(holder) = self.registry().find(id, given, rank)? {
            return Ok(holder);
        }
        let mut registry = self.registry_mut();
        if let Some(holder) = registry.find(id, given, rank)? {
            return Ok(holder);
        }
        let holder = self.open_lane(&registry).ok_or(IndexError::TooManyWorkers)?;
        registry.name(id, rank, holder);
        Ok(holder)
    }

    /// A lane in the shard that has fewest in use.
    pub(super) fn open_lane(&self, registry: &Registry) -> Option<Holder> {
        let in_use = |shard: usize| registry.used.get(shard).copied().unwrap_or(0);
        let shards = self.used.load(Ordering::Acquire).max(self.limits.shards);
        let fewest = (0..shards).min_by_key(|shard| in_use(*shard)).filter(|shard| in_use(*shard) < LANES_GIVEN);
        let number = fewest.unwrap_or(shards);
        if number >= SHARDS_MAX {
            return None;
        }
        for shard in &self.shards[..=number] {
            shard.get_or_init(Box::default);
        }
        self.used.fetch_max(number + 1, Ordering::Release);
        let cell: &ShortLock<Shard> = self.cell(number)?;
        let (lane, generation) = cell.write().open_lane(true)?;
        Some(Holder { lane: (number * LANES + lane) as u32, generation })
    }

    pub(super) fn retire_all(&self, registry: &mut Registry, id: &WorkerId) -> bool {
        let Some(lanes) = registry.remove(id) else { return false };
        for holder in lanes {
            let (shard, target) = at(holder, Tier::Device);
            self.retire(shard, target);
        }
        true
    }

    fn retire(&self, shard: usize, target: Target) {
        let retired = self.on(shard, |shard| {
            shard.lane(target.lane, target.generation)?;
            self.memberships.fetch_sub(shard.retire(target.lane), Ordering::Relaxed);
            Ok(())
        });
        // A lane that has another use by now holds nothing of this one.
        retired.unwrap_or(());
    }

    /// Takes from the worker that holds most until the bound is kept, and a little more, so that not every event pays.
    pub(super) fn enforce_limit(&self) -> usize {
        let most = self.limits.memberships_max;
        if self.memberships() <= most {
            return 0;
        }
        let goal = most - most / 1024;
        let mut evicted = 0;
        while let Some(excess) = self.memberships().checked_sub(goal).filter(|excess| *excess > 0) {
            let largest = self.cells().enumerate().filter_map(|(at, cell)| {
                let (lane, blocks) = cell.read().largest()?;
                Some((blocks, at, lane))
            });
            let Some((_, shard, lane)) = largest.max() else { break };
            let gone = self.on(shard, |shard| {
                let gone = shard.evict(lane, excess.min(UPKEEP));
                self.memberships.fetch_sub(gone, Ordering::Relaxed);
                Ok(gone)
            });
            let gone = gone.unwrap_or(0);
            if gone == 0 {
                break;
            }
            evicted += gone;
        }
        evicted
    }
}

pub(super) fn unknown(id: &WorkerId) -> IndexError {
    IndexError::UnknownWorker(id.clone())
}
