//! Listens to every worker and keeps what a router node knows of them.
//!
//! Parent: `router` supervisor. Children: none; one subscription task per worker belongs to its state.
//! Mailbox: at most one pending "the directory changed", coalesced.
//! Owns: the subscriptions. Writes [`knowledge::Knowledge`], which the shard reads without asking.
//! Never: decides where a request goes.
//! If it dies: its subscriptions end, the knowledge is cleared, the next life builds it from the workers' inventories;
//! meanwhile the shard decides by its own book.

mod guesses;
pub mod knowledge;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_cluster::stream::{Context, Opened, StreamError};
use starling_ids::{Incarnation, RequestId, WorkerId};
use tokio::task::{AbortHandle, JoinSet};

use crate::{
    names,
    report::{BucketAsk, Subscribe, WorkerNews},
    view::View,
};
use knowledge::{Knowledge, Token, Unfit};

/// First wait before a subscription is tried again; doubled up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(50);
/// Longest wait between two tries.
const RETRY_MAX: Duration = Duration::from_secs(1);

/// A subscription stream that brings nothing for this long is given up: reports come every 200 ms.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);

/// What an indexer is told.
#[derive(Debug)]
pub(crate) enum IndexerMsg {
    /// The directory changed, or is read for the first time.
    Directory,
}

impl ractor::Message for IndexerMsg {}

/// What an indexer needs.
#[derive(Clone)]
pub(crate) struct IndexerArgs {
    pub(crate) view: Arc<View>,
    pub(crate) knowledge: Arc<Knowledge>,
}

/// The actor.
pub(crate) struct Indexer;

/// What one life owns.
pub(crate) struct IndexerState {
    args: IndexerArgs,
    following: HashMap<WorkerId, (Incarnation, AbortHandle)>,
    /// The watcher of the directory and one subscription per worker; aborted with the state.
    tasks: JoinSet<()>,
    /// Whether a message about the directory waits.
    told: Arc<AtomicBool>,
    warned: Vec<(WorkerId, String)>,
}

impl Actor for Indexer {
    type Msg = IndexerMsg;
    type State = IndexerState;
    type Arguments = IndexerArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<IndexerMsg>,
        args: IndexerArgs,
    ) -> Result<IndexerState, ActorProcessingErr> {
        args.knowledge.clear();
        let mut tasks = JoinSet::new();
        let told = Arc::new(AtomicBool::new(false));
        tasks.spawn(watch_directory(args.view.clone(), told.clone(), myself));
        Ok(IndexerState { args, following: HashMap::new(), tasks, told, warned: Vec::new() })
    }

    async fn handle(
        &self,
        _myself: ActorRef<IndexerMsg>,
        message: IndexerMsg,
        state: &mut IndexerState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            IndexerMsg::Directory => {
                state.told.store(false, Ordering::SeqCst);
                state.read_directory();
                Ok(())
            }
        }
    }
}

impl IndexerState {
    /// Follows workers that are new or live anew, forgets those that are gone.
    fn read_directory(&mut self) {
        while self.tasks.try_join_next().is_some() {}
        let catalog = self.args.view.catalog();
        let wanted: HashMap<&WorkerId, Incarnation> =
            catalog.workers().map(|(_, worker)| (&worker.id, worker.incarnation)).collect();
        let knowledge = &self.args.knowledge;
        self.following.retain(|worker, (incarnation, task)| {
            // One that is only out of reach goes on where it was: links come back within seconds, or gossip says that it is dead.
            let cut_off = || catalog.cut_off.contains(&(worker.clone(), *incarnation));
            let stays = wanted.get(worker) == Some(incarnation) || cut_off();
            if !stays {
                task.abort();
                knowledge.forget(worker);
            }
            stays
        });
        for (worker, incarnation) in wanted {
            if self.following.contains_key(worker) {
                continue;
            }
            let silent = catalog.workers().any(|(_, known)| known.id == *worker && known.silent());
            match knowledge.follow_as(worker, incarnation, silent) {
                Ok(token) => {
                    let target = Target { worker: worker.clone(), incarnation, token };
                    let task = self.tasks.spawn(subscribe_for_ever(self.args.clone(), target));
                    self.following.insert(worker.clone(), (incarnation, task));
                }
                Err(error) => tracing::warn!(%worker, %error, "worker is not indexed"),
            }
        }
        if self.warned != catalog.refused {
            for (worker, reason) in catalog.refused.iter().filter(|refused| !self.warned.contains(refused)) {
                tracing::warn!(%worker, reason, "worker is left out");
            }
            self.warned.clone_from(&catalog.refused);
        }
    }
}

