//! All of links put together: what [`crate::mesh`] starts and opens streams through.
//!
//! Builds the actors `links` (supervisor of the Link actors), `dialler` (the registry) and `listener`. Never
//! knows what a stream is for.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use starling_ids::{Incarnation, NodeId};
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
};

use super::{
    handshake::answer,
    links::{Dialled, Links, LinksArgs, LinksMsg, Reach, Registry},
    listener::{Listener, ListenerArgs},
    mux::{Mux, OpenError},
};
use crate::{
    config::Timings,
    discovery::Snapshot,
    security::{Alpn, Connection, Tls},
    stream::{Endpoints, Opened, StreamError},
    supervise::{Handle, Policy, Restart, SuperviseError, SupervisorHandle, Tasks, child},
    wire::{Closing, Hello, OpenHead, Party},
};

/// Takes connections that asked for actor sessions.
pub(crate) type SessionSink = Arc<dyn Fn(Connection, SocketAddr) + Send + Sync>;

/// What the layer needs of its node.
pub(crate) struct LinkSetup {
    pub(crate) hello: Hello,
    pub(crate) tls: Tls,
    pub(crate) timings: Timings,
    pub(crate) endpoints: Endpoints,
    pub(crate) handlers: Tasks,
    pub(crate) snapshots: watch::Receiver<Arc<Snapshot>>,
    pub(crate) reach: Reach,
    pub(crate) sessions: SessionSink,
}

/// The way to streams on other nodes. Cheap to clone.
#[derive(Clone)]
pub(crate) struct LinkLayer {
    registry: Registry,
    handle: Handle<LinksMsg>,
    routes: Routes,
    tls: Tls,
}

impl LinkLayer {
    /// Starts links and dialler under `root`. Nothing is accepted before [`Self::listen`].
    pub(crate) async fn start(root: &SupervisorHandle, setup: LinkSetup) -> Result<Self, SuperviseError> {
        let parent = root.child_supervisor("links", Policy::default()).await?;
        let (registry, handle) = (Registry::default(), Handle::new());
        let LinkSetup { hello, tls, timings, endpoints, handlers, snapshots, reach, sessions } = setup;
        let routes = Routes {
            tls: tls.clone(),
            hello: hello.clone(),
            snapshots: snapshots.clone(),
            links: handle.clone(),
            sessions,
        };
        let args = LinksArgs {
            hello,
            tls: tls.clone(),
            timings,
            endpoints,
            handlers,
            snapshots,
            reach,
            registry: registry.clone(),
            parent,
            handle: handle.clone(),
        };
        root.add(child("dialler", "dialler", Restart::Permanent, &handle, move || (Links, args.clone()))).await?;
        Ok(Self { registry, handle, routes, tls })
    }

    #[cfg(test)]
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Starts to accept connections.
    pub(crate) async fn listen(&self, root: &SupervisorHandle, socket: Arc<TcpListener>) -> Result<(), SuperviseError> {
        let args = ListenerArgs { socket, tls: self.tls.clone(), routes: self.routes.clone() };
        let spec = child("listener", "listener", Restart::Permanent, &Handle::new(), move || (Listener, args.clone()));
        root.add(spec).await
    }

    /// Opens a stream on the link to a node in one life, dialling if there is none.
    pub(crate) async fn open(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        head: OpenHead,
        body: Bytes,
    ) -> Result<Opened, StreamError> {
        for last_try in [false, true] {
            let mux = self.link(node, incarnation, head.context.answer_within()).await?;
            match mux.open(head.clone(), body.clone()).await {
                Ok(opened) => return Ok(opened),
                Err(OpenError::Stream(error)) => return Err(error),
                // Closed as idle or as a duplicate in this very moment, before it took the open.
                Err(OpenError::Closed) if last_try => break,
                Err(OpenError::Closed) => {}
            }
        }
        Err(StreamError::Broken("two links in a row were closed".to_owned()))
    }

    /// Whether a node answers over the link that leads to it, within `limit`; `None`: there is none.
    pub(crate) async fn answers(&self, node: &NodeId, incarnation: Incarnation, limit: Duration) -> Option<bool> {
        self.registry.get(node, incarnation)?.answers(limit).await
    }

    async fn link(&self, node: &NodeId, incarnation: Incarnation, limit: Duration) -> Dialled {
        if let Some(mux) = self.registry.get(node, incarnation) {
            return Ok(mux);
        }
        let (waiter, dialled) = oneshot::channel();
        let unavailable = |reason: String| StreamError::Connect { node: node.clone(), reason };
        self.handle
            .cast(LinksMsg::Need(node.clone(), incarnation, waiter))
            .map_err(|error| unavailable(error.to_string()))?;
        match tokio::time::timeout(limit, dialled).await {
            Ok(Ok(answer)) => answer.and_then(|mux| right_life(mux, incarnation)),
            Ok(Err(_)) => Err(unavailable("the dialler is being restarted".to_owned())),
            Err(_) => Err(StreamError::Deadline),
        }
    }
}

fn right_life(mux: Arc<Mux>, wanted: Incarnation) -> Dialled {
    if mux.incarnation == wanted {
        return Ok(mux);
    }
    Err(StreamError::Stale { node: mux.peer.clone(), wanted, current: mux.incarnation })
}

/// Where an accepted connection goes.
#[derive(Clone)]
pub(crate) struct Routes {
    tls: Tls,
    hello: Hello,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    links: Handle<LinksMsg>,
    sessions: SessionSink,
}

impl Routes {
    pub(super) async fn take(&self, connection: Connection, alpn: Alpn, from: SocketAddr) {
        if alpn == Alpn::Session {
            (self.sessions)(connection, from);
            return;
        }
        match answer(connection, (&self.tls, &self.hello), |peer| self.admit(peer)).await {
            Ok(established) => {
                if let Err(error) = self.links.cast(LinksMsg::Accepted(Box::new(established))) {
                    tracing::debug!(%from, %error, "accepted link dropped");
                }
            }
            Err(error) => tracing::debug!(%from, %error, "link refused"),
        }
    }

    /// A node in an earlier life than the one the directory knows is a ghost.
    fn admit(&self, peer: &Hello) -> Result<(), Closing> {
        let snapshot = self.snapshots.borrow();
        match snapshot.node(&peer.node) {
            Some(view) if peer.party == Party::Node && view.record.incarnation > peer.incarnation => {
                Err(Closing::Stale { current: view.record.incarnation })
            }
            _ => Ok(()),
        }
    }
}
