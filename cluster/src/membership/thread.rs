//! The gossip thread: an OS thread of its own, so that a busy runtime never makes this node look dead.
//!
//! Started and joined by the Membership actor; owns the socket, the seal, the driver and its timers. Publishes the
//! member list through a watch and calls the observer. Bounds: [`COMMANDS_MAX`] commands wait; one resolver
//! task. If it dies, the actor hears it through [`GossipThread::ended`] and starts another one.

use std::{
    io,
    net::UdpSocket as StdSocket,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use bytes::Bytes;
use starling_ids::{Incarnation, Metric, NodeId};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    Driver, Effect, Identity, MembershipView, Outranked, Rumour, Seeds,
    driver::{Look, Peer, Proof},
    socket::{SealedSocket, count_dropped},
};
use crate::{discovery::RecordDelta, security::Keys};

/// Commands that may wait for the thread.
const COMMANDS_MAX: usize = 256;
const RESOLVE_ALONE: Duration = Duration::from_secs(1);
const RESOLVE_EVERY: Duration = Duration::from_secs(30);
/// A node with seeds that is still alone says so after this long, and again after each [`COMPLAIN_AGAIN`].
const COMPLAIN_AFTER: Duration = Duration::from_secs(5);
const COMPLAIN_AGAIN: Duration = Duration::from_secs(60);
/// In clusters of more members than this the list is published no more often than in [`PUBLISH_EVERY`]: it costs about a
/// millisecond for 10,000 members, and everybody who watches it some more.
const PUBLISH_AT_ONCE_MAX: usize = 200;
const PUBLISH_EVERY: Duration = Duration::from_millis(50);

/// What the thread is told to do.
pub(super) enum Command {
    AnnounceVersion(u64, Option<RecordDelta>),
    Doubt(NodeId, Incarnation),
    Verified(Peer, Proof),
    ExchangeOpen(oneshot::Sender<Vec<u8>>),
    /// `None`: not a question.
    ExchangeServe(Bytes, oneshot::Sender<Option<Vec<u8>>>),
    /// `None`: it is over.
    ExchangeNext(Bytes, oneshot::Sender<Option<Vec<u8>>>),
    ExchangeFailed,
    Leave(oneshot::Sender<()>),
}

/// What the thread tells; called on the thread, must not block.
pub(super) trait Observer: Send + 'static {
    /// The member list has changed.
    fn members_changed(&self);
    /// A record has a new version.
    fn rumour(&self, rumour: Rumour);
    /// Somebody should find out over TCP whether this member lives, and say so with [`Command::Verified`].
    fn visit(&self, peer: Peer, look: Look);
    /// Somebody should exchange states with this member.
    fn exchange(&self, peer: Peer);
}

/// What the thread needs.
pub(super) struct ThreadArgs {
    pub(super) identity: Identity,
    pub(super) generation: Arc<AtomicU32>,
    pub(super) socket: Arc<StdSocket>,
    pub(super) keys: Keys,
    pub(super) cluster: String,
    pub(super) seeds: Seeds,
    pub(super) view: Arc<watch::Sender<Arc<MembershipView>>>,
    pub(super) observer: Box<dyn Observer>,
}

/// The running thread. Dropping it ends and joins the thread.
pub(super) struct GossipThread {
    commands: mpsc::Sender<Command>,
    /// Dropped to end the thread: tasks may hold senders of commands for longer than this.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl GossipThread {
    /// Starts it. The receiver resolves when the thread has ended, for whatever reason.
    pub(super) fn start(args: ThreadArgs) -> io::Result<(Self, oneshot::Receiver<()>)> {
        let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
        let (alive, ended) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("gossip".into()).spawn(move || {
            let _alive: oneshot::Sender<()> = alive;
            match runtime.block_on(async { Gossip::new(args).map(|gossip| gossip.run(inbox, stopped)) }) {
                Ok(run) => runtime.block_on(run),
                Err(error) => tracing::error!(%error, "the gossip socket does not open"),
            }
            // A resolver that hangs in the C library must not hold up a leaving node.
            runtime.shutdown_background();
        })?;
        Ok((Self { commands, stop: Some(stop), thread: Some(thread) }, ended))
    }

