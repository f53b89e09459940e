use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use starling_cluster::stream::{Context, FaultKind, Incoming, StreamError, StreamHandler};
use starling_engine::FinishReason;
use starling_ids::RequestId;

use super::*;
use crate::{
    generate::{GenerateError, WorkerRequest},
    route::queue::QueueConfig,
    testing::{ERROR_TOKEN, PANIC_TOKEN, Rig, TestModel, all, eventually, prompt, spec, within},
};

fn restarted(rig: &Rig, path: &str) -> impl FnMut() -> bool {
    let (book, path) = (rig.mesh.book().clone(), path.to_owned());
    move || book.snapshot().iter().any(|row| row.path == path && row.restarts == 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_come_in_order_and_the_last_frame_says_why_it_ended() {
    let rig = Rig::ready("worker-order", TestModel::new(), 1).await;
    let frames = rig.complete(spec(prompt(1, 40), 20)).await.expect("an answer");
    let tokens: Vec<_> = frames.iter().flat_map(|frame| frame.tokens.iter().map(|token| token.id)).collect();
    assert_eq!(tokens, (1..=20).collect::<Vec<_>>());
    assert_eq!(frames[0].cached_tokens, Some(0));
    let finishes: Vec<_> = frames.iter().filter_map(|frame| frame.finish).collect();
    assert_eq!(finishes, [FinishReason::Length]);
    let again = rig.complete(spec(prompt(1, 40), 1)).await.expect("an answer");
    assert_eq!(again[0].cached_tokens, Some(32), "two full blocks of the first prompt");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_choice_has_its_own_frames_and_its_own_seed() {
    let rig = Rig::ready("worker-choices", TestModel::new(), 1).await;
    let mut three = spec(prompt(1, 20), 5);
    three.choices = 3;
    three.sampling.seed = 7;
    let frames = rig.complete(three).await.expect("an answer");
    for choice in 0..3 {
        let own: Vec<_> = frames.iter().filter(|frame| frame.choice == choice).collect();
        let tokens: Vec<_> = own.iter().flat_map(|frame| frame.tokens.iter().map(|token| token.id)).collect();
        assert_eq!(tokens, (1..=5).map(|at| (7 + choice) * 1_000 + at).collect::<Vec<_>>());
        assert_eq!(own.iter().filter(|frame| frame.finish.is_some()).count(), 1);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cnt_05_a_client_that_leaves_frees_its_sequences() {
    let rig = Rig::ready("worker-cancel", TestModel::slow(5), 1).await;
    let port = rig.node.workers()[0].seat.now().expect("alive");
    let running = || port.load.borrow().load.running;
    let mut stream = rig.generate(spec(prompt(1, 20), 4_000)).await.expect("accepted");
    within("a token", stream.next()).await.expect("a frame").expect("a token");
    assert_eq!(rig.node.in_flight(), 1);
    drop(stream);
    rig.at_rest().await;
    eventually("the sequence is gone", || running() == 0).await;
    // Before the first token, and before the answer of the worker.
    drop(rig.generate(spec(prompt(2, 20), 4_000)).await.expect("accepted"));
    drop(tokio::time::timeout(Duration::from_micros(50), rig.generate(spec(prompt(3, 20), 4_000))).await);
    rig.at_rest().await;
    eventually("the sequences are gone", || running() == 0).await;
    drop(port);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_does_not_read_slows_nobody_else() {
    let rig = Rig::ready("worker-slow-reader", TestModel::new(), 1).await;
    let stuck = rig.generate(spec(prompt(1, 20), 2_000)).await.expect("accepted");
    let frames = rig.complete(spec(prompt(2, 20), 500)).await.expect("an answer");
    assert_eq!(frames.len(), 500);
    let late = all(stuck).await.expect("the whole answer, however late");
    assert_eq!(late.len(), 2_000);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cnt_03_another_incarnation_is_refused() {
    let rig = Rig::ready("worker-stale", TestModel::new(), 1).await;
    let shared = &rig.node.workers()[0];
    let incarnation = Incarnation(shared.incarnation.0 + 1);
    let request = WorkerRequest {
        spec: spec(prompt(1, 20), 1),
        worker: shared.id.clone(),
        incarnation,
        source: None,
        moves: None,
        may_move: false,
    };
    let body = Bytes::from(rmp_serde::to_vec(&request).expect("encodes"));
    let context = Context::new(RequestId(1), Duration::from_secs(5));
    let own = (rig.mesh.node(), rig.mesh.incarnation());
    let error = rig.mesh.open(own.0, own.1, &names::worker_generate(0), context, body).await.expect_err("refused");
    assert!(matches!(&error, StreamError::Rejected(fault) if fault.kind == FaultKind::StaleIncarnation), "{error}");
    rig.end().await;
}

/// Notes the context of each request, then hands it on.
struct Noting(Arc<dyn StreamHandler>, std::sync::mpsc::Sender<Context>);

impl StreamHandler for Noting {
    fn open(&self, incoming: Incoming) -> futures::future::BoxFuture<'static, ()> {
        self.1.send(incoming.context.clone()).expect("somebody listens");
        self.0.open(incoming)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_gateway_hands_in_arrives_at_the_worker() {
    let rig = Rig::ready("worker-context", TestModel::new(), 1).await;
    let door = rig.mesh.endpoints().get(&names::worker_generate(0)).expect("a worker");
    let (sender, contexts) = std::sync::mpsc::channel();
    rig.mesh.endpoints().serve(names::worker_generate(0), Arc::new(Noting(door, sender)));
    let mut call = rig.call(spec(prompt(1, 20), 1), Duration::from_secs(20));
    call.trace_parent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned());
    call.baggage.set("user", "Ada").expect("fits");
    (call.tenant, call.priority) = ("acme".to_owned(), 2);
    let asked = call.clone();
    all(rig.node.client().generate(call).await.expect("accepted")).await.expect("an answer");
    let context = contexts.try_recv().expect("one request");
    assert_eq!((context.request, &context.trace_parent), (asked.request, &asked.trace_parent));
    assert_eq!((&context.tenant, context.priority, &context.baggage), (&asked.tenant, 2, &asked.baggage));
    assert!(context.time_left <= asked.time_left);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_worker_refuses_before_it_accepts() {
    let model = TestModel { sequences_max: 1, waiting_max: 1, ..TestModel::slow(5) };
    let rig = Rig::queueing("worker-full", model, 1, QueueConfig { places: 0, ..QueueConfig::default() }).await;
    let mut first = rig.generate(spec(prompt(1, 20), 4_000)).await.expect("accepted");
    within("it runs", first.next()).await.expect("a frame").expect("a token");
    let second = rig.generate(spec(prompt(2, 20), 1)).await.expect("waits");
    let third = rig.generate(spec(prompt(3, 20), 1)).await.expect_err("refused");
    assert!(matches!(third, GenerateError::Overloaded { retry_after_ms } if retry_after_ms > 0), "{third:?}");
    drop(first);
    assert_eq!(all(second).await.expect("runs now").len(), 1);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_the_clients_fault() {
    let rig = Rig::ready("worker-bad", TestModel::new(), 1).await;
    let empty = rig.generate(spec(Vec::new(), 1)).await.expect_err("refused");
    assert!(matches!(&empty, GenerateError::Invalid { param: Some(param), .. } if param == "prompt"), "{empty:?}");
    let long = rig.generate(spec(prompt(1, 5_000), 1)).await.expect_err("refused");
    assert_eq!(long, GenerateError::ContextLength { prompt: 5_000, context: 4_096 });
    let mut unknown = spec(prompt(1, 20), 1);
    unknown.model = starling_ids::ModelId::new("other").expect("name");
    assert!(matches!(rig.generate(unknown).await, Err(GenerateError::UnknownModel(_))));
    let mut many = spec(prompt(1, 20), 1);
    many.choices = 17;
    assert!(matches!(rig.generate(many).await, Err(GenerateError::Invalid { param: Some(param), .. }) if param == "n"));
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_error_on_a_sequence_is_an_error_and_never_a_short_answer() {
    let rig = Rig::ready("worker-error", TestModel::new(), 1).await;
    let error = rig.complete(spec(vec![1, 2, ERROR_TOKEN], 5)).await.expect_err("failed");
    assert!(matches!(error, GenerateError::WorkerLost { .. }), "{error:?}");
    assert_eq!(rig.complete(spec(prompt(1, 20), 3)).await.expect("the worker goes on").len(), 3);
    assert_eq!(rig.restarts("workers/0"), 0);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_kills_its_engine_is_given_up_and_its_neighbours_go_on() {
    let rig = Rig::ready("worker-panic", TestModel::slow(2), 1).await;
    let running = rig.generate(spec(prompt(1, 40), 1_000)).await.expect("accepted");
    let error = rig.complete(spec(vec![1, 2, PANIC_TOKEN], 5)).await.expect_err("failed");
    assert!(matches!(&error, GenerateError::WorkerLost { reason, .. } if reason.contains("starts again")), "{error:?}");
    eventually("tried three times", || rig.restarts("workers/0") == 3).await;
    let tokens: Vec<_> = all(running).await.expect("goes on").into_iter().flat_map(|frame| frame.tokens).collect();
    assert!(tokens.iter().map(|token| token.id).eq(1..=1_000), "no token lost, none repeated");
    let frames = rig.complete(spec(prompt(1, 40), 3)).await.expect("it serves again");
    assert_eq!(frames.len(), 3);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn act_01_a_worker_actor_that_panics_takes_nobody_with_it() {
    let rig = Rig::ready("worker-inject", TestModel::slow(2), 2).await;
    let mut streams = Vec::new();
    for kind in 0..4 {
        streams.push(rig.generate(spec(prompt(kind, 40), 300)).await.expect("accepted"));
    }
    let hit = streams.iter().filter(|stream| stream.worker.index == 0).count();
    assert_eq!(hit, 2, "two each");
    assert!(rig.mesh.book().inject_panic("workers/0").await);
    for stream in streams {
        let frames = all(stream).await.expect("those of the one that died go on elsewhere");
        assert!(frames.iter().flat_map(|frame| &frame.tokens).map(|token| token.id).eq(1..=300));
    }
    assert_eq!(rig.complete(spec(prompt(9, 40), 3)).await.expect("the other one serves").len(), 3);
    eventually("restarted", restarted(&rig, "workers/0")).await;
    eventually("both again", || rig.node.client().models().first().is_some_and(|model| model.workers == 2)).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lif_01_a_drain_finishes_what_runs_and_takes_nothing_new() {
    let rig = Rig::ready("worker-drain", TestModel::slow(3), 2).await;
    let first = rig.generate(spec(prompt(1, 40), 100)).await.expect("accepted");
    let second = rig.generate(spec(prompt(2, 40), 100)).await.expect("accepted");
    let (drained, first, second, ()) =
        futures::join!(rig.node.drain(Duration::from_secs(15)), all(first), all(second), async {
            eventually("not listed", || rig.node.client().models().is_empty()).await;
            let refused = rig.generate(spec(prompt(3, 40), 1)).await.expect_err("takes nothing new");
            assert!(matches!(refused, GenerateError::Unavailable(_)), "{refused:?}");
        });
    assert!(drained);
    assert_eq!((first.expect("whole").len(), second.expect("whole").len()), (100, 100));
    for worker in rig.node.workers() {
        assert_eq!(*worker.lifecycle().borrow(), Lifecycle::Drained);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ded_02_a_request_ends_at_its_deadline() {
    let rig = Rig::ready("worker-deadline", TestModel::slow(10), 1).await;
    let stream = rig.generate_within(spec(prompt(1, 20), 4_000), Duration::from_millis(150)).await.expect("accepted");
    assert_eq!(all(stream).await, Err(GenerateError::Deadline));
    rig.end().await;
}
