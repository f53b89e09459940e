//! What lies on which tier, what is on its way, what pays: every decision of the tiers, without I/O and without a clock.
//!
//! Called by the store under its lock. Never: touches a file. Bounds: see each shelf; [`LEAVING_BYTES`] on their way to
//! disk, in memory meanwhile; reads are as many as the callers have blocks to put them.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use starling_ids::BlockHash;

use super::{
    Arrival, Ticket, TierBlock, TierInventory, TierLoad, TierShape, TierStats,
    forecast::{Forecast, Need, Worth},
    record::Line,
    shelf::{Place, Shelf, Stored, Taken},
    sketch::Sketch,
};
use crate::{events::KvEvent, hash::HashKeyed, index::Tier};

/// Bytes of blocks that wait to be written to disk; at least 8 blocks. What comes beyond them is lost to the cache.
pub const LEAVING_BYTES: usize = 64 << 20;

/// A read that takes longer than this is one of a disk that does not answer.
const STALLED: Duration = Duration::from_secs(1);

/// After a failed write nothing is written for this long.
const WRITE_PAUSE: Duration = Duration::from_secs(5);

/// A block to read from disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadJob {
    pub(super) number: u64,
    pub(super) ticket: Ticket,
    pub(super) index: usize,
    pub(super) hash: BlockHash,
    pub(super) stored: Stored,
}

/// A block to write to disk, and which one was there before.
#[derive(Debug)]
pub(super) struct WriteJob {
    pub(super) block: Arc<TierBlock>,
    pub(super) place: Place,
    pub(super) gone: Option<BlockHash>,
}

/// Why a read gave no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadFault {
    Unreadable,
    Corrupt,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Book {
    shape: TierShape,
    host: Shelf,
    memory: Vec<Option<Arc<TierBlock>>>,
    disk: Shelf,
    /// On their way to disk, in order.
    leaving: VecDeque<BlockHash>,
    /// Those on their way and being written.
    departing: HashMap<BlockHash, Arc<TierBlock>, HashKeyed>,
    leaving_max: usize,
    reads: VecDeque<ReadJob>,
    /// Reads under way and when they began.
    under_way: BTreeMap<u64, Duration>,
    numbers: u64,
    sketch: Sketch,
    pub(super) forecast: Forecast,
    paused_until: Duration,
    events: Vec<KvEvent>,
    stats: TierStats,
}

impl Book {
    pub(super) fn new(shape: TierShape, host_bytes: u64, disk: Shelf) -> Self {
        let cost = (shape.block_bytes + 4 * shape.block_tokens).max(1);
        let host = Shelf::new(u32::try_from(host_bytes / cost as u64).unwrap_or(u32::MAX));
        let blocks = host.places_max() as usize + disk.places_max() as usize;
        Self {
            shape,
            host,
            memory: Vec::new(),
            disk,
            leaving: VecDeque::new(),
            departing: HashMap::default(),
            leaving_max: (LEAVING_BYTES / cost).clamp(8, 4_096),
            reads: VecDeque::new(),
            under_way: BTreeMap::new(),
            numbers: 0,
            sketch: Sketch::new(blocks),
            forecast: Forecast::default(),
            paused_until: Duration::ZERO,
            events: Vec::new(),
            stats: TierStats { block_bytes: shape.block_bytes as u64, ..TierStats::default() },
        }
    }

    // What is asked for.

    /// A request came with this chain.
    pub(super) fn note(&mut self, chain: &[BlockHash]) {
        for hash in chain.iter().rev() {
            self.sketch.note(*hash);
            self.host.touch(*hash);
            self.disk.touch(*hash);
        }
    }

    fn place_of(&self, hash: BlockHash) -> Option<Tier> {
        if self.host.get(hash).is_some() || self.departing.contains_key(&hash) {
            return Some(Tier::Host);
        }
        self.disk.get(hash).map(|_| Tier::Disk)
    }

    /// Leading blocks of a chain that are worth fetching. The chain is counted as asked for.
    pub(super) fn worth(&mut self, chain: &[BlockHash], now: Duration) -> Option<Worth> {
        self.stats.asked += chain.len() as u64;
        let lies: Vec<Tier> = chain.iter().map_while(|hash| self.place_of(*hash)).collect();
        self.stats.found += lies.len() as u64;
        let stuck = self.stuck(now);
        let worth = self.forecast.worth(Need {
            chain: &lies,
            block_bytes: self.shape.block_bytes,
            block_tokens: self.shape.block_tokens,
            queued: self.reads.len(),
            stuck,
            now,
        });
        let left = (lies.len() - worth.map_or(0, |worth| worth.blocks)) as u64;
        *if stuck > STALLED { &mut self.stats.stalled } else { &mut self.stats.slower } += left;
        worth
    }

