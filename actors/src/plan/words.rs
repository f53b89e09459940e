//! What a planner says: its decisions with their reasons, and the figures behind them. Pure.
//!
//! They cross nodes as MessagePack and are printed as a table or JSON; fields are only ever appended.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::WorkerId;

use super::{
    fleet::{Fleet, Sides},
    need::{Need, Shape},
    window::Observation,
};
use crate::route::split::Role;

/// What should be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Nothing.
    Hold,
    /// A running worker gets another role.
    Switch {
        /// Who.
        worker: WorkerId,
        /// Its role now.
        from: Role,
        /// The one that it should have.
        to: Role,
    },
    /// So many workers should run, by role; those that are drained are not among them.
    Scale {
        /// How many should run.
        wanted: Fleet,
        /// Workers that were drained for it and can be stopped.
        remove: Vec<WorkerId>,
    },
    /// A worker takes nothing new, and what runs there goes on elsewhere: afterwards it can be stopped.
    Drain {
        /// Who.
        worker: WorkerId,
        /// Its role.
        role: Role,
    },
}

impl Action {
    /// A fixed word for labels.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Switch { .. } => "switch",
            Self::Scale { .. } => "scale",
            Self::Drain { .. } => "drain",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hold => f.write_str("hold"),
            Self::Switch { worker, from, to } => write!(f, "switch {worker} from {from} to {to}"),
            Self::Scale { wanted, .. } => write!(f, "want {wanted}"),
            Self::Drain { worker, role } => write!(f, "drain {worker} ({role})"),
        }
    }
}

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for role in [Role::Both, Role::Prefill, Role::Decode] {
            let count = self.count(role);
            if count > 0 {
                write!(f, "{}{count} {role}", if first { "" } else { ", " })?;
                first = false;
            }
        }
        if first { f.write_str("none") } else { Ok(()) }
    }
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// What should be done.
    pub action: Action,
    /// Why, in words.
    pub reason: String,
}

impl Decision {
    pub(super) fn hold(reason: impl Into<String>) -> Self {
        Self { action: Action::Hold, reason: reason.into() }
    }
}

/// What was seen in an interval, as far as people want to know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Requests a second.
    pub rate: f64,
    /// Requests a second that are expected next.
    pub forecast: f64,
    /// Requests that wait for a worker with room.
    pub waiting: u32,
    /// Tokens of a usual prompt.
    pub prompt_tokens: f64,
    /// Tokens of a usual answer.
    pub answer_tokens: f64,
    /// Share of a prompt's blocks that are cached where it goes, 0 to 1.
    pub cached: f64,
    /// Half of the first tokens came within so many milliseconds; `None` when none came.
    pub ttft_p50_ms: Option<f64>,
    /// Nearly all of them.
    pub ttft_p99_ms: Option<f64>,
    /// Half of the answers had so many milliseconds between tokens.
    pub itl_p50_ms: Option<f64>,
    /// Nearly all of them.
    pub itl_p99_ms: Option<f64>,
    /// Nearly all that waited for a worker did so for less than these milliseconds.
    pub wait_p99_ms: Option<f64>,
    /// Share of the workers' time that prompts took, 0 to about 1.
    pub prefill_use: f64,
    /// Share of the batch that keeps the target that answers took, 0 to about 1.
    pub decode_use: f64,
    /// Share of KV blocks held by live sequences, 0 to 1.
    pub kv_use: f64,
}

impl Figures {
    pub(super) fn of(observation: &Observation, shape: &Shape, forecast: f64, need: &Need) -> Self {
        let seen = &observation.seen;
        Self {
            rate: rate(observation),
            forecast,
            waiting: seen.waiting,
            prompt_tokens: shape.prompt,
            answer_tokens: shape.answer,
            cached: shape.cached,
            ttft_p50_ms: seen.ttft.quantile(0.5),
            ttft_p99_ms: seen.ttft.quantile(0.99),
            itl_p50_ms: seen.itl.quantile(0.5),
            itl_p99_ms: seen.itl.quantile(0.99),
            wait_p99_ms: seen.waits.quantile(0.99),
            prefill_use: need.prefill_use,
            decode_use: need.decode_use,
            kv_use: need.kv_use,
        }
    }
}

/// Requests a second in an interval.
pub(super) fn rate(observation: &Observation) -> f64 {
    observation.seen.arrivals as f64 / observation.window.as_secs_f64()
}

/// What one look came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outlook {
    /// What follows.
    pub decision: Decision,
    /// The workers that are there and sound.
    pub now: Fleet,
    /// Those that should be there.
    pub wanted: Fleet,
    /// Workers that the load takes.
    pub need: Sides,
    /// What is needed for each worker that is there; above 1 they do not suffice.
    pub pressure: f64,
    /// What it was seen by.
    pub figures: Figures,
    /// Nothing is done for so long after a change, if nothing else is against it; zero when something may be done.
    pub cools: Duration,
}
