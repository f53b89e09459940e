//! What goes wrong around a planner: nothing is known, what it begins fails, others change things too.

use std::{collections::BTreeMap, time::Duration};

use starling_ids::NodeId;

use super::cluster::{Cluster, Load, worker_seen};
use crate::{
    plan::{Action, Baseline, Fleet, Mode, Plan, Raw, Rules, Seen},
    route::split::Role,
};

const BUSY: Load = Load { rate: 30.0, prompt: 500.0, answer: 50.0 };
const IDLE: Load = Load { rate: 0.0, prompt: 500.0, answer: 50.0 };

fn fleet(both: u32, prefill: u32, decode: u32) -> Fleet {
    Fleet { both, prefill, decode }
}

#[test]
fn pln_01_no_traffic_comes_to_the_minimum_and_what_is_not_known_moves_nothing() {
    let mut cluster = Cluster::new(fleet(4, 0, 0), Cluster::acting());
    for _ in 0..100 {
        let outlook = cluster.look(IDLE);
        assert!(outlook.pressure.is_finite() && outlook.figures.forecast == 0.0, "{outlook:?}");
    }
    assert_eq!(cluster.fleet(), fleet(1, 0, 0), "{:?}", cluster.last);
    let mut cluster = Cluster::new(fleet(4, 0, 0), Cluster::acting());
    for _ in 0..100 {
        let mut observation = cluster.flow(IDLE);
        observation.missing.push("router a did not answer".to_owned());
        cluster.look_at(&observation);
    }
    assert!(cluster.changes.is_empty(), "{:?}", cluster.changes);
    assert!(cluster.last.is_some_and(|last| last.decision.reason.contains("router a")));
    // One strange sample is no trend.
    let mut cluster = Cluster::new(fleet(2, 0, 0), Cluster::acting());
    for at in 0..40 {
        let mut observation = cluster.flow(Load { rate: 8.0, ..BUSY });
        if at == 20 {
            (observation.seen.arrivals, observation.seen.prompt_tokens) = (5_000, 2_500_000);
        }
        cluster.look_at(&observation);
    }
    let grown = cluster.changes.iter().any(|(_, action)| matches!(action, Action::Scale { .. }));
    assert!(!grown, "{:?}", cluster.changes);
}

#[test]
fn pln_02_a_budget_is_kept_while_what_starts_workers_fails_and_a_shift_is_one_step() {
    let rules = Rules { max: 4, ..Cluster::acting() };
    let mut cluster = Cluster::new(fleet(0, 2, 2), rules);
    cluster.fails = true;
    let answers = Load { rate: 30.0, prompt: 50.0, answer: 60.0 };
    for _ in 0..60 {
        cluster.look(answers);
        assert!(cluster.processes() <= 4);
    }
    assert_eq!(cluster.fleet(), fleet(0, 1, 3), "{:?}", cluster.last);
    // Something fails for as long as it likes: tried again, with longer pauses, never at once.
    let mut cluster = Cluster::new(fleet(1, 0, 0), rules);
    cluster.fails = true;
    for _ in 0..300 {
        cluster.look(BUSY);
    }
    let times: Vec<u64> = cluster.changes.iter().map(|(at, _)| at.as_secs()).collect();
    assert!((4..=12).contains(&times.len()), "{times:?}");
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 30), "{times:?}");
    cluster.fails = false;
    (0..140).for_each(|_| drop(cluster.look(BUSY)));
    assert_eq!(cluster.fleet().total(), 4);
}

#[test]
fn pln_04_nothing_is_begun_before_what_was_begun_is_there_or_given_up() {
    let mut cluster = Cluster::new(fleet(1, 0, 0), Cluster::acting());
    cluster.start_looks = 1_000;
    for _ in 0..40 {
        cluster.look(Load { rate: 12.0, ..BUSY });
    }
    assert_eq!(cluster.changes.len(), 2, "the first is given up after 30 looks: {:?}", cluster.changes);
    let between = cluster.changes[1].0 - cluster.changes[0].0;
    assert!(between >= cluster.rules.expiry(), "{between:?}");
}

#[test]
fn pln_05_what_waits_counts_though_nothing_ends() {
    let rules = Cluster::acting();
    let mut plan = Plan::new(rules, Duration::ZERO);
    let mut wanted = fleet(1, 0, 0);
    for at in 1..12u32 {
        let mut seen = Seen { waiting: at * 40, ..Seen::default() };
        // The same few requests a second come as before; none has ended.
        (0..40).for_each(|_| seen.arrived(500));
        let mut worker = worker_seen(0, Role::Both);
        (worker.running, worker.queued_tokens) = (60, u64::from(at) * 4_000);
        let observation = crate::plan::Observation {
            window: rules.interval,
            seen,
            missing: Vec::new(),
            workers: vec![worker],
            block_tokens: 16,
        };
        wanted = plan.look(&observation, rules.interval * at).wanted;
    }
    assert!(wanted.total() > 1, "{wanted:?}");
}

#[test]
fn pln_06_workers_that_somebody_else_started_count_and_nothing_follows_at_once() {
    let mut cluster = Cluster::new(fleet(1, 0, 0), Rules { mode: Mode::Advise, ..Cluster::acting() });
    for _ in 0..10 {
        cluster.look(Load { rate: 30.0, ..BUSY });
    }
    assert!(cluster.last.as_ref().is_some_and(|last| last.wanted.total() > 1), "{:?}", cluster.last);
    cluster.grow_to(fleet(5, 0, 0), 0);
    for at in 0..30 {
        let outlook = cluster.look(Load { rate: 30.0, ..BUSY });
        assert!(outlook.now.total() == 5 && outlook.wanted.total().abs_diff(5) <= 1, "{outlook:?}");
        assert!(at >= 3 || (!outlook.cools.is_zero() && outlook.wanted.total() == 5), "{outlook:?}");
    }
    assert!(cluster.changes.is_empty(), "who advises touches nothing");
}

