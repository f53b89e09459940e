//! Sums up a run: percentiles, shares, spread over the workers, and what the slowest requests waited for.

use std::time::Duration;

use serde::Serialize;

use super::{
    cluster::{Run, Served, alone_ms},
    setup::Setup,
};

/// Bounds that a good answer keeps.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Slo {
    /// Time to first token, milliseconds.
    pub ttft_ms: f64,
    /// Mean time between tokens, milliseconds.
    pub itl_ms: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft_ms: 2_000.0, itl_ms: 50.0 }
    }
}

/// Values at shares of a sorted list, by nearest rank.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// Ninety-nine of a hundred are at most this.
    pub p99: f64,
    /// The mean.
    pub mean: f64,
}

/// The slowest hundredth by time to first token, means in milliseconds: where their time went.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Slowest {
    /// Until a worker took them into its batch.
    pub queued: f64,
    /// Their own uncached prompt, alone on an idle worker.
    pub own: f64,
    /// The rest: decodes and other prompts in the same steps.
    pub beside: f64,
    /// Uncached tokens.
    pub uncached: f64,
}

/// A run in figures; times in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Requests that ended.
    pub requests: usize,
    /// Requests that did not.
    pub failed: usize,
    /// Decisions that a gateway took without a shard.
    pub fallbacks: usize,
    /// Ended in a second of virtual time.
    pub per_second: f64,
    /// Time to first token.
    pub ttft: Quantiles,
    /// The same if every request had an idle worker and a cache without bounds that all share: no policy can be faster.
    pub ttft_ideal: Quantiles,
    /// Mean time between tokens of a request.
    pub itl: Quantiles,
    /// Whole answers.
    pub e2e: Quantiles,
    /// Where the slowest spent their time.
    pub slowest: Slowest,
    /// Prompt tokens found in a cache, share of all.
    pub hit_rate: f64,
    /// Predicted, share of all.
    pub predicted_rate: f64,
    /// The same of requests that go on from another one; 0 when there is none.
    pub follow_up_share: f64,
    /// What it could be at most: prompt and answer of the one before, in whole blocks.
    pub follow_up_ideal: f64,
    /// Requests with TTFT and mean ITL within the bounds, share of all.
    pub goodput: f64,
    /// Standard deviation over mean of the workers' busy time.
    pub load_cov: f64,
    /// The same of the requests that each was given.
    pub request_cov: f64,
    /// Mean share of time that workers computed.
    pub utilisation: f64,
    /// By how much another worker would have begun the answer sooner, sampled.
    pub regret: Quantiles,
    /// Microseconds of wall time for each decision, lookup included.
    pub decision_us: f64,
}

/// The summary of a run. `seen` are the leading prompt tokens that a perfect cache would have held, by request.
#[must_use]
pub fn summary(run: &Run, setup: &Setup, seen: &[u32], slo: Slo) -> Summary {
    let served = &run.served;
    let good = |one: &&Served| ms(one.ttft) <= slo.ttft_ms && ms(one.itl_mean) <= slo.itl_ms;
    let all = served.len().max(1) as f64;
    let busy: Vec<f64> = run.busy.iter().map(Duration::as_secs_f64).collect();
    let mut given = vec![0.0; run.busy.len()];
    served.iter().for_each(|one| given[one.worker] += 1.0);
    let ideal = |one: &Served| {
        let cached = seen.get(one.index).copied().unwrap_or(0);
        alone_ms(&setup.timing, one.prompt.saturating_sub(cached), setup.step_tokens)
    };
    let follow_ups: Vec<&Served> = served.iter().filter(|one| one.base > 0).collect();
    let block = super::setup::BLOCK;
    Summary {
        requests: served.len(),
        failed: run.failed,
        fallbacks: run.fallbacks,
        per_second: served.len() as f64 / run.lasted.as_secs_f64().max(1e-9),
        ttft: quantiles(served.iter().map(|one| ms(one.ttft))),
        ttft_ideal: quantiles(served.iter().map(ideal)),
        itl: quantiles(served.iter().filter(|one| one.answer > 1).map(|one| ms(one.itl_mean))),
        e2e: quantiles(served.iter().map(|one| ms(one.e2e))),
        slowest: slowest(served, setup),
        hit_rate: share(served.iter(), |one| one.cached),
        predicted_rate: share(served.iter(), |one| one.predicted),
        follow_up_share: share(follow_ups.iter().copied(), |one| one.cached),
        follow_up_ideal: share(follow_ups.iter().copied(), |one| one.base / block * block),
        goodput: served.iter().filter(good).count() as f64 / all,
        load_cov: variation(&busy),
        request_cov: variation(&given),
        utilisation: busy.iter().sum::<f64>() / all_time(run, busy.len()),
        regret: quantiles(run.regrets.iter().copied()),
        decision_us: run.deciding.as_secs_f64() * 1e6 / all,
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn all_time(run: &Run, workers: usize) -> f64 {
    run.lasted.as_secs_f64().max(1e-9) * workers.max(1) as f64
}

fn share<'a>(served: impl Iterator<Item = &'a Served>, of: impl Fn(&Served) -> u32) -> f64 {
    let (part, all) =
        served.fold((0.0, 0.0), |(part, all), one| (part + f64::from(of(one)), all + f64::from(one.prompt)));
    if all > 0.0 { part / all } else { 0.0 }
}

fn slowest(served: &[Served], setup: &Setup) -> Slowest {
    let mut order: Vec<&Served> = served.iter().collect();
    order.sort_by_key(|one| std::cmp::Reverse(one.ttft));
    order.truncate(served.len().div_ceil(100));
    let count = order.len().max(1) as f64;
    let mean = |of: &dyn Fn(&Served) -> f64| order.iter().map(|one| of(one)).sum::<f64>() / count;
    let uncached = |one: &Served| one.prompt.saturating_sub(one.cached);
    let own = |one: &Served| alone_ms(&setup.timing, uncached(one), setup.step_tokens);
    Slowest {
        queued: mean(&|one| ms(one.queued)),
        own: mean(&own),
        beside: mean(&|one| ms(one.ttft) - ms(one.queued) - own(one)),
        uncached: mean(&|one| f64::from(uncached(one))),
    }
}

/// Standard deviation over mean; 0 when there is nothing.
fn variation(values: &[f64]) -> f64 {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / count;
    if mean > 0.0 { variance.sqrt() / mean } else { 0.0 }
}

fn quantiles(values: impl Iterator<Item = f64>) -> Quantiles {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let rank = ((values.len() as f64 * share).ceil() as usize).clamp(1, values.len().max(1)) - 1;
        values.get(rank).copied().unwrap_or_default()
    };
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    Quantiles { p50: at(0.5), p90: at(0.9), p99: at(0.99), mean }
}
