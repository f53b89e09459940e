//! Every preset on small fleets, and the traits on their own; what all these tests share.

use std::{sync::Arc, time::Duration};

use starling_ids::{BlockHash, Incarnation, NodeId, RequestId, WorkerId};

use super::*;
use crate::route::{
    desk::{Decision, Desk},
    fleet::{Heard, Places, Standing},
    rates::Rates,
    receipt::Outcome,
    wishes::{Labels, Wishes},
};

mod book;
mod compose;
mod cost;
mod quick;
mod tiers;
mod wishes;

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
        Self::of(PolicyConfig::named(name).build().expect("a policy"), workers)
    }

    fn of(policy: Policy, workers: usize) -> Self {
        let mut desk = Desk::new(policy, 7);
        let places = Places { sequences: 8, waiting: 64, step_tokens: 512, blocks: 4_096, ..Places::default() };
        for index in 0..workers {
            desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        }
        Self { desk, now: Duration::from_secs(1), request: 0 }
    }

    /// Each worker has room for all of a test's sequences; how fast they are.
    fn large_machines(&mut self) -> Rates {
        let places = Places { sequences: 256, waiting: 64, step_tokens: 8_192, blocks: 65_536, ..Places::default() };
        for index in 0..self.desk.fleet().len() {
            self.desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        }
        Rates { prefill_ms_per_token: 0.0155, decode_ms_per_sequence: 0.1, step_ms: 6.0 }
    }

    fn decide(&mut self, hashes: &[BlockHash], hits: &[(usize, u32)], session: Option<&str>) -> Decision {
        self.request += 1;
        self.now += Duration::from_millis(1);
        let ask = Ask {
            request: RequestId(self.request),
            prompt_tokens: 16 * hashes.len() as u32,
            block_tokens: 16,
            hashes,
            answer_tokens_max: 64,
            session,
            ..Ask::default()
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

fn read(text: &str) -> Result<PolicyConfig, String> {
    toml::from_str(text).map_err(|error| error.to_string())
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
