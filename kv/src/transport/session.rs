//! Shell: the connection to one peer over one transport, with the thread that moves its bytes.
//!
//! Called by the transfer agent; calls a transport's wire. One thread a session, asleep soon after there is nothing to do: a
//! copy of megabytes must not hold a runtime's worker, and a blocking thread needs no runtime at all, so the data plane
//! works the same under any. Batches of one session run in the order of their posts.
//! Never: lets one batch's failure reach the next. Bounds: `QUEUE` batches wait; each ends by its own deadline.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    batch::Batch,
    descriptor::{HostId, TransportKind},
    error::{Refusal, TransferError},
    transfer::{Done, Progress, Transfer},
    wait::{Kick, watch},
};

/// Batches that wait in one session.
pub const QUEUE: usize = 64;
/// Smaller batches say more of latency than of bandwidth.
const TELLING_BYTES: u64 = 256 << 10;

/// Moves the bytes of one batch after another. After an error it must be able to take the next batch.
pub(crate) trait Wire: 'static {
    /// Moves one batch that fits its local region. On return nothing touches its pages any more.
    fn run(&mut self, batch: &Batch, progress: &Progress) -> Result<(), TransferError>;
    /// Does what the outcome of the last batch need not wait for. Never waits.
    fn afterwards(&mut self) {}
}

/// Bytes per second, learned: each transfer moves the estimate a fifth of the way.
#[derive(Debug, Default)]
struct Bandwidth(AtomicU64);

impl Bandwidth {
    fn learn(&self, bytes: u64, took: Duration) {
        let seen = bytes as f64 / took.as_secs_f64().max(1e-9);
        let known = self.get();
        let next = known.map_or(seen, |known| known + (seen - known) * 0.2);
        self.0.store(next.to_bits(), Ordering::Relaxed);
    }

    fn get(&self) -> Option<f64> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(f64::from_bits(bits)),
        }
    }
}

#[derive(Debug)]
struct Shared {
    kick: Arc<Kick>,
    closing: AtomicBool,
    current: Mutex<Option<Arc<Progress>>>,
    bandwidth: Bandwidth,
}

impl Shared {
    fn current(&self, progress: Option<Arc<Progress>>) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }
}

/// A connection to a peer's memory. Dropping it cancels what it has not done.
#[derive(Debug)]
pub struct Session {
    kind: TransportKind,
    peer: HostId,
    jobs: SyncSender<(Batch, Arc<Progress>)>,
    shared: Arc<Shared>,
}

impl Session {
    /// Starts the thread around a wire.
    pub(crate) fn start(kind: TransportKind, peer: HostId, wire: impl Wire + Send) -> Result<Self, TransferError> {
        Self::start_on(kind, peer, || wire)
    }

    /// Starts the thread, which makes its wire itself: for one that may not leave its thread.
    pub(crate) fn start_on<W: Wire>(
        kind: TransportKind,
        peer: HostId,
        wire: impl FnOnce() -> W + Send + 'static,
    ) -> Result<Self, TransferError> {
        let (jobs, queue) = sync_channel(QUEUE);
        let (closing, current) = (AtomicBool::new(false), Mutex::new(None));
        let shared = Shared { kick: Arc::new(Kick::new()?), closing, current, bandwidth: Bandwidth::default() };
        let shared = Arc::new(shared);
        let thread = thread::Builder::new().name(format!("kv-{kind}"));
        let theirs = Arc::clone(&shared);
        // Not joined: it ends with its queue, and a batch's hold says when its pages are quiet.
        thread.spawn(move || work(wire(), &queue, &theirs))?;
        Ok(Self { kind, peer, jobs, shared })
    }

    /// The transport in use.
    #[must_use]
    pub fn kind(&self) -> TransportKind {
        self.kind
    }

    /// The other side.
    #[must_use]
    pub fn peer(&self) -> HostId {
        self.peer
    }

    /// Measured bytes per second; `None` before the first transfer of some size.
    #[must_use]
    pub fn bandwidth(&self) -> Option<f64> {
        self.shared.bandwidth.get()
    }

    /// Starts a transfer. Never blocks; whatever is wrong is the transfer's outcome: `OutOfBounds` for local pages,
    /// `Refused(Busy)` when [`QUEUE`] batches wait.
    pub fn post(&self, batch: Batch) -> Transfer {
        let until = Instant::now() + batch.deadline;
        let progress = Progress::new(Arc::clone(&self.shared.kick), until);
        let transfer = Transfer::of(Arc::clone(&progress));
        if let Err(error) = batch.check() {
            progress.end(Err(error));
            return transfer;
        }
        match self.jobs.try_send((batch, progress)) {
            Ok(()) => {}
            Err(TrySendError::Full((batch, progress))) => {
                drop(batch);
                progress.end(Err(Refusal::Busy.into()));
            }
            Err(TrySendError::Disconnected((batch, progress))) => {
                drop(batch);
                progress.end(Err(TransferError::PeerGone));
            }
        }
        transfer
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Some(progress) = &*self.shared.current.lock().unwrap_or_else(PoisonError::into_inner) {
            progress.give_up();
        }
    }
}

fn work(mut wire: impl Wire, queue: &Receiver<(Batch, Arc<Progress>)>, shared: &Shared) {
    // One batch is often followed by the next at once.
    let next = || watch(|| queue.try_recv().ok()).or_else(|| queue.recv().ok());
    while let Some((batch, progress)) = next() {
        shared.current(Some(Arc::clone(&progress)));
        // Looked at after `current` is set: a session that closes sees one of the two.
        if shared.closing.load(Ordering::Acquire) {
            progress.give_up();
        }
        let began = Instant::now();
        let outcome = progress.halted().and_then(|()| wire.run(&batch, &progress));
        let (bytes, took) = (batch.bytes(), began.elapsed());
        if outcome.is_ok() && bytes >= TELLING_BYTES {
            shared.bandwidth.learn(bytes, took);
        }
        shared.current(None);
        // The hold goes before the outcome is known: whoever awaits may reuse the pages at once.
        drop(batch);
        progress.end(outcome.map(|()| Done { bytes, took }));
        wire.afterwards();
    }
}
