//! The call that the running handler answers, and what it hands on to calls made inside it.
//!
//! Set around every handler; read by clients. It belongs to the task of the handler: a task that the handler starts
//! on its own sees it through [`CallInfo::scope`]. Bounds: none.

use std::{sync::Arc, time::Duration};

use starling_ids::{NodeId, RequestId};
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
    /// Request id, trace, attempt, tenant, priority, baggage, and the time left as of the arrival.
    pub context: Context,
    arrived: Instant,
    deadline: Option<Instant>,
}

impl CallInfo {
    pub(super) fn new(peer: NodeId, context: Context) -> Arc<Self> {
        let deadline = context.deadline();
        Arc::new(Self { peer, context, arrived: Instant::now(), deadline })
    }

    /// Time left until the asker stops waiting; `None` when it waits for ever.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// The context of a call made now on behalf of this one: less time, the same in everything else.
    #[must_use]
    pub fn child(&self) -> Context {
        self.context.child(self.arrived.elapsed())
    }

    /// Runs `work` as part of this call, in whatever task: calls made inside it inherit the context.
    pub async fn scope<F: Future>(self: Arc<Self>, work: F) -> F::Output {
        CURRENT.scope(self, work).await
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

/// The context of a new call: the current call's, or a fresh one, with at most `limit` left.
pub(super) fn outgoing(limit: Duration) -> Context {
    match current_call() {
        Some(call) => {
            let context = call.child();
            Context { time_left: context.time_left.min(limit), ..context }
        }
        None => Context::new(RequestId(rand::random()), limit),
    }
}
