//! The Membership actor: owns the gossip thread and tells the directory who is here.
//!
//! Owns: the thread (joined when the state is dropped), one watcher task. Parent: the node's root. Children: none.
//! Bound: one message for each change of this node's record, each broken link and each question of an exchange;
//! visits and exchanges run as tasks, [`TASKS_MAX`] at most.
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
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use starling_ids::{Incarnation, NodeId};
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    Identity, MembershipView, Rumour, Seeds,
    driver::{Look, Peer},
    outreach::{self, OP_EXCHANGE},
    thread::{Command, GossipThread, Observer, ThreadArgs},
    visits::{Visit, serve_here},
};
use crate::{
    discovery::{DirectoryHandle, RecordDelta},
    security::Keys,
    session::{Caller, Ops},
    stream::{Fault, FaultKind},
    supervise::{ChildSpec, Handle, Restart, TaskOwner, Unavailable, child},
};

/// Visits and exchanges at a time: as many as the driver checks members, and a few.
const TASKS_MAX: usize = 72;
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
    /// The keys of the cluster: gossip seals with the primary and opens with any.
    pub keys: Keys,
    /// The cluster's name; packets of other clusters are not authentic here.
    pub cluster: String,
    /// Where to look for members.
    pub seeds: Seeds,
    /// Where the member list is published.
    pub view: Arc<watch::Sender<Arc<MembershipView>>>,
    /// Told of each change and rumour.
    pub directory: DirectoryHandle,
    /// Asks other nodes.
    pub caller: Caller,
    /// Finds out whether a member that does not answer gossip lives: see [`super::visits`].
    pub visit: Visit,
    /// Where [`OP_EXCHANGE`] is served.
    pub ops: Ops,
}

/// Talks to the Membership actor.
#[derive(Debug, Clone, Default)]
pub struct MembershipHandle {
    handle: Handle<MembershipMsg>,
    generation: Arc<AtomicU32>,
}

impl MembershipHandle {
    /// Spreads the news that this node's record has a new version, and how it differs where that is little.
    pub fn announce_version(&self, version: u64, delta: Option<RecordDelta>) -> Result<(), Unavailable> {
        self.handle.cast(MembershipMsg::AnnounceVersion(version, delta))
    }

    /// A link to this member broke or could not be made: gossip looks at it at once. What is lost here, its next probe
    /// finds.
    pub fn doubt(&self, node: &NodeId, incarnation: Incarnation) {
        if let Err(error) = self.handle.cast(MembershipMsg::Doubt(node.clone(), incarnation)) {
            tracing::debug!(%node, %error, "nobody to tell of a broken link");
        }
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
    serve_here(&args.ops, args.address);
    args.ops.serve(OP_EXCHANGE, Arc::new(move |_from, body| Box::pin(serve(for_ops.clone(), body))));
    child("membership", "membership", Restart::Permanent, &handle.handle, move || {
        let start = Start { args: args.clone(), handle: inner.clone(), generation: generation.clone() };
        (Membership, start)
    })
}

/// What the actor is told.
pub(crate) enum MembershipMsg {
    AnnounceVersion(u64, Option<RecordDelta>),
    Doubt(NodeId, Incarnation),
    Exchange(Peer),
    Visit(Peer, Look),
    Serve(Bytes, oneshot::Sender<Result<Bytes, Fault>>),
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
        let identity = Identity::new(args.node.clone(), args.address, args.incarnation).in_generation(known);
        let observer = Box::new(Relay { directory: args.directory.clone(), handle });
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
        let tasks = TaskOwner::new(TASKS_MAX);
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
        Ok(State { args, thread, tasks, left: false })
    }

    async fn handle(
        &self,
        _myself: ActorRef<MembershipMsg>,
        message: MembershipMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            MembershipMsg::AnnounceVersion(version, delta) => state.command(Command::AnnounceVersion(version, delta)),
            MembershipMsg::Doubt(node, incarnation) => state.command(Command::Doubt(node, incarnation)),
            MembershipMsg::Exchange(peer) => state.exchange(peer),
            MembershipMsg::Visit(peer, look) => state.visit(peer, look),
            MembershipMsg::Serve(question, reply) => state.serve(question, reply),
            MembershipMsg::Leave(reply) => state.leave(reply).await,
            MembershipMsg::ThreadEnded => return state.thread_ended(),
        }
        Ok(())
    }
}

impl State {
    /// A full queue means a thread that does not run; what is lost here comes again by anti-entropy.
    fn command(&self, command: Command) {
        let over = self.left || self.args.view.borrow().outranked.is_some();
        if self.thread.commands().try_send(command).is_err() && !over {
            tracing::warn!("the gossip thread takes no commands");
        }
    }

    fn exchange(&self, peer: Peer) {
        let commands = self.thread.commands();
        let exchange = outreach::exchange(self.args.caller.clone(), peer, commands);
        if !self.tasks.tasks().spawn(exchange) {
            self.command(Command::ExchangeFailed);
        }
    }

    fn visit(&self, peer: Peer, look: Look) {
        let visit = outreach::visit(self.args.visit.clone(), peer, look, self.thread.commands());
        if !self.tasks.tasks().spawn(visit) {
            tracing::debug!("too many visits and exchanges at once");
        }
    }

    /// Dropping the reply tells the asker.
    fn serve(&self, question: Bytes, reply: oneshot::Sender<Result<Bytes, Fault>>) {
        let (commands, own) = (self.thread.commands(), self.args.address);
        let served = self.tasks.tasks().spawn(async move {
            if reply.send(outreach::serve(commands, own, question).await).is_err() {
                tracing::debug!("the asker of an exchange no longer waits");
            }
        });
        if !served {
            tracing::debug!("too many exchanges at once");
        }
    }

    async fn leave(&mut self, reply: RpcReplyPort<()>) {
        self.left = true;
        let (said, heard) = oneshot::channel();
        if send_in_time(&self.thread.commands(), Command::Leave(said)).await
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

/// Hands a question of an exchange to the actor, whose tasks end with it.
async fn serve(handle: Handle<MembershipMsg>, question: Bytes) -> Result<Bytes, Fault> {
    let (reply, answer) = oneshot::channel();
    handle.cast(MembershipMsg::Serve(question, reply))?;
    answer.await.map_err(|_| Fault::new(FaultKind::Unavailable, "membership is busy or was restarted"))?
}

/// Brings news from the thread to the actors.
struct Relay {
    directory: DirectoryHandle,
    handle: Handle<MembershipMsg>,
}

impl Observer for Relay {
    fn members_changed(&self) {
        self.directory.members_changed();
    }

    fn rumour(&self, rumour: Rumour) {
        self.directory.hear(rumour);
    }

    fn visit(&self, peer: Peer, look: Look) {
        self.tell(MembershipMsg::Visit(peer, look));
    }

    fn exchange(&self, peer: Peer) {
        self.tell(MembershipMsg::Exchange(peer));
    }
}

impl Relay {
    /// While the actor restarts its thread is another one too.
    fn tell(&self, message: MembershipMsg) {
        if let Err(error) = self.handle.cast(message) {
            tracing::debug!(%error, "gossip without an actor to tell");
        }
    }
}
