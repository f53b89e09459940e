//! Every preset on small fleets, and the traits on their own.

use std::time::Duration;

use starling_ids::{BlockHash, Incarnation, NodeId, RequestId, WorkerId};

use super::*;
use crate::route::{
    desk::{Decision, Desk},
    fleet::{Heard, Places, Standing},
    rates::Rates,
    receipt::Outcome,
};

fn worker(index: usize) -> WorkerId {
    WorkerId { node: NodeId::new(&format!("n{index}")).expect("name"), index: 0 }
}

fn hashes(kind: u128, count: u128) -> Vec<BlockHash> {
    (0..count).map(|at| BlockHash((kind << 64) + at + 1)).collect()
}

struct Bench {
    desk: Desk,
    now: Duration,
    request: u128,
}

impl Bench {
    fn new(name: PolicyName, workers: usize) -> Self {
        let mut desk = Desk::new(PolicyConfig::named(name).build().expect("a policy"), 7);
        let places = Places { sequences: 8, waiting: 64, step_tokens: 512, blocks: 4_096, ..Places::default() };
        for index in 0..workers {
            desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        }
        Self { desk, now: Duration::from_secs(1), request: 0 }
    }

    fn decide(&mut self, hashes: &[BlockHash], hits: &[(usize, u32)], session: Option<&str>) -> Decision {
        self.request += 1;
        self.now += Duration::from_millis(1);
        let ask = Ask {
            request: RequestId(self.request),
            prompt_tokens: 16 * hashes.len() as u32,
            block_tokens: 16,
            hashes,
            choices: 1,
            answer_tokens_max: 64,
            answer_expected: 0.0,
            session,
            exclude: &[],
            failed: &[],
        };
        let slots: Vec<_> = hits
            .iter()
            .map(|(index, depth)| (self.desk.fleet().slot(&worker(*index)).expect("seated"), *depth))
            .collect();
        self.desk.decide(&ask, &slots, self.now).expect("somebody")
    }

    fn counts(&mut self, asks: usize, of: impl Fn(usize) -> Vec<BlockHash>) -> Vec<u32> {
        let mut counts = vec![0; self.desk.fleet().len()];
        for at in 0..asks {
            let decision = self.decide(&of(at), &[], None);
            let index = (0..counts.len()).find(|index| worker(*index) == decision.worker).expect("known");
            counts[index] += 1;
        }
        counts
    }
}

#[test]
fn every_name_builds_and_reads_back() {
    for name in PolicyName::ALL {
        assert_eq!(name.as_str().parse::<PolicyName>(), Ok(name));
        let mut bench = Bench::new(name, 3);
        bench.decide(&hashes(1, 4), &[], None);
        assert_eq!(bench.desk.explain(RequestId(1))[0].policy, name.as_str());
    }
    let error = "nope".parse::<PolicyName>().expect_err("unknown").to_string();
    assert!(error.contains("nope") && error.contains("round-robin"), "{error}");
}

#[test]
fn a_policy_is_composed_from_a_file_and_nonsense_is_named() {
    let read = |text: &str| toml::from_str::<PolicyConfig>(text).map_err(|error| error.to_string());
    let both = "scorers = [{ use = 'ms' }, { use = 'load', weight = 2.5 }]\npicker = 'lowest'";
    let policy = read(both).expect("reads").build().expect("a policy");
    let named: Vec<_> = policy.scorers.iter().map(|(weight, scorer)| (*weight, scorer.name())).collect();
    assert_eq!(named, [(1.0, "ms"), (2.5, "load")]);
    for (text, named) in [
        ("scorers = [{ use = 'luck' }]", "luck"),
        ("scorers = [{ use = 'ms', weight = 0.0 }]", "weight"),
        ("picker = 'best'", "two-draws"),
    ] {
        let error = read(text).expect("reads").build().expect_err(text).to_string();
        assert!(error.contains(named), "{error}");
    }
    assert!(read("naem = 'dynamo'").is_err());
}

