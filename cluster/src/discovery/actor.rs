//! The Directory actor: keeps the records of all members current and publishes the snapshot.
//!
//! Owns: the core, one task for each record being pulled. Parent: the node's root. Children: none. Bound: one message for
//! each change of the member list or rumour, both of which gossip paces; [`PULLS_MAX`] pulls run at once.
//! If it dies: readers keep the last snapshot; the new one pulls all records again. This node's own record is
//! not lost, it lies in the arguments.

use std::{sync::Arc, time::Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use rand::RngExt;
use starling_ids::{Metric, NodeId};
use tokio::sync::watch;

use super::{
    NodeRecord, OwnRecord, RecordTooLarge, Snapshot, asks,
    core::{Digest, DirectoryCore, RECORD_MAX, Refused},
    pulls::{PULLS_MAX, Pulls},
};
use crate::{
    membership::{MembershipHandle, MembershipView, Rumour},
    session::{Caller, Ops},
    stream::Fault,
    supervise::{ChildSpec, Handle, Restart, TaskOwner, child},
};

/// The operation that hands out a node's own record.
pub const OP_RECORD: &str = "directory/record";
/// The operation that takes a digest and hands out what is newer.
pub const OP_SYNC: &str = "directory/sync";

/// What the Directory actor needs, for every start.
#[derive(Clone)]
pub struct DirectoryArgs {
    /// Gossip's member list.
    pub view: watch::Receiver<Arc<MembershipView>>,
    /// Spreads new versions.
    pub membership: MembershipHandle,
    /// Asks other nodes.
    pub caller: Caller,
    /// Where [`OP_RECORD`] and [`OP_SYNC`] are served.
    pub ops: Ops,
}

/// Talks to the Directory actor, and holds what outlives it.
#[derive(Clone)]
pub struct DirectoryHandle {
    handle: Handle<DirectoryMsg>,
    own: OwnRecord,
    snapshots: Arc<watch::Sender<Arc<Snapshot>>>,
}

impl std::fmt::Debug for DirectoryHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DirectoryHandle({})", self.own.get().node)
    }
}

impl DirectoryHandle {
    /// For a node whose first record is `own`.
    #[must_use]
    pub fn new(own: NodeRecord) -> Self {
        let own = OwnRecord::new(own);
        let first = DirectoryCore::new(own.get()).snapshot();
        Self { handle: Handle::new(), own, snapshots: Arc::new(watch::Sender::new(Arc::new(first))) }
    }

    /// Changes this node's record, raises its version and tells the cluster.
    pub fn publish(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<(), RecordTooLarge> {
        self.own.update(change)?;
        self.tell(DirectoryMsg::OwnChanged);
        Ok(())
    }

    /// This node's own record.
    #[must_use]
    pub fn own(&self) -> Arc<NodeRecord> {
        self.own.get()
    }

    /// Every member as of now.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshots.borrow().clone()
    }

    /// Follows the snapshots.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.subscribe()
    }

    /// What the link layer found out about a node.
    pub fn set_reachable(&self, node: NodeId, reachable: bool) {
        self.tell(DirectoryMsg::Reachable(node, reachable));
    }

    /// Gossip's member list has changed.
    pub(crate) fn members_changed(&self) {
        self.tell(DirectoryMsg::MembersChanged);
    }

    /// Gossip brought news of a record.
    pub(crate) fn hear(&self, rumour: Rumour) {
        self.tell(DirectoryMsg::Heard(rumour));
    }

    /// A directory that is being restarted reads everything anew when it starts.
    fn tell(&self, message: DirectoryMsg) {
        if let Err(error) = self.handle.cast(message) {
            tracing::debug!(%error, "news for a directory that does not run");
        }
    }
}

/// How to start the actor behind `handle`.
#[must_use]
pub fn directory_child(handle: &DirectoryHandle, args: DirectoryArgs) -> ChildSpec {
    let own = handle.own.clone();
    args.ops.serve(
        OP_RECORD,
        Arc::new(move |_from, _body| {
            let record = asks::encode(own.get().as_ref());
            Box::pin(std::future::ready(record))
        }),
    );
    let asked = handle.handle.clone();
    args.ops.serve(OP_SYNC, Arc::new(move |_from, body| Box::pin(asks::answer_sync(asked.clone(), body))));
    let directory = handle.clone();
    child("directory", "directory", Restart::Permanent, &handle.handle, move || {
        (Directory, (directory.clone(), args.clone()))
    })
}

/// What the actor is told.
pub(crate) enum DirectoryMsg {
    OwnChanged,
    MembersChanged,
    Heard(Rumour),
    Reachable(NodeId, bool),
    /// One pull is over.
    Pulled(NodeId, Result<NodeRecord, Fault>),
    /// One comparison of digests is over.
    Synced(Vec<NodeRecord>),
    Newer(Digest, tokio::sync::oneshot::Sender<Vec<Arc<NodeRecord>>>),
    Sync,
    Retry,
}

impl ractor::Message for DirectoryMsg {}

struct Directory;

struct State {
    core: DirectoryCore,
    directory: DirectoryHandle,
    args: DirectoryArgs,
    pulls: Pulls,
    /// When the running timer wakes this actor to try again.
    retry_at: Option<Instant>,
    tasks: TaskOwner,
}

