//! What crosses every hop with a request.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use starling_ids::{AttemptId, RequestId};

use crate::wire::limits::STREAM_INACTIVITY;

/// Carried by every stream, from the gateway to the last actor that works for the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// The client request this stream works for.
    pub request: RequestId,
    /// Which try at it.
    pub attempt: AttemptId,
    /// W3C `traceparent`, when the client sent one.
    pub trace_parent: Option<String>,
    /// Time left until the request must have ended, as of sending. Clocks of two nodes are never compared.
    pub time_left: Duration,
    /// Whose request, for fairness and budgets.
    pub tenant: String,
    /// Lower runs first.
    pub priority: i32,
    /// A long-lived internal stream: no deadline, no inactivity limit, counted apart from requests.
    pub subscription: bool,
}

impl Context {
    /// A context for a request that must end within `time_left`.
    #[must_use]
    pub fn new(request: RequestId, time_left: Duration) -> Self {
        Self {
            request,
            attempt: AttemptId(0),
            trace_parent: None,
            time_left,
            tenant: String::new(),
            priority: 0,
            subscription: false,
        }
    }

    /// A context for a long-lived internal stream, that may be silent and ends with one of its sides.
    #[must_use]
    pub fn subscription(request: RequestId) -> Self {
        Self { subscription: true, ..Self::new(request, Duration::MAX) }
    }

    /// When the time is over by this node's clock; `None` for subscriptions.
    pub(crate) fn deadline(&self) -> Option<tokio::time::Instant> {
        if self.subscription { None } else { tokio::time::Instant::now().checked_add(self.time_left) }
    }

    /// How long an opener waits for accept or reject.
    pub(crate) fn answer_within(&self) -> Duration {
        self.time_left.min(STREAM_INACTIVITY)
    }
}
