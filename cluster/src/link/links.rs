//! The Links actor: which link leads to which node, dialling when there is none, and who is out of reach.
//!
//! Parent: the root; no children (Link actors live under the supervisor `links`); dials and retries run in a
//! task set of its own. Called through [`super::layer::LinkLayer`]; links and dials report to it.
//! Bounds: one dial a node at a time; as many waiters as callers opened streams.
//! If it dies: links and their streams go on; callers that wait for a dial are told that it is unavailable;
//! retries of unreachable nodes begin anew with their next use.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_ids::{Incarnation, Metric, NodeId};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
};

use super::{
    actor::{Link, LinkArgs},
    handshake::{Established, HandshakeError, greet},
    mux::{Ended, Mux},
};
use crate::{
    config::Timings,
    discovery::{NodeView, Snapshot},
    security::{Alpn, Tls},
    stream::{Endpoints, StreamError},
    supervise::{Handle, Restart, SuperviseError, SupervisorHandle, Tasks, child},
    wire::{Closing, Hello, Party, limits},
};

/// First and longest wait between tries to reach a node again.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

pub(crate) type Dialled = Result<Arc<Mux>, StreamError>;
/// Told whenever a node becomes or ceases to be reachable from here.
pub(crate) type Reach = Arc<dyn Fn(&NodeId, Incarnation, bool) + Send + Sync>;

/// What Links is asked and told.
pub(crate) enum LinksMsg {
    /// A link to this node in this life, made if there is none.
    Need(NodeId, Incarnation, oneshot::Sender<Dialled>),
    /// A dial of this side ended.
    Dialled(NodeId, Incarnation, Box<Result<Established, HandshakeError>>),
    /// A handshake of the listener ended well.
    Accepted(Box<Established>),
    /// A link is over.
    Ended(Arc<Mux>, Ended),
    /// Time to try an unreachable node again.
    Retry(NodeId),
}

impl ractor::Message for LinksMsg {}

/// All living links by peer. Shared with openers, who look here first.
#[derive(Clone, Default)]
pub(crate) struct Registry(Arc<RwLock<HashMap<NodeId, Vec<Arc<Mux>>>>>);

impl Registry {
    /// The link for new streams to this node in this life.
    pub(crate) fn get(&self, node: &NodeId, incarnation: Incarnation) -> Option<Arc<Mux>> {
        let links = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let of_life = links.get(node)?.iter().filter(|mux| mux.incarnation == incarnation && mux.is_open());
        of_life.max_by_key(|mux| mux.number).cloned()
    }

    fn all(&self, node: &NodeId) -> Vec<Arc<Mux>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(node).cloned().unwrap_or_default()
    }

    fn insert(&self, mux: Arc<Mux>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).entry(mux.peer.clone()).or_default().push(mux);
    }

    fn remove(&self, mux: &Mux) {
        let mut links = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(list) = links.get_mut(&mux.peer) {
            list.retain(|known| known.number != mux.number);
            if list.is_empty() {
                links.remove(&mux.peer);
            }
        }
    }
}

/// What it is started with, and keeps over restarts.
#[derive(Clone)]
pub(crate) struct LinksArgs {
    pub(crate) hello: Hello,
    pub(crate) tls: Tls,
    pub(crate) timings: Timings,
    pub(crate) endpoints: Endpoints,
    pub(crate) handlers: Tasks,
    pub(crate) snapshots: watch::Receiver<Arc<Snapshot>>,
    pub(crate) reach: Reach,
    pub(crate) registry: Registry,
    /// Parent of the Link actors.
    pub(crate) parent: SupervisorHandle,
    pub(crate) handle: Handle<LinksMsg>,
}

pub(crate) struct Links;

pub(crate) struct State {
    args: LinksArgs,
    dials: HashMap<NodeId, Vec<oneshot::Sender<Dialled>>>,
    /// Failed tries in a row of nodes out of reach.
    unreachable: HashMap<NodeId, u32>,
    tasks: JoinSet<()>,
}

impl Actor for Links {
    type Msg = LinksMsg;
    type State = State;
    type Arguments = LinksArgs;

