//! A worker that is told to take blocks from a peer takes them only when they come sooner than it computes them.

use std::{
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{FutureExt, future::BoxFuture};
use starling_cluster::stream::{Context, Incoming, StreamHandler};
use starling_engine::simulated::faults::Fault;
use starling_ids::{RequestId, WorkerId};
use starling_kv::transport::{Descriptor, Fabric, FabricConfig, GrantToken, HostId, Offer, Region, TransportKind};

use super::{empty, long, simulated, tickets};
use crate::{
    generate::{GenerateSpec, KvSource, WorkerRequest},
    names,
    testing::{Rig, eventually, within},
    transfer::{End, HolderTicket, Limits},
    transfer_agent::{Pull, pull, wire::KvOpened},
    worker::Blocks,
};

/// Blocks of 700 tokens that are whole.
const BLOCKS: u32 = 43;

/// One request at a worker's door, with blocks to be taken from the first one; prompt tokens that it computed.
async fn computed(rig: &Rig, at: u16, spec: GenerateSpec, pulls: bool) -> u64 {
    let workers = rig.node.workers();
    let incarnation = rig.mesh.incarnation();
    let source = KvSource {
        worker: workers[0].id.clone(),
        incarnation,
        compute: false,
        blocks: BLOCKS,
        host: 0,
        disk: 0,
        reading_ms: 0,
    };
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

/// A holder that takes every ticket and says that its memory is there.
struct Opens(Descriptor);

impl StreamHandler for Opens {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let opened = KvOpened { ticket: HolderTicket(1), memory: self.0.clone(), shape: None };
        async move {
            let reply = rmp_serde::to_vec(&opened).expect("encodes");
            let Some((_tx, mut rx)) = incoming.acceptor.accept(reply.into()) else { return };
            while rx.recv().await.is_some_and(|word| word.is_ok()) {}
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_a_way_to_a_peers_memory_that_is_long_in_coming_is_waited_for_no_longer_than_computing_takes() {
    let rig = Rig::with_model("worth-way", simulated(), 1).await;
    let kv = rig.node.workers()[0].seat.now().and_then(|port| port.kv.get().cloned()).expect("its memory");
    // The machine takes the connection and nobody ever reads what comes on it.
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = silent.local_addr().expect("bound").to_string();
    let fabric = Fabric::start(FabricConfig::new(HostId(rand::random()), GrantToken(rand::random()))).expect("started");
    let region = fabric.register(&Region::private(4_096).expect("memory")).expect("registered");
    let offers = vec![Offer { kind: TransportKind::Tcp, address }];
    let memory = Descriptor { offers, ..fabric.describe(region, kv.layout).expect("described") };
    rig.mesh.endpoints().serve(names::worker_kv(7), Arc::new(Opens(memory)));
    let worker = WorkerId { node: rig.mesh.node().clone(), index: 7 };
    let incarnation = rig.mesh.incarnation();
    let source = KvSource { worker, incarnation, compute: false, blocks: BLOCKS, host: 0, disk: 0, reading_ms: 0 };
    let (spec, context) = (long(8, 700, "way"), Context::new(RequestId(rand::random()), Duration::from_secs(60)));
    let job = Pull {
        mesh: &rig.mesh,
        kv: &kv,
        source: &source,
        spec: &spec,
        context: &context,
        first: 0,
        blocks: BLOCKS as usize,
        live: None,
        choice: 0,
        until: Some(Instant::now() + Duration::from_millis(250)),
    };
    let room = Blocks::new(Vec::new(), &kv.returns);
    let (_, end) = within("an end", pull(&job, room, |_| ())).await;
    assert_eq!((end, tickets(&rig)), (End::Late, (0, 0)), "given up, not found to be broken");
    rig.mesh.endpoints().remove(&names::worker_kv(7));
    empty(&rig).await;
    rig.end().await;
}
