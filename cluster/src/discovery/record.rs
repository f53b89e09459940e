//! The record of a node and the view of all of them.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use starling_ids::{EndpointName, Incarnation, ModelId, NodeId};

/// What an instance is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// Where an instance is in its life. Only `Serving` is routable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Lifecycle {
    /// The node is joining.
    Joining,
    /// Loading a model, say.
    Warming,
    /// Takes requests.
    Serving,
    /// Finishes what it has, takes nothing new.
    Draining,
    /// Has nothing left.
    Drained,
    /// About to disappear.
    Gone,
}

/// One thing that a node offers.
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
    /// Free labels; also `engine`, `capacity` and what else tables show.
    pub labels: BTreeMap<String, String>,
    /// What only its users can read (a worker's capabilities), at most 16 KiB.
    pub card: Option<ByteBuf>,
}

/// All that a node offers. Only the node itself writes it, and each change raises `version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Who.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Rises with every change within one incarnation.
    pub version: u64,
    /// Where sessions and links are dialled, and gossip is sent.
    pub address: SocketAddr,
    /// Where its gateway listens, if it has one.
    pub http: Option<SocketAddr>,
    /// `worker`, `router`, `gateway`, sorted.
    pub roles: Vec<String>,
    /// The software it runs.
    pub software: String,
    /// What it offers, sorted by endpoint.
    pub instances: Vec<Instance>,
}

/// What membership says about a node, and this node's own links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NodeState {
    /// A member, reachable as far as known.
    Alive,
    /// A member that failed a probe and may refute.
    Suspect,
    /// A member that this node cannot open a link to now.
    Unreachable,
}

/// One member as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// What it offers; `instances` is empty until its record has been pulled.
    pub record: Arc<NodeRecord>,
    /// Alive, suspect, unreachable.
    pub state: NodeState,
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
}
