//! The Membership actor: owns the gossip thread and tells the directory who is here.
//!
//! Owns: the thread (joined when the state is dropped), one watcher task. Parent: the node's root. Children: none.
//! Bound: one message for each change of this node's record or of the member list; list exchanges run as tasks.
//! If it dies: gossip pauses for the restart; the others suspect this node, and the new thread refutes. The
//! member list and the generation live in the arguments and are kept.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use foca::Member;
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use starling_ids::{Incarnation, NodeId};
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    Identity, MembershipView, Rumour,
    thread::{Command, GossipThread, Observer, ThreadArgs},
};
use crate::{
    discovery::DirectoryHandle,
    security::SealKey,
    session::{Caller, Ops},
    stream::{Fault, FaultKind},
    supervise::{ChildSpec, Handle, Restart, TaskOwner, Unavailable, child},
};

/// The operation that hands out the member list to a node that joins.
pub const OP_STATE: &str = "membership/state";
const STATE_WAIT: Duration = Duration::from_secs(2);
/// Members in one list; about 60 bytes each, below the limit of a session message.
const STATE_MEMBERS_MAX: usize = 2000;
const LEAVE_WAIT: Duration = Duration::from_secs(2);

/// What the Membership actor needs, for every start.
#[derive(Clone)]
pub struct MembershipArgs {
    /// This node.
    pub node: NodeId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// What it advertises.
    pub address: SocketAddr,
    /// The bound gossip socket.
    pub socket: Arc<UdpSocket>,
    /// Gossip keys, newest first: the first one seals, all open.
    pub keys: Vec<SealKey>,
    /// The cluster's name; packets of other clusters are not authentic here.
    pub cluster: String,
    /// `host:port`, names included.
    pub seeds: Vec<String>,
    /// Where the member list is published.
    pub view: Arc<watch::Sender<Arc<MembershipView>>>,
    /// Told of each change and rumour.
    pub directory: DirectoryHandle,
    /// Asks other nodes.
    pub caller: Caller,
    /// Where [`OP_STATE`] is served.
    pub ops: Ops,
}

/// Talks to the Membership actor.
#[derive(Debug, Clone, Default)]
pub struct MembershipHandle {
    handle: Handle<MembershipMsg>,
    generation: Arc<AtomicU32>,
}

impl MembershipHandle {
    /// Spreads the news that this node's record has a new version.
    pub fn announce_version(&self, version: u64) -> Result<(), Unavailable> {
        self.handle.cast(MembershipMsg::AnnounceVersion(version))
    }

    /// Says goodbye to the cluster and ends the thread. The actor stays, silent.
    pub async fn leave(&self) -> Result<(), Unavailable> {
        self.handle.call(MembershipMsg::Leave, LEAVE_WAIT).await
    }
}

/// How to start the actor behind `handle`.
#[must_use]
pub fn membership_child(handle: &MembershipHandle, args: MembershipArgs) -> ChildSpec {
    let (inner, generation) = (handle.handle.clone(), handle.generation.clone());
    let for_ops = handle.handle.clone();
    args.ops.serve(OP_STATE, Arc::new(move |_from, _body| Box::pin(export(for_ops.clone()))));
    child("membership", "membership", Restart::Permanent, &handle.handle, move || {
        let start = Start { args: args.clone(), handle: inner.clone(), generation: generation.clone() };
        (Membership, start)
    })
}

/// What the actor is told.
pub(crate) enum MembershipMsg {
    AnnounceVersion(u64),
    Export(oneshot::Sender<Vec<Member<Identity>>>),
    Import(Vec<Member<Identity>>),
    FirstContact(NodeId),
    Leave(RpcReplyPort<()>),
    ThreadEnded,
}

impl ractor::Message for MembershipMsg {}

struct Membership;

struct Start {
    args: MembershipArgs,
    handle: Handle<MembershipMsg>,
    generation: Arc<AtomicU32>,
}

struct State {
    args: MembershipArgs,
    handle: Handle<MembershipMsg>,
    thread: GossipThread,
    tasks: TaskOwner,
    left: bool,
}

impl Actor for Membership {
    type Msg = MembershipMsg;
    type State = State;
    type Arguments = Start;

    async fn pre_start(&self, myself: ActorRef<MembershipMsg>, start: Start) -> Result<State, ActorProcessingErr> {
        let Start { args, handle, generation } = start;
        let known = generation.load(Ordering::Relaxed);
        let identity =
            Identity { generation: known, ..Identity::new(args.node.clone(), args.address, args.incarnation) };
        let observer = Box::new(Relay { directory: args.directory.clone(), handle: handle.clone() });
        let (thread, ended) = GossipThread::start(ThreadArgs {
            identity,
            generation,
            socket: args.socket.clone(),
            keys: args.keys.clone(),
            cluster: args.cluster.clone(),
            seeds: args.seeds.clone(),
            view: args.view.clone(),
            observer,
        })?;
        let tasks = TaskOwner::new(8);
        let watched = tasks.tasks().spawn(async move {
            // Resolves with an error by design: the thread drops its end.
            let _ended = ended.await.is_err();
            if myself.cast(MembershipMsg::ThreadEnded).is_err() {
                tracing::debug!("the gossip thread outlived its actor");
            }
        });
        if !watched {
            return Err("the gossip thread cannot be watched".into());
        }
        Ok(State { args, handle, thread, tasks, left: false })
    }

