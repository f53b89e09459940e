//! The Listener actor: takes connections from the node's one TCP port through TLS and hands them on.
//!
//! Parent: the root; no children; the accept loop and each handshake run in a task set of its own. Called by
//! nobody. Calls the link layer or the sessions, by the protocol that the handshake settled on.
//! Bounds: [`limits::HANDSHAKES_MAX`] handshakes at a time, each within [`limits::HANDSHAKE_TIME_MAX`]; further
//! connections wait in the kernel. If it dies: unfinished handshakes are cut; the socket itself outlives it,
//! so its successor goes on accepting; established links and sessions never notice.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
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
    // Owned by this loop's task, so the handshakes end with the actor.
    let mut handshakes = JoinSet::new();
    let pending = Arc::new(Semaphore::new(limits::HANDSHAKES_MAX));
    loop {
        let Ok(permit) = pending.clone().acquire_owned().await else { return };
        while handshakes.try_join_next().is_some() {}
        match args.socket.accept().await {
            Ok((stream, from)) => {
                let args = args.clone();
                handshakes.spawn(async move {
                    handshake(args, stream, from).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn handshake(args: ListenerArgs, stream: TcpStream, from: SocketAddr) {
    match args.tls.accept(stream).await {
        Ok((connection, alpn)) => args.routes.take(connection, alpn, from).await,
        Err(error) => tracing::debug!(%from, %error, "connection refused"),
    }
}
