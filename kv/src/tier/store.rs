//! Shell: the tiers at work: one book under a lock, threads that read and write the disk, a clock.
//!
//! Owned by an engine and called by its thread; calls the book, the disk. Every call but [`Tiers::arrived`] and
//! [`Tiers::close`] holds the lock for microseconds and waits for no disk.
//! Never: joins a thread that hangs in a read; what it still reads reaches nobody.
//! Bounds: [`READERS`] reads and one write at a time.
//! If a thread dies: its block never arrives, the request's deadline passes and it computes.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use starling_ids::BlockHash;

use super::{
    Arrival, DiskError, Ticket, TierBlock, TierInventory, TierOptions, TierShape, TierStats,
    book::{Book, ReadFault, WriteJob},
    disk::Disk,
    forecast::Worth,
    page::PageBuffer,
    reader::TierReader,
    record::{Line, read_block, write_block},
    shelf::Shelf,
};
use crate::{events::KvEvent, index::Tier};

/// Reads at a time. One alone leaves a disk idle between two of them.
const READERS: usize = 4;

/// How long a dropped store waits for its threads, which hold its folder.
const DROP_WAIT: Duration = Duration::from_millis(500);

/// Tickets of readers beside the engine have this bit, those of the engine have not.
pub(super) const GUESTS: u64 = 1 << 63;

#[derive(Debug)]
pub(super) struct State {
    pub(super) book: Book,
    /// The threads are to end.
    pub(super) stop: bool,
    threads: usize,
    /// Where blocks go that others than the engine asked for.
    pub(super) guests: HashMap<Ticket, Sender<Arrival>>,
    pub(super) guest_numbers: u64,
}

#[derive(Debug)]
pub(super) struct Shared {
    shape: TierShape,
    pub(super) began: Instant,
    state: Mutex<State>,
    /// There is something to read, or the end.
    pub(super) to_read: Condvar,
    /// There is something to write, or the end.
    to_write: Condvar,
    /// Something was written, or a thread has ended.
    progress: Condvar,
    disk: Option<Disk>,
}

/// The tiers below one engine's device.
#[derive(Debug)]
pub struct Tiers {
    shared: Arc<Shared>,
    arrivals: Receiver<Arrival>,
    /// Of blocks that need no read.
    here: Sender<Arrival>,
}

impl Tiers {
    /// Opens the tiers; `None` when there is none. What a disk kept from an earlier life is there again.
    pub fn open(options: &TierOptions, shape: TierShape) -> Result<Option<Self>, DiskError> {
        if options.is_none() {
            return Ok(None);
        }
        let mut shelf = Shelf::new(0);
        let mut disk = None;
        if let Some(asked) = &options.disk {
            let (opened, places, found) = Disk::open(&asked.folder, asked.bytes, &shape, asked.file.clone())?;
            shelf = Shelf::restored(places, &found.kept);
            let (folder, kept, broken) = (asked.folder.display(), found.kept.len(), found.broken);
            tracing::info!(%folder, places, kept, broken, "disk tier opened");
            disk = Some(opened);
        }
        let has_disk = disk.is_some();
        let book = Book::new(shape, options.host_bytes, shelf);
        let state = State { book, stop: false, threads: 0, guests: HashMap::new(), guest_numbers: 0 };
        let shared = Arc::new(Shared {
            shape,
            began: Instant::now(),
            state: Mutex::new(state),
            to_read: Condvar::new(),
            to_write: Condvar::new(),
            progress: Condvar::new(),
            disk,
        });
        let (sender, arrivals) = channel();
        let tiers = Self { shared, arrivals, here: sender };
        if has_disk {
            tiers.start_threads();
        }
        Ok(Some(tiers))
    }

    /// A system that gives no thread gives a disk tier that finds nothing in time, which is a slow disk like any other.
    fn start_threads(&self) {
        let start = |name: String, run: Box<dyn FnOnce(&Shared) + Send>| {
            let shared = Arc::clone(&self.shared);
            shared.lock().threads += 1;
            let guarded = move || {
                let guard = ThreadGuard(shared);
                run(&guard.0);
            };
            if let Err(error) = thread::Builder::new().name(name).spawn(guarded) {
                tracing::error!(%error, "a thread of the disk tier did not start");
            }
        };
        for number in 0..READERS {
            let arrivals = self.here.clone();
            start(format!("kv-read-{number}"), Box::new(move |shared| read_loop(shared, &arrivals)));
        }
        start("kv-write".to_owned(), Box::new(write_loop));
    }