    /// Leading blocks of a chain that can be read for another worker, which has decided that it wants them. What lies behind a disk
    /// that does not answer is left out.
    pub(super) fn lendable(&mut self, chain: &[BlockHash], now: Duration) -> usize {
        let lies: Vec<Tier> = chain.iter().map_while(|hash| self.place_of(*hash)).collect();
        if self.stuck(now) <= STALLED {
            return lies.len();
        }
        let host = lies.iter().take_while(|tier| **tier == Tier::Host).count();
        self.stats.stalled += (lies.len() - host) as u64;
        host
    }

    /// How long the oldest read under way has taken so far.
    fn stuck(&self, now: Duration) -> Duration {
        self.under_way.values().min().map_or(Duration::ZERO, |oldest| now.saturating_sub(*oldest))
    }

    /// Begins to fetch blocks, numbered from `first` on. What is in memory is there at once; the rest comes from [`Book::next_read`].
    pub(super) fn fetch(&mut self, ticket: Ticket, first: usize, chain: &[BlockHash]) -> Vec<Arrival> {
        let mut here = Vec::new();
        for (index, hash) in (first..).zip(chain.iter().copied()) {
            let held = self.host.get(hash).and_then(|stored| self.memory.get(stored.place as usize)?.clone());
            let (tier, block) = match held.or_else(|| self.departing.get(&hash).cloned()) {
                Some(block) => (Tier::Host, Some(block)),
                None => match self.disk.pin(hash) {
                    Some(stored) => {
                        self.numbers += 1;
                        self.reads.push_back(ReadJob { number: self.numbers, ticket, index, hash, stored });
                        continue;
                    }
                    None => (Tier::Disk, None),
                },
            };
            here.push(Arrival { ticket, index, tier, block });
        }
        here
    }

    /// Nobody waits for these blocks any more; what is being read is read to its end and told to nobody.
    pub(super) fn forget(&mut self, ticket: Ticket) {
        let (gone, kept): (VecDeque<ReadJob>, _) = self.reads.drain(..).partition(|job| job.ticket == ticket);
        self.reads = kept;
        gone.iter().for_each(|job| self.disk.unpin(job.stored.place));
    }

    /// A request waited too long.
    pub(super) fn late(&mut self) {
        self.stats.late += 1;
    }

    /// The engine has taken a block.
    pub(super) fn fetched(&mut self, tier: Tier) {
        self.stats.fetched += 1;
        self.load(tier).fetched += 1;
    }

    pub(super) fn next_read(&mut self, now: Duration) -> Option<ReadJob> {
        let job = self.reads.pop_front()?;
        self.under_way.insert(job.number, now);
        Some(job)
    }

    /// A read has ended. A block that cannot be trusted is forgotten.
    pub(super) fn read_done(
        &mut self,
        job: &ReadJob,
        now: Duration,
        read: Result<TierBlock, ReadFault>,
    ) -> (Arrival, Option<Line>) {
        let beside = self.under_way.len().max(1);
        let began = self.under_way.remove(&job.number).unwrap_or(now);
        let took = now.saturating_sub(began) / u32::try_from(beside).unwrap_or(u32::MAX);
        self.forecast.read(Tier::Disk, self.shape.block_bytes, took, now);
        self.disk.unpin(job.stored.place);
        let mut line = None;
        let block = match read {
            Ok(block) => Some(Arc::new(block)),
            Err(fault) => {
                match fault {
                    ReadFault::Unreadable => self.stats.disk.unreadable += 1,
                    ReadFault::Corrupt => self.stats.disk.corrupt += 1,
                }
                // It may have been written anew meanwhile.
                if self.disk.get(job.hash) == Some(job.stored) {
                    self.disk.remove(job.hash);
                    self.note_removed(Tier::Disk, job.hash);
                    line = Some(Line::Remove(job.hash));
                }
                None
            }
        };
        (Arrival { ticket: job.ticket, index: job.index, tier: Tier::Disk, block }, line)
    }

    // What comes down.

