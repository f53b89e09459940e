//! Why a request went where it went, and what came of it.
//!
//! Written by [`super::desk`]; read when somebody asks (`starling why`, or a request that wants its receipt). They cross nodes
//! as MessagePack. Bounds: the last [`RECEIPTS_MAX`] decisions of a desk, each with at most [`CANDIDATES_MAX`] candidates. A
//! decision is written in the room of the one that it pushes out, so a full ring allocates nothing.

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, RequestId, WorkerId};

use super::{below::TierRates, desk::Ticket};
use crate::generate::KvSource;

/// Decisions remembered.
pub const RECEIPTS_MAX: usize = 1_024;

/// Candidates written down per decision, the chosen one always among them.
pub const CANDIDATES_MAX: usize = 8;

/// One candidate as it was judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Prefix blocks expected in its cache.
    pub hit_blocks: u32,
    /// Sequences in flight there.
    pub in_flight: u32,
    /// Prompt tokens queued there.
    pub queued_tokens: u64,
    /// Its cost, in the unit of the policy (milliseconds for `starling`).
    pub cost: f64,
    /// The cost by its terms.
    pub terms: Vec<(String, f64)>,
    /// Time to the first token there as it was predicted, milliseconds, whatever the policy looks at.
    #[serde(default)]
    pub ttft_ms: f64,
    /// What it has on its slower tiers; `None` when there is nothing of the prompt.
    #[serde(default)]
    pub lower: Option<Lower>,
}

/// What a candidate has of the prompt on its slower tiers, and what was assumed of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Lower {
    /// Blocks in the host's memory that follow those on the device.
    pub host_blocks: u32,
    /// Blocks on disk that follow.
    pub disk_blocks: u32,
    /// Those of them that it is expected to load.
    pub loaded: u32,
    /// Their speed by its own report.
    pub rates: TierRates,
}

/// What came of a decision, as the client of the worker saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Prompt tokens taken from the cache.
    pub cached_tokens: u32,
    /// Tokens in the answer, all choices together.
    pub answer_tokens: u32,
    /// From the question to its first token, milliseconds.
    pub ttft_ms: f64,
    /// From the question to its end, milliseconds.
    pub total_ms: f64,
    /// How often it had to go on elsewhere.
    pub resumed: u32,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// For which request.
    pub request: RequestId,
    /// By which policy.
    pub policy: String,
    /// When, since the shard's node began to decide.
    pub at: Duration,
    /// Workers of the model.
    pub workers: u32,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// The cheapest candidates, cheapest first.
    pub candidates: Vec<Judged>,
    /// Index of the chosen one in `candidates`.
    pub chosen: usize,
    /// How many were as good as the cheapest.
    pub near_equals: usize,
    /// What came of it; `None` while it runs, or when it was refused or lost.
    pub outcome: Option<Outcome>,
    /// Workers passed over because they keep failing, each with `open` or `half-open`.
    #[serde(default)]
    pub cut_off: Vec<(WorkerId, String)>,
    /// How long the request waited for a worker with room, milliseconds.
    #[serde(default)]
    pub waited_ms: f64,
    /// Who answers and where its first blocks come from, when that is another worker.
    #[serde(default)]
    pub source: Option<(WorkerId, KvSource)>,
    /// Milliseconds that another candidate would have been faster, by what was known afterwards. `None` unless the decision
    /// was one of those that are looked into.
    #[serde(default)]
    pub regret_ms: Option<f64>,
    /// It was asked to go on elsewhere: where that would be best, and how long a step took here and would take there, milliseconds.
    #[serde(default)]
    pub shifted: Option<(WorkerId, f64, f64)>,
    /// What it waited for, in a few words; empty when it did not wait.
    #[serde(default)]
    pub waited_for: String,
}

impl Receipt {
    /// With so many candidates at most, the chosen one among them.
    #[must_use]
    pub fn brief(mut self, candidates: usize) -> Self {
        if self.candidates.len() > candidates.max(1) && self.chosen < self.candidates.len() {
            let chosen = self.candidates.remove(self.chosen);
            self.candidates.truncate(candidates.max(1) - 1);
            self.chosen = self.chosen.min(self.candidates.len());
            self.candidates.insert(self.chosen, chosen);
        }
        self
    }
}

/// A candidate in the ring.
#[derive(Debug)]
struct Row {
    worker: WorkerId,
    incarnation: Incarnation,
    hit_blocks: u32,
    in_flight: u32,
    queued_tokens: u64,
    cost: f64,
    ttft_ms: f64,
    lower: Option<Lower>,
    /// Where its terms end in [`Entry::terms`].
    terms_end: usize,
}

/// What is known of a candidate when the decision is taken.
#[derive(Debug, Clone)]
pub(super) struct Seen<'a> {
    pub(super) life: &'a (WorkerId, Incarnation),
    pub(super) hit_blocks: u32,
    pub(super) in_flight: u32,
    pub(super) queued_tokens: u64,
    pub(super) cost: f64,
    pub(super) ttft_ms: f64,
    pub(super) lower: Option<Lower>,
}

/// What is known of the decision as a whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) request: RequestId,
    pub(super) policy: &'static str,
    pub(super) at: Duration,
    pub(super) workers: u32,
    pub(super) prompt_tokens: u32,
    pub(super) near_equals: usize,
    pub(super) chosen: usize,
}

