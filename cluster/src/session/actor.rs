//! The Sessions actor: makes actor sessions on demand, closes those that are idle or lead to nobody, asks over them.
//!
//! Owns: the node server of ractor_cluster (its child, and through it all sessions), one task for each dial and each
//! question. Parent: the node's root. Bound: [`TASKS_MAX`] tasks; waiters and peers as in the table. If it dies: all
//! sessions end, the questions under way fail as unavailable, and new ones dial again.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef};
use ractor_cluster::{
    NodeEventSubscription, NodeServer, NodeServerMessage, NodeSessionMessage,
    node::{NodeConnectionMode, NodeServerSessionInformation},
};
use starling_ids::{Metric, NodeId};

use super::{
    SessionsHandle,
    ask::{Question, ask, refuse},
    envelope::{parse_session_name, session_name},
    table::{Life, Next, Table},
    transport::{SessionStream, Transport},
};
use crate::{
    stream::{Fault, FaultKind},
    supervise::{ChildSpec, Restart, TaskOwner, child},
};

/// Dials and questions under way at one time.
const TASKS_MAX: usize = 8192;
/// Largest frame taken from a peer: a body and what surrounds it.
const FRAME_MAX: u64 = 1 << 20;
/// Sessions that came in and did not become ready are closed after this long.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
const SWEEP_EVERY: Duration = Duration::from_millis(500);

/// Makes a connected stream to a node at an address.
pub type Dial = Arc<dyn Fn(NodeId, SocketAddr) -> BoxFuture<'static, io::Result<SessionStream>> + Send + Sync>;

/// How to start the Sessions actor behind `handle`. `cookie` guards against mis-wiring; the streams guard themselves.
#[must_use]
pub fn sessions_child(handle: &SessionsHandle, cookie: String, dial: Dial) -> ChildSpec {
    let sessions = handle.clone();
    child("sessions", "sessions", Restart::Permanent, handle.actor(), move || {
        (Sessions, Start { sessions: sessions.clone(), cookie: cookie.clone(), dial: dial.clone() })
    })
}

/// What the actor is told.
pub(crate) enum SessionsMsg {
    Ask(Question, SocketAddr),
    Incoming(SessionStream, SocketAddr),
    Dialled(Life, io::Result<SessionStream>),
    Opened(ActorRef<NodeSessionMessage>),
    Ready(ActorRef<NodeSessionMessage>, String),
    Closed(ActorId),
    Touched(Life),
    Sweep,
}

impl ractor::Message for SessionsMsg {}

struct Sessions;

struct Start {
    sessions: SessionsHandle,
    cookie: String,
    dial: Dial,
}

struct State {
    start: Start,
    server: ActorRef<NodeServerMessage>,
    table: Table<ActorRef<NodeSessionMessage>, Question>,
    /// Opened and not ready yet.
    shaking: HashMap<ActorId, (ActorRef<NodeSessionMessage>, Instant)>,
    tasks: TaskOwner,
}

impl Drop for State {
    fn drop(&mut self) {
        self.start.sessions.set_open(BTreeSet::new());
        metrics::gauge!(Metric::SessionsOpen.name()).set(0.0);
    }
}

impl Actor for Sessions {
    type Msg = SessionsMsg;
    type State = State;
    type Arguments = Start;

    async fn pre_start(&self, myself: ActorRef<SessionsMsg>, start: Start) -> Result<State, ActorProcessingErr> {
        let (node, incarnation) = start.sessions.me();
        let (name, host) = session_name(node, incarnation);
        let mode = Some(NodeConnectionMode::Isolated);
        // Its own listener is not used: it stays on loopback, on a port that is told to nobody.
        let server = NodeServer::new(0, start.cookie.clone(), name, host, None, mode)
            .with_listen_addr(std::net::Ipv4Addr::LOCALHOST.into())
            .with_max_inbound_frame_size(FRAME_MAX);
        let (server, _ended) = Actor::spawn_linked(None, server, (), myself.get_cell()).await?;
        let subscription = Box::new(Events(myself.clone()));
        server.cast(NodeServerMessage::SubscribeToEvents { id: "sessions".into(), subscription })?;
        let tasks = TaskOwner::new(TASKS_MAX);
        if !tasks.tasks().spawn(sweep_clock(myself)) {
            return Err("the sessions have no clock".into());
        }
        Ok(State { start, server, table: Table::new(), shaking: HashMap::new(), tasks })
    }

    async fn handle(
        &self,
        myself: ActorRef<SessionsMsg>,
        message: SessionsMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let now = Instant::now();
        match message {
            SessionsMsg::Ask(question, address) => state.ask(&myself, question, address, now),
            SessionsMsg::Incoming(stream, from) => state.open(stream, from.to_string(), true)?,
            SessionsMsg::Dialled(life, Ok(stream)) => {
                state.table.dialled(&life, now);
                state.open(stream, life.0.to_string(), false)?;
            }
            SessionsMsg::Dialled(life, Err(error)) => {
                let fault = Fault::new(FaultKind::Unavailable, format!("no session to {}: {error}", life.0));
                let waiters = state.table.failed(&life, now, rand::random());
                waiters.into_iter().for_each(|question| refuse(question, fault.clone()));
            }
            SessionsMsg::Opened(session) => {
                state.shaking.insert(session.get_id(), (session, now));
            }
            SessionsMsg::Ready(session, name) => state.ready(session, &name, now),
            SessionsMsg::Closed(session) => state.closed(session),
            SessionsMsg::Touched(life) => state.table.touched(&life, now),
            SessionsMsg::Sweep => state.sweep(now),
        }
        Ok(())
    }
}

