//! What this node knows about what every node offers, and which of it is new.
//!
//! Called by [`super::DirectoryEngine`]. Pure: patches, members, rumours and link news go in; what is held, what it lacks,
//! and the snapshot that everybody reads, come out. Bounds: one record for each member, [`super::RECORD_MAX`] bytes each.
//! A record is kept only for the process that gossip knows now, by name, incarnation and address: a node that is down
//! leaves nothing behind, nor does a process that has lost its name to another one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use starling_ids::{Incarnation, NodeId};
use thiserror::Error;

use super::{NodeRecord, NodeState, NodeView, Patch, Snapshot, Stamp, Tally, patch::PatchError};
use crate::membership::{MemberView, Rumour, place};

/// Why a patch was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    /// Gossip knows no such member, or knows that it is down.
    #[error("not a member")]
    NotMember,
    /// It is of another life or process than the member's, or older than what is held.
    #[error("stale")]
    Stale,
    /// It builds on a version that is not held here.
    #[error("builds on a version that is not held")]
    Gap,
    /// Not a record, over the limit, or in the name of this node.
    #[error("not acceptable")]
    Unacceptable,
}

/// What a rumour led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// Nothing that was not known, or about nobody who is a member in that life.
    Nothing,
    /// It brought the change itself.
    Applied,
    /// The record is outdated here and has to be pulled.
    Wanted,
}

/// One other member.
#[derive(Debug)]
struct Known {
    member: MemberView,
    record: Arc<NodeRecord>,
    /// The newest version that rumour or digest spoke of.
    rumoured: u64,
    /// What the links found out last: about which life, and whether it was reached.
    link: Option<(Incarnation, bool)>,
}

impl Known {
    fn wanted(&self) -> bool {
        self.record.version == 0 || self.record.partial || self.rumoured > self.record.version
    }

    fn stamp(&self) -> Option<Stamp> {
        (self.record.version > 0).then(|| stamp(&self.record))
    }

    fn view(&self) -> NodeView {
        let lost = self.link.is_some_and(|(life, reached)| life > self.member.incarnation || !reached);
        let state = match (self.member.suspect, lost) {
            (true, _) => NodeState::Suspect,
            (false, true) => NodeState::Unreachable,
            (false, false) => NodeState::Alive,
        };
        NodeView { record: self.record.clone(), state }
    }
}

/// The directory of one node.
#[derive(Debug)]
pub struct DirectoryCore {
    own: Arc<NodeRecord>,
    others: BTreeMap<NodeId, Known>,
    wanted: BTreeSet<NodeId>,
    tally: Tally,
    /// Sorted by name; always what the fields above say.
    views: Vec<NodeView>,
    changed: bool,
}

impl DirectoryCore {
    /// Knows this node alone.
    #[must_use]
    pub fn new(own: Arc<NodeRecord>) -> Self {
        let mut tally = Tally::default();
        tally.set(&own.node, Some(stamp(&own)));
        let views = vec![NodeView { record: own.clone(), state: NodeState::Alive }];
        Self { own, others: BTreeMap::new(), wanted: BTreeSet::new(), tally, views, changed: true }
    }

    /// This node's own record has changed.
    pub fn set_own(&mut self, own: Arc<NodeRecord>) {
        self.tally.set(&own.node, Some(stamp(&own)));
        self.show(NodeView { record: own.clone(), state: NodeState::Alive });
        self.own = own;
    }

    /// Takes over what gossip says: newcomers, new lives, the suspected, the down. Returns who is new in its life, and
    /// which lives are over. A name that has moved in the same life is another process: two had claimed it.
    pub fn set_members(&mut self, members: &BTreeMap<NodeId, MemberView>) -> Turnover {
        let mut turnover = Turnover::default();
        let over = |(node, known): (&NodeId, &Known)| {
            let known = &known.member;
            let same = |now: &MemberView| now.incarnation == known.incarnation && now.address == known.address;
            let current = members.get(node).is_some_and(same);
            (!current).then(|| (node.clone(), known.incarnation))
        };
        turnover.over = self.others.iter().filter_map(over).collect();
        for (node, _) in &turnover.over {
            self.forget(node);
        }
        let own = self.own.node.clone();
        for (node, member) in members.iter().filter(|(node, _)| **node != own) {
            match self.others.get_mut(node) {
                Some(known) if known.member == *member => {}
                Some(known) => {
                    known.member = member.clone();
                    let view = known.view();
                    self.show(view);
                }
                None => {
                    let record = Arc::new(NodeRecord::new(node.clone(), member.incarnation, member.address));
                    let known = Known { member: member.clone(), record, rumoured: 0, link: None };
                    self.show(known.view());
                    self.others.insert(node.clone(), known);
                    self.wanted.insert(node.clone());
                    turnover.new.push(node.clone());
                }
            }
        }
        turnover
    }

    fn forget(&mut self, node: &NodeId) {
        self.others.remove(node);
        self.wanted.remove(node);
        self.tally.set(node, None);
        if let Ok(at) = self.find(node) {
            self.views.remove(at);
            self.changed = true;
        }
    }

    /// News of a version, and perhaps the change itself.
    pub fn hear(&mut self, rumour: &Rumour) -> Heard {
        if !self.is_process(rumour) {
            return Heard::Nothing;
        }
        let Some(known) = self.others.get_mut(&rumour.node) else { return Heard::Nothing };
        if rumour.version <= known.record.version {
            return Heard::Nothing;
        }
        let news = rumour.version > known.rumoured;
        known.rumoured = known.rumoured.max(rumour.version);
        match rumour.delta.as_ref().and_then(|delta| delta.apply(&known.record, rumour.version)) {
            Some(record) => {
                self.hold(record);
                Heard::Applied
            }
            None if news => {
                self.wanted.insert(rumour.node.clone());
                Heard::Wanted
            }
            None => Heard::Nothing,
        }
    }