impl Actor for Directory {
    type Msg = DirectoryMsg;
    type State = State;
    type Arguments = (DirectoryHandle, DirectoryArgs);

    async fn pre_start(
        &self,
        myself: ActorRef<DirectoryMsg>,
        (directory, args): Self::Arguments,
    ) -> Result<State, ActorProcessingErr> {
        let core = DirectoryCore::new(directory.own.get());
        let tasks = TaskOwner::new(PULLS_MAX + 8);
        if !tasks.tasks().spawn(asks::tick(myself.clone())) {
            return Err("the directory has no clock".into());
        }
        myself.cast(DirectoryMsg::MembersChanged)?;
        Ok(State { core, directory, args, pulls: Pulls::default(), retry_at: None, tasks })
    }

    async fn handle(
        &self,
        myself: ActorRef<DirectoryMsg>,
        message: DirectoryMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.look_at_own();
        match message {
            // Looked at before each message.
            DirectoryMsg::OwnChanged => {}
            DirectoryMsg::MembersChanged => state.members_changed(),
            DirectoryMsg::Heard(rumour) => state.core.hear(&rumour),
            DirectoryMsg::Reachable(node, reachable) => {
                state.core.set_reachable(&node, reachable);
                state.publish();
            }
            DirectoryMsg::Pulled(node, outcome) => state.pulled(node, outcome),
            DirectoryMsg::Synced(records) => records.into_iter().for_each(|record| state.take(record)),
            DirectoryMsg::Newer(digest, reply) => {
                // The asker may have given up; nothing depends on it.
                let _gone = reply.send(state.core.newer_than(&digest, RECORD_MAX)).is_err();
            }
            DirectoryMsg::Sync => {
                state.members_changed();
                state.sync(&myself);
            }
            DirectoryMsg::Retry => state.retry_at = None,
        }
        state.pull_wanted(&myself);
        Ok(())
    }
}

impl State {
    /// News sent while this actor was being restarted went nowhere; the shared record and the watch hold all of it.
    fn look_at_own(&mut self) {
        let own = self.directory.own.get();
        let version = own.version;
        if version == self.core.own().version {
            return;
        }
        self.core.set_own(own);
        self.publish();
        if let Err(error) = self.args.membership.announce_version(version) {
            tracing::debug!(%error, "a new version is not spread; the others find it by comparing digests");
        }
    }

    fn members_changed(&mut self) {
        let view = self.args.view.borrow().clone();
        self.core.set_members(&view.members);
        self.pulls.keep(|node| view.members.contains_key(node));
        self.publish();
    }

    fn publish(&self) {
        let snapshot = self.core.snapshot();
        self.directory.snapshots.send_if_modified(|current| {
            let changed = **current != snapshot;
            if changed {
                *current = Arc::new(snapshot);
            }
            changed
        });
    }

    fn take(&mut self, record: NodeRecord) {
        let node = record.node.clone();
        match self.core.offer(record) {
            Ok(true) => self.publish(),
            Ok(false) => {}
            Err(Refused::Stale) => {
                metrics::counter!(Metric::StaleRefused.name(), "what" => "record").increment(1);
            }
            Err(refused) => tracing::debug!(%node, %refused, "a record was not taken"),
        }
    }

    fn pulled(&mut self, node: NodeId, outcome: Result<NodeRecord, Fault>) {
        let before = self.core.wanted().contains(&node);
        let failed = match outcome {
            Ok(record) => {
                self.take(record);
                before && self.core.wanted().contains(&node)
            }
            Err(fault) => {
                tracing::debug!(%node, %fault, "a record was not pulled");
                true
            }
        };
        if failed {
            self.pulls.failed(node, Instant::now());
        } else {
            self.pulls.done(&node);
        }
    }

    fn pull_wanted(&mut self, myself: &ActorRef<DirectoryMsg>) {
        let (due, next) = self.pulls.due(self.core.wanted(), Instant::now());
        for node in due {
            let pull = asks::pull(self.args.caller.clone(), node.clone(), myself.clone());
            if self.tasks.tasks().spawn(pull) {
                self.pulls.started(node);
            }
        }
        if let Some(at) = next {
            self.retry_when_due(myself, at);
        }
    }

    /// One timer is enough: when it fires, whatever is due is pulled and the next one set.
    fn retry_when_due(&mut self, myself: &ActorRef<DirectoryMsg>, at: Instant) {
        if self.retry_at.is_some() {
            return;
        }
        let myself = myself.clone();
        let started = self.tasks.tasks().spawn(async move {
            tokio::time::sleep_until(at.into()).await;
            asks::send(&myself, DirectoryMsg::Retry);
        });
        // Without a timer the next comparison of digests wakes this actor.
        self.retry_at = started.then_some(at);
    }

    /// Compares digests with one member drawn at random.
    fn sync(&mut self, myself: &ActorRef<DirectoryMsg>) {
        let peers = self.core.peers();
        if peers.is_empty() {
            return;
        }
        let peer = peers[rand::rng().random_range(0..peers.len())].clone();
        let comparison = asks::compare(self.args.caller.clone(), peer, self.core.digest(), myself.clone());
        let _full_set_waits_for_the_next = self.tasks.tasks().spawn(comparison);
    }
}
