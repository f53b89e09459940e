//! What a router node knows of the workers: their prefixes, their loads, whether they are heard.
//!
//! Written by the indexer's subscriptions, read by the router shard and the client without any mailbox; locks are
//! held for microseconds, and the index, which has its own, is looked into under no other. Each subscription writes under a token; a token that was replaced writes nothing, so
//! events that were on their way when a worker left put nothing back.
//! Bounds: the index's own limit; one entry per worker followed.

use std::{
    collections::{HashMap, HashSet},
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use starling_ids::{BlockHash, Incarnation, Metric, WorkerId};
use starling_kv::{
    events::{EventBatch, EventCursor, KvEvent, WrongIncarnation},
    index::{Bucket, Cache, Holder, IndexError, IndexLimits, Overlap, PrefixIndex, Tier},
};

use super::guesses::Guesses;
use crate::report::{BucketAsk, BucketPart, CacheDigests, InventoryPart, LoadReport, ReadUpTo};

/// A worker not heard for this long is not given requests while there are others.
pub const SILENCE_MAX: Duration = Duration::from_secs(2);

/// An engine that has not come round for this long is not given requests while there are others.
const STUCK_MS: u64 = 10_000;

/// How long a worker that just appeared may stay unheard.
const INTRODUCTION_MAX: Duration = Duration::from_secs(3);

/// Names the subscription that may write about a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token(u64);

/// Why a subscription must begin again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unfit {
    /// Another subscription took over, or the worker is not followed any more.
    #[error("the worker is followed by another subscription or not at all")]
    Replaced,
    /// Events are missing.
    #[error("expected event {expected}, got {got}")]
    Gap { expected: u64, got: u64 },
    /// Events came before the inventory was whole.
    #[error("events before the inventory")]
    NoInventory,
    /// They are of another life.
    #[error(transparent)]
    OtherLife(#[from] WrongIncarnation),
    /// The index refuses it.
    #[error(transparent)]
    Refused(#[from] IndexError),
}

/// What is known of one worker, at the moment of asking.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerStatus {
    /// Leading blocks of the prompt that it holds.
    pub hit_blocks: u32,
    /// Its last report and when it came, on [`Knowledge::now`]'s clock.
    pub report: Option<(Duration, LoadReport)>,
    /// Heard lately, not stuck and not draining; true also for one that just appeared.
    pub sound: bool,
}

#[derive(Debug)]
struct Followed {
    token: Token,
    incarnation: Incarnation,
    since: Duration,
    connected: bool,
    heard: Option<Duration>,
    report: Option<(Duration, LoadReport)>,
    /// Parts of an inventory that is not whole yet, by tier.
    parts: [Vec<(Option<BlockHash>, BlockHash)>; Tier::ALL.len()],
    /// How far the events were read; `None` before the inventory is whole.
    cursor: Option<EventCursor>,
    /// Which life of the engine the cursor reads; 0 when it does not say.
    epoch: u64,
    /// The range that is missing was asked for.
    ranged: bool,
    /// Parts of a bucket that is not whole yet.
    bucket: Vec<BlockHash>,
    /// What it may hold, when it tells nothing of its blocks.
    guesses: Option<Guesses>,
}

impl Followed {
    fn sound(&self, now: Duration) -> bool {
        let Some(heard) = self.heard else { return now.saturating_sub(self.since) < INTRODUCTION_MAX };
        let works = self.report.as_ref().is_none_or(|(_, report)| !report.draining && report.turn_age_ms < STUCK_MS);
        self.connected && works && now.saturating_sub(heard) < SILENCE_MAX
    }
}

#[derive(Debug, Default)]
struct Inner {
    followed: HashMap<WorkerId, Followed>,
    tokens: u64,
    /// Who has told something that the shard has not taken.
    fresh: HashSet<WorkerId>,
}

/// A worker's report, the life it is of, and when it came.
pub(crate) type Told = (WorkerId, Incarnation, Duration, LoadReport);

/// See the module. Shared; outlives the indexer's restarts.
#[derive(Debug)]
pub struct Knowledge {
    began: Instant,
    /// Changed while `inner` is locked for writing, so that a replaced subscription changes nothing.
    index: PrefixIndex,
    limits: IndexLimits,
    inner: RwLock<Inner>,
}

impl Default for Knowledge {
    fn default() -> Self {
        let limits = IndexLimits::default();
        Self { began: Instant::now(), index: PrefixIndex::new(limits), limits, inner: RwLock::default() }
    }
}

impl Knowledge {
    /// Time since it was made; the clock of all its times.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What is known of these workers' lives with regard to a prompt, in their order; `None` for one that is not followed.
    /// One look at the index for all of them.
    #[must_use]
    pub fn survey<'a>(
        &self,
        workers: impl IntoIterator<Item = (&'a WorkerId, Incarnation)>,
        hashes: &[BlockHash],
    ) -> Vec<Option<WorkerStatus>> {
        let now = self.now();
        let mut depths: HashMap<(WorkerId, Incarnation), usize> = HashMap::new();
        for found in self.index.matches(hashes, usize::MAX) {
            let deepest = depths.entry((found.worker, found.incarnation)).or_default();
            *deepest = found.depth.max(*deepest);
        }
        let inner = self.read();
        let status = |(worker, incarnation): (&WorkerId, Incarnation)| {
            let followed = inner.followed.get(worker).filter(|followed| followed.incarnation == incarnation)?;
            let depth = depths.get(&(worker.clone(), incarnation)).copied().unwrap_or(0);
            let hit_blocks = u32::try_from(depth).unwrap_or(u32::MAX);
            Some(WorkerStatus { hit_blocks, report: followed.report.clone(), sound: followed.sound(now) })
        };
        workers.into_iter().map(status).collect()
    }

    /// Reports that came since the last time, the newest of each worker.
    pub(crate) fn take_reports(&self) -> Vec<Told> {
        if self.read().fresh.is_empty() {
            return Vec::new();
        }
        let mut inner = self.write();
        let fresh = std::mem::take(&mut inner.fresh);
        let told = |worker: WorkerId| {
            let followed = inner.followed.get(&worker)?;
            let (at, report) = followed.report.clone()?;
            Some((worker, followed.incarnation, at, report))
        };
        fresh.into_iter().filter_map(told).collect()
    }

    /// A new shard has to hear everything.
    pub(crate) fn repeat_reports(&self) {
        let mut inner = self.write();
        inner.fresh = inner.followed.keys().cloned().collect();
    }

    /// Every worker followed and whether it is sound.
    pub(crate) fn soundness(&self) -> Vec<(WorkerId, bool)> {
        let now = self.now();
        self.read().followed.iter().map(|(worker, followed)| (worker.clone(), followed.sound(now))).collect()
    }

    /// Who holds leading blocks of a chain, and how many.
    pub(crate) fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap> {
        let mut overlaps = Vec::new();
        self.index.overlaps(chain, &mut overlaps);
        overlaps
    }

    /// Whose an overlap is.
    pub(crate) fn who(&self, holder: Holder) -> Option<WorkerId> {
        self.index.who(holder).map(|(worker, ..)| worker)
    }

    /// (worker, block) pairs known.
    #[must_use]
    pub fn memberships(&self) -> usize {
        self.index.memberships()
    }

    /// Leading blocks of a chain that a worker holds.
    #[must_use]
    pub fn depth(&self, worker: &WorkerId, chain: &[BlockHash]) -> usize {
        self.index.depth(worker, chain)
    }

    /// Workers whose inventory is here and who are sound.
    #[must_use]
    pub fn heard(&self) -> usize {
        let now = self.now();
        self.read().followed.values().filter(|followed| followed.cursor.is_some() && followed.sound(now)).count()
    }

    /// Whether the inventories of all these lives are here.
    pub(crate) fn covers<'a>(&self, workers: impl IntoIterator<Item = (&'a WorkerId, Incarnation)>) -> bool {
        let inner = self.read();
        workers.into_iter().all(|(worker, incarnation)| {
            let followed = inner.followed.get(worker).filter(|followed| followed.incarnation == incarnation);
            followed.is_some_and(|followed| followed.cursor.is_some())
        })
    }

    /// As [`Self::follow_as`], for a worker that tells of its blocks.
    #[cfg(test)]
    pub(crate) fn follow(&self, worker: &WorkerId, incarnation: Incarnation) -> Result<Token, IndexError> {
        self.follow_as(worker, incarnation, false)
    }

    /// Begins to follow a worker's life; the token is its subscription's. A silent one tells nothing of its blocks.
    pub(crate) fn follow_as(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        silent: bool,
    ) -> Result<Token, IndexError> {
        let since = self.now();
        let mut inner = self.write();
        self.index.add_worker(worker.clone(), incarnation)?;
        inner.tokens += 1;
        let token = Token(inner.tokens);
        let (heard, report, parts, cursor) = (None, None, Default::default(), None);
        let (connected, bucket, guesses) = (false, Vec::new(), silent.then(Guesses::default));
        let (epoch, ranged) = (0, false);
        let followed = Followed {
            token,
            incarnation,
            since,
            connected,
            heard,
            report,
            parts,
            cursor,
            epoch,
            ranged,
            bucket,
            guesses,
        };
        inner.followed.insert(worker.clone(), followed);
        Ok(token)
    }

    /// Forgets a worker and all it holds.
    pub(crate) fn forget(&self, worker: &WorkerId) {
        let mut inner = self.write();
        inner.followed.remove(worker);
        self.index.remove_worker(worker);
        self.gauge();
    }

    /// Forgets everything, as a new indexer begins.
    pub(crate) fn clear(&self) {
        let mut inner = self.write();
        inner.followed.clear();
        self.index.clear();
        self.gauge();
    }

    /// A subscription began or ended. Ended: the worker is not sound until it is heard again.
    pub(crate) fn connected(&self, worker: &WorkerId, token: Token, connected: bool) -> Result<(), Unfit> {
        let mut inner = self.write();
        let followed = inner.by(worker, token)?;
        followed.connected = connected;
        (followed.parts, followed.bucket) = Default::default();
        Ok(())
    }

    /// How far the events of a worker were read, for the next subscription; `None` when it needs an inventory.
    pub(crate) fn read_up_to(&self, worker: &WorkerId, token: Token) -> Option<ReadUpTo> {
        let mut inner = self.write();
        let followed = inner.by(worker, token).ok().filter(|followed| followed.epoch > 0)?;
        let cursor = followed.cursor.as_ref()?;
        // A range that did not close the gap is not asked for again.
        let tried = std::mem::replace(&mut followed.ranged, cursor.has_gap());
        (!(tried && cursor.has_gap())).then(|| ReadUpTo { epoch: followed.epoch, seq: cursor.next() })
    }

    /// Takes a part of an inventory; the last one replaces what was known.
    pub(crate) fn inventory(&self, worker: &WorkerId, token: Token, part: InventoryPart) -> Result<(), Unfit> {
        let now = self.now();
        let mut inner = self.write();
        let followed = inner.by(worker, token)?;
        followed.heard = Some(now);
        followed.parts[part.tier as usize].extend(part.blocks);
        if part.more {
            return Ok(());
        }
        let blocks = std::mem::take(&mut followed.parts);
        if let Some(guesses) = &mut followed.guesses {
            // Its cache may be a new one.
            *guesses = Guesses::default();
        }
        let mut cursor = EventCursor::new(followed.incarnation);
        cursor.resynced(part.incarnation, part.seq)?;
        (followed.cursor, followed.epoch) = (Some(cursor), part.epoch);
        self.index.reset(worker, part.incarnation, &blocks[Tier::Device as usize])?;
        for tier in [Tier::Host, Tier::Disk] {
            let (cache, blocks) = (Cache { rank: 0, tier }, &blocks[tier as usize]);
            if !blocks.is_empty() || !self.index.held(worker, cache, None).is_empty() {
                self.index.reset_in(worker, part.incarnation, cache, blocks)?;
            }
        }
        metrics::counter!(Metric::IndexResyncs.name()).increment(1);
        self.gauge();
        Ok(())
    }

    /// Applies a batch of events; one that was seen already changes nothing.
    pub(crate) fn events(&self, worker: &WorkerId, token: Token, batch: EventBatch) -> Result<(), Unfit> {
        let now = self.now();
        let mut inner = self.write();
        let followed = inner.by(worker, token)?;
        followed.heard = Some(now);
        let cursor = followed.cursor.as_mut().ok_or(Unfit::NoInventory)?;
        let (expected, got, incarnation) = (cursor.next(), batch.seq, batch.incarnation);
        let ready = cursor.accept(batch)?;
        if ready.resync {
            return Err(Unfit::Gap { expected, got });
        }
        for event in &ready.events {
            self.index.apply(worker, incarnation, event)?;
        }
        metrics::counter!(Metric::IndexEvents.name()).increment(ready.events.len() as u64);
        self.gauge();
        Ok(())
    }

    /// Compares what a cache holds with what is known of it; the buckets to ask for when they differ.
    pub(crate) fn digests(
        &self,
        worker: &WorkerId,
        token: Token,
        told: &CacheDigests,
    ) -> Result<Option<BucketAsk>, Unfit> {
        let now = self.now();
        let mut inner = self.write();
        let followed = inner.by(worker, token)?;
        followed.heard = Some(now);
        let at = followed.cursor.as_ref().ok_or(Unfit::NoInventory)?.next();
        // A full index has let go of blocks on purpose; asked for, they would push out others.
        let full = self.index.memberships() >= self.limits.memberships_max / 100 * 99;
        if told.incarnation != followed.incarnation || told.seq != at || full {
            return Ok(None);
        }
        let known = self.index.digests(worker, Cache { rank: 0, tier: told.tier });
        let pairs = known.parts().iter().zip(&told.digests).enumerate();
        let differing = pairs.filter(|(_, (known, told))| known != told).map(|(bucket, _)| bucket);
        let buckets = differing.fold(0, |mask, bucket| mask | 1u64 << bucket);
        if buckets != 0 {
            tracing::warn!(%worker, tier = ?told.tier, buckets = buckets.count_ones(), "its events were not all it did");
        }
        Ok((buckets != 0).then_some(BucketAsk { tier: told.tier, buckets }))
    }

    /// Takes a part of a bucket; the last one replaces what was known of that bucket, and of nothing else.
    pub(crate) fn bucket(&self, worker: &WorkerId, token: Token, part: BucketPart) -> Result<(), Unfit> {
        let now = self.now();
        let mut inner = self.write();
        let followed = inner.by(worker, token)?;
        followed.heard = Some(now);
        let at = followed.cursor.as_ref().ok_or(Unfit::NoInventory)?.next();
        if part.incarnation != followed.incarnation || part.seq != at {
            followed.bucket = Vec::new();
            return Ok(());
        }
        followed.bucket.extend(part.blocks);
        if part.more {
            return Ok(());
        }
        let blocks = std::mem::take(&mut followed.bucket);
        let (cache, right) =
            (Cache { rank: 0, tier: part.tier }, Bucket { bucket: usize::from(part.bucket), blocks: &blocks });
        self.index.repair(worker, part.incarnation, cache, right)?;
        metrics::counter!(Metric::IndexRepairs.name()).increment(1);
        self.gauge();
        Ok(())
    }

    /// A request was given to a worker. Of one that tells nothing of its blocks it is assumed that it keeps the prompt for a
    /// while, within what its pool holds.
    pub(crate) fn gave(&self, worker: &WorkerId, incarnation: Incarnation, chain: &[BlockHash], blocks_max: u32) {
        if chain.is_empty() || self.read().followed.get(worker).is_none_or(|followed| followed.guesses.is_none()) {
            return;
        }
        let now = self.now();
        let mut inner = self.write();
        let followed = inner.followed.get_mut(worker).filter(|followed| followed.incarnation == incarnation);
        let Some(guesses) = followed.and_then(|followed| followed.guesses.as_mut()) else { return };
        let mut gone = guesses.expire(now);
        gone.extend(guesses.expect(chain, blocks_max as usize, now));
        let (parent, blocks) = (None, chain.to_vec());
        self.change(worker, incarnation, &KvEvent::Stored { parent, blocks });
        self.change(worker, incarnation, &KvEvent::Removed { blocks: gone });
        self.gauge();
    }

    /// Forgets guesses that are too old to be good.
    pub(crate) fn expire_guesses(&self) {
        if self.read().followed.values().all(|followed| followed.guesses.is_none()) {
            return;
        }
        let now = self.now();
        let mut inner = self.write();
        for (worker, followed) in &mut inner.followed {
            let gone = followed.guesses.as_mut().map_or_else(Vec::new, |guesses| guesses.expire(now));
            if !gone.is_empty() {
                self.change(worker, followed.incarnation, &KvEvent::Removed { blocks: gone });
            }
        }
    }

    /// A guessed change. One that the index refuses was about a worker that is gone.
    fn change(&self, worker: &WorkerId, incarnation: Incarnation, event: &KvEvent) {
        if let Err(error) = self.index.apply(worker, incarnation, event) {
            tracing::debug!(%worker, %error, "a guess is not kept");
        }
    }

    /// Takes a load report.
    pub(crate) fn load(&self, worker: &WorkerId, token: Token, report: LoadReport) -> Result<(), Unfit> {
        let now = self.now();
        let mut inner = self.write();
        let followed = inner.by(worker, token)?;
        followed.heard = Some(now);
        followed.report = Some((now, report));
        inner.fresh.insert(worker.clone());
        Ok(())
    }

    fn gauge(&self) {
        // Below 2^53, so exact.
        metrics::gauge!(Metric::IndexBlocks.name()).set(self.index.memberships() as f64);
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn by(&mut self, worker: &WorkerId, token: Token) -> Result<&mut Followed, Unfit> {
        self.followed.get_mut(worker).filter(|followed| followed.token == token).ok_or(Unfit::Replaced)
    }
}

#[cfg(test)]
mod tests;
