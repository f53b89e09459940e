//! What a planner said last, for whoever wants to see it.
//!
//! Written by the actor, read by its node's answers. Bounds: [`PAST_MAX`] decisions a model.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use starling_ids::{ModelId, NodeId};

use crate::plan::{Action, Mode, Outlook, Rules};

/// Decisions remembered of each model.
pub const PAST_MAX: usize = 16;

/// One model as its leader sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanRow {
    /// Which.
    pub model: String,
    /// The node that plans for it.
    pub leader: String,
    /// What becomes of decisions.
    pub mode: Mode,
    /// For how long it has led, seconds.
    pub leads_secs: u64,
    /// How long ago it looked last, seconds; `None` before the first whole interval.
    pub looked_secs: Option<u64>,
    /// Between two looks, seconds.
    pub interval_secs: u64,
    /// Time to the first token to keep, milliseconds.
    pub ttft_ms: f64,
    /// Time between two tokens to keep, milliseconds.
    pub itl_ms: f64,
    /// Workers of each side at least.
    pub min: u32,
    /// Workers in all at most.
    pub max: u32,
    /// How the next interval is guessed.
    pub predictor: String,
    /// There is something that starts and stops workers.
    pub hook: bool,
    /// What it saw and decided last.
    pub outlook: Option<Outlook>,
    /// Its last decisions to do something, newest first.
    pub past: Vec<PastRow>,
}

/// One decision to do something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastRow {
    /// How long ago it was taken, seconds.
    pub ago_secs: u64,
    /// What, in words.
    pub action: String,
    /// Why, in words.
    pub reason: String,
    /// `advised`, `begun`, `done`, or `failed: ` and why.
    pub outcome: String,
}

#[derive(Debug)]
struct Past {
    at: Duration,
    action: Action,
    reason: String,
    outcome: String,
}

#[derive(Debug)]
struct Entry {
    since: Duration,
    looked: Option<(Duration, Outlook)>,
    /// Newest first.
    past: VecDeque<Past>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Board {
    entries: BTreeMap<ModelId, Entry>,
    orders: u64,
}

impl Board {
    /// This node leads a model from now on.
    pub(super) fn lead(&mut self, model: &ModelId, now: Duration) {
        self.entries.insert(model.clone(), Entry { since: now, looked: None, past: VecDeque::new() });
    }

    /// It does not any more.
    pub(super) fn forget(&mut self, model: &ModelId) {
        self.entries.remove(model);
    }

    /// A number that no other order of this life has.
    pub(super) fn number(&mut self) -> u64 {
        self.orders += 1;
        self.orders
    }

    /// Takes what a look came to. True when it says to do something that was not said before.
    pub(super) fn note(&mut self, model: &ModelId, outlook: &Outlook, carried_out: bool, now: Duration) -> bool {
        let Some(entry) = self.entries.get_mut(model) else { return false };
        let before = entry.looked.replace((now, outlook.clone()));
        let action = &outlook.decision.action;
        let said = before.is_some_and(|(_, before)| before.decision.action == *action);
        if *action == Action::Hold || (said && !carried_out) {
            return false;
        }
        let outcome = if carried_out { "begun" } else { "advised" }.to_owned();
        let reason = outlook.decision.reason.clone();
        entry.past.push_front(Past { at: now, action: action.clone(), reason, outcome });
        entry.past.truncate(PAST_MAX);
        true
    }

    /// What was begun last was done, or not.
    pub(super) fn ended(&mut self, model: &ModelId, result: Result<(), String>) {
        let newest = self.entries.get_mut(model).and_then(|entry| entry.past.front_mut());
        if let Some(past) = newest.filter(|past| past.outcome == "begun") {
            past.outcome = match result {
                Ok(()) => "done".to_owned(),
                Err(error) => format!("failed: {error}"),
            };
        }
    }

    /// All of it.
    pub(super) fn rows(&self, leader: &NodeId, rules: &Rules, now: Duration) -> Vec<PlanRow> {
        let ago = |at: Duration| now.saturating_sub(at).as_secs();
        let past = |past: &Past| PastRow {
            ago_secs: ago(past.at),
            action: past.action.to_string(),
            reason: past.reason.clone(),
            outcome: past.outcome.clone(),
        };
        let row = |(model, entry): (&ModelId, &Entry)| PlanRow {
            model: model.to_string(),
            leader: leader.to_string(),
            mode: rules.mode,
            leads_secs: ago(entry.since),
            looked_secs: entry.looked.as_ref().map(|(at, _)| ago(*at)),
            interval_secs: rules.interval.as_secs(),
            ttft_ms: rules.ttft_ms,
            itl_ms: rules.itl_ms,
            min: rules.min,
            max: rules.max,
            predictor: rules.predictor.to_string(),
            hook: rules.scales,
            outlook: entry.looked.as_ref().map(|(_, outlook)| outlook.clone()),
            past: entry.past.iter().map(past).collect(),
        };
        self.entries.iter().map(row).collect()
    }
}
