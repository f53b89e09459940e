//! The rows of `starling nodes`, `instances` and `actors`, made from what a node knows. Pure.
//!
//! They cross nodes as MessagePack and are printed as tables or JSON; fields are only ever appended.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use serde::{Deserialize, Serialize};
use starling_actors::{
    cache_report::CacheRow,
    planner::board::PlanRow,
    route::receipt::{Outcome, Receipt},
};
use starling_cluster::{
    discovery::{InstanceKind, Routable, Snapshot},
    supervise,
};
use starling_ids::{ModelId, NodeId};

/// One member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRow {
    /// Its name.
    pub name: String,
    /// `alive`, `suspect` or `unreachable`, as the asked node sees it.
    pub state: String,
    /// Its boot counter.
    pub incarnation: u64,
    /// Its cluster address.
    pub address: String,
    /// Its HTTP address.
    pub http: Option<String>,
    /// `gateway`, `router`, `worker`.
    pub roles: Vec<String>,
    /// What it offers, counted.
    pub instances: usize,
    /// Program and version.
    pub software: String,
    /// Where in its life its liveliest instance is: `joining` until its record has come.
    #[serde(default)]
    pub lifecycle: String,
    /// Free labels of the node.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Where another living process claims the same name. Known of the asked node alone.
    #[serde(default)]
    pub clash: Option<String>,
}

/// One thing that a member offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRow {
    /// `namespace/component/endpoint`.
    pub endpoint: String,
    /// Its node.
    pub node: String,
    /// The node's boot counter.
    pub incarnation: u64,
    /// `worker`, `router`, `gateway` or `service`.
    pub kind: String,
    /// `joining`, `warming`, `serving`, `draining`, `drained` or `gone`.
    pub lifecycle: String,
    /// State of its node: `alive`, `suspect` or `unreachable`.
    pub node_state: String,
    /// The model it serves.
    pub model: Option<String>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Requests that it works on at one time.
    #[serde(default)]
    pub capacity: Option<u32>,
    /// Whether requests may be sent to it now: `yes`, `last resort` or `no`.
    #[serde(default)]
    pub routable: String,
}

/// Every decision about one request that some router remembers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Why {
    /// The router's node and its receipt, in the order of the decisions on each.
    pub receipts: Vec<(String, Receipt)>,
    /// Routers that did not answer.
    pub missing: Vec<Missing>,
}

/// One decision, in short: [`Why`] has all of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestRow {
    /// The request's id, 32 hex digits.
    pub request: String,
    /// How long ago it was decided, milliseconds.
    pub ago_ms: f64,
    /// The model it asked for.
    pub model: String,
    /// The router's node.
    pub router: String,
    /// Where it went, `NODE/INDEX`; empty if nothing is known of it.
    pub worker: String,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Blocks of it expected in the worker's cache.
    pub hit_blocks: u32,
    /// How long it had waited for a worker with room, milliseconds.
    pub waited_ms: f64,
    /// Time to the first token as it was predicted, milliseconds.
    pub predicted_ttft_ms: f64,
    /// What came of it; `None` while it runs, or when it was refused or lost.
    pub outcome: Option<Outcome>,
}

/// The newest decisions of all routers that answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Requests {
    /// Newest first.
    pub requests: Vec<RequestRow>,
    /// Routers that did not answer.
    pub missing: Vec<Missing>,
}

/// One decision in short.
#[must_use]
pub(super) fn request_row(router: &NodeId, model: &ModelId, ago: Duration, receipt: &Receipt) -> RequestRow {
    let chosen = receipt.candidates.get(receipt.chosen);
    RequestRow {
        request: receipt.request.to_string(),
        ago_ms: ago.as_secs_f64() * 1e3,
        model: model.to_string(),
        router: router.to_string(),
        worker: chosen.map(|worker| worker.worker.to_string()).unwrap_or_default(),
        prompt_tokens: receipt.prompt_tokens,
        hit_blocks: chosen.map_or(0, |worker| worker.hit_blocks),
        waited_ms: receipt.waited_ms,
        predicted_ttft_ms: chosen.map_or(0.0, |worker| worker.ttft_ms),
        outcome: receipt.outcome,
    }
}