#[test]
fn pln_07_two_planners_of_one_cluster_change_it_no_oftener_than_one() {
    let rules = Rules { scales: false, ..Cluster::acting() };
    let mut cluster = Cluster::new(fleet(0, 1, 3), rules);
    let mut other = Plan::new(rules, Duration::ZERO);
    let mut changes = Vec::new();
    for at in 0..120 {
        let prompts = Load { rate: 10.0, prompt: 1_500.0, answer: 10.0 };
        let answers = Load { rate: 10.0, prompt: 100.0, answer: 160.0 };
        let observation = cluster.flow(if at % 60 < 30 { prompts } else { answers });
        let before = cluster.fleet();
        // They look one after the other, and the second one sees what the first one did only in its next look.
        cluster.look_at(&observation);
        let after = cluster.fleet();
        let outlook = other.look(&observation, cluster.now);
        if before == after && other.carries_out(&outlook.decision.action) {
            other.failed(cluster.now);
            changes.push((cluster.now, outlook.decision.action));
        }
    }
    changes.extend(cluster.changes.clone());
    changes.sort_by_key(|(at, _)| *at);
    assert!(changes.windows(2).all(|pair| pair[1].0 - pair[0].0 >= rules.cool()), "{changes:?}");
}

#[test]
fn planning_twice_on_the_same_is_nothing() {
    let mut cluster = Cluster::new(fleet(0, 1, 3), Rules { scales: false, ..Cluster::acting() });
    let prompts = Load { rate: 10.0, prompt: 1_500.0, answer: 10.0 };
    while cluster.changes.is_empty() {
        cluster.look(prompts);
    }
    let observation = cluster.flow(prompts);
    let (first, second) = (cluster.look_at(&observation), cluster.look_at(&observation));
    assert_eq!((first.decision.action, second.decision.action), (Action::Hold, Action::Hold));
}

#[test]
fn a_drained_worker_is_named_until_it_was_stopped() {
    let mut cluster = Cluster::new(fleet(3, 0, 0), Cluster::acting());
    cluster.fails = true;
    (0..60).for_each(|_| drop(cluster.look(IDLE)));
    let named: Vec<_> = cluster
        .changes
        .iter()
        .filter_map(|(_, action)| match action {
            Action::Scale { wanted, remove } => Some((wanted.total(), remove.len())),
            _ => None,
        })
        .collect();
    assert!(named.len() >= 2 && named.iter().all(|one| *one == (2, 1)), "{named:?}");
    cluster.fails = false;
    (0..200).for_each(|_| drop(cluster.look(IDLE)));
    assert_eq!((cluster.fleet(), cluster.processes()), (fleet(1, 0, 0), 1));
}

#[test]
fn a_drained_worker_that_was_started_again_is_left_alone() {
    let mut cluster = Cluster::new(fleet(2, 0, 0), Cluster::acting());
    let drained = |action: &Action| match action {
        Action::Drain { worker, .. } => Some(worker.clone()),
        _ => None,
    };
    let worker = loop {
        let found = drained(&cluster.look(IDLE).decision.action);
        if let Some(worker) = found {
            break worker;
        }
    };
    let mut observation = cluster.flow(IDLE);
    let again =
        crate::plan::WorkerSeen { id: worker, incarnation: starling_ids::Incarnation(2), ..worker_seen(0, Role::Both) };
    observation.workers.push(again);
    let outlook = cluster.look_at(&observation);
    assert_eq!((outlook.decision.action, outlook.now.total()), (Action::Hold, 2));
}

#[test]
fn a_baseline_takes_differences_and_begins_anew_with_each_life() {
    let router = NodeId::new("r").expect("name");
    let raw = |life: u64, arrivals: u64, prefilled: u64| {
        let mut worker = worker_seen(0, Role::Both);
        worker.prefilled = prefilled;
        let seen = Seen { life, arrivals, ..Seen::default() };
        Raw { routers: BTreeMap::from([(router.clone(), Some(seen))]), workers: vec![worker], block_tokens: 16 }
    };
    let mut baseline = Baseline::default();
    let at = Duration::from_secs;
    assert_eq!(baseline.take(raw(1, 500, 9_000), at(10)), None, "nothing to compare with");
    let seen = baseline.take(raw(1, 520, 9_400), at(20)).expect("a window");
    assert_eq!((seen.seen.arrivals, seen.workers[0].prefilled, seen.window), (20, 400, at(10)));
    assert_eq!(baseline.take(raw(1, 520, 9_400), at(20)), None, "no time has passed");
    let seen = baseline.take(raw(2, 7, 30), at(30)).expect("a window");
    assert_eq!((seen.seen.arrivals, seen.workers[0].prefilled), (7, 30), "both began anew");
    let silent = Raw { routers: BTreeMap::from([(router.clone(), None)]), ..raw(2, 7, 30) };
    assert_eq!(baseline.take(silent, at(40)).expect("a window").missing.len(), 1);
    let mut two = raw(2, 8, 31);
    two.routers.insert(NodeId::new("s").expect("name"), Some(Seen { arrivals: 1_000, ..Seen::default() }));
    let seen = baseline.take(two, at(50)).expect("a window");
    assert_eq!((seen.seen.arrivals, seen.missing.len()), (0, 2), "of neither is it known when its counting began");
}