    /// A way to command the thread.
    pub(super) fn commands(&self) -> mpsc::Sender<Command> {
        self.commands.clone()
    }
}

impl Drop for GossipThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the gossip thread panicked");
        }
    }
}

struct Gossip {
    driver: Driver,
    socket: SealedSocket,
    epoch: Instant,
    seeds: Seeds,
    resolving: JoinSet<Vec<std::net::SocketAddr>>,
    next_resolve: Instant,
    next_complaint: Instant,
    generation: Arc<AtomicU32>,
    view: Arc<watch::Sender<Arc<MembershipView>>>,
    observer: Box<dyn Observer>,
    /// Since when a change waits to be published.
    unpublished: bool,
    next_publish: Instant,
    outranked: Option<Outranked>,
    rival: Option<Identity>,
    over: bool,
}

impl Gossip {
    fn new(args: ThreadArgs) -> io::Result<Self> {
        let ThreadArgs { identity, generation, socket, keys, cluster, seeds, view, observer } = args;
        let Some(node) = identity.node.clone() else { return Err(io::Error::other("a member needs a name")) };
        let socket = SealedSocket::new(&socket, &keys, &cluster, (&node, identity.incarnation))?;
        Ok(Self {
            driver: Driver::new(identity, rand::random(), Duration::ZERO),
            socket,
            epoch: Instant::now(),
            seeds,
            resolving: JoinSet::new(),
            next_resolve: Instant::now(),
            next_complaint: Instant::now() + COMPLAIN_AFTER,
            generation,
            view,
            observer,
            unpublished: false,
            next_publish: Instant::now(),
            outranked: None,
            rival: None,
            over: false,
        })
    }

    /// Until told to leave, outranked, or the actor is gone.
    async fn run(mut self, mut inbox: mpsc::Receiver<Command>, mut stopped: oneshot::Receiver<()>) {
        // A node that knows nobody is a member too.
        count_members(self.driver.member_count());
        while !self.over {
            let mut tick_at = self.epoch + self.driver.next_tick();
            if self.unpublished {
                tick_at = tick_at.min(self.next_publish);
            }
            tokio::select! {
                biased;
                _ended = &mut stopped => break,
                command = inbox.recv() => match command {
                    Some(command) => self.obey(command),
                    None => break,
                },
                (from, payload) = self.socket.receive() => {
                    let now = self.epoch.elapsed();
                    if let Err(dropped) = self.driver.receive(from, &payload, now) {
                        count_dropped(dropped);
                    }
                }
                Some(resolved) = self.resolving.join_next() => self.resolved(resolved),
                () = tokio::time::sleep_until(tick_at.into()) => {}
            }
            let now = self.epoch.elapsed();
            self.driver.tick(now);
            self.resolve_when_due();
            self.complain_when_due();
            self.perform();
        }
        self.resolving.abort_all();
    }

    fn obey(&mut self, command: Command) {
        let now = self.epoch.elapsed();
        match command {
            Command::AnnounceVersion(version, delta) => self.driver.announce_version(version, delta),
            Command::Doubt(node, incarnation) => self.driver.suspect_hint(&node, incarnation, now),
            Command::Verified(peer, proof) => self.driver.verified(&peer.node, peer.incarnation, proof, now),
            // Askers may have given up; nothing depends on it.
            Command::ExchangeOpen(reply) => drop(reply.send(self.driver.exchange_open())),
            Command::ExchangeServe(question, reply) => {
                let answer = self.driver.exchange_serve(&question, now);
                drop(reply.send(answer.inspect_err(|dropped| count_dropped(*dropped)).ok()));
            }
            Command::ExchangeNext(answer, reply) => {
                let next = self.driver.exchange_next(&answer, now);
                drop(reply.send(next.inspect_err(|dropped| count_dropped(*dropped)).unwrap_or(None)));
            }
            Command::ExchangeFailed => self.driver.exchange_failed(now),
            Command::Leave(reply) => {
                self.driver.leave(now);
                self.perform();
                self.over = true;
                let _gone = reply.send(()).is_err();
            }
        }
    }

