//! Turns the engine's numbers into metrics and load reports.
//!
//! Called by the engine thread after each step. Gauges are held by [`LoadGauges`], whose drop sets them to zero, so
//! that a dead engine reports nothing in flight. Never: waits.

use std::time::Duration;

use starling_engine::{EngineLoad, Measured};
use starling_ids::{Metric, WorkerId};
use starling_kv::tier::{TierLoad, TierStats};
use tokio::sync::watch;

use super::rates::{RateBook, StepFacts};
use crate::{report::LoadReport, route::below::TierRates};

/// What was measured so far.
#[derive(Debug)]
pub(crate) struct Meter {
    gauges: LoadGauges,
    rates: RateBook,
    last: EngineLoad,
    tiers: TierStats,
    /// Blocks of its lower tiers are read for other workers.
    lends: bool,
}

impl Meter {
    pub(crate) fn new(worker: &WorkerId, lends: bool) -> Self {
        let gauges = LoadGauges { worker: worker.index.to_string() };
        gauges.set(&EngineLoad::default());
        Self { gauges, rates: RateBook::default(), last: EngineLoad::default(), tiers: TierStats::default(), lends }
    }

    /// Enters the numbers of the lower tiers, which routers are told with the next report.
    pub(crate) fn observe_tiers(&mut self, stats: &TierStats) {
        if *stats == self.tiers {
            return;
        }
        let before = std::mem::replace(&mut self.tiers, *stats);
        for (reason, left) in [
            ("slower", stats.slower.saturating_sub(before.slower)),
            ("stalled", stats.stalled.saturating_sub(before.stalled)),
        ] {
            if left > 0 {
                let worker = self.gauges.worker.clone();
                metrics::counter!(Metric::KvTierLeft.name(), "worker" => worker, "reason" => reason).increment(left);
            }
        }
        self.gauges.count(Metric::KvTierAsked, stats.asked.saturating_sub(before.asked));
        self.gauges.count(Metric::KvTierLate, stats.late.saturating_sub(before.late));
        for (tier, now, before) in [("host", &stats.host, &before.host), ("disk", &stats.disk, &before.disk)] {
            let worker = || self.gauges.worker.clone();
            let blocks = metrics::gauge!(Metric::KvTierBlocks.name(), "worker" => worker(), "tier" => tier);
            // Below 2^53, so exact.
            blocks.set(now.blocks as f64);
            let count = |metric: Metric, of: fn(&TierLoad) -> u64| {
                let by = of(now).saturating_sub(of(before));
                if by > 0 {
                    metrics::counter!(metric.name(), "worker" => worker(), "tier" => tier).increment(by);
                }
            };
            count(Metric::KvTierStored, |load| load.stored);
            count(Metric::KvTierFetched, |load| load.fetched);
            count(Metric::KvTierLost, |load| load.evicted + load.refused + load.dropped);
            count(Metric::KvTierFaults, |load| load.unreadable + load.corrupt + load.unwritten);
        }
    }

    /// A request that came from another worker was in nobody's batch for so long.
    pub(crate) fn observe_move(&self, paused: Duration) {
        tracing::debug!(?paused, "a request goes on here");
        let pause = metrics::histogram!(Metric::WorkerMovePause.name(), "worker" => self.gauges.worker.clone());
        pause.record(paused.as_secs_f64());
    }

    /// Learns from a step that was computed in another process.
    pub(crate) fn learn(&mut self, step: &Measured) {
        let Measured { took, prefilled, sampled } = *step;
        self.rates.learn(StepFacts { took, prefilled, sampled });
    }

    /// Enters the load after a step (`took`) or after a change without one; `admitted` requests were taken so far.
    pub(crate) fn observe(
        &mut self,
        report: &watch::Sender<LoadReport>,
        (load, admitted): (EngineLoad, u64),
        took: Option<Duration>,
    ) {
        let sampled = load.tokens_generated.saturating_sub(self.last.tokens_generated);
        let prefilled = load.tokens_prefilled.saturating_sub(self.last.tokens_prefilled);
        let cached = load.tokens_cached.saturating_sub(self.last.tokens_cached);
        if let Some(took) = took {
            self.rates.learn(StepFacts { took, prefilled, sampled });
            let step = metrics::histogram!(Metric::WorkerStepSeconds.name(), "worker" => self.gauges.worker.clone());
            step.record(took.as_secs_f64());
        }
        let recomputed = load.tokens_recomputed.saturating_sub(self.last.tokens_recomputed);
        self.gauges.count(Metric::WorkerTokensRecomputed, recomputed);
        self.gauges.count(Metric::WorkerTokensGenerated, sampled);
        self.gauges.count(Metric::WorkerTokensPrefilled, prefilled);
        self.gauges.count(Metric::WorkerTokensCached, cached);
        if load != self.last {
            self.gauges.set(&load);
        }
        self.last = load;
        report.send_if_modified(|told| {
            let (rates, tiers) = (self.rates.rates(), tier_rates(&self.tiers, self.lends));
            let now = LoadReport { load, admitted, rates, turn_age_ms: 0, tiers, ..told.clone() };
            let much = now.differs_much(told);
            // Small changes are kept too, for the next heartbeat, but wake nobody.
            if much || now.load != told.load || now.admitted != told.admitted || now.tiers != told.tiers {
                *told = now;
            }
            much
        });
    }
}

/// What routers are told of the lower tiers; `None` when there are none.
fn tier_rates(stats: &TierStats, lends: bool) -> Option<TierRates> {
    let any = stats.host.blocks_max + stats.disk.blocks_max > 0;
    let (host_ms, disk_ms) = (stats.host.block_ms, stats.disk.block_ms);
    any.then_some(TierRates { host_ms, disk_ms, disk_wait_ms: stats.disk_wait_ms, lends })
}

/// The gauges of one engine, zero before and after it.
#[derive(Debug)]
struct LoadGauges {
    worker: String,
}

impl LoadGauges {
    fn set(&self, load: &EngineLoad) {
        for (metric, value) in [
            (Metric::WorkerRunning, load.running),
            (Metric::WorkerWaiting, load.waiting),
            (Metric::WorkerKvBlocksUsed, load.blocks_pinned),
            (Metric::WorkerKvBlocksCached, load.blocks_cached),
        ] {
            metrics::gauge!(metric.name(), "worker" => self.worker.clone()).set(f64::from(value));
        }
    }

    fn count(&self, metric: Metric, by: u64) {
        if by > 0 {
            metrics::counter!(metric.name(), "worker" => self.worker.clone()).increment(by);
        }
    }
}

impl Drop for LoadGauges {
    fn drop(&mut self) {
        self.set(&EngineLoad::default());
    }
}