/// A decision in the ring.
#[derive(Debug)]
pub(super) struct Entry {
    ticket: Ticket,
    head: Head,
    rows: Vec<Row>,
    terms: Vec<(&'static str, f64)>,
    outcome: Option<Outcome>,
    regret_ms: Option<f64>,
    cut_off: Vec<(WorkerId, &'static str)>,
    waited_ms: f64,
    waited_for: &'static str,
    source: Option<(WorkerId, KvSource)>,
    shifted: Option<(WorkerId, f64, f64)>,
}

impl Entry {
    /// A worker was passed over because it keeps failing.
    pub(super) fn cut_off(&mut self, worker: &WorkerId, state: &'static str) {
        self.cut_off.push((worker.clone(), state));
    }

    /// Adds a candidate; `terms` calls back for each term of its cost.
    pub(super) fn candidate(&mut self, seen: Seen<'_>, terms: impl FnOnce(&mut dyn FnMut(&'static str, f64))) {
        let list = &mut self.terms;
        terms(&mut |name, value| list.push((name, value)));
        let Seen { life: (worker, incarnation), hit_blocks, in_flight, queued_tokens, cost, ttft_ms, lower } = seen;
        let (worker, incarnation, terms_end) = (worker.clone(), *incarnation, self.terms.len());
        self.rows.push(Row {
            worker,
            incarnation,
            hit_blocks,
            in_flight,
            queued_tokens,
            cost,
            ttft_ms,
            lower,
            terms_end,
        });
    }

    fn told(&self) -> Receipt {
        let mut begin = 0;
        let judged = |row: &Row| {
            let terms = self.terms.get(begin..row.terms_end).unwrap_or_default().iter();
            begin = row.terms_end;
            Judged {
                worker: row.worker.clone(),
                incarnation: row.incarnation,
                hit_blocks: row.hit_blocks,
                in_flight: row.in_flight,
                queued_tokens: row.queued_tokens,
                cost: row.cost,
                terms: terms.map(|(name, value)| ((*name).to_owned(), *value)).collect(),
                ttft_ms: row.ttft_ms,
                lower: row.lower,
            }
        };
        Receipt {
            candidates: self.rows.iter().map(judged).collect(),
            request: self.head.request,
            policy: self.head.policy.to_owned(),
            at: self.head.at,
            workers: self.head.workers,
            prompt_tokens: self.head.prompt_tokens,
            chosen: self.head.chosen,
            near_equals: self.head.near_equals,
            outcome: self.outcome,
            regret_ms: self.regret_ms,
            cut_off: self.cut_off.iter().map(|(worker, state)| (worker.clone(), (*state).to_owned())).collect(),
            waited_ms: self.waited_ms,
            waited_for: self.waited_for.to_owned(),
            source: self.source.clone(),
            shifted: self.shifted.clone(),
        }
    }
}

/// The last decisions.
#[derive(Debug, Default)]
pub struct Receipts {
    /// Tickets rise, so it is sorted by them.
    ring: VecDeque<Entry>,
}

impl Receipts {
    /// A new decision without candidates yet, in the room of the oldest one when the ring is full.
    pub(super) fn begin(&mut self, ticket: Ticket, head: Head) -> &mut Entry {
        let oldest = if self.ring.len() >= RECEIPTS_MAX { self.ring.pop_front() } else { None };
        let room = oldest.map(|entry| (entry.rows, entry.terms, entry.cut_off));
        let (mut rows, mut terms, mut cut_off) = room.unwrap_or_default();
        rows.clear();
        terms.clear();
        cut_off.clear();
        let (outcome, regret_ms, waited_ms, source) = (None, None, 0.0, None);
        let (shifted, waited_for) = (None, "");
        let entry =
            Entry { ticket, head, rows, terms, outcome, regret_ms, cut_off, waited_ms, waited_for, source, shifted };
        self.ring.push_back(entry);
        let last = self.ring.len() - 1;
        &mut self.ring[last]
    }

    /// Adds what came of a decision, if it is still remembered.
    pub(super) fn ended(&mut self, ticket: Ticket, outcome: Outcome, regret_ms: Option<f64>) {
        if let Some(at) = self.place(ticket) {
            (self.ring[at].outcome, self.ring[at].regret_ms) = (Some(outcome), regret_ms);
        }
    }

    /// One decision.
    #[must_use]
    pub fn get(&self, ticket: Ticket) -> Option<Receipt> {
        self.place(ticket).map(|at| self.ring[at].told())
    }

    /// Adds how long a request waited before its decision, and what for.
    pub(super) fn waited(&mut self, ticket: Ticket, time: Duration, what_for: &'static str) {
        if let Some(at) = self.place(ticket) {
            self.ring[at].waited_for = what_for;
            self.ring[at].waited_ms = time.as_secs_f64() * 1e3;
        }
    }

    /// Adds who answers and where its first blocks come from, when that is another worker.
    pub(super) fn fed(&mut self, ticket: Ticket, worker: WorkerId, source: KvSource) {
        if let Some(at) = self.place(ticket) {
            self.ring[at].source = Some((worker, source));
        }
    }

    /// Adds that a request was asked to go on elsewhere.
    pub(super) fn shifted(&mut self, ticket: Ticket, to: WorkerId, (here_ms, there_ms): (f64, f64)) {
        if let Some(at) = self.place(ticket) {
            self.ring[at].shifted = Some((to, here_ms, there_ms));
        }
    }

    /// The decisions about one request, oldest first.
    #[must_use]
    pub fn of(&self, request: RequestId) -> Vec<Receipt> {
        self.ring.iter().filter(|entry| entry.head.request == request).map(Entry::told).collect()
    }

    /// The newest decisions, newest first, each with its chosen candidate alone.
    pub fn newest(&self) -> impl Iterator<Item = Receipt> + '_ {
        self.ring.iter().rev().map(|entry| entry.told().brief(1))
    }

    fn place(&self, ticket: Ticket) -> Option<usize> {
        self.ring.binary_search_by(|known| known.ticket.cmp(&ticket)).ok()
    }
}
