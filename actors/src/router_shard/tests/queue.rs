//! Requests that wait: whose turn it is, who is told what, and that nothing is left behind.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use starling_ids::{NodeId, WorkerId};
use tokio::task::JoinSet;

use crate::{
    client::{Call, GenerateStream},
    generate::GenerateError,
    route::{queue::QueueConfig, wishes::Wishes},
    testing::{Rig, TestModel, all, eventually, prompt, spec, within},
};

/// Computes one sequence and is given one ahead. It would take more: one that was just cancelled may still be there.
fn narrow(step_ms: u64) -> TestModel {
    TestModel { sequences_max: 1, waiting_max: 8, ..TestModel::slow(step_ms) }
}

/// Takes both places of a narrow worker for as long as the streams live.
async fn occupy(rig: &Rig) -> Vec<GenerateStream> {
    let taken = join_all((0..2).map(|kind| rig.generate(spec(prompt(kind, 40), 4_000)))).await;
    taken.into_iter().map(|stream| stream.expect("accepted")).collect()
}

/// Asks and reads the whole answer.
fn ask(asking: &mut JoinSet<()>, rig: &Rig, call: Call) {
    let client = rig.node.client().clone();
    asking.spawn(async move {
        let stream = client.generate(call).await.expect("accepted in the end");
        assert_eq!(all(stream).await.expect("an answer").len(), 3);
    });
}

