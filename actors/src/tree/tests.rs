use std::{collections::HashSet, sync::Arc, time::Duration};

use futures::future::join_all;
use starling_engine::{Activations, EngineKind, KernelChoice, LoadedModel, ModelOptions, simulated::SimulatedModel};
use starling_ids::ModelId;
use starling_kv::hash::block_hashes;

use crate::{
    generate::GenerateSpec,
    testing::{Rig, TestModel, all, eventually, prompt, spec, within},
};

/// A router with a client, and two nodes that compute, all in one process but each a node of its own: streams
/// between them go over links.
struct Three {
    front: Rig,
    workers: Vec<Rig>,
}

impl Three {
    async fn start(name: &str, model: TestModel) -> Self {
        let front = Rig::join(&format!("{name}-front"), None, true, Vec::new()).await;
        let seeds = vec![front.mesh.address().to_string()];
        let mut workers = Vec::new();
        for at in 0..2 {
            let name = format!("{name}-w{at}");
            workers.push(Rig::join(&name, Some((model.clone(), 1)), false, seeds.clone()).await);
        }
        let three = Self { front, workers };
        eventually("both workers heard", || three.front.node.heard() == 2).await;
        three
    }

    async fn end(self) {
        self.front.at_rest().await;
        for rig in self.workers {
            rig.end().await;
        }
        self.front.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_code_serves_workers_of_other_nodes() {
    let three = Three::start("tree-remote", TestModel::new()).await;
    let mut served = HashSet::new();
    let mut kind = 0;
    // A worker whose node is suspected for a moment gets nothing meanwhile, so this waits for both rather than count.
    while served.len() < 2 {
        let stream = three.front.generate(spec(prompt(kind * 100, 320), 20)).await.expect("accepted");
        served.insert(stream.worker.clone());
        let frames = all(stream).await.expect("an answer");
        let tokens: Vec<_> = frames.iter().flat_map(|frame| frame.tokens.iter().map(|token| token.id)).collect();
        assert_eq!(tokens, (1..=20).collect::<Vec<_>>());
        kind += 1;
        assert!(kind < 40, "one worker was never asked");
    }
    eventually("all blocks indexed", || three.front.node.indexed_blocks() == 20 * kind as usize).await;
    // One whose node is suspected for a moment is passed over; then the other one holds the prefix too.
    let mut warm = 0;
    for _ in 0..3 {
        let frames = three.front.complete(spec(prompt(100, 320), 1)).await.expect("an answer");
        warm = frames[0].cached_tokens.expect("told").max(warm);
    }
    assert!(warm >= 304);
    let card = three.front.node.client().models()[0].card.clone();
    let bundle = three.front.node.client().bundle(&card).await.expect("fetched over a link");
    assert_eq!(bundle.digest(), card.bundle_digest);
    three.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_the_sequences_of_another_node() {
    let three = Three::start("tree-cancel", TestModel::slow(5)).await;
    let calls = (0..6).map(|kind| three.front.generate(spec(prompt(kind, 40), 4_000)));
    let streams: Vec<_> = join_all(calls).await.into_iter().map(|stream| stream.expect("accepted")).collect();
    assert_eq!(three.front.node.reservations(), 6);
    let in_flight = || three.workers.iter().map(|rig| rig.node.in_flight()).sum::<usize>();
    assert_eq!(in_flight(), 6);
    drop(streams);
    eventually("nothing in flight", || in_flight() == 0).await;
    three.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ded_a_node_that_leaves_in_the_middle_of_answers_is_replaced_and_no_token_is_lost() {
    let mut three = Three::start("tree-leave", TestModel::slow(5)).await;
    let calls = (0..8).map(|kind| three.front.generate(spec(prompt(kind * 40, 40), 200)));
    let streams: Vec<_> = join_all(calls).await.into_iter().map(|stream| stream.expect("accepted")).collect();
    let gone = three.workers.pop().expect("a worker node");
    let name = gone.mesh.node().clone();
    gone.mesh.leave().await;
    for kind in 100..104 {
        let frames = three.front.complete(spec(prompt(kind, 40), 2)).await.expect("the other one serves");
        assert_eq!(frames.len(), 2);
    }
    assert!(streams.iter().any(|stream| stream.worker.node == name), "the test is about a loss");
    for stream in streams {
        let frames = all(stream).await.expect("every answer is whole");
        assert_eq!(frames.iter().filter(|frame| frame.finish.is_some()).count(), 1);
        assert_eq!(frames.iter().filter(|frame| frame.cached_tokens.is_some()).count(), 1, "told once");
        assert!(frames.iter().flat_map(|frame| &frame.tokens).map(|token| token.id).eq(1..=200));
    }
    let front = &three.front;
    eventually("it left the list", || front.node.client().models().iter().all(|model| model.workers == 1)).await;
    three.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_goes_is_replaced_by_the_next_in_rank() {
    let three = Three::start("tree-owner", TestModel::new()).await;
    let seeds = vec![three.front.mesh.address().to_string()];
    let second = Rig::join("tree-owner-second", None, true, seeds).await;
    eventually("the second hears both", || second.node.heard() == 2).await;
    within("served through either", async {
        for kind in 0..5 {
            assert_eq!(second.complete(spec(prompt(kind, 40), 2)).await.expect("served").len(), 2);
        }
    })
    .await;
    three.front.mesh.leave().await;
    let call = second.generate_within(spec(prompt(50, 40), 2), Duration::from_secs(10));
    assert_eq!(all(call.await.expect("served by the next")).await.expect("an answer").len(), 2);
    for rig in three.workers {
        rig.end().await;
    }
    second.end().await;
}

/// The product's own scheduler and block pool, with predicted times.
fn simulated() -> Arc<dyn LoadedModel> {
    let options = ModelOptions {
        kind: EngineKind::Simulated,
        path: None,
        served_name: Some(ModelId::new("test").expect("name")),
        threads: 1,
        kv_bytes: 64 << 20,
        sequences_max: 16,
        waiting_max: 64,
        batch_tokens_max: 512,
        kernel: KernelChoice::Auto,
        activations: Activations::default(),
    };
    Arc::new(SimulatedModel::load(&options).expect("a model"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_scheduler_serves_shares_prefixes_and_is_empty_at_rest() {
    let rig = Rig::with_model("tree-simulated", simulated(), 3).await;
    let calls = (0..24).map(|kind| rig.complete(text(kind, 200, 12)));
    for frames in join_all(calls).await {
        let frames = frames.expect("an answer");
        assert_eq!(frames.iter().map(|frame| frame.tokens.len()).sum::<usize>(), 12);
        assert_eq!(frames.iter().filter(|frame| frame.finish.is_some()).count(), 1);
    }
    rig.at_rest().await;
    let first = rig.generate(text(900, 2_000, 4)).await.expect("accepted");
    let holder = first.worker.clone();
    all(first).await.expect("an answer");
    let known = || rig.node.client().models()[0].card.clone();
    let chain = block_hashes(known().hash_seed, &text(900, 2_000, 4).prompt, known().block_tokens as usize);
    eventually("its blocks indexed", || rig.node.hit_blocks(&holder, &chain) >= 124).await;
    for _ in 0..3 {
        let stream = rig.generate(text(900, 2_000, 4)).await.expect("accepted");
        assert_eq!(stream.worker, holder);
        assert!(all(stream).await.expect("an answer")[0].cached_tokens.expect("told") >= 1_900);
    }
    let gone = join_all((0..12).map(|kind| rig.generate(text(kind + 50, 300, 4_000)))).await;
    drop(gone);
    rig.end().await;
}

/// A prompt of tokens that every vocabulary has.
fn text(kind: u32, len: u32, tokens_max: u32) -> GenerateSpec {
    spec((0..len).map(|at| (kind * 37 + at * 7) % 200 + 20).collect(), tokens_max)
}
