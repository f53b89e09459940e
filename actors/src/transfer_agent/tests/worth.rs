//! A worker that is told to take blocks from a peer takes them only when they come sooner than it computes them.

use std::time::{Duration, Instant};

use starling_cluster::stream::Context;
use starling_engine::simulated::faults::Fault;
use starling_ids::RequestId;

use super::{empty, long, simulated, tickets};
use crate::{
    generate::{GenerateSpec, KvSource, WorkerRequest},
    names,
    testing::{Rig, eventually, within},
    transfer::Limits,
};

/// Blocks of 700 tokens that are whole.
const BLOCKS: u32 = 43;

/// One request at a worker's door, with blocks to be taken from the first one; prompt tokens that it computed.
async fn computed(rig: &Rig, at: u16, spec: GenerateSpec, pulls: bool) -> u64 {
    let workers = rig.node.workers();
    let incarnation = rig.mesh.incarnation();
    let source = KvSource { worker: workers[0].id.clone(), incarnation, compute: false, blocks: BLOCKS };
    let worker = workers[usize::from(at)].id.clone();
    let request =
        WorkerRequest { spec, worker, incarnation, source: pulls.then_some(source), moves: None, may_move: false };
    let body = rmp_serde::to_vec(&request).expect("encodes");
    let context = Context::new(RequestId(rand::random()), Duration::from_secs(60));
    let port = workers[usize::from(at)].seat.now().expect("alive");
    let prefilled = || port.load.borrow().load.tokens_prefilled;
    let before = prefilled();
    let door = names::worker_generate(at);
    let opening = rig.mesh.open(rig.mesh.node(), incarnation, &door, context, body.into());
    let mut opened = within("accepted", opening).await.expect("accepted");
    while within("a frame", opened.rx.recv()).await.is_some_and(|frame| frame.is_ok()) {}
    eventually("it ended", || port.load.borrow().load.running == 0).await;
    prefilled() - before
}

/// The second worker knows how fast it is.
async fn learned(rig: &Rig) {
    let port = rig.node.workers()[1].seat.now().expect("alive");
    for kind in 0..20 {
        if port.load.borrow().rates.is_some() {
            return;
        }
        computed(rig, 1, long(kind, 700, "learn"), false).await;
    }
    panic!("no rates after 20 answers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_a_peer_are_taken_when_they_come_sooner_and_computed_when_they_do_not() {
    let rig = Rig::with_model("worth-link", simulated(), 2).await;
    learned(&rig).await;
    let held = async |salt: &str| {
        computed(&rig, 0, long(5, 700, salt), false).await;
        long(5, 700, salt)
    };
    let few = computed(&rig, 1, held("fast").await, true).await;
    assert!(few <= 700 - u64::from(BLOCKS) * 16 + 16, "{few} tokens computed: the blocks came");
    // Now a link of one byte a second, as far as is known here; the router that chose knew better.
    let kv = rig.node.workers()[1].seat.now().and_then(|port| port.kv.get().cloned()).expect("its memory");
    let spec = held("slow").await;
    kv.agent.learn(1.0);
    assert_eq!(computed(&rig, 1, spec, true).await, 700, "computing was sooner");
    assert_eq!(tickets(&rig), (0, 0));
    empty(&rig).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_a_peer_that_gives_nothing_is_waited_for_no_longer_than_computing_takes() {
    let rig = Rig::with_model("worth-late", simulated(), 2).await;
    learned(&rig).await;
    rig.node.workers()[0].set_fault(Fault::Hang).expect("simulated");
    let begun = Instant::now();
    let all = computed(&rig, 1, long(6, 700, "late"), true).await;
    assert_eq!(all, 700);
    assert!(begun.elapsed() < Limits::default().lease + Duration::from_secs(10), "{:?}", begun.elapsed());
    rig.node.workers()[0].set_fault(Fault::None).expect("simulated");
    eventually("no ticket is left", || tickets(&rig) == (0, 0)).await;
    empty(&rig).await;
    rig.end().await;
}
