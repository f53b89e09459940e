//! The same traffic under several loads and policies.
//!
//! Called by `starling bench replay`. A load is a share of the capacity: what the cluster ends in a second under the
//! `dynamo` policy when all of the traffic waits from the beginning, so that no batch has an empty place that could be filled.

use std::time::Duration;

use serde::Serialize;
use starling_actors::route::policy::PolicyName;

use super::{
    cluster::{Cluster, SimError},
    report::{Slo, Summary, summary},
    setup::Setup,
    trace::{Asked, rate, seen_before, stretched},
};

/// At which pace requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// A share of the capacity, above 0.
    Load(f64),
    /// So many times as fast as the traffic says, above 0.
    Speedup(f64),
    /// The next when one ends, so many at once.
    Closed(usize),
}

/// One run of a sweep.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// Engines.
    pub workers: usize,
    /// Gateways.
    pub gateways: usize,
    /// How workers were chosen.
    pub policy: String,
    /// Share of the capacity, when the pace was given so.
    pub load: Option<f64>,
    /// Requests that came in a second; of a closed loop, that ended.
    pub rate: f64,
    /// What came of it.
    pub summary: Summary,
}

/// Traffic and a cluster for it.
#[derive(Debug)]
pub struct Sweep<'a> {
    /// Requests.
    pub asked: &'a [Asked],
    /// The machines; policy and pace are put in by each run.
    pub base: Setup,
    /// Bounds of a good answer.
    pub slo: Slo,
    seen: Vec<u32>,
}

impl<'a> Sweep<'a> {
    /// Of this traffic on this cluster.
    #[must_use]
    pub fn new(asked: &'a [Asked], base: Setup, slo: Slo) -> Self {
        Self { asked, base, slo, seen: seen_before(asked) }
    }

    /// Requests that the cluster ends in a second when its batches are as full as they can be: the pace between the first
    /// and the last fifth of all ends.
    ///
    /// # Errors
    /// As a run.
    pub fn capacity(&self, progress: impl FnMut(usize, Duration)) -> Result<f64, SimError> {
        let most = self.base.workers * self.base.sequences as usize;
        let setup = Setup { concurrency: Some(most), faults: super::setup::Faults::default(), ..self.base.clone() };
        let setup = setup.with_policy(PolicyName::Dynamo);
        let ended = Cluster::new(&setup, self.asked)?.run(progress)?.ended;
        let (from, to) = (ended.len() / 5, ended.len() * 4 / 5);
        let lasted = ended.get(to).zip(ended.get(from)).map_or(0.0, |(to, from)| (*to - *from).as_secs_f64());
        if lasted <= 0.0 {
            return Err(SimError::Setup("too few requests to measure the capacity: give --speedup".to_owned()));
        }
        Ok((to - from) as f64 / lasted)
    }

    /// One run.
    ///
    /// # Errors
    /// What the setup, the policy or an engine says.
    pub fn run(
        &self,
        policy: PolicyName,
        pace: Pace,
        capacity: f64,
        progress: impl FnMut(usize, Duration),
    ) -> Result<Point, SimError> {
        let factor = match pace {
            Pace::Load(load) => rate(self.asked) / (load * capacity),
            Pace::Speedup(speedup) => 1.0 / speedup,
            Pace::Closed(_) => 1.0,
        };
        let paced = stretched(self.asked, factor);
        let concurrency = if let Pace::Closed(most) = pace { Some(most) } else { None };
        let setup = Setup { concurrency, ..self.base.clone() }.with_policy(policy);
        let run = Cluster::new(&setup, &paced)?.run(progress)?;
        let summary = summary(&run, &setup, &self.seen, self.slo);
        Ok(Point {
            workers: setup.workers,
            gateways: setup.gateways,
            policy: policy.as_str().to_owned(),
            load: if let Pace::Load(load) = pace { Some(load) } else { None },
            rate: if concurrency.is_some() { summary.per_second } else { rate(&paced) },
            summary,
        })
    }
}