/// The caches of every worker that answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Caches {
    /// A row for each tier, by worker, device first.
    pub caches: Vec<CacheRow>,
    /// Worker nodes that did not answer.
    pub missing: Vec<Missing>,
}

/// What the planner says of every model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plans {
    /// A row a model, by its leader; by model.
    pub plans: Vec<PlanRow>,
    /// Routers that did not answer.
    pub missing: Vec<Missing>,
}

/// One actor of one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActorRow {
    /// Its node.
    pub node: String,
    /// Path in the node's tree.
    pub path: String,
    /// What it is: `worker`, `link`, `supervisor`.
    pub kind: String,
    /// `starting`, `running`, `restarting`, `stopping` or `stopped`.
    pub state: String,
    /// Restarts since the node started.
    pub restarts: u64,
    /// Messages waiting.
    pub mailbox_depth: u64,
    /// Seconds since its last start.
    pub uptime_secs: u64,
    /// Who started it from elsewhere and takes it along: `NODE`, or `NODE programs/NAME` for an actor there.
    #[serde(default)]
    pub owner: Option<String>,
}

/// A member that did not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Who.
    pub node: String,
    /// What was seen instead.
    pub reason: String,
}

/// The actors of all members that answered, and who did not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterActors {
    /// Sorted by node and path.
    pub actors: Vec<ActorRow>,
    /// Sorted by node.
    pub missing: Vec<Missing>,
}

/// Every member, sorted by name. `clash` is who else claims the name of the node that answers.
#[must_use]
pub(super) fn node_rows(snapshot: &Snapshot, own: &NodeId, clash: Option<SocketAddr>) -> Vec<NodeRow> {
    let row = |view: &starling_cluster::discovery::NodeView| NodeRow {
        name: view.record.node.to_string(),
        state: view.state.label().to_owned(),
        incarnation: view.record.incarnation.0,
        address: view.record.address.to_string(),
        http: view.record.http.map(|http| http.to_string()),
        roles: view.record.roles.clone(),
        instances: view.record.instances.len(),
        software: view.record.software.clone(),
        lifecycle: view.record.lifecycle().label().to_owned(),
        labels: view.record.labels.clone(),
        clash: clash.filter(|_| view.record.node == *own).map(|address| address.to_string()),
    };
    snapshot.nodes.iter().map(row).collect()
}

/// Every instance, sorted by endpoint and node.
#[must_use]
pub(super) fn instance_rows(snapshot: &Snapshot) -> Vec<InstanceRow> {
    let views = snapshot.nodes.iter();
    let pairs = views.flat_map(|view| view.record.instances.iter().map(move |instance| (view, instance)));
    let mut rows: Vec<InstanceRow> = pairs
        .map(|(view, instance)| InstanceRow {
            endpoint: instance.endpoint.to_string(),
            node: view.record.node.to_string(),
            incarnation: view.record.incarnation.0,
            kind: kind(instance.kind).to_owned(),
            lifecycle: instance.lifecycle.label().to_owned(),
            node_state: view.state.label().to_owned(),
            model: instance.model.as_ref().map(ToString::to_string),
            labels: instance.labels.clone(),
            capacity: instance.capacity,
            routable: routable(view.routable(instance)).to_owned(),
        })
        .collect();
    rows.sort_by(|a, b| (&a.endpoint, &a.node).cmp(&(&b.endpoint, &b.node)));
    rows
}

/// The actors of one node.
#[must_use]
pub(super) fn actor_rows(node: &NodeId, book: &[supervise::ActorRow]) -> Vec<ActorRow> {
    let row = |actor: &supervise::ActorRow| ActorRow {
        node: node.to_string(),
        path: actor.path.clone(),
        kind: actor.kind.clone(),
        state: actor.state.label().to_owned(),
        restarts: actor.restarts,
        mailbox_depth: actor.mailbox_depth,
        uptime_secs: actor.uptime.as_secs(),
        owner: actor.owner.clone(),
    };
    book.iter().map(row).collect()
}

