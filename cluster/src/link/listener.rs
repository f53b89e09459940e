//! The Listener actor: takes connections from the node's one TCP port through TLS and hands them on.
//!
//! Parent: the root; no children; the accept loop and each handshake run in a task set of its own. Called by
//! nobody. Calls the link layer or the sessions, by the protocol that the handshake settled on.
//! Bounds: [`limits::HANDSHAKES_MAX`] handshakes at a time, each within [`limits::HANDSHAKE_TIME_MAX`]; when there are
//! that many, the oldest one makes way once it is older than [`limits::HANDSHAKE_GRACE`]. If it dies: unfinished handshakes are cut; the socket itself outlives it,
//! so its successor goes on accepting; established links and sessions never notice.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Duration};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::Instant,
};

use super::layer::Routes;
use crate::{security::Tls, wire::limits};

/// A pause after the kernel refused an accept (no file descriptors left, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// It has no messages; its tasks do the work.
pub(crate) struct ListenerMsg;

impl ractor::Message for ListenerMsg {}

/// What it is started with, and keeps over restarts.
#[derive(Clone)]
pub(crate) struct ListenerArgs {
    pub(crate) socket: Arc<TcpListener>,
    pub(crate) tls: Tls,
    pub(crate) routes: Routes,
}

pub(crate) struct Listener;

impl Actor for Listener {
    type Msg = ListenerMsg;
    type State = JoinSet<()>;
    type Arguments = ListenerArgs;

    async fn pre_start(
        &self,
        _myself: ActorRef<ListenerMsg>,
        args: ListenerArgs,
    ) -> Result<JoinSet<()>, ActorProcessingErr> {
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(args));
        Ok(tasks)
    }
}

async fn accept(args: ListenerArgs) {
    let mut handshakes = Handshakes::default();
    loop {
        handshakes.make_room().await;
        match args.socket.accept().await {
            Ok((stream, from)) => handshakes.begin(handshake(args.clone(), stream, from)),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// What is under way. Owned by the accept loop's task, so all of it ends with the actor.
#[derive(Default)]
struct Handshakes {
    tasks: JoinSet<()>,
    /// The oldest first; those that have ended are among them until the next look.
    begun: VecDeque<(Instant, AbortHandle)>,
}

impl Handshakes {
    /// Waits until there is room. Who says nothing makes way for who comes later: an honest handshake takes
    /// milliseconds, so the one that has been silent for longest is given up.
    async fn make_room(&mut self) {
        loop {
            while self.tasks.try_join_next().is_some() {}
            self.begun.retain(|(_, task)| !task.is_finished());
            if self.tasks.len() < limits::HANDSHAKES_MAX {
                return;
            }
            let Some((since, oldest)) = self.begun.front() else { return };
            tokio::select! {
                _ended = self.tasks.join_next() => {}
                () = tokio::time::sleep_until(*since + limits::HANDSHAKE_GRACE) => {
                    tracing::debug!("a silent connection makes way for a new one");
                    oldest.abort();
                    self.tasks.join_next().await;
                }
            }
        }
    }

    fn begin(&mut self, handshake: impl Future<Output = ()> + Send + 'static) {
        let task = self.tasks.spawn(handshake);
        self.begun.push_back((Instant::now(), task));
    }
}

async fn handshake(args: ListenerArgs, stream: TcpStream, from: SocketAddr) {
    match args.tls.accept(stream).await {
        Ok((connection, alpn)) => args.routes.take(connection, alpn, from).await,
        Err(error) => tracing::debug!(%from, %error, "connection refused"),
    }
}
