//! Why a stream was refused or stopped, typed by who must act, and the one table of what may be tried next.
//!
//! Called by everybody who opens or answers streams. Pure. Two layers stay apart: what the directory knew before
//! anything was sent, and what a request met on its way ([`Layer`]).

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, Metric, NodeId};
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

/// What to do after a failure. Says nothing about whether the request was acted on: see
/// [`StreamError::may_have_acted`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Advice {
    /// Another instance may do, now.
    RetryElsewhere,
    /// The same may do after this many milliseconds.
    RetryAfter(u64),
    /// The same node lives and may do at once; look into the directory again for its present incarnation.
    RetrySame,
    /// The same request gives the same, or nobody waits for it any more.
    GiveUp,
}

/// Which layer a failure belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layer {
    /// Known from membership and directory before anything was sent.
    Directory,
    /// Met by a request on its way.
    Request,
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

    /// What may be tried after a refusal with this fault. Another instance comes first; where there is none,
    /// `retry_after_ms` says when the same one may do.
    #[must_use]
    pub const fn advice(&self) -> Advice {
        match (self.kind, self.retry_after_ms) {
            (FaultKind::Invalid | FaultKind::DeadlineExceeded, _) | (FaultKind::NotFound, None) => Advice::GiveUp,
            (FaultKind::NotFound, Some(ms)) => Advice::RetryAfter(ms),
            (
                FaultKind::Overloaded
                | FaultKind::Draining
                | FaultKind::StaleIncarnation
                | FaultKind::Unavailable
                | FaultKind::Internal,
                _,
            ) => Advice::RetryElsewhere,
        }
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
    /// Gossip has declared the node down, not long ago; it may come back in another incarnation.
    #[error("node {node} has been down for {since_ms} ms")]
    Down {
        /// The node.
        node: NodeId,
        /// How long ago this node heard of it, milliseconds.
        since_ms: u64,
    },
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

/// While gossip brings news that another node has already.
const NEWS_WAIT_MS: u64 = 200;

impl StreamError {
    /// What may be tried next. The whole table:
    ///
    /// | failure | advice | acted on |
    /// |---|---|---|
    /// | unknown node, down | elsewhere | no |
    /// | stale, the node is in a later life | same node, anew | no |
    /// | stale, this node's directory is ahead | after 200 ms | no |
    /// | no link | elsewhere | no |
    /// | rejected | as its fault says ([`Fault::advice`]) | no |
    /// | failed after it was accepted | as its fault says | maybe |
    /// | broken, inactive | elsewhere | maybe |
    /// | deadline, cancelled | give up | maybe |
    /// | frame too large | give up | no |
    #[must_use]
    pub const fn advice(&self) -> Advice {
        match self {
            Self::UnknownNode(_) | Self::Down { .. } | Self::Connect { .. } => Advice::RetryElsewhere,
            Self::Stale { wanted, current, .. } if wanted.0 < current.0 => Advice::RetrySame,
            Self::Stale { .. } => Advice::RetryAfter(NEWS_WAIT_MS),
            Self::Rejected(fault) | Self::Failed(fault) => fault.advice(),
            Self::Broken(_) | Self::Inactive(_) => Advice::RetryElsewhere,
            Self::Deadline | Self::Cancelled | Self::TooLarge { .. } => Advice::GiveUp,
        }
    }

    /// Whether the other side may have acted on the request: then only one that may be done twice is worth a retry.
    #[must_use]
    pub const fn may_have_acted(&self) -> bool {
        match self {
            Self::UnknownNode(_) | Self::Down { .. } | Self::Stale { .. } | Self::Connect { .. } => false,
            Self::Rejected(_) | Self::TooLarge { .. } => false,
            Self::Failed(_) | Self::Broken(_) | Self::Inactive(_) | Self::Deadline | Self::Cancelled => true,
        }
    }

    /// Whether the directory or the request failed.
    #[must_use]
    pub const fn layer(&self) -> Layer {
        match self {
            Self::UnknownNode(_) | Self::Down { .. } | Self::Stale { .. } => Layer::Directory,
            _ => Layer::Request,
        }
    }

    /// A fixed word for labels and logs.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::UnknownNode(_) => "unknown_node",
            Self::Down { .. } => "down",
            Self::Stale { .. } => "stale",
            Self::Connect { .. } => "connect",
            Self::Rejected(_) => "rejected",
            Self::Failed(_) => "failed",
            Self::Broken(_) => "broken",
            Self::Inactive(_) => "inactive",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::TooLarge { .. } => "too_large",
        }
    }

    /// Counts it under its layer.
    pub(crate) fn count(&self) {
        let metric = match self.layer() {
            Layer::Directory => Metric::DirectoryFaults,
            Layer::Request => Metric::RequestFaults,
        };
        metrics::counter!(metric.name(), "kind" => self.label()).increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stale(wanted: u64, current: u64) -> StreamError {
        let node = NodeId::new("w").expect("name");
        StreamError::Stale { node, wanted: Incarnation(wanted), current: Incarnation(current) }
    }

    #[test]
    fn every_failure_has_advice_and_a_layer() {
        let node = NodeId::new("w").expect("name");
        let full = Fault::new(FaultKind::Overloaded, "full").retry_after_ms(9);
        let table = [
            (StreamError::UnknownNode(node.clone()), Layer::Directory, Advice::RetryElsewhere, false),
            (StreamError::Down { node: node.clone(), since_ms: 5 }, Layer::Directory, Advice::RetryElsewhere, false),
            (stale(1, 2), Layer::Directory, Advice::RetrySame, false),
            (stale(2, 1), Layer::Directory, Advice::RetryAfter(NEWS_WAIT_MS), false),
            (StreamError::Connect { node, reason: "no".into() }, Layer::Request, Advice::RetryElsewhere, false),
            (StreamError::Rejected(full.clone()), Layer::Request, Advice::RetryElsewhere, false),
            (StreamError::Failed(full), Layer::Request, Advice::RetryElsewhere, true),
            (StreamError::Broken("cut".into()), Layer::Request, Advice::RetryElsewhere, true),
            (StreamError::Inactive(9), Layer::Request, Advice::RetryElsewhere, true),
            (StreamError::Deadline, Layer::Request, Advice::GiveUp, true),
            (StreamError::Cancelled, Layer::Request, Advice::GiveUp, true),
            (StreamError::TooLarge { len: 2, limit: 1 }, Layer::Request, Advice::GiveUp, false),
        ];
        for (error, layer, advice, acted) in table {
            assert_eq!((error.layer(), error.advice(), error.may_have_acted()), (layer, advice, acted), "{error}");
        }
    }

    #[test]
    fn a_refusal_that_nobody_else_can_mend_is_given_up() {
        let advice = |kind| Fault::new(kind, "").advice();
        for kind in [FaultKind::Invalid, FaultKind::NotFound, FaultKind::DeadlineExceeded] {
            assert_eq!(advice(kind), Advice::GiveUp);
            assert!(!kind.elsewhere());
        }
        assert_eq!(advice(FaultKind::Draining), Advice::RetryElsewhere);
        assert_eq!(Fault::new(FaultKind::NotFound, "").retry_after_ms(3).advice(), Advice::RetryAfter(3));
    }
}
