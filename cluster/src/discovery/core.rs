//! What this node knows about what every node offers, and which of it is new.
//!
//! Called by the Directory actor and its simulation. Pure: records, members and digests go in; what to pull, and
//! the snapshot that everybody reads, come out. Bounds: one record for each member, [`RECORD_MAX`] bytes each.
//! A record is kept only for a member in its current life, so a node that is down leaves nothing behind.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};
use thiserror::Error;

use super::{NodeRecord, NodeState, NodeView, Snapshot};
use crate::membership::{MemberView, Rumour};

/// Longest encoded record in bytes; it must fit one session message.
pub const RECORD_MAX: usize = 192 * 1024;

/// Which version of which record a node holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest(pub BTreeMap<NodeId, (Incarnation, u64)>);

/// Why a record was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    /// Gossip knows no such member, or knows that it is down.
    #[error("not a member")]
    NotMember,
    /// It is of another life than the member's, or older than the one held.
    #[error("stale")]
    Stale,
    /// Over [`RECORD_MAX`], or in the name of this node.
    #[error("not acceptable")]
    Unacceptable,
}

/// One other member.
#[derive(Debug)]
struct Known {
    member: MemberView,
    record: Arc<NodeRecord>,
    pulled: bool,
    /// The newest version that rumour or digest spoke of.
    rumoured: u64,
    reachable: bool,
}

impl Known {
    fn wanted(&self) -> bool {
        !self.pulled || self.rumoured > self.record.version
    }
}

/// The directory of one node.
#[derive(Debug)]
pub struct DirectoryCore {
    own: Arc<NodeRecord>,
    others: BTreeMap<NodeId, Known>,
}

impl DirectoryCore {
    /// Knows this node alone.
    #[must_use]
    pub fn new(own: Arc<NodeRecord>) -> Self {
        Self { own, others: BTreeMap::new() }
    }

    /// This node's own record has changed.
    pub fn set_own(&mut self, own: Arc<NodeRecord>) {
        self.own = own;
    }

    /// Takes over what gossip says: newcomers, new lives, the suspected, the down.
    pub fn set_members(&mut self, members: &BTreeMap<NodeId, MemberView>) {
        self.others.retain(|node, known| members.get(node).is_some_and(|m| m.incarnation == known.member.incarnation));
        for (node, member) in members {
            match self.others.get_mut(node) {
                Some(known) => known.member = member.clone(),
                None => {
                    let record = Arc::new(placeholder(member));
                    let known = Known { member: member.clone(), record, pulled: false, rumoured: 0, reachable: true };
                    self.others.insert(node.clone(), known);
                }
            }
        }
    }

    /// News of a version; what it makes wanted, [`DirectoryCore::wanted`] lists.
    pub fn hear(&mut self, rumour: &Rumour) {
        if let Some(known) = self.others.get_mut(&rumour.node)
            && known.member.incarnation == rumour.incarnation
        {
            known.rumoured = known.rumoured.max(rumour.version);
        }
    }

    /// Nodes whose record is missing or outdated.
    #[must_use]
    pub fn wanted(&self) -> BTreeSet<NodeId> {
        self.others.iter().filter(|(_, known)| known.wanted()).map(|(node, _)| node.clone()).collect()
    }

    /// Takes a record; whether it was news.
    pub fn offer(&mut self, record: NodeRecord) -> Result<bool, Refused> {
        if record.node == self.own.node || encoded_len(&record) > RECORD_MAX {
            return Err(Refused::Unacceptable);
        }
        let known = self.others.get_mut(&record.node).ok_or(Refused::NotMember)?;
        if record.incarnation != known.member.incarnation {
            return Err(Refused::Stale);
        }
        if known.pulled && record.version < known.record.version {
            return Err(Refused::Stale);
        }
        let news = !known.pulled || record.version > known.record.version;
        if news {
            known.record = Arc::new(record);
            known.pulled = true;
        }
        Ok(news)
    }

    /// What the link layer found out. A node is reachable until a link to it failed, and again once one was made.
    pub fn set_reachable(&mut self, node: &NodeId, reachable: bool) {
        if let Some(known) = self.others.get_mut(node) {
            known.reachable = reachable;
        }
    }

