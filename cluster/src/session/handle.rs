//! The door to other nodes' operations.
//!
//! Called by everybody who asks another node something. A question to this node itself is answered without a session.
//! Bounds: a deadline for each question.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::{Incarnation, NodeId};
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, timeout, timeout_at},
};

use super::{BODY_MAX, Ops, SessionStream, actor::SessionsMsg, ask::Question, table::Life};
use crate::{
    discovery::Snapshot,
    stream::{Fault, FaultKind},
    supervise::Handle,
};

/// Asks one operation of a node: node, operation, body, time allowed.
pub type Caller =
    Arc<dyn Fn(NodeId, &'static str, Bytes, Duration) -> BoxFuture<'static, Result<Bytes, Fault>> + Send + Sync>;

/// A node that gossip has just brought may be missing in the snapshot for a moment.
const UNKNOWN_WAIT: Duration = Duration::from_millis(300);

/// Talks to the Sessions actor. Cheap to clone.
#[derive(Clone)]
pub struct SessionsHandle {
    inner: Arc<Inner>,
}

struct Inner {
    handle: Handle<SessionsMsg>,
    me: Life,
    ops: Ops,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    /// To whom sessions are open now; written by the actor.
    open: RwLock<BTreeSet<Life>>,
}

impl std::fmt::Debug for SessionsHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SessionsHandle({})", self.inner.me.0)
    }
}

impl SessionsHandle {
    /// For this node, answering `ops` and finding others in the directory's `snapshots`.
    #[must_use]
    pub fn new(node: NodeId, incarnation: Incarnation, ops: Ops, snapshots: watch::Receiver<Arc<Snapshot>>) -> Self {
        let inner = Inner { handle: Handle::new(), me: (node, incarnation), ops, snapshots, open: RwLock::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Asks `node`, in the life the directory knows, and waits at most `limit`.
    ///
    /// `NotFound`: no such member, or no such operation there. `Unavailable`: no session, or it broke; the question may
    /// or may not have been acted on. `Invalid`: the body is over [`BODY_MAX`].
    pub async fn call(&self, node: &NodeId, op: &str, body: Bytes, limit: Duration) -> Result<Bytes, Fault> {
        let deadline = Instant::now() + limit;
        let late = || Fault::new(FaultKind::DeadlineExceeded, format!("{node} gave no answer to {op} in time"));
        if body.len() > BODY_MAX {
            let message = format!("a body of {} bytes is over the limit of {BODY_MAX}", body.len());
            return Err(Fault::new(FaultKind::Invalid, message));
        }
        if *node == self.inner.me.0 {
            let answer = self.inner.ops.answer(node.clone(), op, body);
            return timeout_at(deadline, answer).await.map_err(|_| late())?;
        }
        let (incarnation, address) = self.find(node, limit.min(UNKNOWN_WAIT)).await?;
        let (answer, answered) = oneshot::channel();
        let to = (node.clone(), incarnation);
        let question = Question { to, from: self.inner.me.clone(), op: op.to_owned(), body, deadline, answer };
        self.inner.handle.cast(SessionsMsg::Ask(question, address))?;
        match timeout_at(deadline, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(Fault::new(FaultKind::Unavailable, "the sessions were restarted")),
            Err(_) => Err(late()),
        }
    }

    /// The same as a value that actors can hold.
    #[must_use]
    pub fn caller(&self) -> Caller {
        let sessions = self.clone();
        Arc::new(move |node, op, body, limit| {
            let sessions = sessions.clone();
            Box::pin(async move { sessions.call(&node, op, body, limit).await })
        })
    }

    /// Takes a connected stream that a peer has dialled. Dropped, and so closed, while the actor restarts.
    pub fn accept(&self, stream: SessionStream, from: SocketAddr) {
        if let Err(error) = self.inner.handle.cast(SessionsMsg::Incoming(stream, from)) {
            tracing::debug!(%from, %error, "a session was not taken");
        }
    }

    /// Whether a session to this life of a node is open, so that a question to it costs no handshake.
    #[must_use]
    pub fn is_open(&self, node: &NodeId, incarnation: Incarnation) -> bool {
        let open = self.inner.open.read().unwrap_or_else(PoisonError::into_inner);
        open.contains(&(node.clone(), incarnation))
    }

    pub(super) fn set_open(&self, open: BTreeSet<Life>) {
        *self.inner.open.write().unwrap_or_else(PoisonError::into_inner) = open;
    }

    /// The operations this node answers.
    #[must_use]
    pub fn ops(&self) -> &Ops {
        &self.inner.ops
    }

    pub(super) fn actor(&self) -> &Handle<SessionsMsg> {
        &self.inner.handle
    }

    pub(super) fn me(&self) -> (&NodeId, Incarnation) {
        (&self.inner.me.0, self.inner.me.1)
    }

    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        self.inner.snapshots.borrow().clone()
    }

    /// A peer has asked something: its session is in use.
    pub(super) fn touched(&self, peer: &Life) {
        if let Err(error) = self.inner.handle.cast(SessionsMsg::Touched(peer.clone())) {
            tracing::debug!(%error, "no sessions to touch");
        }
    }

    async fn find(&self, node: &NodeId, wait: Duration) -> Result<(Incarnation, SocketAddr), Fault> {
        let mut snapshots = self.inner.snapshots.clone();
        let known = timeout(wait, snapshots.wait_for(|snapshot| snapshot.node(node).is_some())).await;
        let snapshot = match known {
            Ok(Ok(snapshot)) => snapshot.clone(),
            _ => return Err(Fault::new(FaultKind::NotFound, format!("node {node} is not a member"))),
        };
        let view = snapshot.node(node).ok_or_else(|| Fault::new(FaultKind::NotFound, "not a member"))?;
        Ok((view.record.incarnation, view.record.address))
    }
}