#[test]
fn round_robin_goes_round_and_random_and_two_draws_reach_everybody() {
    assert_eq!(Bench::new(PolicyName::RoundRobin, 4).counts(40, |at| hashes(at as u128, 2)), [10; 4]);
    for name in [PolicyName::Random, PolicyName::P2c, PolicyName::LeastLoaded, PolicyName::Starling, PolicyName::Dynamo]
    {
        let counts = Bench::new(name, 4).counts(400, |at| hashes(at as u128, 2));
        assert!(counts.iter().all(|count| (60..=140).contains(count)), "{name:?} {counts:?}");
    }
}

#[test]
fn sticky_policies_stick_until_the_worker_is_overloaded() {
    for name in [PolicyName::Session, PolicyName::PrefixHash] {
        let mut bench = Bench::new(name, 4);
        let first = bench.decide(&hashes(5, 20), &[], Some("conversation"));
        let again = bench.decide(&hashes(5, 20), &[], Some("conversation"));
        assert_eq!(first.worker, again.worker, "{name:?}");
        let mut places = std::collections::HashSet::new();
        for _ in 0..12 {
            places.insert(bench.decide(&hashes(5, 20), &[], Some("conversation")).worker);
        }
        assert!(places.len() > 1, "{name:?}: one worker is not buried under one session");
    }
}

#[test]
fn cost_weighs_a_hit_against_a_queue_in_milliseconds() {
    let mut bench = Bench::new(PolicyName::Starling, 2);
    let rates = Rates { prefill_ms_per_token: 0.1, decode_ms_per_sequence: 0.1, step_ms: 5.0 };
    let idle = Heard { at: bench.now, rates: Some(rates), ..Heard::default() };
    for index in 0..2 {
        bench.desk.hear(&worker(index), Incarnation(1), idle);
    }
    let warm = bench.decide(&hashes(1, 60), &[(1, 60)], None);
    assert_eq!(warm.worker, worker(1));
    // 40,000 tokens wait there: 4 s, and computing 960 anew takes a tenth of a second.
    let busy = Heard { at: bench.now, prefill_tokens: 40_000, waiting: 3, admitted: 1, ..idle };
    bench.desk.confirm(warm.ticket, 1);
    bench.desk.hear(&worker(1), Incarnation(1), busy);
    assert_eq!(bench.decide(&hashes(1, 60), &[(1, 60)], None).worker, worker(0));
    let receipt = &bench.desk.explain(RequestId(2))[0];
    let total = |at: usize| receipt.candidates[at].terms.iter().map(|(_, value)| value).sum::<f64>();
    assert!((total(0) - receipt.candidates[0].cost).abs() < 1e-6);
    assert_eq!(receipt.candidates[1].terms[0].0, "queue");
    assert!(receipt.candidates[1].terms[0].1 > 4_000.0);
}

#[test]
fn the_dynamo_cost_is_the_published_one() {
    let mut bench = Bench::new(PolicyName::Dynamo, 2);
    // 10 blocks cold: prefill 10, decode 10.
    let first = bench.decide(&hashes(1, 10), &[], None);
    assert!((first.choice.cost - 20.0).abs() < 1e-9, "{first:?}");
    let other = worker(usize::from(first.worker == worker(0)));
    // There: booked 10 + own 10 - cached 10, decode the same 10 blocks. On the other one: 20.
    let second = bench.decide(&hashes(1, 10), &[((other == worker(0)) as usize, 10)], None);
    assert!((second.choice.cost - 20.0).abs() < 1e-9, "{second:?}");
    bench.desk.prefilled(first.ticket);
    let third = bench.decide(&hashes(1, 10), &[((other == worker(0)) as usize, 10)], None);
    assert_eq!(third.worker, first.worker);
}