    /// Whether a block that leaves the device is to be copied here. One that lies here already counts as used.
    pub(super) fn wants(&mut self, hash: BlockHash, now: Duration) -> bool {
        if self.host.get(hash).is_some() {
            self.host.touch(hash);
            return false;
        }
        self.host.places_max() > 0 || self.disk_wants(hash, now)
    }

    fn disk_wants(&mut self, hash: BlockHash, now: Duration) -> bool {
        if self.disk.places_max() == 0 || self.departing.contains_key(&hash) {
            return false;
        }
        if self.disk.get(hash).is_some() {
            self.disk.touch(hash);
            return false;
        }
        if self.leaving.len() >= self.leaving_max || now < self.paused_until {
            self.stats.disk.dropped += 1;
            return false;
        }
        true
    }

    /// A block that left the device: to the host's memory, whose own last one goes to disk.
    pub(super) fn offer(&mut self, block: Arc<TierBlock>, now: Duration) {
        let hash = block.hash;
        let place = match self.host.take(hash, &self.sketch) {
            Taken::Free(place) => place,
            Taken::Instead(place, gone) => {
                self.stats.host.evicted += 1;
                self.note_removed(Tier::Host, gone);
                if let Some(gone) = self.memory.get_mut(place as usize).and_then(Option::take) {
                    self.leave(gone, now);
                }
                place
            }
            Taken::Refused => {
                self.stats.host.refused += u64::from(self.host.places_max() > 0 && self.host.get(hash).is_none());
                return self.leave(block, now);
            }
        };
        if self.memory.len() <= place as usize {
            self.memory.resize(place as usize + 1, None);
        }
        let parent = block.parent;
        self.memory[place as usize] = Some(block);
        self.host.stored(place, parent, 0);
        self.stats.host.stored += 1;
        self.note_stored(Tier::Host, parent, hash);
    }

    /// Queues a block for the disk.
    fn leave(&mut self, block: Arc<TierBlock>, now: Duration) {
        if self.disk_wants(block.hash, now) {
            self.leaving.push_back(block.hash);
            self.departing.insert(block.hash, block);
        }
    }

    /// Queues what lies in the host's memory alone, the longest unused first, while there is room. True when all is queued.
    pub(super) fn flush(&mut self, now: Duration) -> bool {
        let alone = |hash: &BlockHash| self.disk.get(*hash).is_none() && !self.departing.contains_key(hash);
        let hosts: Vec<BlockHash> = self.host.iter().map(|(hash, _)| hash).filter(alone).collect();
        for hash in hosts {
            if self.leaving.len() >= self.leaving_max {
                return false;
            }
            let stored = self.host.get(hash);
            if let Some(block) = stored.and_then(|stored| self.memory.get(stored.place as usize)?.clone()) {
                self.leave(block, now);
            }
            // What the disk refuses must not be offered again and again.
            self.host.remove(hash);
        }
        true
    }

    /// Room on the way to disk.
    pub(super) fn has_room(&self) -> bool {
        self.leaving.len() < self.leaving_max
    }

    /// Nothing is on its way to disk.
    pub(super) fn is_settled(&self) -> bool {
        self.departing.is_empty()
    }

    pub(super) fn next_write(&mut self) -> Option<WriteJob> {
        while let Some(hash) = self.leaving.pop_front() {
            let Some(block) = self.departing.get(&hash).cloned() else { continue };
            let (place, gone) = match self.disk.take(hash, &self.sketch) {
                Taken::Free(place) => (place, None),
                Taken::Instead(place, gone) => {
                    self.stats.disk.evicted += 1;
                    self.note_removed(Tier::Disk, gone);
                    (place, Some(gone))
                }
                Taken::Refused => {
                    self.stats.disk.refused += 1;
                    self.departing.remove(&hash);
                    continue;
                }
            };
            return Some(WriteJob { block, place, gone });
        }
        None
    }

    /// A write has ended, with the block's checksum or without; the lines of it for the index.
    pub(super) fn write_done(&mut self, job: &WriteJob, now: Duration, written: Option<u64>) -> Vec<Line> {
        let (hash, parent) = (job.block.hash, job.block.parent);
        self.departing.remove(&hash);
        let mut lines: Vec<Line> = job.gone.map(Line::Remove).into_iter().collect();
        match written {
            Some(tag) if self.disk.stored(job.place, parent, tag) => {
                self.stats.disk.stored += 1;
                self.note_stored(Tier::Disk, parent, hash);
                lines.push(Line::Put(hash, Stored { place: job.place, parent, tag }));
            }
            Some(_) => {}
            None => {
                self.disk.abandon(job.place);
                self.paused_until = now + WRITE_PAUSE;
                self.unwritten();
            }
        }
        lines
    }

