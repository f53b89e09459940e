//! The record of a node and the view of all of them.
//!
//! Called by everybody who publishes or looks for instances. Pure. A record is written by its node alone.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use starling_ids::{EndpointName, Incarnation, ModelId, NodeId};
use twox_hash::XxHash3_64;

use super::Lifecycle;
use crate::blobs::BlobDigest;

/// What an instance is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum InstanceKind {
    /// Completes sequences.
    Worker,
    /// Decides where requests go.
    Router,
    /// Speaks HTTP.
    Gateway,
    /// Registered by a program.
    Service,
}

impl InstanceKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Worker, Self::Router, Self::Gateway, Self::Service];
}

impl From<InstanceKind> for u8 {
    fn from(kind: InstanceKind) -> Self {
        kind as Self
    }
}

impl TryFrom<u8> for InstanceKind {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, &'static str> {
        Self::ALL.get(usize::from(number)).copied().ok_or("no such kind of instance")
    }
}

/// One thing that a node offers. Endpoint, kind, lifecycle and model are its vital part and travel first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// Its endpoint, unique on its node.
    pub endpoint: EndpointName,
    /// What for.
    pub kind: InstanceKind,
    /// Where in its life.
    pub lifecycle: Lifecycle,
    /// The model it serves, for workers.
    pub model: Option<ModelId>,
    /// The version of the record in which it last changed. Written by the directory.
    pub changed: u64,
    /// Free labels; also `engine` and what else tables show.
    pub labels: BTreeMap<String, String>,
    /// The blob with what only its users can read: a worker's capabilities.
    pub card: Option<BlobDigest>,
    /// The blob with what its users need besides, to be fetched when they need it: a worker's tokenizer.
    pub bundle: Option<BlobDigest>,
    /// Requests that it works on at one time.
    pub capacity: Option<u32>,
    /// Digest of its KV layout; blocks move only between equal layouts.
    pub layout: Option<u64>,
}

impl Instance {
    /// One with nothing but its vital part; the rest is set by struct update.
    #[must_use]
    pub const fn new(endpoint: EndpointName, kind: InstanceKind, lifecycle: Lifecycle) -> Self {
        let labels = BTreeMap::new();
        let (model, card, bundle, capacity, layout) = (None, None, None, None, None);
        Self { endpoint, kind, lifecycle, model, changed: 0, labels, card, bundle, capacity, layout }
    }
}

/// Names an endpoint in eight bytes, for small news.
#[must_use]
pub fn endpoint_hash(endpoint: &EndpointName) -> u64 {
    XxHash3_64::oneshot(endpoint.as_str().as_bytes())
}

/// Which instances were taken away lately, so that news can be told as a difference.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdrawn {
    /// Hash of the endpoint and the version in which it went, oldest first; at most [`Withdrawn::KEPT`].
    pub recent: Vec<(u64, u64)>,
    /// Up to this version withdrawals are forgotten: who holds an older record takes all of it.
    pub forgotten: u64,
}

impl Withdrawn {
    /// Withdrawals remembered.
    pub const KEPT: usize = 32;

    pub(super) fn add(&mut self, endpoint: u64, version: u64) {
        self.recent.retain(|(known, _)| *known != endpoint);
        self.recent.push((endpoint, version));
        while self.recent.len() > Self::KEPT {
            self.forgotten = self.forgotten.max(self.recent.remove(0).1);
        }
    }
}

/// All that a node offers. Only the node itself writes it, and each change raises `version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Who.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Rises with every change within one incarnation; 0 until the record has come.
    pub version: u64,
    /// Where sessions and links are dialled, and gossip is sent.
    pub address: SocketAddr,
    /// Where its gateway listens, if it has one.
    pub http: Option<SocketAddr>,
    /// `worker`, `router`, `gateway`, sorted.
    pub roles: Vec<String>,
    /// The software it runs.
    pub software: String,
    /// Free labels of the node: `zone`, `rack`.
    pub labels: BTreeMap<String, String>,
    /// What it offers, sorted by endpoint.
    pub instances: Vec<Instance>,
    /// What it offered lately.
    pub withdrawn: Withdrawn,
    /// Only the vital part has come so far: labels, cards, bundles, capacities and layouts are missing.
    pub partial: bool,
}

impl NodeRecord {
    /// What is known of a node before its record has come.
    #[must_use]
    pub fn new(node: NodeId, incarnation: Incarnation, address: SocketAddr) -> Self {
        Self {
            node,
            incarnation,
            version: 0,
            address,
            http: None,
            roles: Vec::new(),
            software: String::new(),
            labels: BTreeMap::new(),
            instances: Vec::new(),
            withdrawn: Withdrawn::default(),
            partial: false,
        }
    }

    /// The node's own place in life, read off its instances: the liveliest of them counts. A node without any is
    /// serving once its record has come.
    #[must_use]
    pub fn lifecycle(&self) -> Lifecycle {
        let vigour = |life: &Lifecycle| match life {
            Lifecycle::Serving => 5,
            Lifecycle::Warming => 4,
            Lifecycle::Joining => 3,
            Lifecycle::Draining => 2,
            Lifecycle::Drained => 1,
            Lifecycle::Gone => 0,
        };
        let liveliest = self.instances.iter().map(|instance| instance.lifecycle).max_by_key(vigour);
        liveliest.unwrap_or(if self.version == 0 { Lifecycle::Joining } else { Lifecycle::Serving })
    }

    /// The instance of an endpoint.
    #[must_use]
    pub fn instance(&self, endpoint: &EndpointName) -> Option<&Instance> {
        let at = self.instances.binary_search_by(|instance| instance.endpoint.cmp(endpoint)).ok()?;
        Some(&self.instances[at])
    }
}