    async fn handle(
        &self,
        _myself: ActorRef<MembershipMsg>,
        message: MembershipMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            MembershipMsg::AnnounceVersion(version) => state.command(Command::AnnounceVersion(version)),
            MembershipMsg::Export(reply) => state.command(Command::Export(reply)),
            MembershipMsg::Import(members) => state.command(Command::Import(members)),
            MembershipMsg::FirstContact(peer) => state.pull_list(peer),
            MembershipMsg::Leave(reply) => state.leave(reply).await,
            MembershipMsg::ThreadEnded => return state.thread_ended(),
        }
        Ok(())
    }
}

impl State {
    /// A full queue means a thread that does not run; what is lost here comes again by anti-entropy.
    fn command(&self, command: Command) {
        let Some(commands) = self.thread.commands() else { return };
        let over = self.left || self.args.view.borrow().outranked.is_some();
        if commands.try_send(command).is_err() && !over {
            tracing::warn!("the gossip thread takes no commands");
        }
    }

    /// Gossip brings the list in seconds; asking for it brings all of it at once.
    fn pull_list(&self, peer: NodeId) {
        let (caller, handle) = (self.args.caller.clone(), self.handle.clone());
        let started = self.tasks.tasks().spawn(async move {
            match caller(peer.clone(), OP_STATE, Bytes::new(), STATE_WAIT).await {
                Ok(list) => match rmp_serde::from_slice(&list) {
                    Ok(members) => {
                        if let Err(error) = handle.cast(MembershipMsg::Import(members)) {
                            tracing::debug!(%error, "a member list came too late");
                        }
                    }
                    Err(error) => tracing::warn!(%peer, %error, "a member list does not decode"),
                },
                Err(fault) => tracing::debug!(%peer, %fault, "no member list; gossip will bring it"),
            }
        });
        if !started {
            tracing::debug!("a member list is being fetched already");
        }
    }

    async fn leave(&mut self, reply: RpcReplyPort<()>) {
        self.left = true;
        let (said, heard) = oneshot::channel();
        if let Some(commands) = self.thread.commands()
            && send_in_time(&commands, Command::Leave(said)).await
            && tokio::time::timeout(LEAVE_WAIT / 2, heard).await.is_err()
        {
            tracing::warn!("the gossip thread did not say goodbye in time");
        }
        if reply.send(()).is_err() {
            tracing::debug!("nobody waits for the goodbye");
        }
    }

    /// An end that nobody asked for is a failure of this actor, and its supervisor starts both again.
    fn thread_ended(&self) -> Result<(), ActorProcessingErr> {
        // Of a lost name the mesh tells its owner, who ends or begins anew.
        let outranked = self.args.view.borrow().outranked.is_some();
        if outranked || self.left { Ok(()) } else { Err("the gossip thread ended".into()) }
    }
}

async fn send_in_time(commands: &mpsc::Sender<Command>, command: Command) -> bool {
    matches!(tokio::time::timeout(LEAVE_WAIT / 2, commands.send(command)).await, Ok(Ok(())))
}

/// Answers [`OP_STATE`]: what this node knows about members, alive first.
async fn export(handle: Handle<MembershipMsg>) -> Result<Bytes, Fault> {
    let (reply, answer) = oneshot::channel();
    handle.cast(MembershipMsg::Export(reply))?;
    let unavailable = || Fault::new(FaultKind::Unavailable, "the gossip thread gives no answer");
    let answer = tokio::time::timeout(STATE_WAIT, answer).await.map_err(|_| unavailable())?;
    let mut members = answer.map_err(|_| unavailable())?;
    members.sort_by_key(|member| !super::message::present(member.state()));
    members.truncate(STATE_MEMBERS_MAX);
    let encoded = rmp_serde::to_vec(&members).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))?;
    Ok(encoded.into())
}

/// Brings news from the thread to the actors.
struct Relay {
    directory: DirectoryHandle,
    handle: Handle<MembershipMsg>,
}

impl Observer for Relay {
    fn members_changed(&self, view: &MembershipView, first: bool) {
        self.directory.members_changed();
        if let Some(peer) = view.members.keys().next().filter(|_| first)
            && let Err(error) = self.handle.cast(MembershipMsg::FirstContact(peer.clone()))
        {
            tracing::debug!(%error, "first contact without an actor to tell");
        }
    }

    fn rumour(&self, rumour: Rumour) {
        self.directory.hear(rumour);
    }
}