    /// The versions held here, this node's own included.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let own = (self.own.node.clone(), (self.own.incarnation, self.own.version));
        let pulled = self.others.iter().filter(|(_, known)| known.pulled);
        Digest(pulled.map(|(node, known)| (node.clone(), held(&known.record))).chain([own]).collect())
    }

    /// Records that the other side lacks, at most `bytes_max` encoded bytes of them.
    #[must_use]
    pub fn newer_than(&self, digest: &Digest, bytes_max: usize) -> Vec<Arc<NodeRecord>> {
        let mut left = bytes_max;
        let mut newer = Vec::new();
        let held_here = self.others.values().filter(|known| known.pulled).map(|known| &known.record);
        for record in std::iter::once(&self.own).chain(held_here) {
            let length = encoded_len(record);
            if digest.0.get(&record.node).is_none_or(|theirs| *theirs < held(record)) && length <= left {
                left -= length;
                newer.push(record.clone());
            }
        }
        newer
    }

    /// The members alive, for choosing whom to compare digests with.
    #[must_use]
    pub fn peers(&self) -> Vec<NodeId> {
        self.others.iter().filter(|(_, known)| !known.member.suspect).map(|(node, _)| node.clone()).collect()
    }

    /// This node's own record.
    #[must_use]
    pub fn own(&self) -> &Arc<NodeRecord> {
        &self.own
    }

    /// All members, this node included, sorted by name.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let own = NodeView { record: self.own.clone(), state: NodeState::Alive };
        let mut nodes: Vec<NodeView> = self.others.values().map(view).chain([own]).collect();
        nodes.sort_by(|one, two| one.record.node.cmp(&two.record.node));
        Snapshot { nodes }
    }
}

/// Bytes of a record in MessagePack. One that does not encode counts as too long.
#[must_use]
pub(super) fn encoded_len(record: &NodeRecord) -> usize {
    rmp_serde::to_vec(record).map_or(usize::MAX, |bytes| bytes.len())
}

fn held(record: &NodeRecord) -> (Incarnation, u64) {
    (record.incarnation, record.version)
}

fn view(known: &Known) -> NodeView {
    let state = match (known.member.suspect, known.reachable) {
        (true, _) => NodeState::Suspect,
        (false, false) => NodeState::Unreachable,
        (false, true) => NodeState::Alive,
    };
    NodeView { record: known.record.clone(), state }
}

