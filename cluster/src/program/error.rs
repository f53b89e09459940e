//! Why a call did not get its answer: what the directory knew, what the request met, and what to do about it.
//!
//! Called by clients. Pure. The two layers stay apart: a [`DirectoryFault`] was known before anything was sent, a
//! [`RequestFault`] happened to a request that was on its way.

use starling_ids::{EndpointName, Incarnation, NodeId};
use thiserror::Error;

use crate::stream::{Advice, Fault, FaultKind, StreamError};

/// While gossip brings news of an instance.
const NEWS_WAIT_MS: u64 = 200;

/// What the directory says against a call. Nothing was sent.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DirectoryFault {
    /// No instance of this endpoint is known.
    #[error("no instance of {endpoint} is known{hint}")]
    Unknown {
        /// The endpoint.
        endpoint: EndpointName,
        /// Names that it may have meant, or what there is; the end of the sentence.
        hint: String,
    },
    /// Instances are known and none can be called: they start, drain, are unreachable, or were tried already.
    #[error("none of {listed} instances of {endpoint} can be called now")]
    NoneServing {
        /// The endpoint.
        endpoint: EndpointName,
        /// How many are known.
        listed: usize,
    },
    /// The node is not a member any more.
    #[error("node {0} is down")]
    Down(NodeId),
    /// The node lives in another incarnation than the one addressed.
    #[error("node {node} is in incarnation {current}, the call was for {wanted}")]
    Stale {
        /// The node.
        node: NodeId,
        /// Addressed.
        wanted: Incarnation,
        /// Known here.
        current: Incarnation,
    },
}

/// What happened to a request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestFault {
    /// No link to the node could be made; the request was not seen by it.
    #[error("no link to {node}: {reason}")]
    Connect {
        /// The node.
        node: NodeId,
        /// What failed.
        reason: String,
    },
    /// Refused, with a reason, before any answer.
    #[error("rejected: {0}")]
    Rejected(Fault),
    /// Ended by the other side with a reason, after it was accepted.
    #[error("failed: {0}")]
    Failed(Fault),
    /// The link broke or the other side vanished; it may have acted on the request.
    #[error("broken: {0}")]
    Broken(String),
    /// The time allowed is over.
    #[error("deadline exceeded")]
    Deadline,
    /// Nothing came for this many milliseconds.
    #[error("no frame for {0} ms")]
    Inactive(u64),
    /// Cancelled by one side.
    #[error("cancelled")]
    Cancelled,
    /// A value larger than a frame; nothing was sent.
    #[error("a value of {len} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its length.
        len: usize,
        /// The bound.
        limit: usize,
    },
    /// A value of this program cannot be written as MessagePack.
    #[error("the value cannot be encoded: {0}")]
    Encode(String),
    /// What came is not of the type that this side expects.
    #[error("the value cannot be read: {0}")]
    Decode(String),
}

/// A call without its answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CallError {
    /// The directory knew that it cannot work; nothing was sent.
    #[error(transparent)]
    Directory(#[from] DirectoryFault),
    /// Something happened to the request.
    #[error(transparent)]
    Request(#[from] RequestFault),
}

impl CallError {
    /// What may be tried next. The same table as [`StreamError::advice`]; see also [`Self::may_have_acted`].
    #[must_use]
    pub fn advice(&self) -> Advice {
        match self {
            Self::Directory(DirectoryFault::Down(_)) => Advice::RetryElsewhere,
            Self::Directory(DirectoryFault::Stale { wanted, current, .. }) if wanted < current => Advice::RetrySame,
            Self::Directory(_) => Advice::RetryAfter(NEWS_WAIT_MS),
            Self::Request(fault) => fault.advice(),
        }
    }

    /// Whether the other side may have acted on the request: then only one that may be done twice is worth a retry.
    #[must_use]
    pub fn may_have_acted(&self) -> bool {
        match self {
            Self::Directory(_) => false,
            Self::Request(fault) => fault.may_have_acted(),
        }
    }

    /// The other side's own words, when it said something.
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Request(RequestFault::Rejected(fault) | RequestFault::Failed(fault)) => Some(fault),
            _ => None,
        }
    }
}

impl RequestFault {
    /// What may be tried next.
    #[must_use]
    pub fn advice(&self) -> Advice {
        match self {
            Self::Connect { .. } | Self::Broken(_) | Self::Inactive(_) => Advice::RetryElsewhere,
            Self::Rejected(fault) | Self::Failed(fault) => fault.advice(),
            Self::Deadline | Self::Cancelled => Advice::GiveUp,
            Self::TooLarge { .. } | Self::Encode(_) | Self::Decode(_) => Advice::GiveUp,
        }
    }

