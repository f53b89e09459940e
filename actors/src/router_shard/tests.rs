mod breaker;
mod even;
mod gateways;
mod queue;
mod shards;

use std::{collections::HashMap, time::Duration};

use futures::future::join_all;

use crate::{
    generate::GenerateError,
    route::queue::QueueConfig,
    testing::{Rig, TestModel, all, eventually, prompt, spec, within},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_goes_to_the_worker_that_holds_it() {
    let model = TestModel { prefill_takes: Duration::from_micros(100), ..TestModel::slow(1) };
    let rig = Rig::ready("shard-prefix", model, 2).await;
    let mut holders = HashMap::new();
    for kind in 0..6 {
        let stream = rig.generate(spec(prompt(kind * 100, 320), 2)).await.expect("accepted");
        holders.insert(kind, stream.worker.clone());
        all(stream).await.expect("an answer");
    }
    eventually("all blocks indexed", || rig.node.indexed_blocks() == 6 * 20).await;
    for round in 0..3 {
        for kind in 0..6 {
            let stream = rig.generate(spec(prompt(kind * 100, 320), 2)).await.expect("accepted");
            assert_eq!(stream.worker, holders[&kind], "round {round}");
            assert_eq!(stream.hit_blocks, 20);
            let frames = all(stream).await.expect("an answer");
            assert!(frames[0].cached_tokens.expect("told") >= 304);
        }
    }
    assert_eq!(holders.values().map(|worker| worker.index).collect::<std::collections::BTreeSet<_>>().len(), 2);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bal_07_a_burst_is_spread_evenly() {
    let rig = Rig::ready("shard-burst", TestModel::slow(20), 4).await;
    // Short prompts: what a report says about queued tokens in the middle of the burst must not outweigh a sequence.
    let calls = (0..64).map(|kind| rig.generate(spec(prompt(kind * 40, 4), 30)));
    let streams: Vec<_> = join_all(calls).await.into_iter().map(|stream| stream.expect("accepted")).collect();
    let mut counts = HashMap::new();
    for stream in &streams {
        *counts.entry(stream.worker.index).or_insert(0u32) += 1;
    }
    assert!(counts.len() == 4 && counts.values().all(|count| (15..=17).contains(count)), "{counts:?}");
    assert_eq!(rig.node.reservations(), 64);
    for frames in join_all(streams.into_iter().map(all)).await {
        assert_eq!(frames.expect("an answer").len(), 30);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bal_03_paced_prompts_use_every_worker() {
    let rig = Rig::ready("shard-paced", TestModel::new(), 4).await;
    let mut counts = [0u32; 4];
    for kind in 0..200 {
        let stream = rig.generate(spec(prompt(kind * 19, 64), 1)).await.expect("accepted");
        counts[usize::from(stream.worker.index)] += 1;
        all(stream).await.expect("an answer");
    }
    assert!(counts.iter().all(|count| (30..=70).contains(count)), "{counts:?}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_or_indexer_that_panics_fails_no_request() {
    let rig = Rig::ready("shard-inject", TestModel::slow(2), 2).await;
    for path in ["router/shard", "router/indexer"] {
        let running = rig.generate(spec(prompt(1, 100), 200)).await.expect("accepted");
        assert!(rig.mesh.book().inject_panic(path).await);
        for kind in 0..10 {
            assert_eq!(rig.complete(spec(prompt(kind, 60), 2)).await.expect("served meanwhile").len(), 2);
        }
        assert_eq!(all(running).await.expect("not touched").len(), 200);
        eventually("restarted", || rig.restarts(path) == 1).await;
    }
    eventually("both workers heard again", || rig.node.heard() == 2).await;
    eventually("index rebuilt from inventories", || rig.node.indexed_blocks() > 0).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_shard_the_client_decides_by_itself() {
    let rig = Rig::start("shard-none", TestModel::new(), 2, false).await;
    within("ready", rig.node.ready()).await;
    for kind in 0..10 {
        assert_eq!(rig.complete(spec(prompt(kind, 60), 2)).await.expect("served").len(), 2);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lif_04_the_first_request_after_a_model_is_listed_succeeds() {
    for round in 0..5 {
        let rig = Rig::start(&format!("shard-first-{round}"), TestModel::new(), 1, true).await;
        eventually("listed", || !rig.node.client().models().is_empty()).await;
        assert_eq!(rig.complete(spec(prompt(1, 60), 2)).await.expect("routed").len(), 2);
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cnt_08_a_refused_request_goes_elsewhere_and_holds_nothing_where_it_was_refused() {
    let model = TestModel { sequences_max: 1, waiting_max: 1, ..TestModel::slow(5) };
    let rig = Rig::queueing("shard-elsewhere", model, 2, QueueConfig { places: 0, ..QueueConfig::default() }).await;
    // At least one fits on each at once. What does not fit is told so, whoever was asked first.
    let calls = (0..8).map(|kind| rig.generate(spec(prompt(kind, 40), 30)));
    let (accepted, refused): (Vec<_>, Vec<_>) = join_all(calls).await.into_iter().partition(Result::is_ok);
    assert!(accepted.len() >= 2, "{} accepted", accepted.len());
    for error in refused.into_iter().filter_map(Result::err) {
        assert!(matches!(error, GenerateError::Overloaded { .. }), "{error:?}");
    }
    // A reservation ends with its reader, and nobody has read yet.
    eventually("one for each that runs, none for the refused", || rig.node.reservations() == accepted.len()).await;
    for stream in accepted {
        assert_eq!(all(stream.expect("accepted")).await.expect("an answer").len(), 30);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tokenizer_is_fetched_once_and_checked() {
    let rig = Rig::ready("shard-bundle", TestModel::new(), 1).await;
    let card = rig.node.client().models()[0].card.clone();
    let client = rig.node.client();
    let (one, two) = futures::join!(client.bundle(&card), client.bundle(&card));
    let (one, two) = (one.expect("fetched"), two.expect("fetched"));
    assert!(std::sync::Arc::ptr_eq(&one, &two));
    assert_eq!(one.digest(), card.bundle_digest);
    let unknown = starling_engine::ModelCard { bundle_digest: "0".repeat(64), ..card };
    assert!(matches!(client.bundle(&unknown).await, Err(GenerateError::Unavailable(_))));
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_decision_can_be_explained() {
    let rig = Rig::ready("shard-why", TestModel::new(), 2).await;
    let request = starling_ids::RequestId(42);
    let slip = crate::client::Slip::default();
    let call = crate::client::Call {
        request,
        spec: spec(prompt(1, 60), 1),
        time_left: Duration::from_secs(5),
        trace_parent: None,
        baggage: Default::default(),
        tenant: String::new(),
        priority: 0,
        weight: 1,
        budget: 0,
        session: None,
        wishes: Default::default(),
        slip: Some(slip.clone()),
    };
    let stream = rig.node.client().generate(call).await.expect("accepted");
    let receipts = rig.node.explain(request).await;
    assert_eq!(receipts.len(), 1);
    assert_eq!(receipts[0].candidates[receipts[0].chosen].worker, stream.worker);
    all(stream).await.expect("an answer");
    rig.at_rest().await;
    let receipt = rig.node.explain(request).await.remove(0);
    assert_eq!((receipt.workers, receipt.policy.as_str(), receipt.prompt_tokens), (2, "starling", 60));
    let outcome = receipt.outcome.expect("what came of it is told too");
    assert_eq!((outcome.cached_tokens, outcome.answer_tokens, outcome.resumed), (0, 1, 0));
    assert!(outcome.ttft_ms > 0.0 && outcome.ttft_ms <= outcome.total_ms);
    // Who asked along with the request was told the same.
    assert_eq!(slip.receipts(), [receipt]);
    rig.end().await;
}
