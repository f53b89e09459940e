//! Running requests that go from one worker to another: texts, tokens computed, and what is left behind.

use std::time::Duration;

use futures::{StreamExt, future::join_all};
use starling_engine::EngineLoad;
use starling_ids::RequestId;

use super::*;
use crate::client::GenerateStream;

const TOKENS: u32 = 250;

fn request(kind: TokenId, salt: &str) -> GenerateSpec {
    let mut spec = long(kind, 300 + kind * 11, salt);
    spec.stop.tokens_max = TOKENS;
    spec
}

/// Starts requests and reads the first frames of each, until each has said `tokens` tokens; whom they run at.
async fn begin(rig: &Rig, count: u32, salt: &str, tokens: usize) -> Vec<(GenerateStream, Vec<GenerateFrame>)> {
    let one = async |kind| {
        let mut stream = rig.generate(request(kind, salt)).await.expect("accepted");
        let mut frames = Vec::new();
        while text(&frames).len() < tokens {
            frames.push(within("a frame", stream.next()).await.expect("goes on").expect("well"));
        }
        (stream, frames)
    };
    join_all((0..count).map(one)).await
}

/// Reads them to their ends; their texts.
async fn finish(streams: Vec<(GenerateStream, Vec<GenerateFrame>)>) -> Vec<Vec<TokenId>> {
    let one = async |(stream, mut frames): (GenerateStream, Vec<GenerateFrame>)| {
        frames.extend(all(stream).await.expect("every answer is whole"));
        assert_eq!(frames.iter().filter(|frame| frame.finish.is_some()).count(), 1, "one end");
        assert_eq!(frames.iter().filter(|frame| frame.cached_tokens.is_some()).count(), 1, "told once");
        text(&frames)
    };
    join_all(streams.into_iter().map(one)).await
}

/// The texts when nothing disturbs them.
async fn undisturbed(rig: &Rig, count: u32) -> Vec<Vec<TokenId>> {
    join_all((0..count).map(async |kind| text(&rig.complete(request(kind, "whole")).await.expect("an answer")))).await
}