    fn resolve_when_due(&mut self) {
        let now = Instant::now();
        if now < self.next_resolve || self.seeds.is_empty() || !self.resolving.is_empty() {
            return;
        }
        let alone = self.driver.member_count() == 0;
        self.next_resolve = now + if alone { RESOLVE_ALONE } else { RESOLVE_EVERY };
        let seeds = self.seeds.clone();
        self.resolving.spawn(async move { seeds.resolve().await });
    }

    /// Nothing else tells an operator that a joining node is talking to the wind.
    fn complain_when_due(&mut self) {
        let now = Instant::now();
        if self.seeds.is_empty() || self.driver.member_count() > 0 {
            self.next_complaint = now + COMPLAIN_AFTER;
        } else if now >= self.next_complaint {
            self.next_complaint = now + COMPLAIN_AGAIN;
            tracing::warn!(
                seeds = %self.seeds,
                "alone: no seed answers; not started yet, not reachable over UDP, or started with another cluster key"
            );
        }
    }

    fn resolved(&mut self, resolved: Result<Vec<std::net::SocketAddr>, tokio::task::JoinError>) {
        match resolved {
            Ok(addresses) if !addresses.is_empty() => {
                let own = self.driver.identity().address();
                self.driver.set_seeds(addresses.into_iter().filter(|seed| *seed != own).collect());
            }
            // Names may resolve again later; until then the addresses known so far stay.
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the resolver task failed"),
        }
    }

    fn perform(&mut self) {
        for effect in self.driver.take_effects() {
            match effect {
                Effect::Send { to, payload } => self.socket.send(to, &payload),
                Effect::MembersChanged(_) => self.unpublished = true,
                Effect::Rumour(rumour) => self.observer.rumour(rumour),
                Effect::Exchange(peer) => self.observer.exchange(peer),
                Effect::Verify(peer, look) => self.observer.visit(peer, look),
                Effect::NameClash(rival) => self.clash(rival),
                Effect::Outranked(why) => {
                    self.outranked = Some(why);
                    self.publish();
                    self.over = true;
                }
            }
        }
        let small = self.driver.member_count() <= PUBLISH_AT_ONCE_MAX;
        if self.unpublished && (small || Instant::now() >= self.next_publish) {
            self.publish();
        }
        // A thread that follows this one starts above all that this one was known as.
        self.generation.fetch_max(self.driver.identity().generation.saturating_add(1), Ordering::Relaxed);
    }

    /// The other process is told by gossip. This node's operator hears it from here, once for each rival.
    fn clash(&mut self, rival: Identity) {
        metrics::counter!(Metric::NameClashes.name()).increment(1);
        if self.rival.as_ref().is_some_and(|known| known.same_process(&rival)) {
            return;
        }
        let (address, incarnation) = (rival.address(), rival.incarnation);
        tracing::warn!(
            %address, %incarnation,
            "another process claims the name of this node and was refused; give it another --name or stop it"
        );
        self.rival = Some(rival);
        self.publish();
    }

    fn publish(&mut self) {
        self.unpublished = false;
        self.next_publish = Instant::now() + PUBLISH_EVERY;
        let members = self.driver.members();
        count_members(members.len());
        let view = MembershipView { members, outranked: self.outranked.clone(), rival: self.rival.clone() };
        self.view.send_replace(Arc::new(view));
        self.observer.members_changed();
    }
}

/// Counts this node with the `others`.
fn count_members(others: usize) {
    let alive = u32::try_from(others + 1).unwrap_or(u32::MAX);
    metrics::gauge!(Metric::GossipMembers.name()).set(f64::from(alive));
}