/// What membership says about a node, and this node's own links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NodeState {
    /// A member, reachable as far as known.
    Alive,
    /// A member that failed a probe and may refute.
    Suspect,
    /// A member that this node cannot open a link to now, or whose link speaks for a later life than gossip does.
    Unreachable,
}

impl NodeState {
    /// The word for tables and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Suspect => "suspect",
            Self::Unreachable => "unreachable",
        }
    }
}

/// Whether a request may be sent somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Routable {
    /// It serves, and gossip and links agree that it lives in this incarnation.
    Yes,
    /// The same, but it failed a probe and may refute: only when nobody else is left.
    LastResort,
    /// It does not serve now, or cannot be reached in this incarnation.
    No,
}

impl Routable {
    /// The one rule, for routers, clients and tables.
    ///
    /// A record is of the incarnation that gossip knows; a link that fails, or that found a later incarnation behind the
    /// address, makes the node unreachable until both agree again. A suspect is not dropped: most suspicions are refuted
    /// within a second, and to try a frozen node costs one retry.
    #[must_use]
    pub const fn of(lifecycle: Lifecycle, state: NodeState) -> Self {
        match (lifecycle, state) {
            (Lifecycle::Serving, NodeState::Alive) => Self::Yes,
            (Lifecycle::Serving, NodeState::Suspect) => Self::LastResort,
            _ => Self::No,
        }
    }
}

/// One member as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// What it offers; `instances` is empty until its record has been pulled.
    pub record: Arc<NodeRecord>,
    /// Alive, suspect, unreachable.
    pub state: NodeState,
}

impl NodeView {
    /// Whether a request may be sent to one of its instances now; see [`Routable::of`].
    #[must_use]
    pub const fn routable(&self, instance: &Instance) -> Routable {
        Routable::of(instance.lifecycle, self.state)
    }
}

/// Every member, this node included, sorted by name. Down members are not in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Sorted by node name.
    pub nodes: Vec<NodeView>,
}

impl Snapshot {
    /// The view of one node.
    #[must_use]
    pub fn node(&self, node: &NodeId) -> Option<&NodeView> {
        self.nodes.binary_search_by(|view| view.record.node.cmp(node)).ok().map(|at| &self.nodes[at])
    }

    /// All instances of a kind with their node, in order of (node, endpoint).
    pub fn instances(&self, kind: InstanceKind) -> impl Iterator<Item = (&NodeView, &Instance)> {
        self.nodes
            .iter()
            .flat_map(|view| view.record.instances.iter().map(move |instance| (view, instance)))
            .filter(move |(_, instance)| instance.kind == kind)
    }

    /// Those of them that take requests now ([`NodeView::routable`]), last resorts included and marked.
    pub fn routable(&self, kind: InstanceKind) -> impl Iterator<Item = (&NodeView, &Instance, Routable)> {
        let judged = self.instances(kind).map(|(view, instance)| (view, instance, view.routable(instance)));
        judged.filter(|(.., routable)| *routable != Routable::No)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(state: NodeState, lifecycle: Lifecycle) -> NodeView {
        let (node, address) = (NodeId::new("w").expect("name"), SocketAddr::from(([127, 0, 0, 1], 1)));
        let mut record = NodeRecord::new(node, Incarnation(1), address);
        let endpoint = EndpointName::new("a/b/c").expect("name");
        record.instances.push(Instance::new(endpoint, InstanceKind::Worker, lifecycle));
        NodeView { record: Arc::new(record), state }
    }

    #[test]
    fn only_a_serving_instance_of_a_node_that_gossip_and_links_agree_on_is_routable() {
        for lifecycle in Lifecycle::ALL {
            for state in [NodeState::Alive, NodeState::Suspect, NodeState::Unreachable] {
                let view = view(state, lifecycle);
                let expected = match (lifecycle, state) {
                    (Lifecycle::Serving, NodeState::Alive) => Routable::Yes,
                    (Lifecycle::Serving, NodeState::Suspect) => Routable::LastResort,
                    _ => Routable::No,
                };
                assert_eq!(view.routable(&view.record.instances[0]), expected);
                let snapshot = Snapshot { nodes: vec![view] };
                let listed = snapshot.routable(InstanceKind::Worker).count();
                assert_eq!(listed, usize::from(expected != Routable::No));
            }
        }
    }

    #[test]
    fn a_node_is_where_its_liveliest_instance_is() {
        let mut record = NodeRecord::clone(&view(NodeState::Alive, Lifecycle::Drained).record);
        assert_eq!(record.lifecycle(), Lifecycle::Drained);
        let endpoint = EndpointName::new("a/b/d").expect("name");
        record.instances.push(Instance::new(endpoint, InstanceKind::Worker, Lifecycle::Warming));
        assert_eq!(record.lifecycle(), Lifecycle::Warming);
        record.instances.clear();
        assert_eq!(record.lifecycle(), Lifecycle::Joining);
        record.version = 1;
        assert_eq!(record.lifecycle(), Lifecycle::Serving);
    }

    #[test]
    fn old_withdrawals_are_forgotten_in_order() {
        let mut withdrawn = Withdrawn::default();
        for version in 1..=Withdrawn::KEPT as u64 + 2 {
            withdrawn.add(version, version);
        }
        assert_eq!((withdrawn.recent.len(), withdrawn.forgotten), (Withdrawn::KEPT, 2));
        withdrawn.add(5, 99);
        assert_eq!(withdrawn.recent.last(), Some(&(5, 99)), "one entry for an endpoint");
        assert_eq!(withdrawn.recent.len(), Withdrawn::KEPT);
    }
}
