use std::{collections::BTreeMap, sync::Arc};

use serde_bytes::ByteBuf;
use starling_cluster::discovery::NodeRecord;
use starling_kv::hash::HashSeed;

use super::*;

fn capabilities(model: &str, block_tokens: u32) -> Capabilities {
    Capabilities {
        card: ModelCard {
            id: ModelId::new(model).expect("name"),
            architecture: "test".to_owned(),
            context_length: 1_024,
            vocab_size: 256,
            block_tokens,
            bundle_digest: "d".to_owned(),
            eos_ids: vec![0],
            hash_seed: HashSeed(1),
        },
        layout_digest: 1,
        limits: EngineLimits { sequences_max: 8, waiting_max: 8, batch_tokens_max: 64, kv_blocks: 64 },
    }
}

fn worker(index: u16, lifecycle: Lifecycle, capabilities: &Capabilities) -> Instance {
    Instance {
        endpoint: names::worker_generate(index),
        kind: InstanceKind::Worker,
        lifecycle,
        model: Some(capabilities.card.id.clone()),
        labels: BTreeMap::new(),
        card: Some(ByteBuf::from(rmp_serde::to_vec(capabilities).expect("encodes"))),
    }
}

fn router() -> Instance {
    Instance {
        endpoint: names::router_route(),
        kind: InstanceKind::Router,
        lifecycle: Lifecycle::Serving,
        model: None,
        labels: BTreeMap::new(),
        card: None,
    }
}

fn node(name: &str, state: NodeState, instances: Vec<Instance>) -> NodeView {
    let record = NodeRecord {
        node: NodeId::new(name).expect("name"),
        incarnation: Incarnation(3),
        version: 1,
        address: ([127, 0, 0, 1], 7).into(),
        http: None,
        roles: Vec::new(),
        software: String::new(),
        instances,
    };
    NodeView { record: Arc::new(record), state }
}

#[test]
fn lif_04_a_model_is_listed_only_when_a_worker_of_it_can_be_asked() {
    let caps = capabilities("m", 16);
    for lifecycle in [Lifecycle::Joining, Lifecycle::Warming, Lifecycle::Draining, Lifecycle::Drained, Lifecycle::Gone]
    {
        let nodes = vec![node("a", NodeState::Alive, vec![worker(0, lifecycle, &caps)])];
        let catalog = Catalog::read(&Snapshot { nodes });
        assert!(catalog.models.is_empty(), "{lifecycle:?}");
        assert!(catalog.announced.contains(&caps.card.id), "known, though not to be asked");
    }
    let unreachable = node("a", NodeState::Unreachable, vec![worker(0, Lifecycle::Serving, &caps)]);
    assert!(Catalog::read(&Snapshot { nodes: vec![unreachable] }).models.is_empty());
    let serving = node("a", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &caps)]);
    let catalog = Catalog::read(&Snapshot { nodes: vec![serving] });
    let model = &catalog.models[&caps.card.id];
    assert_eq!(model.workers[0].id.to_string(), "a/0");
    assert_eq!(model.workers[0].incarnation, Incarnation(3));
}

#[test]
fn idx_09_a_worker_with_another_block_size_is_left_out_with_a_reason() {
    let nodes = vec![
        node("a", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &capabilities("m", 16))]),
        node("b", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &capabilities("m", 64))]),
    ];
    let catalog = Catalog::read(&Snapshot { nodes });
    assert_eq!(catalog.workers().count(), 1);
    assert_eq!(catalog.refused[0].0.to_string(), "b/0");
    assert!(catalog.refused[0].1.contains("64"), "{}", catalog.refused[0].1);
}

#[test]
fn suspects_are_marked_and_suspect_routers_stand_apart() {
    let caps = capabilities("m", 16);
    let nodes = vec![
        node("a", NodeState::Suspect, vec![router(), worker(0, Lifecycle::Serving, &caps)]),
        node("b", NodeState::Alive, vec![router(), worker(0, Lifecycle::Serving, &caps)]),
        node("c", NodeState::Unreachable, vec![router()]),
    ];
    let catalog = Catalog::read(&Snapshot { nodes });
    let names = |nodes: &[NodeId]| nodes.iter().map(|node| node.as_str().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&catalog.routers), ["b"]);
    assert_eq!(names(&catalog.routers_suspect), ["a"]);
    let suspects: Vec<_> = catalog.models[&caps.card.id].workers.iter().map(|worker| worker.suspect).collect();
    assert_eq!(suspects, [true, false]);
}

#[test]
fn a_card_that_cannot_be_read_is_refused_by_name() {
    let mut instance = worker(0, Lifecycle::Serving, &capabilities("m", 16));
    instance.card = Some(ByteBuf::from(vec![0xc1]));
    let catalog = Catalog::read(&Snapshot { nodes: vec![node("a", NodeState::Alive, vec![instance])] });
    assert!(catalog.models.is_empty());
    assert_eq!(catalog.refused.len(), 1);
}
