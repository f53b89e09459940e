//! Who a member is in gossip, and which of two claims to one name wins.
//!
//! Called by the driver and, through it, by foca. Pure: it orders by boot counter, then by generation,
//! never by a clock.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};

/// A member as gossip names it.
///
/// The name is the address in foca's sense: two identities with one name are two lives of one node, or two
/// nodes that clash, and one of them wins. A restart on another port or host is therefore the same member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Whose. `None` stands for "whoever listens there", for announcements to seeds, and never for a member.
    pub node: Option<NodeId>,
    /// Where its gossip, links and sessions arrive.
    pub address: SocketAddr,
    /// The life of the process.
    pub incarnation: Incarnation,
    /// Raised within one life when the cluster thought the node dead and it rejoins.
    pub generation: u32,
}

/// What foca calls the address of an identity. Equality is not transitive on purpose: `None` equals all.
#[derive(Debug, Clone)]
pub struct Name(Option<NodeId>);

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(two)) => one == two,
            _ => true,
        }
    }
}

impl Identity {
    /// A node in its first generation of this life.
    #[must_use]
    pub fn new(node: NodeId, address: SocketAddr, incarnation: Incarnation) -> Self {
        Self { node: Some(node), address, incarnation, generation: 0 }
    }

    /// Whoever listens at `address`. foca answers an announcement to any identity of the same [`Name`].
    #[must_use]
    pub fn whoever(address: SocketAddr) -> Self {
        Self { node: None, address, incarnation: Incarnation(0), generation: 0 }
    }

    /// Whether both are the same process, in whatever generation.
    #[must_use]
    pub fn same_process(&self, other: &Self) -> bool {
        self.node == other.node && self.incarnation == other.incarnation && self.address == other.address
    }

    /// Whether this one replaces `other` of the same name: later life, then later generation. Two nodes that
    /// claim one name in one life are told apart by address, so that all members choose the same one.
    #[must_use]
    pub fn beats(&self, other: &Self) -> bool {
        let rank = |id: &Self| (id.incarnation, id.generation, id.address);
        rank(self) > rank(other)
    }
}

impl foca::Identity for Identity {
    type Addr = Name;

    fn renew(&self) -> Option<Self> {
        let generation = self.generation.checked_add(1)?;
        Some(Self { generation, ..self.clone() })
    }

    fn addr(&self) -> Name {
        Name(self.node.clone())
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        self.beats(adversary)
    }
}

#[cfg(test)]
mod tests {
    use foca::Identity as _;
    use proptest::prelude::*;

    use super::*;

    fn identity(name: &str, port: u16, boot: u64) -> Identity {
        Identity::new(NodeId::new(name).expect("name"), SocketAddr::from(([10, 0, 0, 1], port)), Incarnation(boot))
    }

    #[test]
    fn mem_05_a_restart_elsewhere_is_the_same_member_and_wins() {
        let (before, after) = (identity("w1", 1, 1), identity("w1", 2, 2));
        assert_eq!(before.addr(), after.addr());
        assert!(after.win_addr_conflict(&before));
        assert!(!before.win_addr_conflict(&after));
        assert_ne!(before.addr(), identity("w2", 1, 1).addr());
    }

    #[test]
    fn a_renewed_identity_wins_over_its_former_self_and_loses_to_a_restart() {
        let before = identity("w1", 1, 1);
        let renewed = before.renew().expect("renews");
        assert!(renewed.win_addr_conflict(&before));
        assert!(renewed.same_process(&before));
        assert!(identity("w1", 1, 2).win_addr_conflict(&renewed));
    }

    #[test]
    fn whoever_answers_to_every_name() {
        let seed = Identity::whoever(SocketAddr::from(([10, 0, 0, 9], 1)));
        assert_eq!(seed.addr(), identity("w1", 1, 1).addr());
    }

    proptest! {
        #[test]
        fn mem_07_of_two_claims_exactly_one_wins(a in (0..3u64, 0..3u32, 1..4u16), b in (0..3u64, 0..3u32, 1..4u16)) {
            let make = |(boot, generation, port)| Identity { generation, ..identity("w1", port, boot) };
            let (one, two) = (make(a), make(b));
            prop_assert_eq!(one.beats(&two) || two.beats(&one), one != two);
            prop_assert!(!(one.beats(&two) && two.beats(&one)));
        }
    }
}
