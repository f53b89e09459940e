//! Counters of routers and workers, made into what happened in one interval.
//!
//! Called by the actor once an interval and model. Pure. Bounds: one state a router and one a worker, forgotten with them.

use std::{collections::BTreeMap, time::Duration};

use starling_ids::{Incarnation, NodeId, WorkerId};

use super::seen::Seen;
use crate::route::{rates::Rates, split::Role};

/// One worker as its last report and the directory have it.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerSeen {
    /// Who.
    pub id: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// What it is for.
    pub role: Role,
    /// It is heard and works.
    pub sound: bool,
    /// Its process is there for it alone: it can be stopped without taking anything else along.
    pub removable: bool,
    /// How fast it is, once it knows.
    pub rates: Option<Rates>,
    /// Sequences that it decodes together.
    pub sequences_max: u32,
    /// Tokens that one of its steps computes, prompts and answers together.
    pub step_tokens: u32,
    /// KV blocks in its pool.
    pub blocks: u32,
    /// Those of them that live sequences hold.
    pub blocks_pinned: u32,
    /// Sequences in its batch.
    pub running: u32,
    /// Sequences that wait behind them.
    pub waiting: u32,
    /// Prompt tokens not computed yet.
    pub queued_tokens: u64,
    /// Prompt tokens computed: since its engine began in a [`Raw`], in the interval in an [`Observation`].
    pub prefilled: u64,
    /// Tokens sampled, likewise.
    pub generated: u64,
}

/// What is known at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Raw {
    /// What each router has counted; `None` of one that did not answer.
    pub routers: BTreeMap<NodeId, Option<Seen>>,
    /// Every worker of the model that takes requests.
    pub workers: Vec<WorkerSeen>,
    /// Tokens in a KV block, at least 1.
    pub block_tokens: u32,
}

/// What happened in one interval, and how things stand at its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// How long it was, above zero.
    pub window: Duration,
    /// What all routers saw, together.
    pub seen: Seen,
    /// Routers of which it is not known, in words.
    pub missing: Vec<String>,
    /// The workers.
    pub workers: Vec<WorkerSeen>,
    /// Tokens in a KV block, at least 1.
    pub block_tokens: u32,
}

/// What was known at the moment before.
#[derive(Debug, Default)]
pub struct Baseline {
    at: Option<Duration>,
    routers: BTreeMap<NodeId, Seen>,
    workers: BTreeMap<WorkerId, (Incarnation, u64, u64)>,
}

impl Baseline {
    /// Takes a moment; what happened since the one before it. `None` for the first one, and for one at the same time.
    pub fn take(&mut self, raw: Raw, now: Duration) -> Option<Observation> {
        let before = self.at.replace(now);
        let mut seen = Seen::default();
        let mut missing = Vec::new();
        for (router, told) in &raw.routers {
            match (told, self.routers.get(router)) {
                (None, _) => missing.push(format!("router {router} did not answer")),
                // Of one that is new it is not known how long it has counted.
                (Some(_), None) => missing.push(format!("router {router} is new here")),
                (Some(told), Some(before)) => seen.merge(&told.since(before)),
            }
        }
        // Of one that did not answer, the next answer spans more than one interval: it begins anew.
        self.routers.clear();
        self.routers.extend(raw.routers.into_iter().filter_map(|(router, told)| Some((router, told?))));
        let workers: Vec<WorkerSeen> = raw.workers.into_iter().map(|worker| self.since(worker)).collect();
        self.workers.retain(|id, _| workers.iter().any(|worker| worker.id == *id));
        let window = before.and_then(|before| now.checked_sub(before)).filter(|window| !window.is_zero())?;
        Some(Observation { window, seen, missing, workers, block_tokens: raw.block_tokens.max(1) })
    }

    /// A worker with its counters of the interval. An engine that began anew counts from zero; of a worker that is new, the
    /// interval is not known.
    fn since(&mut self, worker: WorkerSeen) -> WorkerSeen {
        let now = (worker.incarnation, worker.prefilled, worker.generated);
        let (prefilled, generated) = match self.workers.insert(worker.id.clone(), now) {
            Some((life, prefilled, generated)) if life == worker.incarnation => {
                let more = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
                (more(worker.prefilled, prefilled), more(worker.generated, generated))
            }
            _ => (0, 0),
        };
        WorkerSeen { prefilled, generated, ..worker }
    }
}