fn load(worker: &crate::worker::WorkerShared) -> EngineLoad {
    worker.seat.now().map(|port| port.load.borrow().load).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drained_nodes_requests_go_on_elsewhere_and_nothing_is_computed_twice() {
    let router = Rig::with_model("move-one", simulated(), 1).await;
    let seeds = vec![router.mesh.address().to_string()];
    let other = Rig::join_model("move-two", simulated(), 1, seeds).await;
    eventually("both heard", || router.node.heard() == 2).await;
    let whole = undisturbed(&router, 8).await;
    let (stays, leaves) = (&router.node.workers()[0], &other.node.workers()[0]);
    let before = (load(stays).tokens_generated, load(leaves).tokens_generated);
    let streams = begin(&router, 8, "moved", 10).await;
    let there = streams.iter().filter(|(stream, _)| stream.worker == *leaves.id()).count();
    assert!((1..8).contains(&there), "both work: {there}");
    let (drained, texts) = futures::join!(other.node.drain(Duration::from_secs(20)), finish(streams));
    assert!(drained, "everything left in time");
    assert_eq!(texts, whole);
    empty(&router).await;
    empty(&other).await;
    let (kept, gone) = (load(stays), load(leaves));
    assert_eq!((kept.tokens_recomputed, gone.tokens_recomputed), (0, 0));
    let generated = (kept.tokens_generated - before.0, gone.tokens_generated - before.1);
    assert_eq!(generated.0 + generated.1, u64::from(8 * TOKENS), "every token was chosen once");
    let all_there = there as u64 * u64::from(TOKENS);
    assert!(generated.1 < all_there, "{} of {all_there} tokens: they left before their end", generated.1);
    within("it leaves", other.end()).await;
    router.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_answers_no_more_is_left_and_one_alone_is_not() {
    let rig = Rig::with_model("move-role", simulated(), 2).await;
    eventually("both heard", || rig.node.heard() == 2).await;
    let whole = undisturbed(&rig, 6).await;
    let streams = begin(&rig, 6, "moved", 4).await;
    let first = streams[0].0.worker.clone();
    let (left, kept): (Vec<_>, Vec<_>) = rig.node.workers().iter().partition(|worker| *worker.id() == first);
    left[0].set_duty(Role::Prefill);
    let texts = finish(streams).await;
    assert_eq!(texts, whole);
    empty(&rig).await;
    assert_eq!(load(kept[0]).tokens_recomputed, 0);
    // The last one that answers goes on with what it has, whatever it is told.
    let streams = begin(&rig, 4, "alone", 4).await;
    kept[0].set_duty(Role::Prefill);
    assert_eq!(finish(streams).await, whole[..4]);
    empty(&rig).await;
    rig.end().await;
}

/// One text for each answer of a request.
fn answers(frames: &[GenerateFrame], choices: u32) -> Vec<Vec<TokenId>> {
    let of = |choice| frames.iter().filter(move |frame| frame.choice == choice).flat_map(|frame| &frame.tokens);
    (0..choices).map(|choice| of(choice).map(|token| token.id).collect()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_several_answers_moves_with_all_of_them() {
    let rig = Rig::with_model("move-several", simulated(), 2).await;
    eventually("both heard", || rig.node.heard() == 2).await;
    let ask = |kind, salt: &str| {
        let mut spec = request(kind, salt);
        (spec.choices, spec.sampling.temperature, spec.sampling.seed) = (3, 1.0, 7);
        spec
    };
    let whole = join_all((0..2).map(async |kind| rig.complete(ask(kind, "whole")).await.expect("an answer"))).await;
    let begin = async |kind| {
        let mut stream = rig.generate(ask(kind, "moved")).await.expect("accepted");
        let mut frames = Vec::new();
        while text(&frames).len() < 12 {
            frames.push(within("a frame", stream.next()).await.expect("goes on").expect("well"));
        }
        (stream, frames)
    };
    let streams = join_all((0..2).map(begin)).await;
    let first = streams[0].0.worker.clone();
    let (left, kept): (Vec<_>, Vec<_>) = rig.node.workers().iter().partition(|worker| *worker.id() == first);
    let before = load(kept[0]).tokens_generated;
    left[0].set_duty(Role::Prefill);
    for ((stream, mut frames), whole) in streams.into_iter().zip(&whole) {
        frames.extend(all(stream).await.expect("every answer is whole"));
        assert_eq!(frames.iter().filter(|frame| frame.finish.is_some()).count(), 3, "one end each");
        assert_eq!(answers(&frames, 3), answers(whole, 3));
    }
    assert!(load(kept[0]).tokens_generated > before, "it went on there");
    empty(&rig).await;
    assert_eq!(load(kept[0]).tokens_recomputed, 0);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_dies_while_requests_come_to_it_costs_no_token() {
    let rig = Rig::with_model("move-panic", simulated(), 2).await;
    eventually("both heard", || rig.node.heard() == 2).await;
    let whole = undisturbed(&rig, 6).await;
    for round in 0..3 {
        let streams = begin(&rig, 6, &format!("moved-{round}"), 3 + round).await;
        let first = streams[0].0.worker.clone();
        let (left, kept): (Vec<_>, Vec<_>) = rig.node.workers().iter().partition(|worker| *worker.id() == first);
        let path = format!("workers/{}", kept[0].id().index);
        left[0].set_duty(Role::Prefill);
        let die = async {
            // At another moment of the way in each round.
            for _ in 0..round * 40 {
                tokio::task::yield_now().await;
            }
            rig.mesh.book().inject_panic(&path).await
        };
        let (texts, panicked) = futures::join!(finish(streams), die);
        assert!(panicked);
        assert_eq!(texts, whole, "round {round}");
        left[0].set_duty(Role::Both);
        eventually("both serve", || rig.node.client().models().first().is_some_and(|model| model.workers == 2)).await;
        empty(&rig).await;
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_while_their_requests_move_leave_nothing_behind() {
    let rig = Rig::with_model("move-left", simulated(), 2).await;
    eventually("both heard", || rig.node.heard() == 2).await;
    let mut streams = begin(&rig, 8, "left", 2).await;
    let first = streams[0].0.worker.clone();
    let leaves = rig.node.workers().iter().find(|worker| *worker.id() == first).expect("there");
    leaves.set_duty(Role::Prefill);
    while let Some((mut stream, _)) = streams.pop() {
        // Some leave before the next word, some a few frames later.
        for _ in 0..streams.len() {
            within("a frame", stream.next()).await.expect("goes on").expect("well");
        }
        drop(stream);
    }
    empty(&rig).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_their_shard_asks_to_leave_go_on_elsewhere() {
    let rig = Rig::with_model("move-asked", simulated(), 2).await;
    eventually("both heard", || rig.node.heard() == 2).await;
    let whole = undisturbed(&rig, 4).await;
    let streams = begin(&rig, 4, "asked", 4).await;
    let workers: Vec<_> = rig.node.workers().iter().collect();
    let taken = || {
        let ports = workers.iter().filter_map(|worker| worker.seat.now());
        ports.map(|port| port.load.borrow().admitted).sum::<u64>()
    };
    eventually("all are in the workers' accounts", || taken() >= 8).await;
    let before = taken();
    assert_eq!(rig.node.ask_all_to_leave(), 4);
    assert_eq!(finish(streams).await, whole);
    empty(&rig).await;
    // Two that change places say as much as before: what tells is that they were taken once more.
    assert!(taken() > before, "nobody went elsewhere");
    assert!(workers.iter().all(|worker| load(worker).tokens_recomputed == 0));
    rig.end().await;
}

/// The workers that were chosen for a request, in their order.
async fn chosen(rig: &Rig, request: RequestId) -> Vec<WorkerId> {
    let receipts = rig.node.explain(request).await;
    receipts.into_iter().map(|receipt| receipt.candidates[receipt.chosen].worker.clone()).collect()
}

/// All places are taken when everybody is asked to leave, so everybody waits in the queue of the shard; places become free
/// at both workers, and nobody may be given one at the worker where it runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_for_a_place_elsewhere_is_never_given_its_own_worker() {
    let rig = Rig::with_model("move-waits", simulated(), 2).await;
    eventually("both heard", || rig.node.heard() == 2).await;
    // Every second one ends early and frees a place.
    let request = |kind: TokenId, salt: &str| {
        let mut spec = request(kind, salt);
        spec.stop.tokens_max = if kind.is_multiple_of(2) { 60 } else { 250 };
        spec
    };
    let whole = async |kind| text(&rig.complete(request(kind, "whole")).await.expect("an answer"));
    let whole = join_all((0..16).map(whole)).await;
    let ask = async |kind: TokenId| {
        let call = rig.call(request(kind, "waits"), Duration::from_secs(20));
        let id = call.request;
        let mut stream = rig.node.client().generate(call).await.expect("accepted");
        let first = within("a frame", stream.next()).await.expect("goes on").expect("well");
        (id, stream, vec![first])
    };
    let running = join_all((0..16).map(ask)).await;
    // They wait inside the workers, which are full with them.
    let ahead = join_all((16..20).map(|kind| rig.generate(request(kind, "ahead")))).await;
    assert_eq!(rig.node.ask_all_to_leave(), 20);
    let (ids, streams): (Vec<_>, Vec<_>) =
        running.into_iter().map(|(id, stream, frames)| (id, (stream, frames))).unzip();
    let texts = finish(streams).await;
    for (stream, kind) in ahead.into_iter().zip(16..) {
        let frames = all(stream.expect("accepted")).await.expect("an answer");
        assert_eq!(text(&frames).len() as u32, request(kind, "").stop.tokens_max);
    }
    let mut looked = 0;
    for (kind, id) in ids.into_iter().enumerate() {
        let workers = chosen(&rig, id).await;
        let own = workers.iter().filter(|worker| **worker == workers[0]).count();
        assert_eq!(own, 1, "request {kind} was sent to its own worker: {workers:?}");
        looked += workers.len() - 1;
    }
    assert_eq!(texts, whole);
    assert!(looked > 0, "some found a place");
    empty(&rig).await;
    rig.end().await;
}

/// Wherever one of them is sent is about to end as well: none is lost, and none goes round in a circle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_workers_that_all_drain_end_where_they_are() {
    let router = Rig::with_model("drain-one", simulated(), 2).await;
    let seeds = vec![router.mesh.address().to_string()];
    let other = Rig::join_model("drain-two", simulated(), 2, seeds).await;
    eventually("all heard", || router.node.heard() == 4).await;
    let whole = undisturbed(&router, 8).await;
    let streams = begin(&router, 8, "drained", 4).await;
    let limit = Duration::from_secs(20);
    let drains = futures::future::join(other.node.drain(limit), router.node.drain(limit));
    let (texts, drained) = futures::join!(finish(streams), drains);
    assert_eq!(drained, (true, true), "all ended in time");
    assert_eq!(texts, whole);
    empty(&router).await;
    empty(&other).await;
    within("it leaves", other.end()).await;
    router.end().await;
}
