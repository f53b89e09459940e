use std::sync::Arc;

use starling_cluster::discovery::{Lifecycle, NodeRecord, NodeState};
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
        model: Some(capabilities.card.id.clone()),
        card: Some(digest(capabilities)),
        ..Instance::new(names::worker_generate(index), InstanceKind::Worker, lifecycle)
    }
}

fn router() -> Instance {
    Instance::new(names::router_route(), InstanceKind::Router, Lifecycle::Serving)
}

fn digest(capabilities: &Capabilities) -> BlobDigest {
    BlobDigest::of(&rmp_serde::to_vec(capabilities).expect("encodes"))
}

/// The catalog of somebody who has fetched these cards.
fn read(nodes: Vec<NodeView>, cards: &[&Capabilities]) -> Catalog {
    Catalog::read(&Snapshot { nodes }, |wanted| match cards.iter().find(|card| digest(card) == wanted) {
        Some(card) => Card::Known(Arc::new((*card).clone())),
        None if wanted == BlobDigest([9; 32]) => Card::Unreadable,
        None => Card::Missing,
    })
}

fn node(name: &str, state: NodeState, instances: Vec<Instance>) -> NodeView {
    let (node, address) = (NodeId::new(name).expect("name"), ([127, 0, 0, 1], 7).into());
    let record = NodeRecord { version: 1, instances, ..NodeRecord::new(node, Incarnation(3), address) };
    NodeView { record: Arc::new(record), state }
}

#[test]
fn lif_04_a_model_is_listed_only_when_a_worker_of_it_can_be_asked() {
    let caps = capabilities("m", 16);
    for lifecycle in [Lifecycle::Joining, Lifecycle::Warming, Lifecycle::Draining, Lifecycle::Drained, Lifecycle::Gone]
    {
        let nodes = vec![node("a", NodeState::Alive, vec![worker(0, lifecycle, &caps)])];
        let catalog = read(nodes, &[&caps]);
        assert!(catalog.models.is_empty(), "{lifecycle:?}");
        assert!(catalog.announced.contains(&caps.card.id), "known, though not to be asked");
    }
    let unreachable = node("a", NodeState::Unreachable, vec![worker(0, Lifecycle::Serving, &caps)]);
    assert!(read(vec![unreachable], &[&caps]).models.is_empty());
    let serving = node("a", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &caps)]);
    let catalog = read(vec![serving], &[&caps]);
    let model = &catalog.models[&caps.card.id];
    assert_eq!(model.workers[0].id.to_string(), "a/0");
    assert_eq!(model.workers[0].incarnation, Incarnation(3));
}

#[test]
fn idx_09_a_worker_with_another_block_size_is_left_out_with_a_reason() {
    let (one, other) = (capabilities("m", 16), capabilities("m", 64));
    let nodes = vec![
        node("a", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &one)]),
        node("b", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &other)]),
    ];
    let catalog = read(nodes, &[&one, &other]);
    assert_eq!(catalog.workers().count(), 1);
    assert_eq!(catalog.refused[0].0.to_string(), "b/0");
    let reason = &catalog.refused[0].1;
    assert!(reason.contains("blocks of 64 tokens") && reason.contains("with blocks of 16 tokens, or"), "{reason}");
}

#[test]
fn suspects_are_marked_and_suspect_routers_stand_apart() {
    let caps = capabilities("m", 16);
    let nodes = vec![
        node("a", NodeState::Suspect, vec![router(), worker(0, Lifecycle::Serving, &caps)]),
        node("b", NodeState::Alive, vec![router(), worker(0, Lifecycle::Serving, &caps)]),
        node("c", NodeState::Unreachable, vec![router()]),
    ];
    let catalog = read(nodes, &[&caps]);
    let names = |nodes: &[NodeId]| nodes.iter().map(|node| node.as_str().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&catalog.routers), ["b"]);
    assert_eq!(names(&catalog.routers_suspect), ["a"]);
    let suspects: Vec<_> = catalog.models[&caps.card.id].workers.iter().map(|worker| worker.suspect).collect();
    assert_eq!(suspects, [true, false]);
}

#[test]
fn a_card_that_cannot_be_read_is_refused_by_name() {
    let mut instance = worker(0, Lifecycle::Serving, &capabilities("m", 16));
    instance.card = Some(BlobDigest([9; 32]));
    let catalog = read(vec![node("a", NodeState::Alive, vec![instance])], &[]);
    assert!(catalog.models.is_empty());
    assert_eq!(catalog.refused.len(), 1);
}

#[test]
fn a_worker_whose_card_is_on_its_way_waits_for_it_and_is_not_refused() {
    let caps = capabilities("m", 16);
    let serving = || node("a", NodeState::Alive, vec![worker(0, Lifecycle::Serving, &caps)]);
    let catalog = read(vec![serving()], &[]);
    assert!(catalog.models.is_empty() && catalog.refused.is_empty());
    assert_eq!(catalog.missing.into_iter().collect::<Vec<_>>(), [digest(&caps)]);
    let mut vital = NodeRecord::clone(&serving().record);
    (vital.partial, vital.instances[0].card) = (true, None);
    let view = NodeView { record: Arc::new(vital), state: NodeState::Alive };
    let catalog = read(vec![view], &[&caps]);
    assert!(catalog.models.is_empty() && catalog.refused.is_empty() && catalog.missing.is_empty());
    assert!(catalog.announced.contains(&caps.card.id), "the model is known already");
}

/// Seven workers served, their card came late, and every request was refused at once for as long.
#[test]
fn lif_04_a_request_waits_for_workers_that_serve_and_are_out_of_reach_for_a_moment() {
    let caps = capabilities("m", 16);
    let model = &caps.card.id;
    let serving = |state| node("a", state, vec![worker(0, Lifecycle::Serving, &caps)]);
    assert!(read(vec![serving(NodeState::Alive)], &[]).may_come(model), "its card is on its way");
    assert!(read(vec![serving(NodeState::Unreachable)], &[&caps]).may_come(model), "a link is being made");
    let mut vital = NodeRecord::clone(&serving(NodeState::Alive).record);
    (vital.partial, vital.instances[0].card) = (true, None);
    let vital = NodeView { record: Arc::new(vital), state: NodeState::Alive };
    assert!(read(vec![vital], &[&caps]).may_come(model), "the rest of its record is on its way");
    let unread = NodeRecord { version: 0, ..NodeRecord::clone(&node("b", NodeState::Alive, Vec::new()).record) };
    let unread = NodeView { record: Arc::new(unread), state: NodeState::Alive };
    assert!(read(vec![unread.clone()], &[]).may_come(model), "nothing is known yet");

    assert!(!read(vec![serving(NodeState::Alive)], &[&caps]).may_come(model), "it can be asked now");
    let other = ModelId::new("other").expect("name");
    assert!(!read(vec![serving(NodeState::Alive), unread], &[&caps]).may_come(&other), "nobody names it");
    for lifecycle in [Lifecycle::Warming, Lifecycle::Draining, Lifecycle::Drained] {
        let catalog = read(vec![node("a", NodeState::Unreachable, vec![worker(0, lifecycle, &caps)])], &[&caps]);
        assert!(!catalog.may_come(model), "{lifecycle:?} may take minutes");
    }
}