    /// Whether the other side may have acted on the request.
    #[must_use]
    pub fn may_have_acted(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::TooLarge { .. } | Self::Encode(_) => false,
            // A handler that answers at once refuses and fails in the same way: one that broke had begun.
            Self::Rejected(fault) => fault.kind == FaultKind::Internal,
            Self::Failed(_) | Self::Broken(_) | Self::Inactive(_) | Self::Decode(_) => true,
            Self::Deadline | Self::Cancelled => true,
        }
    }
}

/// A refusal by this program itself, an operator say.
impl From<Fault> for CallError {
    fn from(fault: Fault) -> Self {
        Self::Request(RequestFault::Rejected(fault))
    }
}

impl From<StreamError> for CallError {
    fn from(error: StreamError) -> Self {
        let request = match error {
            StreamError::UnknownNode(node) | StreamError::Down { node, .. } => {
                return DirectoryFault::Down(node).into();
            }
            StreamError::Stale { node, wanted, current } => {
                return DirectoryFault::Stale { node, wanted, current }.into();
            }
            StreamError::Connect { node, reason } => RequestFault::Connect { node, reason },
            // Whichever side's clock is first, it is the same deadline.
            StreamError::Rejected(fault) | StreamError::Failed(fault) if fault.kind == FaultKind::DeadlineExceeded => {
                RequestFault::Deadline
            }
            StreamError::Rejected(fault) => RequestFault::Rejected(fault),
            StreamError::Failed(fault) => RequestFault::Failed(fault),
            StreamError::Broken(reason) => RequestFault::Broken(reason),
            StreamError::Inactive(ms) => RequestFault::Inactive(ms),
            StreamError::Deadline => RequestFault::Deadline,
            StreamError::Cancelled => RequestFault::Cancelled,
            StreamError::TooLarge { len, limit } => RequestFault::TooLarge { len, limit },
        };
        request.into()
    }
}

/// For handlers that call others: what their own asker is told.
impl From<CallError> for Fault {
    fn from(error: CallError) -> Self {
        let kind = match &error {
            CallError::Request(RequestFault::Rejected(fault) | RequestFault::Failed(fault)) => return fault.clone(),
            CallError::Request(RequestFault::Deadline) => FaultKind::DeadlineExceeded,
            CallError::Request(RequestFault::Encode(_) | RequestFault::Decode(_) | RequestFault::TooLarge { .. }) => {
                FaultKind::Internal
            }
            _ => FaultKind::Unavailable,
        };
        Fault::new(kind, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_what_may_have_happened_to_the_request() {
        let node = NodeId::new("a").unwrap();
        let advice = |error: StreamError| {
            let error = CallError::from(error);
            (error.advice(), error.may_have_acted())
        };
        assert_eq!(advice(StreamError::UnknownNode(node.clone())), (Advice::RetryElsewhere, false));
        assert_eq!(advice(StreamError::Connect { node, reason: "refused".into() }), (Advice::RetryElsewhere, false));
        let full = Fault::new(FaultKind::Overloaded, "full").retry_after_ms(5);
        assert_eq!(advice(StreamError::Rejected(full.clone())), (Advice::RetryElsewhere, false));
        assert_eq!(advice(StreamError::Failed(full)), (Advice::RetryElsewhere, true));
        let broke = Fault::new(FaultKind::Internal, "panic");
        assert_eq!(advice(StreamError::Rejected(broke)), (Advice::RetryElsewhere, true), "it had begun");
        assert_eq!(advice(StreamError::Broken("cut".into())), (Advice::RetryElsewhere, true));
        let wrong = Fault::new(FaultKind::Invalid, "no");
        assert_eq!(advice(StreamError::Rejected(wrong)), (Advice::GiveUp, false));
        assert_eq!(advice(StreamError::Deadline), (Advice::GiveUp, true));
    }

    #[test]
    fn a_fault_of_another_node_keeps_its_kind_on_the_way_back() {
        let fault = Fault::new(FaultKind::Invalid, "no such word");
        assert_eq!(Fault::from(CallError::from(StreamError::Rejected(fault.clone()))), fault);
        let down = CallError::from(StreamError::UnknownNode(NodeId::new("a").unwrap()));
        assert_eq!(Fault::from(down).kind, FaultKind::Unavailable);
    }
}
