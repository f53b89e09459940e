//! Slots move between shards while requests go on: a shard joins, leaves, or has more to decide than one should.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use starling_cluster::discovery::InstanceKind;
use starling_ids::{ModelId, NodeId, RequestId};

use crate::{
    client::Call,
    generate::GenerateSpec,
    route::{slots::rank, split::Role, spread::SpreadRule},
    testing::{Rig, TestModel, all, eventually, prompt, spec, within},
    tree::{EngineManner, NodeOptions, WorkerRole},
};

/// A node's name of this beginning that comes before all `others` for the model's only slot.
fn owner_before(others: &[&str], beginning: &str) -> String {
    let model = ModelId::new("test").expect("name");
    let first = |name: &String| {
        let names = others.iter().copied().chain([name.as_str()]).map(|name| NodeId::new(name).expect("name"));
        rank(&model, 0, names.collect())[0].as_str() == name.as_str()
    };
    (0..100).map(|at| format!("{beginning}{at}")).find(first).expect("one of a hundred")
}

fn routers(rig: &Rig) -> usize {
    rig.mesh.snapshot().routable(InstanceKind::Router).count()
}

/// Prompts of this many conversations, each known to a worker already.
const KNOWN: u32 = 12;

/// Asks again what is known; cached tokens of each and the request.
async fn ask_known(rig: &Rig, kind: u32) -> (u32, RequestId) {
    let call = rig.call(spec(prompt(kind % KNOWN * 100, 161), 2), Duration::from_secs(20));
    let request = call.request;
    let frames = all(rig.node.client().generate(call).await.expect("accepted")).await.expect("an answer");
    (frames.iter().filter_map(|frame| frame.cached_tokens).sum(), request)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_joins_takes_its_slots_when_it_knows_the_prefixes_and_gives_them_back_when_it_drains() {
    let rig = Rig::ready("shards-first", TestModel::slow(1), 3).await;
    for kind in 0..KNOWN {
        ask_known(&rig, kind).await;
    }
    eventually("all is indexed", || rig.node.indexed_blocks() >= KNOWN as usize * 10).await;
    let name = owner_before(&["shards-first"], "shards-next");
    let next = Rig::join(&name, None, true, vec![rig.mesh.address().to_string()]).await;
    let mut kind = 0;
    // Requests go on all the while: not one fails, and each finds its prefix whoever decides.
    while routers(&rig) < 2 {
        assert!(ask_known(&rig, kind).await.0 >= 160, "with the shard before");
        kind += 1;
    }
    assert!(next.node.heard() == 3 && next.node.indexed_blocks() >= KNOWN as usize * 10, "it knows before it serves");
    let mut taken = 0;
    while taken < 20 {
        let (cached, request) = ask_known(&rig, kind).await;
        assert!(cached >= 160, "with the next shard");
        taken += u32::from(!next.node.explain(request).await.is_empty());
        kind += 1;
        assert!(kind < 5_000, "the next shard is never asked");
    }
    // One that it has reserved runs on while it leaves.
    let running = rig.generate(spec(prompt(9, 40), 100)).await.expect("accepted");
    next.node.drain(Duration::from_secs(1)).await;
    while routers(&rig) == 2 {
        assert!(ask_known(&rig, kind).await.0 >= 160, "while it drains");
        kind += 1;
    }
    let (cached, request) = ask_known(&rig, kind).await;
    assert!(cached >= 160 && !rig.node.explain(request).await.is_empty(), "the first one decides again");
    assert_eq!(all(running).await.expect("an answer").len(), 100);
    next.end().await;
    assert!(ask_known(&rig, kind + 1).await.0 >= 160);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_model_is_decided_by_two_shards_and_by_one_again_when_it_is_calm() {
    let spread = SpreadRule { per_second: 20.0, calm: Duration::from_millis(1_500) };
    let role = WorkerRole { model: Arc::new(TestModel::new()), engine: "test".to_owned(), count: 2, duty: Role::Both };
    let options = NodeOptions { worker: Some(role), router: true, spread, ..NodeOptions::default() };
    let rig = Rig::begin("hot-first", options, Vec::new()).await;
    within("ready", rig.node.ready()).await;
    let options = NodeOptions { router: true, spread, ..NodeOptions::default() };
    // The slots of two parts have different owners: names are tried until they have.
    let model = ModelId::new("test").expect("name");
    let apart = |name: &String| {
        let nodes = || vec![NodeId::new("hot-first").expect("name"), NodeId::new(name).expect("name")];
        rank(&model, 0, nodes())[0] != rank(&model, 1, nodes())[0]
    };
    let name = (0..100).map(|at| format!("hot-next{at}")).find(apart).expect("one of a hundred");
    let next = Rig::begin(&name, options, vec![rig.mesh.address().to_string()]).await;
    eventually("both are listed", || routers(&rig) == 2 && routers(&next) == 2).await;
    let mut at = 0u32;
    let both = async {
        loop {
            let calls = (at..at + 20).map(|kind| rig.call(spec(prompt(kind * 40, 33), 1), Duration::from_secs(20)));
            let calls: Vec<Call> = calls.collect();
            let asked: Vec<RequestId> = calls.iter().map(|call| call.request).collect();
            let answers = calls.into_iter().map(async |call| {
                let stream = rig.node.client().generate(call).await.expect("accepted");
                all(stream).await.expect("an answer");
            });
            join_all(answers).await;
            at = (at + 20) % 1_000;
            let (mut here, mut there) = (0, 0);
            for request in asked {
                here += usize::from(!rig.node.explain(request).await.is_empty());
                there += usize::from(!next.node.explain(request).await.is_empty());
            }
            if here > 0 && there > 0 {
                return;
            }
        }
    };
    within("both decide", both).await;
    let parts = || [&rig, &next].map(|rig| rig.node.parts_of(&model));
    assert!(parts().contains(&2), "{:?}", parts());
    eventually("it is calm again", || parts() == [1, 1]).await;
    next.end().await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_of_workers_that_tell_nothing_of_their_blocks_find_their_way_back() {
    let engine = EngineManner { kv_silent: true, ..EngineManner::default() };
    let role =
        WorkerRole { model: Arc::new(TestModel::slow(1)), engine: "test".to_owned(), count: 3, duty: Role::Both };
    let options = NodeOptions { worker: Some(role), router: true, engine, ..NodeOptions::default() };
    let rig = Rig::begin("silent-workers", options, Vec::new()).await;
    within("ready", rig.node.ready()).await;
    eventually("heard and listed", || rig.node.heard() == 3 && routers(&rig) == 1).await;
    for kind in 0..KNOWN {
        assert_eq!(ask_known(&rig, kind).await.0, 0);
    }
    assert_eq!(rig.node.indexed_blocks(), KNOWN as usize * 10, "what was given, not what was told");
    for kind in 0..KNOWN {
        assert!(ask_known(&rig, kind).await.0 >= 160);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_an_adapter_go_to_those_that_have_it_and_share_no_block_with_others() {
    let rig = Rig::ready("adapters-none", TestModel::slow(1), 2).await;
    let role =
        WorkerRole { model: Arc::new(TestModel::slow(1)), engine: "test".to_owned(), count: 1, duty: Role::Both };
    let engine = EngineManner { adapters: vec!["law".to_owned()], ..EngineManner::default() };
    let options = NodeOptions { worker: Some(role), engine, ..NodeOptions::default() };
    let has = Rig::begin("adapters-law", options, vec![rig.mesh.address().to_string()]).await;
    within("ready", has.node.ready()).await;
    eventually("all heard", || rig.node.heard() == 3).await;
    let asked = |adapter: &str, kind| GenerateSpec { adapter: Some(adapter.to_owned()), ..spec(prompt(kind, 161), 2) };
    for kind in 0..6 {
        let stream = rig.generate(asked("law", kind)).await.expect("accepted");
        assert_eq!(stream.worker.node.as_str(), "adapters-law");
        all(stream).await.expect("an answer");
    }
    // The same prompt without the adapter finds nothing of it, wherever it goes; with it, all of it.
    eventually("indexed", || rig.node.indexed_blocks() == 60).await;
    let cached = async |spec| {
        let frames = rig.complete(spec).await.expect("an answer");
        frames.iter().filter_map(|frame| frame.cached_tokens).sum::<u32>()
    };
    assert_eq!(cached(spec(prompt(0, 161), 2)).await, 0);
    assert_eq!(cached(asked("law", 0)).await, 160);
    let nobody = rig.generate(asked("poems", 0)).await.map(drop).expect_err("nobody has it");
    assert_eq!(nobody.to_string(), "the model `test` has no adapter `poems`; it has law");
    has.end().await;
    eventually("it is gone", || rig.node.heard() == 2).await;
    let nobody = rig.generate(asked("law", 0)).await.map(drop).expect_err("nobody has it any more");
    assert!(nobody.to_string().ends_with("it has none"), "{nobody}");
    rig.end().await;
}