    async fn pre_start(&self, _myself: ActorRef<LinksMsg>, args: LinksArgs) -> Result<State, ActorProcessingErr> {
        Ok(State { args, dials: HashMap::new(), unreachable: HashMap::new(), tasks: JoinSet::new() })
    }

    async fn handle(
        &self,
        myself: ActorRef<LinksMsg>,
        message: LinksMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        while state.tasks.try_join_next().is_some() {}
        match message {
            LinksMsg::Need(node, incarnation, waiter) => state.need(&myself, node, incarnation, waiter),
            LinksMsg::Dialled(node, incarnation, result) => match *result {
                Ok(established) => state.dialled(node, established).await,
                Err(error) => state.dial_failed(&myself, node, incarnation, error),
            },
            LinksMsg::Accepted(established) => {
                if let Err(error) = state.register(*established).await {
                    tracing::warn!(%error, "an accepted link was not started");
                }
            }
            LinksMsg::Ended(mux, ended) => state.ended(&myself, &mux, &ended),
            LinksMsg::Retry(node) => state.retry(&myself, node),
        }
        Ok(())
    }
}

impl State {
    fn need(
        &mut self,
        myself: &ActorRef<LinksMsg>,
        node: NodeId,
        incarnation: Incarnation,
        waiter: oneshot::Sender<Dialled>,
    ) {
        if let Some(mux) = self.args.registry.get(&node, incarnation) {
            // A caller that has stopped waiting needs no link.
            waiter.send(Ok(mux)).ok();
            return;
        }
        match self.dials.get_mut(&node) {
            Some(waiters) => waiters.push(waiter),
            None => self.dial(myself, node, vec![waiter]),
        }
    }

    fn dial(&mut self, myself: &ActorRef<LinksMsg>, node: NodeId, waiters: Vec<oneshot::Sender<Dialled>>) {
        self.dials.insert(node.clone(), waiters);
        let Some((address, incarnation)) = self.known(&node) else {
            self.unreachable.remove(&node);
            self.answer(&node, &Err(StreamError::UnknownNode(node.clone())));
            return;
        };
        let hello = Hello { wanted: Some((node.clone(), incarnation)), ..self.args.hello.clone() };
        let (tls, dial_max, myself) = (self.args.tls.clone(), self.args.timings.dial_max, myself.clone());
        let mut snapshots = self.args.snapshots.clone();
        self.tasks.spawn(async move {
            let made = async {
                let connection = tls.connect(address, Some(&node), Alpn::Link, dial_max).await?;
                greet(connection, &hello).await
            };
            let there = |view: &NodeView| view.record.incarnation == incarnation && view.record.address == address;
            // Nobody should wait for a node that gossip has given up, or for one that is elsewhere.
            let result = tokio::select! {
                made = made => made,
                _snapshot = snapshots.wait_for(|snapshot| !snapshot.node(&node).is_some_and(there)) => {
                    Err(HandshakeError::Gone)
                }
            };
            let result = Box::new(result);
            // Without Links there is nobody to use the link.
            myself.send_message(LinksMsg::Dialled(node, incarnation, result)).ok();
        });
    }

    /// Where the directory says that a node is, and in which life.
    fn known(&self, node: &NodeId) -> Option<(SocketAddr, Incarnation)> {
        self.args.snapshots.borrow().node(node).map(|view| (view.record.address, view.record.incarnation))
    }

    async fn dialled(&mut self, node: NodeId, established: Established) {
        let registered = self.register(established).await;
        let answer = registered.map_err(|error| StreamError::Connect { node: node.clone(), reason: error.to_string() });
        self.answer(&node, &answer);
    }

