//! A planner in a node of its own: what it sees of real requests, who leads, what its hook gets.

mod hooks;

use std::time::Duration;

use bytes::Bytes;

use super::{board::PlanRow, *};
use crate::{
    names,
    testing::{Rig, TestModel, eventually, prompt, spec, within},
    tree::{NodeOptions, WorkerRole},
};

/// What a node says that it plans.
async fn rows(rig: &Rig) -> Vec<PlanRow> {
    let own = rig.mesh.node().clone();
    let answer = rig.mesh.call(&own, names::OP_PLAN, Bytes::new(), Duration::from_secs(5)).await;
    rmp_serde::from_slice(&answer.expect("an answer")).expect("rows")
}

fn options(workers: u16, router: bool) -> NodeOptions {
    let model = Arc::new(TestModel::slow(2));
    let role = WorkerRole { model, engine: "test".to_owned(), count: workers, duty: Role::Both };
    // No target is missed however slow the machine is: what is planned follows from the counts alone.
    let (ttft_ms, itl_ms) = (60_000.0, 60_000.0);
    let rules = Rules { interval: Duration::from_millis(100), ttft_ms, itl_ms, ..Rules::default() };
    let planner = PlannerOptions { rules, hook: None };
    NodeOptions { worker: (workers > 0).then_some(role), router, planner, ..NodeOptions::default() }
}

/// Waits until a node leads a model and its row is as it should be.
async fn row(what: &str, rig: &Rig, is: impl Fn(&PlanRow) -> bool) -> PlanRow {
    let wait = async {
        loop {
            if let Some(found) = rows(rig).await.into_iter().find(&is) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(what, wait).await
}

#[tokio::test(flavor = "multi_thread")]
async fn it_sees_requests_and_workers_and_touches_nothing_when_it_advises() {
    let rig = Rig::begin("plan-alone", options(2, true), Vec::new()).await;
    within("ready", rig.node.ready()).await;
    let both = |row: &PlanRow| row.outlook.as_ref().is_some_and(|outlook| outlook.now.both == 2);
    row("it looks", &rig, both).await;
    for kind in 0..4 {
        rig.complete(spec(prompt(kind, 64), 20)).await.expect("an answer");
    }
    let seen = |row: &PlanRow| row.outlook.as_ref().is_some_and(|outlook| outlook.figures.answer_tokens > 0.0);
    let figures = row("it sees them", &rig, seen).await.outlook.expect("looked").figures;
    assert!((figures.answer_tokens - 20.0).abs() < 1e-9 && (figures.prompt_tokens - 64.0).abs() < 1e-9, "{figures:?}");
    // With nothing to do one of two is too many. That takes a while, and is only said.
    let few = |row: &PlanRow| row.past.first().is_some_and(|past| past.action == "want 1 both");
    let advised = row("it advises", &rig, few).await;
    assert!(advised.past.iter().all(|past| past.outcome == "advised"), "{advised:?}");
    eventually("both are heard", || rig.node.heard() == 2).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_router_leads_and_the_next_one_takes_over() {
    let first = Rig::begin("plan-a", options(0, true), Vec::new()).await;
    let seeds = vec![first.mesh.address().to_string()];
    let second = Rig::begin("plan-b", options(0, true), seeds.clone()).await;
    let workers = Rig::begin("plan-w", options(1, false), seeds).await;
    within("ready", workers.node.ready()).await;
    let (own, other) = (first.mesh.node().clone(), second.mesh.node().clone());
    let model = ModelId::new("test").expect("name");
    let leader = slots::rank(&model, 0, vec![own.clone(), other]).remove(0);
    let (leader, next) = if leader == own { (first, second) } else { (second, first) };
    let looked = |row: &PlanRow| row.outlook.as_ref().is_some_and(|outlook| outlook.now.both == 1);
    row("the first in rank leads", &leader, looked).await;
    within("the other one does not", async {
        while !rows(&next).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    leader.end().await;
    let row = row("the next one leads", &next, looked).await;
    assert_eq!(row.leader, next.mesh.node().to_string());
    next.end().await;
    workers.end().await;
}