    /// Whether a rumour is about the very process that gossip knows under its name.
    #[must_use]
    pub fn is_process(&self, rumour: &Rumour) -> bool {
        let of =
            |member: &MemberView| member.incarnation == rumour.incarnation && place(member.address) == rumour.place;
        self.member(&rumour.node).is_some_and(of)
    }

    /// Nodes whose record is missing, not whole, or outdated.
    #[must_use]
    pub const fn wanted(&self) -> &BTreeSet<NodeId> {
        &self.wanted
    }

    /// Takes a patch; whether it was news.
    pub fn offer(&mut self, patch: Patch) -> Result<bool, Refused> {
        if patch.node == self.own.node {
            return Err(Refused::Unacceptable);
        }
        let known = self.others.get(&patch.node).ok_or(Refused::NotMember)?;
        if patch.incarnation != known.member.incarnation || patch.address != known.member.address {
            return Err(Refused::Stale);
        }
        let (incarnation, place) = (patch.incarnation, place(patch.address));
        let offered = Stamp { incarnation, place, version: patch.version, whole: patch.is_whole() };
        match known.stamp() {
            _ if offered.version == 0 => return Err(Refused::Unacceptable),
            Some(held) if offered.version < held.version => return Err(Refused::Stale),
            // A newer vital part is not worth the labels and cards that are held: the whole is on its way.
            Some(held) if offered <= held || (held.whole && !offered.whole) => return Ok(false),
            _ => {}
        }
        let record = patch.apply(&known.record).map_err(|error| match error {
            PatchError::Gap => Refused::Gap,
            PatchError::Malformed => Refused::Unacceptable,
        })?;
        self.hold(record);
        Ok(true)
    }

    /// Keeps a record that is newer than the one held.
    fn hold(&mut self, record: NodeRecord) {
        let node = record.node.clone();
        let Some(known) = self.others.get_mut(&node) else { return };
        known.record = Arc::new(record);
        let (stamp, wanted, view) = (known.stamp(), known.wanted(), known.view());
        self.tally.set(&node, stamp);
        if !wanted {
            self.wanted.remove(&node);
        }
        self.show(view);
    }

    /// What the link layer found out about one life of a node. A node is reachable until a link to it failed, and again
    /// once one was made; a link to a later life says that the one gossip knows is over. Returns whether that is news.
    pub fn set_reachable(&mut self, node: &NodeId, incarnation: Incarnation, reachable: bool) -> bool {
        let Some(known) = self.others.get_mut(node) else { return false };
        if incarnation < known.member.incarnation {
            return false;
        }
        let before = known.view();
        known.link = Some((incarnation, reachable));
        let view = known.view();
        let news = view != before;
        if news {
            self.show(view);
        }
        news
    }

    /// The record held of a node, this one included; `None` until it has come.
    #[must_use]
    pub fn record(&self, node: &NodeId) -> Option<&Arc<NodeRecord>> {
        if *node == self.own.node {
            return Some(&self.own);
        }
        self.others.get(node).map(|known| &known.record).filter(|record| record.version > 0)
    }

    /// A member other than this node, as gossip sees it.
    #[must_use]
    pub fn member(&self, node: &NodeId) -> Option<&MemberView> {
        self.others.get(node).map(|known| &known.member)
    }

    /// How many other members there are.
    #[must_use]
    pub fn others(&self) -> usize {
        self.others.len()
    }

    /// A member other than this node that is neither suspect nor unreachable, by a number drawn at random. `None`: there is
    /// none, or none near the draw.
    #[must_use]
    pub fn peer(&self, draw: usize) -> Option<&NodeId> {
        const NEAR: usize = 64;
        let count = self.views.len();
        let alive = |view: &&NodeView| view.state == NodeState::Alive && view.record.node != self.own.node;
        let near = (0..count.min(NEAR)).map(|step| &self.views[(draw.wrapping_add(step)) % count]);
        near.into_iter().find(alive).map(|view| &view.record.node)
    }

    /// Which version of which record is held.
    #[must_use]
    pub const fn tally(&self) -> &Tally {
        &self.tally
    }

    /// This node's own record.
    #[must_use]
    pub const fn own(&self) -> &Arc<NodeRecord> {
        &self.own
    }

    /// All members, this node included, sorted by name.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { nodes: self.views.clone() }
    }

    /// Whether the snapshot has changed since this was last asked.
    pub const fn take_changed(&mut self) -> bool {
        std::mem::replace(&mut self.changed, false)
    }

    fn show(&mut self, view: NodeView) {
        match self.find(&view.record.node) {
            Ok(at) if self.views[at] == view => return,
            Ok(at) => self.views[at] = view,
            Err(at) => self.views.insert(at, view),
        }
        self.changed = true;
    }

    fn find(&self, node: &NodeId) -> Result<usize, usize> {
        self.views.binary_search_by(|view| view.record.node.cmp(node))
    }
}

/// What a new member list changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Turnover {
    /// Members that were not there, or not in this life.
    pub new: Vec<NodeId>,
    /// Lives that have ended.
    pub over: Vec<(NodeId, Incarnation)>,
}

pub(super) fn stamp(record: &NodeRecord) -> Stamp {
    let (incarnation, place) = (record.incarnation, place(record.address));
    Stamp { incarnation, place, version: record.version, whole: !record.partial }
}
