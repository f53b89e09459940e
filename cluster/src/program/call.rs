//! The call that the running handler answers, and what it hands on to calls made inside it.
//!
//! Set around every handler; read by clients. It belongs to the task of the handler: a task that the handler starts
//! on its own does not see it. Bounds: none.

use std::{sync::Arc, time::Duration};

use starling_ids::{AttemptId, NodeId, RequestId};
use tokio::time::Instant;

use crate::stream::Context;

tokio::task_local! {
    static CURRENT: Arc<CallInfo>;
}

/// Who asks, and for which request.
#[derive(Debug)]
pub struct CallInfo {
    /// The node that asks; this one for local calls.
    pub peer: NodeId,
    /// Request id, trace, tenant, priority, time left as of the arrival.
    pub context: Context,
    deadline: Option<Instant>,
}

impl CallInfo {
    pub(super) fn new(peer: NodeId, context: Context) -> Arc<Self> {
        let deadline = context.deadline();
        Arc::new(Self { peer, context, deadline })
    }

    /// Time left until the asker stops waiting; `None` when it waits for ever.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline.map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

/// The call that is being answered; `None` outside of handlers.
#[must_use]
pub fn current_call() -> Option<Arc<CallInfo>> {
    CURRENT.try_with(Arc::clone).ok()
}

/// Runs a handler as the answer to `call`.
pub(super) async fn answering<F: Future>(call: Arc<CallInfo>, handler: F) -> F::Output {
    CURRENT.scope(call, handler).await
}

/// The context of a new call: the current call's, or a fresh one, with at most `limit` left.
pub(super) fn outgoing(limit: Duration) -> Context {
    let Some(call) = current_call() else { return Context::new(RequestId(rand::random()), limit) };
    let time_left = call.time_left().map_or(limit, |left| left.min(limit));
    Context { time_left, subscription: false, attempt: AttemptId(0), ..call.context.clone() }
}
