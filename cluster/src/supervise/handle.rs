//! A typed way to an actor that survives its restarts.
//!
//! Called by everybody who talks to an actor. Never waits for a restart: while the actor is down a send
//! fails at once as [`Unavailable`], and the caller decides. Bounds: the mailbox behind it is unbounded, so
//! whoever sends bounds the work before (credits, permits); [`ActorStats::mailbox_depth`] shows what waits.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use ractor::{ActorCell, ActorRef, ActorStatus, Message, RpcReplyPort};
use thiserror::Error;

use super::ActorStats;
use crate::stream::{Fault, FaultKind};

/// Why an actor gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unavailable {
    /// It is not running: being restarted, stopped, or not started yet.
    #[error("actor {0} is not running")]
    NotRunning(Arc<str>),
    /// It did not answer in time; it may still do the work.
    #[error("actor {path} gave no answer within {waited_ms} ms")]
    Timeout {
        /// Its path.
        path: Arc<str>,
        /// The time allowed, milliseconds.
        waited_ms: u64,
    },
    /// It died or dropped the question.
    #[error("actor {0} dropped the question")]
    Dropped(Arc<str>),
}

impl From<Unavailable> for Fault {
    fn from(error: Unavailable) -> Self {
        Fault::new(FaultKind::Unavailable, error.to_string())
    }
}

/// Cloneable address of one actor. Made empty, filled when its [`super::ChildSpec`] is started.
pub struct Handle<M> {
    inner: Arc<Inner<M>>,
}

struct Inner<M> {
    slot: ArcSwapOption<ActorRef<M>>,
    stats: Arc<ActorStats>,
}

impl<M> Clone for Handle<M> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<M> std::fmt::Debug for Handle<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({})", self.inner.stats.path())
    }
}

impl<M: Message> Default for Handle<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Message> Handle<M> {
    /// An address without an actor behind it yet.
    #[must_use]
    pub fn new() -> Self {
        Self { inner: Arc::new(Inner { slot: ArcSwapOption::empty(), stats: Arc::new(ActorStats::default()) }) }
    }

    /// Sends a message without waiting. An `Ok` says that it is in the mailbox of a living actor.
    pub fn cast(&self, message: M) -> Result<(), Unavailable> {
        let slot = self.inner.slot.load();
        let Some(actor) = slot.as_ref() else { return Err(self.not_running()) };
        self.inner.stats.sent();
        actor.send_message(message).map_err(|_| {
            self.inner.stats.taken();
            self.not_running()
        })
    }

    /// Asks and waits for the answer, at most `timeout`.
    pub async fn call<T: Send + 'static>(
        &self,
        build: impl FnOnce(RpcReplyPort<T>) -> M,
        timeout: Duration,
    ) -> Result<T, Unavailable> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.cast(build(RpcReplyPort::from((sender, timeout))))?;
        match tokio::time::timeout(timeout, receiver).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Unavailable::Dropped(self.inner.stats.path())),
            Err(_) => Err(Unavailable::Timeout {
                path: self.inner.stats.path(),
                waited_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    /// Whether messages are taken now.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.actor().is_some_and(|actor| actor.get_status() <= ActorStatus::Upgrading)
    }

    /// The actor behind it now. Do not keep it: after a restart it is dead.
    #[must_use]
    pub fn actor(&self) -> Option<ActorRef<M>> {
        self.inner.slot.load().as_ref().map(|actor| actor.as_ref().clone())
    }

    /// Depth, restarts, state.
    #[must_use]
    pub fn stats(&self) -> &Arc<ActorStats> {
        &self.inner.stats
    }

    pub(crate) fn set(&self, actor: ActorRef<M>) -> ActorCell {
        let cell = actor.get_cell();
        self.inner.slot.store(Some(Arc::new(actor)));
        cell
    }

    fn not_running(&self) -> Unavailable {
        Unavailable::NotRunning(self.inner.stats.path())
    }
}