impl State {
    fn ask(&mut self, myself: &ActorRef<SessionsMsg>, question: Question, address: SocketAddr, now: Instant) {
        let life = question.to.clone();
        if let Some(another) = self.table.found_at(&life, address, now) {
            another.stop(Some("the name is another process's now".into()));
        }
        match self.table.want(&life, question, now) {
            Next::Ask(session, question) => self.run(session, question),
            Next::Dial => self.dial(myself, life, address, now),
            Next::Wait => {}
            Next::NotNow(question, wait) => {
                let fault = Fault::new(FaultKind::Unavailable, format!("the last dial of {} failed", life.0));
                refuse(question, fault.retry_after_ms(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)));
            }
            Next::Full(question) => {
                refuse(question, Fault::new(FaultKind::Overloaded, format!("too many questions wait for {}", life.0)));
            }
        }
    }

    fn run(&self, session: ActorRef<NodeSessionMessage>, question: Question) {
        // A question that is dropped with its task tells its asker so.
        if !self.tasks.tasks().spawn(ask(session, question)) {
            tracing::warn!("too many questions under way; one was refused");
        }
    }

    fn dial(&mut self, myself: &ActorRef<SessionsMsg>, life: Life, address: SocketAddr, now: Instant) {
        let stream = (self.start.dial)(life.0.clone(), address);
        let (answer_to, dialled) = (myself.clone(), life.clone());
        let started = self.tasks.tasks().spawn(async move {
            let outcome = stream.await;
            tell(&answer_to, SessionsMsg::Dialled(dialled, outcome));
        });
        if !started {
            let fault = Fault::new(FaultKind::Overloaded, "too many dials and questions under way");
            let waiters = self.table.failed(&life, now, 0.0);
            waiters.into_iter().for_each(|question| refuse(question, fault.clone()));
        }
    }

    fn open(&self, stream: SessionStream, peer: String, is_server: bool) -> Result<(), ActorProcessingErr> {
        let stream = Box::new(Transport { stream, peer });
        Ok(self.server.cast(NodeServerMessage::ConnectionOpenedExternal { stream, is_server })?)
    }

    fn ready(&mut self, session: ActorRef<NodeSessionMessage>, name: &str, now: Instant) {
        self.shaking.remove(&session.get_id());
        let Some(life) = parse_session_name(name) else {
            session.stop(Some("not a node of this cluster".into()));
            return;
        };
        for question in self.table.ready(&life, session.clone(), now) {
            self.run(session.clone(), question);
        }
        self.count();
    }

    fn closed(&mut self, session: ActorId) {
        self.shaking.remove(&session);
        self.table.closed_where(|known| known.get_id() == session);
        self.count();
    }

    fn sweep(&mut self, now: Instant) {
        self.shaking.retain(|_, (session, since)| {
            let late = now - *since > HANDSHAKE_MAX;
            if late {
                session.stop(Some("no handshake".into()));
            }
            !late
        });
        let snapshot = self.start.sessions.snapshot();
        let is_member = |(node, incarnation): &Life| {
            snapshot.node(node).is_some_and(|view| view.record.incarnation == *incarnation)
        };
        let swept = self.table.sweep(is_member, now, rand::random());
        for session in swept.close {
            session.stop(Some("idle, or no member any more".into()));
        }
        for question in swept.fail {
            let fault = Fault::new(FaultKind::Unavailable, format!("no session to {} could be made", question.to.0));
            refuse(question, fault);
        }
        self.count();
    }

    fn count(&self) {
        let lives: BTreeSet<Life> = self.table.open().cloned().collect();
        let open = u32::try_from(lives.len()).unwrap_or(u32::MAX);
        self.start.sessions.set_open(lives);
        metrics::gauge!(Metric::SessionsOpen.name()).set(f64::from(open));
    }
}

async fn sweep_clock(myself: ActorRef<SessionsMsg>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        if myself.cast(SessionsMsg::Sweep).is_err() {
            return;
        }
    }
}

fn tell(actor: &ActorRef<SessionsMsg>, message: SessionsMsg) {
    if actor.cast(message).is_err() {
        tracing::debug!("the sessions actor is gone");
    }
}

/// Brings the node server's news to the actor.
struct Events(ActorRef<SessionsMsg>);

impl NodeEventSubscription for Events {
    fn node_session_opened(&self, session: NodeServerSessionInformation) {
        tell(&self.0, SessionsMsg::Opened(session.actor));
    }

    fn node_session_disconnected(&self, session: NodeServerSessionInformation) {
        tell(&self.0, SessionsMsg::Closed(session.actor.get_id()));
    }

    fn node_session_authenticated(&self, _session: NodeServerSessionInformation) {}

    fn node_session_ready(&self, session: NodeServerSessionInformation) {
        let name = session.peer_name.map(|name| name.name).unwrap_or_default();
        tell(&self.0, SessionsMsg::Ready(session.actor, name));
    }
}
