//! The frames of a link, and what two ends agree on in their hellos. Pure.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_ids::{EndpointName, Incarnation, NodeId};

use super::limits;
use crate::stream::{Context, Fault};

/// The protocol versions this software speaks, lowest and highest.
pub const PROTOCOL: (u16, u16) = (2, 2);

/// One stream on one link. Odd ids are opened by the side that dialled, even ones by the other; never reused.
pub type StreamId = u32;

/// Everything that can stand on a link.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// First frame of each side.
    Hello(Box<Hello>),
    /// Asks for a stream.
    Open {
        /// Its id, chosen by the opener.
        stream: StreamId,
        /// Where to, and for what.
        head: Box<OpenHead>,
        /// The first body.
        body: Bytes,
    },
    /// The stream is open; both sides may send.
    Accept {
        /// Which.
        stream: StreamId,
        /// The reply body.
        reply: Bytes,
    },
    /// The stream is refused and its id is dead.
    Reject {
        /// Which.
        stream: StreamId,
        /// Why.
        fault: Box<Fault>,
    },
    /// One frame of a stream.
    Data {
        /// Which.
        stream: StreamId,
        /// The payload, untouched.
        payload: Bytes,
    },
    /// The reader of a direction took frames.
    Credit {
        /// Which.
        stream: StreamId,
        /// How much of its window is free again, bytes.
        amount: u32,
    },
    /// The reader of a direction left; its sender should stop. Before an accept: the opener left.
    Cancel {
        /// Which.
        stream: StreamId,
    },
    /// Clean end of the sender's direction.
    End {
        /// Which.
        stream: StreamId,
    },
    /// End of the sender's direction by a failure.
    Fail {
        /// Which.
        stream: StreamId,
        /// Why.
        why: Box<FailWhy>,
    },
    /// Asks for a pong with the same number.
    Ping(u64),
    /// Answers a ping.
    Pong(u64),
    /// Nothing follows.
    Goodbye(Closing),
}

/// How a direction ended without an end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailWhy {
    /// The sender said why.
    Fault(Fault),
    /// The sender vanished.
    Dropped(String),
}

/// Why a link is closed, or was never opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Closing {
    /// No streams for a while; dial again when needed.
    Idle,
    /// There is a better link between the two nodes; use that.
    Duplicate,
    /// The node is going away.
    Leaving,
    /// The addressed node lives in another incarnation.
    Stale {
        /// The one it lives in.
        current: Incarnation,
    },
    /// Anything else, for people.
    Refused(String),
}

/// What an opener asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenHead {
    /// Where to.
    pub endpoint: EndpointName,
    /// Request, deadline, tenant, priority.
    pub context: Context,
}

/// What kind of process speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Party {
    /// A node of the cluster.
    Node,
    /// A tool that only opens streams.
    Client,
}

/// Who speaks, what it can do, whom it means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Lowest and highest protocol version.
    pub protocol: (u16, u16),
    /// Node or tool.
    pub party: Party,
    /// Its name; for a tool any name.
    pub node: NodeId,
    /// Its life; 0 for a tool.
    pub incarnation: Incarnation,
    /// Name and version of its software, for people.
    pub software: String,
    /// Whom the dialer means: the node and its life. A tool and the answering side mean nobody.
    pub wanted: Option<(NodeId, Incarnation)>,
    /// Largest payload it takes, bytes.
    pub payload_max: u32,
    /// Frames of one direction of a stream that it takes before it gives credits back.
    pub window: u32,
    /// Bytes of the same. A frame takes at least `window_bytes / window`, at most three quarters of `window_bytes`.
    #[serde(default)]
    pub window_bytes: u32,
}

impl Hello {
    /// The hello of this software, addressed to nobody.
    #[must_use]
    pub fn new(party: Party, node: NodeId, incarnation: Incarnation, software: String) -> Self {
        Self {
            protocol: PROTOCOL,
            party,
            node,
            incarnation,
            software,
            wanted: None,
            payload_max: u32::try_from(limits::FRAME_PAYLOAD_MAX).unwrap_or(u32::MAX),
            window: u32::try_from(limits::STREAM_WINDOW_FRAMES).unwrap_or(u32::MAX),
            window_bytes: u32::try_from(limits::STREAM_WINDOW_BYTES).unwrap_or(u32::MAX),
        }
    }
}

/// The protocol version that both speak, or a sentence that names both ranges.
pub fn settle(ours: &Hello, theirs: &Hello) -> Result<u16, String> {
    let highest = ours.protocol.1.min(theirs.protocol.1);
    if highest < ours.protocol.0.max(theirs.protocol.0) {
        return Err(format!(
            "{} ({}) speaks link protocol {} to {}, {} ({}) speaks {} to {}",
            ours.node,
            ours.software,
            ours.protocol.0,
            ours.protocol.1,
            theirs.node,
            theirs.software,
            theirs.protocol.0,
            theirs.protocol.1
        ));
    }
    if theirs.window == 0 || theirs.window_bytes < 4 || theirs.payload_max == 0 {
        return Err(format!("{} takes no frames: windows and payload limit must be above zero", theirs.node));
    }
    Ok(highest)
}

// Frames are moved once for each token; what makes one large is boxed.
const _: () = assert!(size_of::<Frame>() <= 48);

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(protocol: (u16, u16)) -> Hello {
        let node = NodeId::new("a").unwrap();
        Hello { protocol, ..Hello::new(Party::Node, node, Incarnation(1), "test 1".into()) }
    }

    #[test]
    fn the_highest_common_version_is_taken_and_a_gap_is_named() {
        assert_eq!(settle(&hello((1, 3)), &hello((2, 5))), Ok(3));
        assert_eq!(settle(&hello((2, 2)), &hello((1, 2))), Ok(2));
        let gap = settle(&hello((1, 2)), &hello((3, 4))).unwrap_err();
        assert!(gap.contains("1 to 2") && gap.contains("3 to 4"), "{gap}");
        assert!(settle(&hello((1, 1)), &Hello { window: 0, ..hello((1, 1)) }).is_err());
        assert!(settle(&hello((1, 1)), &Hello { window_bytes: 0, ..hello((1, 1)) }).is_err());
    }
}
