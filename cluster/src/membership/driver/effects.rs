//! What the driver shows of members and asks of its owner.
//!
//! Read by the gossip thread, the directory and the simulation. Types only.

use std::{net::SocketAddr, time::Duration};

use starling_ids::{Incarnation, NodeId};

use crate::membership::{Identity, message::Rumour};

/// A member other than this node, as gossip sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView {
    /// Who.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Where its gossip, links and sessions arrive.
    pub address: SocketAddr,
    /// Whether it failed a probe and has not refuted that yet.
    pub suspect: bool,
}

/// What the driver asks its owner to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Seal this payload and send it.
    Send {
        /// Where to.
        to: SocketAddr,
        /// What.
        payload: Vec<u8>,
    },
    /// What [`super::Driver::members`] gives has changed. These have come or gone, as [`super::Driver::knows`] tells for
    /// each; a member that is suspected, or is not any more, is not among them.
    MembersChanged(Vec<NodeId>),
    /// A record elsewhere has a new version.
    Rumour(Rumour),
    /// The name is taken; the driver has fallen silent for good.
    Outranked(Outranked),
    /// Exchange all that is known with this member over TCP: [`super::Driver::exchange_open`] says how to begin.
    Exchange(Peer),
    /// Find out over TCP whether this member lives, and say so through [`super::Driver::verified`] within
    /// [`VERIFY_MAX`]. Where that cannot be done now, nothing needs to be said.
    Verify(Peer, Look),
    /// Another living process claims this node's name and has lost to it. The process may be told of again.
    NameClash(Identity),
}

/// A member to be reached over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Who.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Where its links and sessions arrive.
    pub address: SocketAddr,
}

/// A member as somebody to reach.
pub(super) fn peer(id: &Identity) -> Option<Peer> {
    Some(Peer { node: id.node.clone()?, incarnation: id.incarnation, address: id.address() })
}

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Whether anybody listens there at all: costs both sides next to nothing. Only [`Proof::Refused`] is of interest.
    Knock,
    /// Whether the member itself answers: over what connects the two already, else with a handshake.
    Visit,
}

/// What a look over TCP has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The member answered as itself.
    Alive,
    /// The host answered that nobody listens there: the process is gone.
    Refused,
    /// No answer in time, which may be the network's fault.
    Silent,
}

/// Longest wait for the answer to [`Effect::Verify`]; a later one is taken for [`Proof::Silent`]. Below the shortest
/// suspicion, so that the answer counts.
pub const VERIFY_MAX: Duration = Duration::from_millis(1200);

/// Why this node cannot be a member under its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outranked {
    /// Who holds the name, where that is known.
    pub holder: Option<Identity>,
    /// Whether the holder is down: then it was an earlier life of this node, whose counter is lost.
    pub down: bool,
}
