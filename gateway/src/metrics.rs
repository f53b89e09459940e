//! The gateway's metric handles, taken once so that a token costs no look-up.
//!
//! Labels come from closed sets: a client's text never becomes one.

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use starling_ids::Metric;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// Chat completions.
    Chat,
    /// Raw completions.
    Completions,
    /// The model list, or one model.
    Models,
    /// The page that shows the cluster.
    Console,
    /// Everything else that does not exist.
    Unknown,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Answered as asked.
    Ok,
    /// The client's fault.
    ClientError,
    /// Ours.
    ServerError,
    /// The client left.
    Cancelled,
}

impl Route {
    const ALL: [Self; 5] = [Self::Chat, Self::Completions, Self::Models, Self::Console, Self::Unknown];

    const fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Models => "models",
            Self::Console => "console",
            Self::Unknown => "unknown",
        }
    }
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Ok, Self::ClientError, Self::ServerError, Self::Cancelled];

    /// Of an HTTP status.
    pub(crate) const fn of(status: u16) -> Self {
        match status {
            0..400 => Self::Ok,
            400..500 => Self::ClientError,
            500.. => Self::ServerError,
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Ok => "2xx",
            Self::ClientError => "4xx",
            Self::ServerError => "5xx",
            Self::Cancelled => "cancelled",
        }
    }
}

/// One set of handles.
#[derive(Clone)]
pub(crate) struct GatewayMetrics {
    requests: [[Counter; 4]; 5],
    pub(crate) in_flight: Gauge,
    pub(crate) permits: Gauge,
    pub(crate) cancelled: Counter,
    pub(crate) ttft_s: Histogram,
    pub(crate) itl_s: Histogram,
}

impl GatewayMetrics {
    /// Handles of the recorder that is installed now.
    pub(crate) fn new() -> Self {
        let of = |route: Route| {
            Outcome::ALL.map(|outcome| {
                counter!(Metric::GatewayRequests.name(), "route" => route.label(), "class" => outcome.label())
            })
        };
        Self {
            requests: Route::ALL.map(of),
            in_flight: gauge!(Metric::GatewayInFlight.name()),
            permits: gauge!(Metric::GatewayPermits.name()),
            cancelled: counter!(Metric::GatewayCancelled.name()),
            ttft_s: histogram!(Metric::GatewayTtft.name()),
            itl_s: histogram!(Metric::GatewayItl.name()),
        }
    }

    /// Counts one request that is over.
    pub(crate) fn count(&self, route: Route, outcome: Outcome) {
        self.requests[route as usize][outcome as usize].increment(1);
    }
}

impl std::fmt::Debug for GatewayMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GatewayMetrics")
    }
}
