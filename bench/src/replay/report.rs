//! Sums up a run: percentiles, shares, spread over the workers.

use std::time::Duration;

use serde::Serialize;

use super::cluster::{Run, Served};

/// A run in figures.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Requests that ended.
    pub requests: usize,
    /// Requests that did not.
    pub failed: usize,
    /// Ended in a second of virtual time.
    pub per_second: f64,
    /// Time to first token, ms: p50, p90, p99, mean.
    pub ttft: [f64; 4],
    /// Mean time between tokens of a request, ms.
    pub itl: [f64; 4],
    /// Whole answers, ms.
    pub e2e: [f64; 4],
    /// Prompt tokens found in a cache, share of all.
    pub hit_rate: f64,
    /// Predicted, share of all.
    pub predicted_rate: f64,
    /// Requests with TTFT and mean ITL within the bound, share of all.
    pub goodput: f64,
    /// Standard deviation over mean of the workers' busy time.
    pub load_cov: f64,
    /// Mean share of time that workers computed.
    pub utilisation: f64,
    /// Microseconds of wall time for each decision, lookup included.
    pub decision_us: f64,
}

/// Bounds that a good answer keeps.
#[derive(Debug, Clone, Copy)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Duration,
    /// Mean time between tokens.
    pub itl: Duration,
}

/// The summary of a run.
#[must_use]
pub fn summary(run: &Run, slo: Slo) -> Summary {
    let served = &run.served;
    let good = served.iter().filter(|served| served.ttft <= slo.ttft && served.itl_mean <= slo.itl).count();
    let tokens = |of: fn(&Served) -> u32| served.iter().map(|served| f64::from(of(served))).sum::<f64>();
    let busy: Vec<f64> = run.busy.iter().map(Duration::as_secs_f64).collect();
    let mean = busy.iter().sum::<f64>() / busy.len().max(1) as f64;
    let variance = busy.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / busy.len().max(1) as f64;
    let all = served.len().max(1) as f64;
    Summary {
        requests: served.len(),
        failed: run.failed,
        per_second: served.len() as f64 / run.lasted.as_secs_f64().max(1e-9),
        ttft: quantiles(served.iter().map(|served| served.ttft)),
        itl: quantiles(served.iter().filter(|served| served.answer > 1).map(|served| served.itl_mean)),
        e2e: quantiles(served.iter().map(|served| served.e2e)),
        hit_rate: tokens(|s| s.cached) / tokens(|s| s.prompt).max(1.0),
        predicted_rate: tokens(|s| s.predicted) / tokens(|s| s.prompt).max(1.0),
        goodput: good as f64 / all,
        load_cov: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 },
        utilisation: mean / run.lasted.as_secs_f64().max(1e-9),
        decision_us: run.deciding.as_secs_f64() * 1e6 / all,
    }
}

fn quantiles(values: impl Iterator<Item = Duration>) -> [f64; 4] {
    let mut values: Vec<f64> = values.map(|value| value.as_secs_f64() * 1e3).collect();
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let rank = ((values.len() as f64 * share).ceil() as usize).clamp(1, values.len().max(1)) - 1;
        values.get(rank).copied().unwrap_or_default()
    };
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    [at(0.5), at(0.9), at(0.99), mean]
}
