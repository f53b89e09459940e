//! What the outside of a worker shares with its engine thread: commands, cancels, returned blocks, pulse, load.
//!
//! The command channel is bounded; a cancel never needs room in it, since it is a mark beside the channel and
//! a live request is marked at most once. Built by the worker actor for each of its lives.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::SyncSender,
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use starling_cluster::{stream::Fault, supervise::Tasks};
use starling_engine::{EngineLimits, SamplingParams, StopParams, SubmitError};
use starling_ids::TokenId;
use starling_kv::{hash::HashSeed, tier::TierStats};
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    blocks::{Arrived, RoomAsk, Watch},
    leaving::{Leaving, Lives, TakenOver},
    ledger::RequestKey,
    publisher::SubscriberId,
};
use crate::{
    generate::GenerateFrame,
    report::{BucketAsk, LoadReport, Subscribe},
    transfer_agent::KvFace,
};

/// Commands that wait for the engine thread; it takes all of them between two steps.
pub(crate) const COMMANDS_MAX: usize = 1_024;

/// What the engine thread hands to a request's stream.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// News of one answer.
    Frame(GenerateFrame),
    /// Every answer has ended.
    End,
    /// The engine failed on the request.
    Fail(Fault),
    /// It goes on at another worker; nothing more comes from here.
    Moved,
    /// It came from another worker; its next token is the so-manieth.
    From(u32),
}

/// One request on its way into the engine.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) key: RequestKey,
    pub(crate) hash_seed: HashSeed,
    /// One for each answer that is wanted here.
    pub(crate) answers: Vec<AnswerStart>,
    pub(crate) sampling: SamplingParams,
    pub(crate) stop: StopParams,
    pub(crate) logprobs: Option<u8>,
    pub(crate) priority: i32,
    /// Holds every frame that the request's budget allows, so the engine thread never waits for it.
    pub(crate) outbox: mpsc::Sender<Delivery>,
    /// Its number among the requests taken, or why it was not.
    pub(crate) verdict: oneshot::Sender<Result<u64, SubmitError>>,
}

/// Where one answer begins.
#[derive(Debug)]
pub(crate) struct AnswerStart {
    /// Its number in the request.
    pub(crate) choice: u32,
    /// The prompt, and what the answer has said elsewhere.
    pub(crate) tokens: Arc<[TokenId]>,
    /// How many of them it has said.
    pub(crate) answered: u32,
}

/// A subscriber and its queue.
pub(crate) type Subscribed = (SubscriberId, mpsc::Receiver<Bytes>);

/// What the engine thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Queue a request.
    Submit(Box<Submission>),
    /// Send events from now on, after an inventory.
    Subscribe(Subscribe, oneshot::Sender<Option<Subscribed>>),
    /// Tell a subscriber what is in some buckets of a cache.
    Buckets(SubscriberId, BucketAsk),
    /// Lend blocks of a chain, those that are here and those that become ready.
    Lend(Box<Watch>),
    /// Pin what is here of a chain, and reserve room for the rest.
    Room(Box<RoomAsk>),
    /// Take blocks that came from elsewhere, then go on.
    Arrived(Box<Arrived>),
    /// Lend the blocks of a live request until it is handed over.
    Leave(Box<Leaving>),
    /// Go on with a request that was handed over elsewhere.
    TakeOver(Box<TakenOver>),
    /// Look at the cancels, at the returned blocks and at the stop flag.
    Wake,
}

/// The face of a living worker.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) commands: SyncSender<Command>,
    pub(crate) cancels: Arc<Cancels>,
    pub(crate) load: watch::Receiver<LoadReport>,
    /// The tiers below its device, as of its last step; `None` without any.
    pub(crate) tiers: watch::Receiver<Option<TierStats>>,
    pub(crate) pulse: Arc<Pulse>,
    /// Set when the engine is built.
    pub(crate) limits: Arc<OnceLock<EngineLimits>>,
    /// Set when the engine is built and transports can reach its memory.
    pub(crate) kv: Arc<OnceLock<Arc<KvFace>>>,
    /// Runs the streams; owned by the actor.
    pub(crate) tasks: Tasks,
    pub(crate) next_key: AtomicU64,
    /// The requests that may leave.
    pub(crate) lives: Arc<Lives>,
}

impl Port {
    /// A key no other request of this life has.
    pub(crate) fn key(&self) -> RequestKey {
        RequestKey(self.next_key.fetch_add(1, Ordering::Relaxed))
    }
}

/// Requests that nobody waits for any more.
#[derive(Debug, Default)]
pub(crate) struct Cancels {
    marked: Mutex<Vec<RequestKey>>,
    any: AtomicBool,
}

impl Cancels {
    fn mark(&self, key: RequestKey) {
        self.lock().push(key);
        self.any.store(true, Ordering::Release);
    }

    /// All marks since the last call. Cheap when there are none.
    pub(crate) fn take(&self) -> Vec<RequestKey> {
        if self.any.swap(false, Ordering::Acquire) { std::mem::take(&mut *self.lock()) } else { Vec::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RequestKey>> {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cancels a request when dropped, unless it ended.
#[derive(Debug)]
pub(crate) struct CancelGuard {
    pub(crate) port: Arc<Port>,
    pub(crate) key: RequestKey,
    pub(crate) ended: bool,
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        if !self.ended {
            self.port.cancels.mark(self.key);
            // A full channel wakes the thread as well; a closed one has nothing left to cancel.
            self.port.commands.try_send(Command::Wake).ok();
        }
    }
}

/// When the engine thread last came round.
#[derive(Debug)]
pub(crate) struct Pulse {
    last: Mutex<Option<Instant>>,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self { last: Mutex::new(None) }
    }

    /// The thread comes round; with `idle` it now waits for commands and cannot be late.
    pub(crate) fn beat(&self, idle: bool) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = (!idle).then(Instant::now);
    }

    /// Time since then; zero while it waits for commands.
    pub(crate) fn age(&self) -> Duration {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).map_or(Duration::ZERO, |at| at.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_taken_once() {
        let cancels = Cancels::default();
        assert!(cancels.take().is_empty());
        cancels.mark(RequestKey(3));
        cancels.mark(RequestKey(4));
        assert_eq!(cancels.take(), [RequestKey(3), RequestKey(4)]);
        assert!(cancels.take().is_empty());
    }
}