/// Tells the actor of changes, one message at a time however many there are.
async fn watch_directory(view: Arc<View>, told: Arc<AtomicBool>, actor: ActorRef<IndexerMsg>) {
    let mut changes = view.watch();
    loop {
        if !told.swap(true, Ordering::SeqCst) && actor.send_message(IndexerMsg::Directory).is_err() {
            return;
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

struct Target {
    worker: WorkerId,
    incarnation: Incarnation,
    token: Token,
}

/// Subscribes, and again whenever the stream ends, until the task is aborted or replaced.
async fn subscribe_for_ever(args: IndexerArgs, target: Target) {
    let Target { worker, token, .. } = &target;
    let mut wait = RETRY_MIN;
    loop {
        match subscribe_once(&args, &target).await {
            Ended::Replaced => return,
            Ended::Heard(reason) => {
                wait = RETRY_MIN;
                tracing::debug!(%worker, reason, "event stream ended");
            }
            Ended::Unheard(reason) => tracing::debug!(%worker, reason, "no event stream"),
        }
        if args.knowledge.connected(worker, *token, false).is_err() {
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RETRY_MAX);
    }
}

/// How a subscription ended.
enum Ended {
    Replaced,
    /// After at least one frame.
    Heard(String),
    /// Before any.
    Unheard(String),
}

async fn subscribe_once(args: &IndexerArgs, target: &Target) -> Ended {
    let endpoint = names::worker_events(target.worker.index);
    let context = Context::subscription(RequestId::default());
    let from = args.knowledge.read_up_to(&target.worker, target.token);
    let body = rmp_serde::to_vec(&Subscribe { digests: true, from }).map(Bytes::from).unwrap_or_default();
    let opened = args.view.mesh().open(&target.worker.node, target.incarnation, &endpoint, context, body);
    let Opened { mut rx, tx, .. } = match tokio::time::timeout(SILENCE_LIMIT, opened).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return Ended::Unheard(error.to_string()),
        Err(_) => return Ended::Unheard(StreamError::Deadline.to_string()),
    };
    rx.set_inactivity(Some(SILENCE_LIMIT));
    if args.knowledge.connected(&target.worker, target.token, true).is_err() {
        return Ended::Replaced;
    }
    let mut heard = false;
    loop {
        let reason = match rx.recv().await {
            Some(Ok(frame)) => match take(&args.knowledge, target, &frame) {
                Ok(ask) => {
                    heard = true;
                    if let Some(bytes) = ask.and_then(|ask| rmp_serde::to_vec(&ask).ok()) {
                        // No credit: the next digests differ as well.
                        tx.try_send(bytes.into()).ok();
                    }
                    continue;
                }
                Err(Refusal::Unfit(Unfit::Replaced)) => return Ended::Replaced,
                Err(refusal) => refusal.to_string(),
            },
            Some(Err(error)) => error.to_string(),
            None => "the worker ended it".to_owned(),
        };
        return if heard { Ended::Heard(reason) } else { Ended::Unheard(reason) };
    }
}

/// Why a frame ends its subscription.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("a frame cannot be read: {0}")]
    Unreadable(#[from] rmp_serde::decode::Error),
    #[error("news of {0} on another worker's stream")]
    Stranger(WorkerId),
    #[error(transparent)]
    Unfit(#[from] Unfit),
}

/// Takes a frame in; what to ask the worker about it, if anything.
fn take(knowledge: &Knowledge, target: &Target, frame: &[u8]) -> Result<Option<BucketAsk>, Refusal> {
    let (worker, token) = (&target.worker, target.token);
    let own = |of: &WorkerId| if of == worker { Ok(()) } else { Err(Refusal::Stranger(of.clone())) };
    match rmp_serde::from_slice(frame)? {
        WorkerNews::Inventory(part) => {
            own(&part.worker)?;
            knowledge.inventory(worker, token, part)?;
        }
        WorkerNews::Events(batch) => {
            own(&batch.worker)?;
            knowledge.events(worker, token, batch)?;
        }
        WorkerNews::Load(report) => {
            own(&report.worker)?;
            knowledge.load(worker, token, report)?;
        }
        WorkerNews::Digests(told) => {
            own(&told.worker)?;
            return Ok(knowledge.digests(worker, token, &told)?);
        }
        WorkerNews::Bucket(part) => {
            own(&part.worker)?;
            knowledge.bucket(worker, token, part)?;
        }
    }
    Ok(None)
}
