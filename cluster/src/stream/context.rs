//! What crosses every hop with a request.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use starling_ids::{AttemptId, RequestId};

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
}

impl Context {
    /// A context for a request that must end within `time_left`.
    #[must_use]
    pub fn new(request: RequestId, time_left: Duration) -> Self {
        Self { request, attempt: AttemptId(0), trace_parent: None, time_left, tenant: String::new(), priority: 0 }
    }
}