#[test]
fn cnt_03_what_is_reserved_comes_back_once_whatever_happens_to_its_worker() {
    let mut bench = Bench::new(PolicyName::Starling, 2);
    let decisions: Vec<_> = (0..6).map(|kind| bench.decide(&hashes(kind, 4), &[], None)).collect();
    let places = Places { sequences: 8, ..Places::default() };
    // A new life begins with nothing; late ends of the earlier one change nothing there.
    bench.desk.seat(&worker(0), Incarnation(2), places, Standing::Sound);
    let slot = bench.desk.fleet().slot(&worker(0)).expect("seated");
    assert_eq!((bench.desk.fleet().requests[slot], bench.desk.fleet().unreported_tokens[slot]), (0, 0));
    for decision in &decisions {
        let of_old_life = decision.worker == worker(0);
        bench.desk.confirm(decision.ticket, 1);
        bench.desk.ended(decision.ticket, Outcome::default());
        assert_eq!(bench.desk.release(decision.ticket), !of_old_life);
        assert!(!bench.desk.release(decision.ticket), "once");
    }
    assert_eq!(bench.desk.reservations(), 0);
    let fleet = bench.desk.fleet();
    for (_, slot) in fleet.workers() {
        assert_eq!((fleet.requests[slot], fleet.sequences[slot], fleet.unreported[slot]), (0, 0, 0));
        assert_eq!((fleet.unreported_tokens[slot], fleet.unreported_blocks[slot]), (0, 0));
    }
}

#[test]
fn a_reservation_is_counted_once_beside_the_workers_own_account() {
    let mut bench = Bench::new(PolicyName::LeastLoaded, 1);
    let slot = bench.desk.fleet().slot(&worker(0)).expect("seated");
    let (one, two) = (bench.decide(&hashes(1, 4), &[], None), bench.decide(&hashes(2, 4), &[], None));
    assert_eq!(bench.desk.fleet().queued_tokens(slot), 128);
    // The account comes before the confirmation of what it covers.
    let heard = Heard { at: bench.now, running: 1, prefill_tokens: 64, admitted: 1, ..Heard::default() };
    bench.desk.hear(&worker(0), Incarnation(1), heard);
    bench.desk.confirm(one.ticket, 1);
    bench.desk.confirm(two.ticket, 2);
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (2, 128));
    bench.desk.hear(&worker(0), Incarnation(1), Heard { running: 2, prefill_tokens: 128, admitted: 2, ..heard });
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (2, 128));
    assert!(bench.desk.release(one.ticket) && bench.desk.release(two.ticket));
    bench.desk.hear(&worker(0), Incarnation(1), Heard { admitted: 2, at: bench.now, ..Heard::default() });
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (0, 0));
}

#[test]
fn doubtful_and_cooling_workers_are_the_last_resort_and_excluded_ones_none() {
    let mut bench = Bench::new(PolicyName::RoundRobin, 3);
    bench.desk.set_standing(&worker(0), Standing::Doubtful);
    let ask = |exclude: &[WorkerId], failed: &[WorkerId], bench: &mut Bench| {
        let hashes = hashes(1, 2);
        let ask = Ask {
            request: RequestId(1),
            prompt_tokens: 32,
            block_tokens: 16,
            hashes: &hashes,
            choices: 1,
            answer_tokens_max: 1,
            answer_expected: 0.0,
            session: None,
            exclude,
            failed,
        };
        bench.desk.decide(&ask, &[], bench.now).map(|decision| decision.worker)
    };
    for _ in 0..4 {
        assert_ne!(ask(&[], &[], &mut bench), Some(worker(0)));
    }
    assert_eq!(ask(&[worker(1)], &[worker(1)], &mut bench), Some(worker(2)));
    assert_eq!(ask(&[], &[], &mut bench), Some(worker(2)), "worker 1 cools");
    assert_eq!(ask(&[worker(1), worker(2)], &[], &mut bench), Some(worker(0)));
    assert_eq!(ask(&[worker(0), worker(1), worker(2)], &[], &mut bench), None);
}
