//! The Directory actor: keeps the records of all members current and publishes the snapshot.
//!
//! Owns: the engine, one task for each question under way, one clock. Parent: the node's root. Children: none. Bound: one
//! message for each change of the member list or rumour, both of which gossip paces; questions as in [`asks`].
//! If it dies: readers keep the last snapshot; the new one pulls all records again. This node's own record is
//! not lost, it lies in the arguments.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_ids::{Incarnation, NodeId};
use tokio::{sync::watch, time::Instant};

use super::{
    COALESCE, COALESCE_FROM, DirectoryEffect, DirectoryEngine, NodeRecord, OwnRecord, PULLS_MAX, PublishError,
    Snapshot, asks,
    down::DownBook,
    exchange::{Ask, Told},
};
use crate::{
    membership::{MembershipHandle, MembershipView, Rumour},
    session::{Caller, Ops},
    supervise::{ChildSpec, Handle, Restart, TaskOwner, child},
};

/// The operation through which directories talk to one another.
pub const OP_DIRECTORY: &str = "directory/ask";

/// What the Directory actor needs, for every start.
#[derive(Clone)]
pub struct DirectoryArgs {
    /// Gossip's member list.
    pub view: watch::Receiver<Arc<MembershipView>>,
    /// Spreads new versions.
    pub membership: MembershipHandle,
    /// Asks other nodes.
    pub caller: Caller,
    /// Where [`OP_DIRECTORY`] is served.
    pub ops: Ops,
}

/// Talks to the Directory actor, and holds what outlives it.
#[derive(Clone)]
pub struct DirectoryHandle {
    handle: Handle<DirectoryMsg>,
    own: OwnRecord,
    snapshots: Arc<watch::Sender<Arc<Snapshot>>>,
    down: Arc<DownBook>,
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
        let first = super::DirectoryCore::new(own.get()).snapshot();
        let snapshots = Arc::new(watch::Sender::new(Arc::new(first)));
        Self { handle: Handle::new(), own, snapshots, down: Arc::default() }
    }

    /// Changes this node's record, raises its version and tells the cluster.
    pub fn publish(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<(), PublishError> {
        self.own.update(change).inspect_err(|error| tracing::warn!(%error, "the record was not changed"))?;
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

    /// Follows the snapshots. A reader that falls behind sees the latest one; what it missed it finds by comparing that with
    /// the one it saw before. Small clusters publish every change at once, large ones at most every 25 ms.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.subscribe()
    }

    /// How long ago a node that is no member was declared down or left, if that was not long ago.
    #[must_use]
    pub fn down_for(&self, node: &NodeId) -> Option<Duration> {
        self.down.since(node, std::time::Instant::now())
    }

    /// What the link layer found out about one life of a node.
    pub fn set_reachable(&self, node: NodeId, incarnation: Incarnation, reachable: bool) {
        self.tell(DirectoryMsg::Reachable(node, incarnation, reachable));
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
    let (asked, served) = (handle.handle.clone(), Arc::new(AtomicUsize::new(0)));
    args.ops.serve(
        OP_DIRECTORY,
        Arc::new(move |from, body| Box::pin(asks::answer(asked.clone(), served.clone(), from, body))),
    );
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
    Reachable(NodeId, Incarnation, bool),
    /// Another node asks.
    Asked(NodeId, Ask, tokio::sync::oneshot::Sender<Told>),
    /// A question of this node has its answer, or will have none.
    Told(u64, Option<Told>),
    Tick,
}

impl ractor::Message for DirectoryMsg {}

struct Directory;

struct State {
    engine: DirectoryEngine,
    directory: DirectoryHandle,
    args: DirectoryArgs,
    epoch: Instant,
    due: watch::Sender<Instant>,
    /// A large cluster's member list is read at most as often as its snapshot is published.
    members_read: Option<Instant>,
    members_stale: bool,
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
        let engine = DirectoryEngine::new(directory.own.get(), rand::random(), Duration::ZERO);
        let tasks = TaskOwner::new(4 * PULLS_MAX);
        let epoch = Instant::now();
        let due = watch::Sender::new(epoch);
        if !tasks.tasks().spawn(asks::clock(myself.clone(), due.subscribe())) {
            return Err("the directory has no clock".into());
        }
        myself.cast(DirectoryMsg::MembersChanged)?;
        Ok(State { engine, directory, args, epoch, due, members_read: None, members_stale: true, tasks })
    }

    async fn handle(
        &self,
        myself: ActorRef<DirectoryMsg>,
        message: DirectoryMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let now = state.epoch.elapsed();
        // News sent while this actor was being restarted went nowhere; the shared record and the watch hold all of it.
        if state.directory.own.get().version != state.engine.core().own().version {
            let (own, delta) = state.directory.own.news();
            state.engine.set_own(own, delta, now);
        }
        match message {
            // Looked at before each message.
            DirectoryMsg::OwnChanged => {}
            DirectoryMsg::MembersChanged => state.members_stale = true,
            DirectoryMsg::Heard(rumour) => state.engine.hear(&rumour, now),
            DirectoryMsg::Reachable(node, incarnation, reachable) => {
                state.engine.set_reachable(&node, incarnation, reachable, now);
            }
            DirectoryMsg::Asked(from, ask, reply) => {
                // The asker may have given up; nothing depends on it.
                let _gone = reply.send(state.engine.answer(&from, &ask, now)).is_err();
            }
            DirectoryMsg::Told(ticket, told) => state.engine.told(ticket, told, now),
            DirectoryMsg::Tick => state.engine.tick(now),
        }
        state.read_members(now);
        state.perform(&myself);
        Ok(())
    }
}

impl State {
    fn read_members(&mut self, now: Duration) {
        let early = self.members_read.is_some_and(|at| at.elapsed() < COALESCE);
        if !self.members_stale || (early && self.engine.core().others() >= COALESCE_FROM) {
            return;
        }
        self.members_stale = false;
        self.members_read = Some(Instant::now());
        let view = self.args.view.borrow_and_update().clone();
        self.engine.set_members(&view.members, now);
    }

    fn perform(&mut self, myself: &ActorRef<DirectoryMsg>) {
        for effect in self.engine.take_effects() {
            match effect {
                DirectoryEffect::Ask { ticket, to, ask } => {
                    let asking = asks::ask(self.args.caller.clone(), ticket, to, ask, myself.clone());
                    if !self.tasks.tasks().spawn(asking) && myself.cast(DirectoryMsg::Told(ticket, None)).is_err() {
                        tracing::debug!("the directory ends");
                    }
                }
                DirectoryEffect::Publish(snapshot) => drop(self.directory.snapshots.send_replace(snapshot)),
                DirectoryEffect::Announce(version, delta) => {
                    if let Err(error) = self.args.membership.announce_version(version, delta) {
                        tracing::debug!(%error, "a new version is not spread; the others find it by comparing");
                    }
                }
                DirectoryEffect::Down(node, incarnation) => {
                    self.directory.down.note(node, incarnation, std::time::Instant::now());
                }
            }
        }
        let next = self.epoch + self.engine.next_tick();
        let next = match self.members_read {
            Some(at) if self.members_stale => next.min(at + COALESCE),
            _ => next,
        };
        self.due.send_if_modified(|due| std::mem::replace(due, next) != next);
    }
}