    fn dial_failed(
        &mut self,
        myself: &ActorRef<LinksMsg>,
        node: NodeId,
        incarnation: Incarnation,
        error: HandshakeError,
    ) {
        if let HandshakeError::Refused(Closing::Stale { current }) = error {
            // It is there, in another life; gossip will say so too.
            self.unreachable.remove(&node);
            let error = StreamError::Stale { node: node.clone(), wanted: incarnation, current };
            self.answer(&node, &Err(error));
            return;
        }
        let failures = self.unreachable.entry(node.clone()).or_insert(0);
        *failures = failures.saturating_add(1);
        let delay = RETRY.0.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(RETRY.1);
        // Jitter: those who lost the same node should not all come back to it at one moment.
        let delay = delay.mul_f64(rand::random_range(0.5..1.0));
        tracing::debug!(%node, %error, retry_ms = delay.as_millis() as u64, "no link");
        (self.args.reach)(&node, incarnation, false);
        self.answer(&node, &Err(StreamError::Connect { node: node.clone(), reason: error.to_string() }));
        let myself = myself.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep(delay).await;
            myself.send_message(LinksMsg::Retry(node)).ok();
        });
    }

    fn retry(&mut self, myself: &ActorRef<LinksMsg>, node: NodeId) {
        if self.unreachable.contains_key(&node) && !self.dials.contains_key(&node) {
            self.dial(myself, node, Vec::new());
        }
    }

    fn answer(&mut self, node: &NodeId, answer: &Dialled) {
        for waiter in self.dials.remove(node).into_iter().flatten() {
            waiter.send(answer.clone()).ok();
        }
    }

    /// Starts the actor of a new link and settles which of several links to one node goes on.
    async fn register(&mut self, established: Established) -> Result<Arc<Mux>, SuperviseError> {
        let Established { connection, decoder, peer, dialled } = established;
        let mux = Mux::new(&peer, dialled, self.args.endpoints.clone(), self.args.handlers.clone());
        let is_node = peer.party == Party::Node;
        let key_removed = Box::pin(self.args.tls.removed(&connection));
        let mut args = Some(LinkArgs {
            mux: mux.clone(),
            connection,
            decoder,
            timings: self.args.timings,
            key_removed,
            links: self.args.handle.clone(),
        });
        let others = if is_node { self.args.registry.all(&peer.node) } else { Vec::new() };
        let name = match (is_node, others.is_empty()) {
            (true, true) => peer.node.to_string(),
            (true, false) => format!("{}~{}", peer.node, mux.number),
            (false, _) => format!("client~{}", mux.number),
        };
        if is_node {
            self.args.registry.insert(mux.clone());
        }
        let spec = child(name, "link", Restart::Temporary, &Handle::new(), move || (Link, args.take()));
        if let Err(error) = self.args.parent.add(spec).await {
            self.args.registry.remove(&mux);
            return Err(error);
        }
        if is_node {
            self.unreachable.remove(&peer.node);
            (self.args.reach)(&peer.node, peer.incarnation, true);
            others.iter().for_each(|other| self.settle(other, &mux));
        }
        Ok(mux)
    }

    /// Two links to one node: one of them goes. Both ends decide alike.
    fn settle(&self, old: &Mux, new: &Mux) {
        if old.incarnation != new.incarnation {
            let (dead, life) = if old.incarnation < new.incarnation { (old, new) } else { (new, old) };
            metrics::counter!(Metric::StaleRefused.name(), "what" => "link").increment(1);
            // The goodbye first: a link that is over says nothing, and the earlier life may only have been frozen. It
            // would wait for credits of streams that nobody reads any more.
            dead.close(Closing::Leaving);
            dead.end(&Ended {
                reason: format!("the node is in incarnation {} now", life.incarnation).into(),
                orderly: false,
            });
            return;
        }
        // Both dialled at the same time: the link of the lower name stays. Otherwise the old one has lost its
        // other end, or the new one would not have been dialled.
        let glare = old.dialled != new.dialled && old.age() < limits::HANDSHAKE_TIME_MAX;
        let old_is_of_lower = old.dialled == (self.args.hello.node < old.peer);
        if glare && old_is_of_lower { new.close(Closing::Duplicate) } else { old.close(Closing::Duplicate) }
    }

    fn ended(&mut self, myself: &ActorRef<LinksMsg>, mux: &Mux, ended: &Ended) {
        self.args.registry.remove(mux);
        let known = self.known(&mux.peer).is_some_and(|(_, incarnation)| incarnation == mux.incarnation);
        if ended.orderly || !known || self.args.registry.get(&mux.peer, mux.incarnation).is_some() {
            return;
        }
        tracing::info!(peer = %mux.peer, reason = %ended.reason, "link broken");
        (self.args.reach)(&mux.peer, mux.incarnation, false);
        self.unreachable.entry(mux.peer.clone()).or_insert(0);
        self.retry(myself, mux.peer.clone());
    }
}