    /// Something could not be written.
    pub(super) fn unwritten(&mut self) {
        self.stats.disk.unwritten += 1;
    }

    // What is told.

    /// What lies on disk, for an index that is written anew.
    pub(super) fn on_disk(&self) -> Vec<(BlockHash, Stored)> {
        self.disk.iter().collect()
    }

    /// How many blocks lie on disk.
    pub(super) fn disk_len(&self) -> usize {
        self.disk.len()
    }

    /// (block before it, block) on each tier, in no order.
    pub(super) fn inventory(&self) -> Vec<TierInventory> {
        let list = |shelf: &Shelf| shelf.iter().map(|(hash, stored)| (stored.parent, hash)).collect();
        vec![(Tier::Host, list(&self.host)), (Tier::Disk, list(&self.disk))]
    }

    /// Forgets everything that nobody reads or writes right now; the lines of it for the index.
    pub(super) fn clear(&mut self) -> Vec<Line> {
        self.leaving.clear();
        self.memory.clear();
        let hosts: Vec<BlockHash> = self.host.iter().map(|(hash, _)| hash).collect();
        for hash in hosts {
            self.host.remove(hash);
        }
        let disks: Vec<BlockHash> = self.disk.iter().map(|(hash, _)| hash).collect();
        for hash in &disks {
            self.disk.remove(*hash);
        }
        self.departing.clear();
        self.events.clear();
        for tier in [Tier::Host, Tier::Disk] {
            self.events.push(KvEvent::ClearedBelow { tier });
        }
        disks.into_iter().map(Line::Remove).collect()
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn stats(&self, now: Duration) -> TierStats {
        let load = |load: TierLoad, shelf: &Shelf, tier| TierLoad {
            block_ms: self.forecast.block_ms(tier, self.shape.block_bytes),
            blocks: shelf.len() as u64,
            blocks_max: u64::from(shelf.places_max()),
            bytes_per_second: self.forecast.bytes_per_second(tier),
            ..load
        };
        TierStats {
            reading: (self.reads.len() + self.under_way.len()) as u64,
            leaving: self.departing.len() as u64,
            compute_ms: self.forecast.compute_ms(),
            disk_wait_ms: self.forecast.disk_wait_ms(self.shape.block_bytes, self.reads.len(), self.stuck(now)),
            host: load(self.stats.host, &self.host, Tier::Host),
            disk: load(self.stats.disk, &self.disk, Tier::Disk),
            ..self.stats
        }
    }

    /// Conservation: the shelves are whole, the host's memory holds what its shelf lists, nothing waits for nothing.
    pub(super) fn check(&self) -> Result<(), String> {
        self.host.check()?;
        self.disk.check()?;
        let held = self.memory.iter().flatten().count();
        if held != self.host.len() {
            return Err(format!("{held} blocks in memory, {} listed", self.host.len()));
        }
        if self.leaving.len() > self.departing.len() || self.leaving.len() > self.leaving_max {
            return Err(format!("{} leave, {} depart", self.leaving.len(), self.departing.len()));
        }
        let idle = self.reads.is_empty() && self.under_way.is_empty() && self.departing.is_empty();
        if idle && self.host.busy() + self.disk.busy() > 0 {
            return Err(format!("at rest {} places are busy", self.host.busy() + self.disk.busy()));
        }
        Ok(())
    }

    fn load(&mut self, tier: Tier) -> &mut TierLoad {
        if tier == Tier::Disk { &mut self.stats.disk } else { &mut self.stats.host }
    }

    fn note_stored(&mut self, tier: Tier, parent: Option<BlockHash>, hash: BlockHash) {
        match self.events.last_mut() {
            Some(KvEvent::StoredBelow { tier: last, blocks, .. })
                if *last == tier && parent.is_some() && blocks.last().copied() == parent =>
            {
                blocks.push(hash);
            }
            _ => self.events.push(KvEvent::StoredBelow { tier, parent, blocks: vec![hash] }),
        }
    }

    fn note_removed(&mut self, tier: Tier, hash: BlockHash) {
        match self.events.last_mut() {
            Some(KvEvent::RemovedBelow { tier: last, blocks }) if *last == tier => blocks.push(hash),
            _ => self.events.push(KvEvent::RemovedBelow { tier, blocks: vec![hash] }),
        }
    }
}