fn routable(routable: Routable) -> &'static str {
    match routable {
        Routable::Yes => "yes",
        Routable::LastResort => "last resort",
        Routable::No => "no",
    }
}

fn kind(kind: InstanceKind) -> &'static str {
    match kind {
        InstanceKind::Worker => "worker",
        InstanceKind::Router => "router",
        InstanceKind::Gateway => "gateway",
        InstanceKind::Service => "service",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use starling_cluster::discovery::{Instance, Lifecycle, NodeRecord, NodeState, NodeView};
    use starling_ids::{EndpointName, Incarnation};

    use super::*;

    fn snapshot() -> Snapshot {
        let instance = |endpoint: &str, kind| Instance {
            labels: [("engine".to_owned(), "simulated".to_owned())].into(),
            capacity: Some(16),
            ..Instance::new(EndpointName::new(endpoint).unwrap(), kind, Lifecycle::Serving)
        };
        let view = |name: &str, state, instances| NodeView {
            record: Arc::new(NodeRecord {
                version: 1,
                roles: vec!["worker".into()],
                software: "starling 0.1.0".into(),
                labels: [("zone".to_owned(), "north".to_owned())].into(),
                instances,
                ..NodeRecord::new(NodeId::new(name).unwrap(), Incarnation(3), "10.0.0.1:7400".parse().unwrap())
            }),
            state,
        };
        let worker = instance("starling/worker-0/generate", InstanceKind::Worker);
        let router = instance("starling/router/route", InstanceKind::Router);
        Snapshot {
            nodes: vec![
                view("a", NodeState::Alive, vec![router, worker.clone()]),
                view("b", NodeState::Suspect, vec![worker]),
            ],
        }
    }

    #[test]
    fn instances_are_sorted_by_endpoint_then_node() {
        let rows = instance_rows(&snapshot());
        let order: Vec<_> = rows.iter().map(|row| (row.kind.as_str(), row.node.as_str())).collect();
        assert_eq!(order, [("router", "a"), ("worker", "a"), ("worker", "b")]);
        assert_eq!((rows[2].node_state.as_str(), rows[2].routable.as_str()), ("suspect", "last resort"));
        assert_eq!((rows[1].routable.as_str(), rows[1].capacity), ("yes", Some(16)));
    }

    #[test]
    fn the_json_of_a_node_keeps_its_keys_and_order() {
        let (own, rival) = (NodeId::new("a").unwrap(), Some("10.0.0.9:7400".parse().unwrap()));
        let rows = node_rows(&snapshot(), &own, rival);
        assert_eq!(rows[1].clash, None, "one node's rival is nobody else's");
        let text = serde_json::to_string(&rows[0]).unwrap();
        let expected = r#"{"name":"a","state":"alive","incarnation":3,"address":"10.0.0.1:7400","http":null,"#;
        assert!(text.starts_with(expected), "{text}");
        let then = r#""roles":["worker"],"instances":2,"software":"starling 0.1.0","lifecycle":"serving","#;
        assert!(text.contains(then), "{text}");
        assert!(text.ends_with(r#""labels":{"zone":"north"},"clash":"10.0.0.9:7400"}"#), "{text}");
    }

    #[test]
    fn actors_carry_their_node_and_whole_seconds() {
        let actor = supervise::ActorRow {
            path: "workers/0".into(),
            kind: "worker".into(),
            state: supervise::ActorState::Running,
            restarts: 2,
            mailbox_depth: 0,
            uptime: Duration::from_millis(2_900),
            owner: Some("b programs/parent".into()),
        };
        let rows = actor_rows(&NodeId::new("a").unwrap(), &[actor]);
        assert_eq!((rows[0].node.as_str(), rows[0].state.as_str(), rows[0].uptime_secs), ("a", "running", 2));
        assert_eq!(rows[0].owner.as_deref(), Some("b programs/parent"));
    }
}
