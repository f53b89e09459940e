//! Why a stream was refused or stopped: typed by who must act.

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};
use thiserror::Error;

/// Whose fault it is and what may be tried. Mapped to HTTP in one table of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FaultKind {
    /// The request is wrong; trying again gives the same.
    Invalid,
    /// The endpoint, model or thing named does not exist there.
    NotFound,
    /// No room now; another worker or a later try may do.
    Overloaded,
    /// The node is going away; another may do.
    Draining,
    /// Addressed to an earlier life of the node or worker.
    StaleIncarnation,
    /// The time allowed is over.
    DeadlineExceeded,
    /// The actor that should answer is being restarted.
    Unavailable,
    /// The other side broke; its log says more.
    Internal,
}

impl FaultKind {
    /// Whether another worker may succeed where this one refused.
    #[must_use]
    pub const fn elsewhere(self) -> bool {
        matches!(self, Self::Overloaded | Self::Draining | Self::StaleIncarnation | Self::Unavailable | Self::Internal)
    }

    /// A fixed word for labels and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not_found",
            Self::Overloaded => "overloaded",
            Self::Draining => "draining",
            Self::StaleIncarnation => "stale_incarnation",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
        }
    }
}

/// A refusal or a failure, as it crosses the wire.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("{}: {message}", kind.label())]
pub struct Fault {
    /// Whose fault, what may be tried.
    pub kind: FaultKind,
    /// One sentence for a person: what was wrong, what would be right.
    pub message: String,
    /// The field of the request, for [`FaultKind::Invalid`].
    pub param: Option<String>,
    /// When to try again, milliseconds.
    pub retry_after_ms: Option<u64>,
}

impl Fault {
    /// A fault without field and retry time.
    #[must_use]
    pub fn new(kind: FaultKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after_ms: None }
    }

    /// The same, to be tried again after this many milliseconds.
    #[must_use]
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }
}

/// How a stream failed on this side.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StreamError {
    /// The directory knows no such node.
    #[error("node {0} is not a member")]
    UnknownNode(NodeId),
    /// The node lives in another incarnation than the one addressed.
    #[error("node {node} is in incarnation {current}, the stream was for {wanted}")]
    Stale {
        /// The node.
        node: NodeId,
        /// Addressed.
        wanted: Incarnation,
        /// Known here.
        current: Incarnation,
    },
    /// No link could be made.
    #[error("no link to {node}: {reason}")]
    Connect {
        /// The node.
        node: NodeId,
        /// What failed.
        reason: String,
    },
    /// Refused before any data.
    #[error("rejected: {0}")]
    Rejected(Fault),
    /// Ended by the other side with a failure, after it was accepted.
    #[error("failed: {0}")]
    Failed(Fault),
    /// The link broke or the other side vanished: no end was seen.
    #[error("stream broken: {0}")]
    Broken(String),
    /// No frame for longer than the inactivity limit.
    #[error("no frame for {0} ms")]
    Inactive(u64),
    /// The context's time is over.
    #[error("deadline exceeded")]
    Deadline,
    /// Cancelled by this side or the other.
    #[error("cancelled")]
    Cancelled,
    /// A frame larger than the limit; nothing was sent.
    #[error("frame of {len} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its length.
        len: usize,
        /// The bound.
        limit: usize,
    },
}