    /// Time since it was opened; the clock of its deadlines.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.shared.began.elapsed()
    }

    /// A request came with this chain of hashes.
    pub fn note(&self, chain: &[BlockHash]) {
        self.shared.lock().book.note(chain);
    }

    /// The engine computed `tokens` prompt tokens in `took`.
    pub fn computed(&self, tokens: usize, took: Duration) {
        self.shared.lock().book.forecast.computed(tokens, took);
    }

    /// How many of a chain's leading blocks are here and come sooner than they are computed, and until when to wait.
    #[must_use]
    pub fn worth(&self, chain: &[BlockHash]) -> Option<Worth> {
        let now = self.now();
        self.shared.lock().book.worth(chain, now)
    }

    /// Begins to fetch blocks; each arrives once through [`Tiers::arrived`], or never when its disk hangs.
    pub fn fetch(&self, ticket: Ticket, chain: &[BlockHash]) {
        let here = self.shared.lock().book.fetch(ticket, 0, chain);
        for arrival in here {
            // The receiver is a field of this very struct.
            self.here.send(arrival).ok();
        }
        self.shared.to_read.notify_all();
    }

    /// For those who read blocks beside the engine.
    #[must_use]
    pub fn reader(&self) -> TierReader {
        TierReader::new(Arc::clone(&self.shared))
    }

    /// Stops waiting for a ticket, in time or, with `late`, because its time is over. Blocks from the tiers `taken` are on the
    /// device; one that still arrives is nobody's.
    pub fn forget(&self, ticket: Ticket, late: bool, taken: &[Tier]) {
        let mut state = self.shared.lock();
        state.book.forget(ticket);
        if late {
            state.book.late();
        }
        taken.iter().for_each(|tier| state.book.fetched(*tier));
    }

    /// What has arrived; waits up to `wait` for the first.
    #[must_use]
    pub fn arrived(&self, wait: Duration) -> Vec<Arrival> {
        let first = if wait.is_zero() { None } else { self.arrivals.recv_timeout(wait).ok() };
        first.into_iter().chain(self.arrivals.try_iter()).collect()
    }

    /// The copy of a tier's block to the device took so long.
    pub fn copied(&self, tier: Tier, took: Duration) {
        if tier == Tier::Host {
            let now = self.now();
            self.shared.lock().book.forecast.read(tier, self.shared.shape.block_bytes, took, now);
        }
    }

    /// Whether a block that leaves the device is to be handed to [`Tiers::offer`].
    #[must_use]
    pub fn wants(&self, hash: BlockHash) -> bool {
        let now = self.now();
        self.shared.lock().book.wants(hash, now)
    }

    /// Takes a block that leaves the device. One that finds no room is lost to the cache and counted.
    pub fn offer(&self, block: TierBlock) {
        let now = self.now();
        self.shared.lock().book.offer(Arc::new(block), now);
        self.shared.to_write.notify_one();
    }

    /// The same after waiting until `until` for room on the way to disk; `block` is asked for only when it is wanted. False
    /// when there was no room in time.
    pub fn offer_within(&self, hash: BlockHash, until: Duration, block: impl FnOnce() -> Option<TierBlock>) -> bool {
        let room = self.shared.wait(until, |state| state.book.has_room());
        if room
            && self.wants(hash)
            && let Some(block) = block()
        {
            self.offer(block);
        }
        room
    }

    /// What changed on the tiers since the last call.
    #[must_use]
    pub fn take_events(&self) -> Vec<KvEvent> {
        self.shared.lock().book.take_events()
    }

    /// (block before it, block) on each tier, in no order.
    #[must_use]
    pub fn inventory(&self) -> Vec<TierInventory> {
        self.shared.lock().book.inventory()
    }

    /// Forgets every block.
    pub fn clear(&self) {
        let lines = self.shared.lock().book.clear();
        self.shared.log(&lines);
    }

    /// Numbers.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        let now = self.now();
        self.shared.lock().book.stats(now)
    }

    /// Conservation of places and bytes. For tests and debug assertions.
    pub fn check(&self) -> Result<(), String> {
        self.shared.lock().book.check()
    }

    /// Writes what lies in memory alone to disk and ends, within `limit`. What is not written then is lost to the cache.
    pub fn close(self, limit: Duration) {
        let Some(disk) = &self.shared.disk else { return };
        let until = self.now() + limit;
        loop {
            let now = self.now();
            let all = self.shared.lock().book.flush(now);
            self.shared.to_write.notify_one();
            if all || !self.shared.wait(until, |state| state.book.has_room()) {
                break;
            }
        }
        if !self.shared.wait(until, |state| state.book.is_settled()) {
            let left = self.stats().leaving;
            tracing::warn!(left, "blocks were not written to disk in time");
        }
        if let Err(error) = disk.sync() {
            tracing::warn!(%error, "the disk tier's index is not safe from a power cut");
        }
    }
}

