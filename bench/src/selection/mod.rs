//! How long the choice of a worker takes, for few and for many workers.
//!
//! Called by the program `selection`. Figures for each number of workers:
//!
//! - `choose`: filters, scorers and picker alone, on the fixture of `dynamo-kv-router`'s own bench `worker_selection`: a prompt
//!   of 2,048 tokens, each worker with its own load, and 31 of 32 workers with some of it in their cache;
//! - `decide`: the same with what a shard does besides: who is eligible, the receipt, the reservation, and giving it back;
//! - `whole`: for a prompt of 10,000 tokens, the look-up in the prefix index, then `decide`; once when eight workers hold
//!   a part of the prompt, once when all do; `lookup-few` and `lookup-all` are its first part alone;
//! - `grant`: for each of those that wait in the queue and are given to a worker, see [`grant`].
//!
//! Samples are timed one by one, or in small groups where one is too short for the clock.

mod fixture;
mod grant;

use std::{hint::black_box, time::Instant};

use serde::Serialize;
use starling_actors::route::policy::{PolicyConfig, PolicyName, Question, Scratch};

use fixture::{Holders, Shard};

/// What one number of workers took, in nanoseconds.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What was timed, see the module.
    pub what: &'static str,
    /// The policy.
    pub policy: &'static str,
    /// Workers.
    pub workers: usize,
    /// Half of the samples took no longer.
    pub p50_ns: u64,
    /// 99 of 100 took no longer.
    pub p99_ns: u64,
    /// Samples.
    pub samples: usize,
}

/// All rows for one policy and one number of workers.
///
/// # Errors
/// When the policy or the index refuses something.
pub fn measure(policy: PolicyName, workers: usize, samples: usize) -> Result<Vec<Row>, String> {
    let name = policy.as_str();
    let row = |what, times| row(what, name, workers, times);
    let mut rows =
        vec![row("choose", choose(policy, workers, samples)?), row("decide", decide(policy, workers, samples)?)];
    let parts = [("lookup-few", "whole-few", Holders::Eight), ("lookup-all", "whole-all", Holders::All)];
    for (first, all, holders) in parts {
        let (lookup, whole) = whole(policy, workers, holders, samples)?;
        rows.extend([row(first, lookup), row(all, whole)]);
    }
    rows.push(row("grant", grant::grants(policy, workers, samples)?));
    Ok(rows)
}

fn row(what: &'static str, policy: &'static str, workers: usize, mut times: Vec<u64>) -> Row {
    times.sort_unstable();
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or_default();
    Row { what, policy, workers, p50_ns: at(0.5), p99_ns: at(0.99), samples: times.len() }
}

fn choose(policy: PolicyName, workers: usize, samples: usize) -> Result<Vec<u64>, String> {
    let shard = Shard::like_theirs(PolicyName::Starling, workers)?;
    let mut policy = PolicyConfig::named(policy).build().map_err(|error| error.to_string())?;
    let (mut scratch, hits) = (Scratch::default(), shard.hits_by_slot());
    let eligible: Vec<usize> = (0..workers).collect();
    let ask = shard.ask(0);
    // Too short for the clock one by one when there are few workers.
    let group = (2_000 / workers).clamp(1, 64) as u64;
    let mut times = Vec::with_capacity(samples);
    for sample in 0..samples as u64 {
        let began = Instant::now();
        for draw in sample * group..(sample + 1) * group {
            let question = Question { ask: &ask, fleet: shard.desk.fleet(), hits: &hits, below: &[], draw };
            black_box(policy.choose(black_box(&question), black_box(&eligible), &mut scratch));
        }
        times.push(since(began) / group);
    }
    Ok(times)
}

fn decide(policy: PolicyName, workers: usize, samples: usize) -> Result<Vec<u64>, String> {
    let mut shard = Shard::like_theirs(policy, workers)?;
    let hits = shard.hits.clone();
    let mut times = Vec::with_capacity(samples);
    for sample in 0..samples {
        let began = Instant::now();
        let decision = shard.decide(sample, |desk, ask, now| desk.decide(ask, black_box(&hits), now));
        let ticket = decision.ok_or("nobody was chosen")?.ticket;
        let released = shard.desk.release(ticket);
        times.push(since(began));
        if !released {
            return Err("a reservation was gone".to_owned());
        }
    }
    Ok(times)
}

/// The look-ups, and the decisions with them.
fn whole(policy: PolicyName, workers: usize, holders: Holders, samples: usize) -> Result<(Vec<u64>, Vec<u64>), String> {
    let (mut shard, index) = Shard::with_index(policy, workers, holders)?;
    let (mut overlaps, mut lookups, mut times) = (Vec::new(), Vec::new(), Vec::with_capacity(samples));
    for sample in 0..samples {
        let began = Instant::now();
        index.overlaps(shard.prompt(), &mut overlaps);
        lookups.push(since(began));
        let who = |holder| index.who(holder).map(|(worker, ..)| worker);
        let decision = shard.decide(sample, |desk, ask, now| desk.decide_over(ask, &overlaps, who, now));
        times.push(since(began));
        let ticket = decision.ok_or("nobody was chosen")?.ticket;
        shard.desk.release(ticket);
    }
    Ok((lookups, times))
}

fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
