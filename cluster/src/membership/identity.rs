//! Who a member is in gossip, and which of two claims to one name wins.
//!
//! Called by the driver and, through it, by foca. Pure: it orders by boot counter, then by generation,
//! never by a clock.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6},
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use starling_ids::{Incarnation, NodeId};
use twox_hash::XxHash3_64;

/// A member as gossip names it.
///
/// The name is the address in foca's sense: two identities with one name are two lives of one node, or two
/// nodes that clash, and one of them wins. A restart on another port or host is therefore the same member.
///
/// Small on purpose, and compared by its first field: foca searches its member list from the start for each packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct Identity {
    key: NameKey,
    /// Whose. `None` stands for "whoever listens there", for announcements to seeds, and never for a member.
    pub node: Option<NodeId>,
    at: At,
    /// The life of the process.
    pub incarnation: Incarnation,
    /// Raised within one life when the cluster thought the node dead and it rejoins.
    pub generation: u32,
}

/// A name as 64 bits, what foca calls the address of an identity: 0 stands for whoever listens. Equality is not
/// transitive on purpose: 0 equals all. Two names of one cluster share a key once in 10^11 clusters of
/// 10,000 nodes; they would then be treated like a clash of names.
#[derive(Debug, Clone, Copy)]
pub struct NameKey(u64);

impl PartialEq for NameKey {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0 || self.0 == 0 || other.0 == 0
    }
}

impl Eq for NameKey {}

impl NameKey {
    /// The key of a name, the same on every node.
    #[must_use]
    pub fn of(node: &NodeId) -> Self {
        Self(XxHash3_64::oneshot(node.as_str().as_bytes()).max(1))
    }

    /// As a number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// An address in 16 bytes instead of 32: most are of version 4, and there are as many as members.
#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    V4(SocketAddrV4),
    V6(Arc<SocketAddrV6>),
}

/// An address as a number that all nodes compute alike: with name and incarnation it names a process. Two nodes of one
/// name in one life differ by it.
#[must_use]
pub fn place(address: SocketAddr) -> u32 {
    let mut bytes = [0; 18];
    match address.ip() {
        IpAddr::V4(ip) => bytes[..4].copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => bytes[..16].copy_from_slice(&ip.octets()),
    }
    bytes[16..].copy_from_slice(&address.port().to_be_bytes());
    (XxHash3_64::oneshot(&bytes) >> 32) as u32
}

/// An identity on the wire.
#[derive(Serialize, Deserialize)]
struct Wire {
    node: WireName,
    address: SocketAddr,
    incarnation: Incarnation,
    generation: u32,
}

/// A name on the wire: text, empty for whoever listens.
struct WireName(Option<NodeId>);

impl Serialize for WireName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_ref().map_or("", NodeId::as_str))
    }
}

impl<'de> Deserialize<'de> for WireName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(ReadName)
    }
}

struct ReadName;

impl de::Visitor<'_> for ReadName {
    type Value = WireName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a node name or nothing")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<WireName, E> {
        if text.is_empty() {
            return Ok(WireName(None));
        }
        interned(text).map(|node| WireName(Some(node))).map_err(E::custom)
    }
}

/// Names remembered for [`interned`]; beyond it all are forgotten, which costs allocations only.
const INTERNED_MAX: usize = 32_768;

/// The name, sharing its text with earlier ones: each packet repeats names that this thread has read before.
fn interned(text: &str) -> Result<NodeId, starling_ids::NameError> {
    thread_local! {
        static NAMES: RefCell<HashMap<u64, NodeId>> = RefCell::default();
    }
    let hash = XxHash3_64::oneshot(text.as_bytes());
    NAMES.with_borrow_mut(|names| {
        if let Some(known) = names.get(&hash).filter(|known| known.as_str() == text) {
            return Ok(known.clone());
        }
        let node = NodeId::new(text)?;
        if names.len() >= INTERNED_MAX {
            names.clear();
        }
        names.insert(hash, node.clone());
        Ok(node)
    })
}

impl From<Wire> for Identity {
    fn from(wire: Wire) -> Self {
        let Wire { node: WireName(node), address, incarnation, generation } = wire;
        Self::make(node, address, incarnation, generation)
    }
}

impl From<Identity> for Wire {
    fn from(identity: Identity) -> Self {
        let address = identity.address();
        let Identity { node, incarnation, generation, .. } = identity;
        Self { node: WireName(node), address, incarnation, generation }
    }
}

impl Identity {
    /// A node in its first generation of this life.
    #[must_use]
    pub fn new(node: NodeId, address: SocketAddr, incarnation: Incarnation) -> Self {
        Self::make(Some(node), address, incarnation, 0)
    }

    fn make(node: Option<NodeId>, address: SocketAddr, incarnation: Incarnation, generation: u32) -> Self {
        let key = node.as_ref().map_or(NameKey(0), NameKey::of);
        let at = match address {
            SocketAddr::V4(address) => At::V4(address),
            SocketAddr::V6(address) => At::V6(Arc::new(address)),
        };
        Self { key, node, at, incarnation, generation }
    }

    /// The same in another generation.
    #[must_use]
    pub fn in_generation(self, generation: u32) -> Self {
        Self { generation, ..self }
    }

    /// Where its gossip, links and sessions arrive.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        match &self.at {
            At::V4(address) => SocketAddr::V4(*address),
            At::V6(address) => SocketAddr::V6(**address),
        }
    }

    /// Its name as a number; 0 for [`Identity::whoever`].
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key.0
    }

    /// Whoever listens at `address`. foca answers an announcement to any identity of the same [`NameKey`].
    #[must_use]
    pub fn whoever(address: SocketAddr) -> Self {
        Self::make(None, address, Incarnation(0), 0)
    }

    /// Whether both are the same process, in whatever generation.
    #[must_use]
    pub fn same_process(&self, other: &Self) -> bool {
        self.node == other.node && self.incarnation == other.incarnation && self.at == other.at
    }

    /// Whether this one replaces `other` of the same name: later life, then later generation. Two nodes that
    /// claim one name in one life are told apart by address, so that all members choose the same one.
    #[must_use]
    pub fn beats(&self, other: &Self) -> bool {
        let rank = |id: &Self| (id.incarnation, id.generation, id.address());
        rank(self) > rank(other)
    }
}

impl foca::Identity for Identity {
    type Addr = NameKey;

    fn renew(&self) -> Option<Self> {
        let generation = self.generation.checked_add(1)?;
        Some(Self { generation, ..self.clone() })
    }

    fn addr(&self) -> NameKey {
        self.key
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

    #[test]
    fn an_identity_is_small_and_comes_back_from_the_wire() {
        assert!(size_of::<Identity>() <= 56, "{} bytes for each member of each node", size_of::<Identity>());
        assert!(size_of::<foca::Member<Identity>>() <= 64);
        let six =
            Identity::new(NodeId::new("w6").expect("name"), "[fe80::1]:7".parse().expect("address"), Incarnation(9));
        for identity in [identity("w1", 1, 3), six, Identity::whoever(SocketAddr::from(([10, 0, 0, 9], 1)))] {
            let bytes = rmp_serde::to_vec(&identity).expect("encodes");
            assert_eq!(rmp_serde::from_slice::<Identity>(&bytes).expect("decodes"), identity);
        }
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