/// What gossip alone says about a member.
fn placeholder(member: &MemberView) -> NodeRecord {
    NodeRecord {
        node: member.node.clone(),
        incarnation: member.incarnation,
        version: 0,
        address: member.address,
        http: None,
        roles: Vec::new(),
        software: String::new(),
        instances: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;

    fn member(name: &str, incarnation: u64) -> MemberView {
        let (node, address) = (NodeId::new(name).expect("name"), SocketAddr::from(([10, 0, 0, 1], 7)));
        MemberView { node, incarnation: Incarnation(incarnation), address, suspect: false }
    }

    fn record(name: &str, incarnation: u64, version: u64) -> NodeRecord {
        NodeRecord { version, software: "s".into(), ..placeholder(&member(name, incarnation)) }
    }

    fn members(list: &[(&str, u64)]) -> BTreeMap<NodeId, MemberView> {
        list.iter().map(|(name, boot)| member(name, *boot)).map(|m| (m.node.clone(), m)).collect()
    }

    fn core(list: &[(&str, u64)]) -> DirectoryCore {
        let mut core = DirectoryCore::new(Arc::new(record("me", 1, 1)));
        core.set_members(&members(list));
        core
    }

    fn names(snapshot: &Snapshot) -> Vec<&str> {
        snapshot.nodes.iter().map(|view| view.record.node.as_str()).collect()
    }

    #[test]
    fn members_are_listed_sorted_before_and_after_their_record_came() {
        let mut core = core(&[("z", 1), ("a", 1)]);
        assert_eq!(names(&core.snapshot()), ["a", "me", "z"]);
        assert_eq!(core.wanted().len(), 2);
        assert_eq!(core.offer(record("z", 1, 4)), Ok(true));
        assert_eq!(core.offer(record("z", 1, 4)), Ok(false));
        let z = NodeId::new("z").expect("name");
        assert_eq!(core.snapshot().node(&z).map(|view| view.record.version), Some(4));
        core.hear(&Rumour { node: z.clone(), incarnation: Incarnation(1), version: 5 });
        assert!(core.wanted().contains(&z));
        assert_eq!(core.offer(record("z", 1, 5)), Ok(true));
        assert!(!core.wanted().contains(&z));
    }

    #[test]
    fn mem_09_the_record_of_a_dead_node_or_life_does_not_come_back() {
        let mut core = core(&[("w", 1)]);
        assert_eq!(core.offer(record("w", 1, 9)), Ok(true));
        core.set_members(&members(&[]));
        assert_eq!(names(&core.snapshot()), ["me"]);
        assert_eq!(core.offer(record("w", 1, 10)), Err(Refused::NotMember));
        core.set_members(&members(&[("w", 2)]));
        assert_eq!(core.offer(record("w", 1, 11)), Err(Refused::Stale));
        assert_eq!(core.snapshot().nodes[1].record.version, 0, "nothing of the earlier life is left");
        core.hear(&Rumour { node: NodeId::new("w").expect("name"), incarnation: Incarnation(1), version: 99 });
        assert_eq!(core.offer(record("w", 2, 1)), Ok(true));
        assert!(core.wanted().is_empty(), "a rumour about an earlier life wants nothing");
    }

    #[test]
    fn an_older_version_and_a_foreign_hand_are_refused() {
        let mut core = core(&[("w", 1)]);
        assert_eq!(core.offer(record("w", 1, 5)), Ok(true));
        assert_eq!(core.offer(record("w", 1, 4)), Err(Refused::Stale));
        assert_eq!(core.offer(record("me", 1, 99)), Err(Refused::Unacceptable));
        let mut huge = record("w", 1, 6);
        huge.software = "x".repeat(RECORD_MAX);
        assert_eq!(core.offer(huge), Err(Refused::Unacceptable));
    }

    #[test]
    fn states_come_from_gossip_and_from_the_links() {
        let mut core = core(&[("w", 1)]);
        let w = NodeId::new("w").expect("name");
        let state = |core: &DirectoryCore| core.snapshot().node(&w).map(|view| view.state);
        core.set_reachable(&w, false);
        assert_eq!(state(&core), Some(NodeState::Unreachable));
        let mut suspected = members(&[("w", 1)]);
        suspected.get_mut(&w).expect("member").suspect = true;
        core.set_members(&suspected);
        assert_eq!(state(&core), Some(NodeState::Suspect));
        core.set_members(&members(&[("w", 2)]));
        assert_eq!(state(&core), Some(NodeState::Alive), "a new life starts reachable");
    }

    proptest! {
        /// Two directories that exchange by digest hold the same records, newest ones, after one round each way.
        #[test]
        fn one_exchange_each_way_makes_two_directories_agree(
            ours in proptest::collection::vec((0..5usize, 1..9u64), 0..12),
            theirs in proptest::collection::vec((0..5usize, 1..9u64), 0..12),
        ) {
            const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
            let list: Vec<(&str, u64)> = NAMES.iter().map(|name| (*name, 1)).collect();
            let mut sides = [core(&list), core(&list)];
            for (side, offers) in sides.iter_mut().zip([ours, theirs]) {
                for (name, version) in offers {
                    let _stale_or_not = side.offer(record(NAMES[name], 1, version));
                }
            }
            for (from, to) in [(0, 1), (1, 0)] {
                for record in sides[from].newer_than(&sides[to].digest(), usize::MAX) {
                    if record.node.as_str() != "me" {
                        prop_assert_eq!(sides[to].offer(record.as_ref().clone()), Ok(true));
                    }
                }
            }
            prop_assert_eq!(sides[0].digest(), sides[1].digest());
        }
    }
}