impl Drop for Tiers {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        // Whoever still reads hears that nothing more comes.
        state.guests.clear();
        drop(state);
        self.shared.to_read.notify_all();
        self.shared.to_write.notify_all();
        let until = self.now() + DROP_WAIT;
        if !self.shared.wait(until, |state| state.threads == 0) {
            tracing::warn!("the disk hangs; its threads are left to end by themselves");
        } else if let Some(disk) = &self.shared.disk {
            // A thread that has counted itself out may hold the folder for a moment longer.
            disk.release();
        }
    }
}

/// Counts a thread out, however it ends.
struct ThreadGuard(Arc<Shared>);

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.0.lock().threads -= 1;
        self.0.progress.notify_all();
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a state; false when it did not come in time.
    fn wait(&self, until: Duration, reached: impl Fn(&State) -> bool) -> bool {
        let limit = until.saturating_sub(self.began.elapsed());
        let state = self.lock();
        let waited = self.progress.wait_timeout_while(state, limit, |state| !reached(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        reached(&state)
    }

    /// Enters changes into the index of the disk.
    fn log(&self, lines: &[Line]) {
        let Some(disk) = self.disk.as_ref().filter(|_| !lines.is_empty()) else { return };
        let count = self.lock().book.disk_len();
        let live = || self.lock().book.on_disk();
        if let Err(error) = disk.append(&self.shape, lines, live, count) {
            tracing::warn!(%error, "the index of the disk tier cannot be written; blocks stored from now on do not outlive this process");
            self.lock().book.unwritten();
        }
    }
}

fn read_loop(shared: &Shared, arrivals: &Sender<Arrival>) {
    let Some(disk) = &shared.disk else { return };
    loop {
        let mut state = shared.lock();
        let job = loop {
            if state.stop {
                return;
            }
            if let Some(job) = state.book.next_read(shared.began.elapsed()) {
                break job;
            }
            state = shared.to_read.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let read = match disk.read(job.stored.place) {
            Ok(buffer) => read_block(buffer, &shared.shape, job.hash, job.stored.tag).ok_or(ReadFault::Corrupt),
            Err(error) => {
                tracing::debug!(%error, "a block cannot be read from disk");
                Err(ReadFault::Unreadable)
            }
        };
        let mut state = shared.lock();
        let (arrival, line) = state.book.read_done(&job, shared.began.elapsed(), read);
        let guest = (arrival.ticket.0 & GUESTS != 0).then(|| state.guests.get(&arrival.ticket).cloned());
        drop(state);
        // Whoever has ended waits for nothing.
        match guest {
            None => arrivals.send(arrival).ok(),
            Some(guest) => guest.and_then(|guest| guest.send(arrival).ok()),
        };
        shared.log(&line.into_iter().collect::<Vec<_>>());
    }
}

fn write_loop(shared: &Shared) {
    let Some(disk) = &shared.disk else { return };
    let mut buffer = PageBuffer::new(disk.place_bytes());
    loop {
        let mut state = shared.lock();
        let job = loop {
            if state.stop {
                return;
            }
            if let Some(job) = state.book.next_write() {
                break job;
            }
            // What was refused made room as well.
            shared.progress.notify_all();
            state = shared.to_write.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let written = write(shared, disk, &job, &mut buffer);
        let lines = shared.lock().book.write_done(&job, shared.began.elapsed(), written);
        shared.log(&lines);
        shared.progress.notify_all();
    }
}

/// Writes one block; its checksum, or `None` when it could not be written.
fn write(shared: &Shared, disk: &Disk, job: &WriteJob, buffer: &mut PageBuffer) -> Option<u64> {
    let sum = write_block(&job.block, &shared.shape, buffer)?;
    match disk.write(job.place, buffer) {
        Ok(()) => Some(sum),
        Err(error) => {
            tracing::warn!(%error, "a block cannot be written to disk");
            None
        }
    }
}