fn call(rig: &Rig, tenant: &str, priority: i32) -> Call {
    let call = rig.call(spec(prompt(7, 40), 3), Duration::from_secs(20));
    Call { tenant: tenant.to_owned(), priority, ..call }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_waits_and_is_served() {
    let rig = Rig::ready("queue-waits", narrow(5), 2).await;
    let answers = join_all((0..24).map(|kind| rig.complete(spec(prompt(kind, 40), 8))));
    for answer in within("all are served", answers).await {
        assert_eq!(answer.expect("nobody is refused").len(), 8);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_goes_to_the_higher_class_and_between_tenants_by_tokens() {
    let rig = Rig::ready("queue-turns", narrow(2), 1).await;
    let mut taken = occupy(&rig).await;
    let (mut asking, mut requests) = (JoinSet::new(), Vec::new());
    let who = [("low", "a", 9), ("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("high", "c", -9)];
    for (before, (name, tenant, priority)) in who.into_iter().enumerate() {
        let call = call(&rig, tenant, priority);
        requests.push((name, call.request));
        ask(&mut asking, &rig, call);
        eventually("it waits", || rig.node.waiting() == before + 1).await;
    }
    taken.clear();
    while let Some(done) = within("the answers", asking.join_next()).await {
        done.expect("no panic");
    }
    // By the shard's clock: who is told first says little on a busy machine. Two decided in one go have the same time.
    let mut decided = HashMap::new();
    for (name, request) in requests {
        decided.insert(name, rig.node.explain(request).await.last().expect("a receipt").at);
    }
    assert!(decided.values().all(|at| decided["high"] <= *at && *at <= decided["low"]), "{decided:?}");
    // Tenant b waits behind one of a, not behind all of them.
    assert!(decided["b1"] <= decided["a3"], "{decided:?}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_leaves_gives_its_place_up_at_once() {
    let rig = Rig::ready("queue-leaves", narrow(5), 1).await;
    let taken = occupy(&rig).await;
    let mut waiting = JoinSet::new();
    for kind in 0..5 {
        let (client, call) = (rig.node.client().clone(), rig.call(spec(prompt(kind, 40), 3), Duration::from_secs(20)));
        waiting.spawn(async move { client.generate(call).await.map(drop) });
    }
    eventually("all wait", || rig.node.waiting() == 5).await;
    assert_eq!(rig.node.reservations(), 2);
    drop(waiting);
    eventually("none waits", || rig.node.waiting() == 0).await;
    assert_eq!(rig.node.reservations(), 2);
    drop(taken);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_waits_for_a_worker_of_its_own_holds_nobody_up() {
    let rig = Rig::ready("queue-pinned", narrow(5), 2).await;
    let node = NodeId::new("queue-pinned").expect("name");
    let only = |index| Wishes { worker: Some(WorkerId { node: node.clone(), index }), ..Wishes::default() };
    let pinned = |tokens| Call { wishes: only(0), ..rig.call(spec(prompt(1, 40), tokens), Duration::from_secs(20)) };
    let taken = join_all((0..2).map(|_| rig.node.client().generate(pinned(4_000)))).await;
    assert!(taken.iter().all(Result::is_ok));
    let mut asking = JoinSet::new();
    for before in 0..12 {
        ask(&mut asking, &rig, pinned(3));
        eventually("it waits for its worker", || rig.node.waiting() == before + 1).await;
    }
    let answer = within("the other worker is free", rig.complete(spec(prompt(7, 40), 3))).await;
    assert_eq!((answer.expect("served").len(), rig.node.waiting()), (3, 12));
    drop(taken);
    while let Some(done) = within("the answers", asking.join_next()).await {
        done.expect("no panic");
    }
    let nobody = rig.node.client().generate(Call { wishes: only(9), ..pinned(3) }).await.map(drop);
    assert!(matches!(&nobody, Err(GenerateError::Unavailable(why)) if why.contains("/9 is here")), "{nobody:?}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ded_02_one_whose_time_is_over_is_told_so() {
    let rig = Rig::ready("queue-deadline", narrow(5), 1).await;
    let taken = occupy(&rig).await;
    let late = rig.generate_within(spec(prompt(3, 40), 3), Duration::from_millis(300)).await;
    assert_eq!(late.map(drop), Err(GenerateError::Deadline));
    eventually("its place is free", || rig.node.waiting() == 0).await;
    drop(taken);
    rig.end().await;
    let short = QueueConfig { wait_ms_max: 200, ..QueueConfig::default() };
    let rig = Rig::queueing("queue-patience", narrow(5), 1, short).await;
    let taken = occupy(&rig).await;
    let refused = rig.generate(spec(prompt(3, 40), 3)).await.map(drop);
    assert!(matches!(refused, Err(GenerateError::Overloaded { retry_after_ms: 1_000.. })), "{refused:?}");
    drop(taken);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_refuses_the_greedy_tenant_as_429_and_lets_a_higher_class_displace() {
    let small = QueueConfig { places: 3, tenant_places: 2, ..QueueConfig::default() };
    let rig = Arc::new(Rig::queueing("queue-full", narrow(5), 1, small).await);
    let taken = occupy(&rig).await;
    let mut asking = JoinSet::new();
    for (tenant, priority, waiting) in [("greedy", 0, 1), ("greedy", 5, 2), ("modest", 5, 3)] {
        let (rig, call) = (rig.clone(), call(&rig, tenant, priority));
        let client = rig.node.client().clone();
        asking.spawn(async move { (tenant, priority, client.generate(call).await.map(drop)) });
        eventually("it waits", || rig.node.waiting() == waiting).await;
    }
    let over = rig.node.client().generate(call(&rig, "greedy", -50)).await.map(drop);
    assert!(matches!(over, Err(GenerateError::TenantLimit { retry_after_ms: 1_000.., .. })), "{over:?}");
    // Another tenant without a place would displace one of the greedy tenant here; this one has its part.
    let full = rig.node.client().generate(call(&rig, "modest", 5)).await.map(drop);
    assert!(matches!(full, Err(GenerateError::Overloaded { .. })), "{full:?}");
    let high = (rig.node.client().clone(), call(&rig, "third", 0));
    asking.spawn(async move { ("third", 0, high.0.generate(high.1).await.map(drop)) });
    let (tenant, priority, displaced) =
        within("one makes way", asking.join_next()).await.expect("one").expect("no panic");
    assert_eq!((priority, rig.node.waiting()), (5, 3), "{tenant}");
    assert!(matches!(displaced, Err(GenerateError::Overloaded { .. })), "{displaced:?}");
    drop(taken);
    while let Some(done) = within("the others are served", asking.join_next()).await {
        let (tenant, _, served) = done.expect("no panic");
        assert_eq!(served, Ok(()), "{tenant}");
    }
    Arc::into_inner(rig).expect("nobody else has it").end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_wait_outlive_their_shard() {
    let rig = Rig::ready("queue-panic", narrow(5), 1).await;
    let taken = occupy(&rig).await;
    let mut asking = JoinSet::new();
    for _ in 0..4 {
        ask(&mut asking, &rig, call(&rig, "", 0));
    }
    eventually("all wait", || rig.node.waiting() == 4).await;
    assert!(rig.mesh.book().inject_panic("router/shard").await);
    eventually("restarted", || rig.restarts("router/shard") == 1).await;
    eventually("all wait again", || rig.node.waiting() == 4).await;
    drop(taken);
    while let Some(done) = within("all are served", asking.join_next()).await {
        done.expect("no panic");
    }
    rig.end().await;
}
