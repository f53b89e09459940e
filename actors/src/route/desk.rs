//! One model's decisions: choose a worker and count the request there in a single step.
//!
//! Called by the router shard, which holds a [`Desk`] behind a lock for some microseconds per request, and by the
//! cluster simulator. Choice and count are one step, so requests that arrive together see each other. A reservation
//! is counted until [`Desk::release`]; a worker that left or began a new life takes its own with it, and the late end of a
//! request there changes nothing. Never: I/O, a clock. Bounds: one entry per reservation held.

mod book;
mod room;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use starling_ids::{Incarnation, RequestId, WorkerId};
use starling_kv::index::{Holder, Overlap};

pub use room::{Hits, Takers};

pub use super::{
    ask::{Ask, Decision, Ticket},
    gate::COOLING,
};
use super::{
    below::Below,
    breaker::State,
    columns::Lanes,
    fleet::{Fleet, Places, Slot, Standing},
    gate::Gate,
    overlay::Overlay,
    policy::{Choice, Cost, Policy, Question, Scratch, mix},
    queue::rooms::Rooms,
    rebalance::Balance,
    receipt::{CANDIDATES_MAX, Head, Lower, Outcome, Receipt, Receipts, Seen},
    regret::{Oracle, Regret, SHARE, Work},
    split,
    wishes::Labels,
};
use book::{Held, Recent};

/// Answer tokens assumed before any answer has ended.
const ANSWER_PRIOR: f64 = 128.0;
/// Weight of one ended answer in the running mean.
const ANSWER_PACE: f64 = 0.02;

/// See the module.
#[derive(Debug)]
pub struct Desk {
    fleet: Fleet,
    policy: Policy,
    /// It goes by time.
    by_ms: bool,
    held: HashMap<Ticket, Held>,
    /// Oldest first, by slot.
    recent: Vec<VecDeque<Recent>>,
    hits: Vec<u32>,
    lanes: Lanes,
    found: Vec<(Slot, u32)>,
    /// What a decision under way finds on slower tiers, by slot; empty when there is nothing.
    below: Vec<Below>,
    overlay: Overlay,
    /// What the overlay adds to the hits of a decision under way: the slot, and what it has by its worker's own word.
    expected: Vec<(Slot, u32)>,
    eligible: Vec<Slot>,
    scratch: Scratch,
    /// Candidates of one receipt.
    shown: Vec<(Slot, f64)>,
    receipts: Receipts,
    gate: Gate,
    oracle: Oracle,
    balance: Balance,
    decisions: u64,
    seed: u64,
    answer_mean: f64,
}

impl Desk {
    /// A desk without workers. Desks of different seeds break first ties differently.
    #[must_use]
    pub fn new(policy: Policy, seed: u64) -> Self {
        let by_ms = policy.scorers.iter().any(|(_, scorer)| scorer.name() == "ms");
        Self {
            fleet: Fleet::default(),
            policy,
            by_ms,
            held: HashMap::new(),
            recent: Vec::new(),
            hits: Vec::new(),
            lanes: Lanes::default(),
            found: Vec::new(),
            below: Vec::new(),
            overlay: Overlay::default(),
            expected: Vec::new(),
            eligible: Vec::new(),
            scratch: Scratch::default(),
            shown: Vec::new(),
            receipts: Receipts::default(),
            gate: Gate::default(),
            oracle: Oracle::default(),
            balance: Balance::default(),
            decisions: 0,
            seed,
            answer_mean: ANSWER_PRIOR,
        }
    }

    /// Decides nothing while every worker is taken by these bounds.
    #[must_use]
    pub fn with_rooms(mut self, rooms: Rooms) -> Self {
        self.fleet.hold_back(rooms, 1);
        self
    }

    /// How long an answer of at most so many tokens usually is.
    #[must_use]
    pub fn answer_expected(&self, tokens_max: u32) -> f64 {
        self.answer_mean.min(f64::from(tokens_max.max(1)))
    }

    /// What it knows of the workers.
    #[must_use]
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Reservations held.
    #[must_use]
    pub fn reservations(&self) -> usize {
        self.held.len()
    }

    /// A worker is there, in this life, with these bounds.
    pub fn seat(&mut self, worker: &WorkerId, incarnation: Incarnation, places: Places, standing: Standing) -> Slot {
        let before = self.fleet.slot(worker).and_then(|slot| self.fleet.life(slot)).map(|(_, life)| *life);
        if before.is_some_and(|life| life != incarnation) {
            self.vacate(worker);
        }
        let known = before == Some(incarnation);
        if !known {
            self.lanes.clear();
        }
        let slot = self.fleet.seat(worker, incarnation, places);
        self.fleet.standing[slot] = standing;
        if self.recent.len() < self.fleet.width() {
            self.recent.resize_with(self.fleet.width(), VecDeque::new);
            self.hits.resize(self.fleet.width(), 0);
            self.gate.widen(self.fleet.width());
        }
        slot
    }

    /// Gives a worker its labels; without them it has none.
    pub fn set_labels(&mut self, worker: &WorkerId, labels: &Arc<Labels>) {
        if let Some(slot) = self.fleet.slot(worker) {
            self.fleet.set_labels(slot, labels);
        }
    }

    /// Whether a worker may be chosen, as the directory and its silence say.
    pub fn set_standing(&mut self, worker: &WorkerId, standing: Standing) {
        if let Some(slot) = self.fleet.slot(worker) {
            self.fleet.standing[slot] = standing;
        }
    }

    /// Chooses a worker and counts the request there. `hits` are the workers that hold leading blocks of the prompt.
    /// `None` when no worker is left, or all are taken.
    pub fn decide(&mut self, ask: &Ask<'_>, hits: &[(Slot, u32)], now: Duration) -> Option<Decision> {
        let ask = Ask { answer_expected: self.answer_expected(ask.answer_tokens_max), ..*ask };
        self.gate.learn(&ask, &mut self.fleet, now);
        self.note_hits(&ask, hits);
        let draw = mix(self.seed, self.decisions);
        self.list(&ask, draw, now);
        let question = Question { ask: &ask, fleet: &self.fleet, hits: &self.hits, below: &self.below, draw };
        let choice = self.policy.choose(&question, &self.eligible, &mut self.scratch);
        let joint = choice.map(|choice| self.join(&ask, choice, draw));
        let decision = choice.zip(joint).and_then(|(choice, (slot, source))| {
            self.write_down(&ask, choice, source.is_some(), (now, draw));
            self.reserve(&ask, Choice { slot, ..choice }, source, now)
        });
        if let Some(Decision { ticket, worker, source: Some(source), .. }) = &decision {
            self.receipts.fed(*ticket, worker.clone(), source.clone());
        }
        self.forget_hits(hits);
        decision
    }

    /// For a decision: who holds how much of the prompt, and will.
    fn note_hits(&mut self, ask: &Ask<'_>, hits: &[(Slot, u32)]) {
        for (slot, depth) in hits {
            if let Some(hit) = self.hits.get_mut(*slot) {
                // Ranks of one worker: the best of them counts.
                *hit = (*hit).max(*depth);
            }
        }
        if self.by_ms {
            self.foresee(ask);
        }
    }

    fn forget_hits(&mut self, hits: &[(Slot, u32)]) {
        if hits.len() * 4 > self.hits.len() {
            self.hits.fill(0);
            return self.expected.clear();
        }
        for (slot, _) in hits.iter().chain(&self.expected) {
            if let Some(hit) = self.hits.get_mut(*slot) {
                *hit = 0;
            }
        }
        self.expected.clear();
    }

    /// Adds to the hits what requests that run will leave behind where they run.
    fn foresee(&mut self, ask: &Ask<'_>) {
        let Self { overlay, hits, expected, fleet, .. } = self;
        let step = |slot: Slot| fleet.places[slot].step_tokens.div_ceil(ask.block_tokens.max(1)) as usize;
        overlay.find(ask.hashes, step, |slot, depth| {
            if let Some(hit) = hits.get_mut(slot)
                && *hit < depth
            {
                expected.push((slot, std::mem::replace(hit, depth)));
            }
        });
    }

    /// Who answers, and where the first blocks come from: only blocks that are there can come. What the chosen one is about
    /// to compute is as good as there for itself alone.
    fn join(&mut self, ask: &Ask<'_>, choice: Choice, draw: u64) -> (Slot, Option<split::Source>) {
        let mut waits = false;
        for (slot, told) in self.expected.iter_mut().rev() {
            if *slot == choice.slot {
                waits = true;
            } else {
                std::mem::swap(told, &mut self.hits[*slot]);
            }
        }
        let question = Question { ask, fleet: &self.fleet, hits: &self.hits, below: &self.below, draw };
        let joint = split::join(&question, &self.eligible, choice.slot, self.by_ms && !waits);
        for (slot, told) in &mut self.expected {
            if *slot != choice.slot {
                std::mem::swap(told, &mut self.hits[*slot]);
            }
        }
        joint
    }

    /// Slots that may be chosen now, into `eligible`, as far as they take the request.
    fn list(&mut self, ask: &Ask<'_>, draw: u64, now: Duration) {
        self.list_allowed(ask, draw, now);
        let Self { fleet, hits, gate, eligible, .. } = self;
        gate.keep_open(ask, (fleet, hits), now, eligible);
        let decodes = |slot: &Slot| fleet.places[*slot].role.decodes();
        if fleet.has_specialists() && eligible.iter().any(decodes) {
            eligible.retain(decodes);
        }
    }

    /// Slots that may have the request, with room for it or without, into `eligible`: doubtful, cooling and cut-off ones only when
    /// none of the others may have it at all.
    fn list_allowed(&mut self, ask: &Ask<'_>, draw: u64, now: Duration) {
        let Self { fleet, hits, below, policy, gate, eligible, .. } = self;
        let question = Question { ask, fleet, hits, below, draw };
        for last_resort in [false, true] {
            gate.list(fleet, now, last_resort, eligible);
            policy.allow(&question, eligible);
            if !eligible.is_empty() {
                break;
            }
        }
    }

    /// As [`Self::decide`], with the answer of the prefix index as it is: `who` tells whose an overlap is, and is asked once for each
    /// holder, not for each request.
    pub fn decide_over(
        &mut self,
        ask: &Ask<'_>,
        overlaps: &[Overlap],
        who: impl Fn(Holder) -> Option<WorkerId>,
        now: Duration,
    ) -> Option<Decision> {
        let found = self.found(overlaps, who);
        let decision = self.decide(ask, &found, now);
        self.found = found;
        self.below.clear();
        decision
    }

    /// Slots of the holders, and what those have on lower tiers into `below`. The caller puts the list back and clears `below`, so that
    /// the next decision allocates nothing.
    fn found(&mut self, overlaps: &[Overlap], who: impl Fn(Holder) -> Option<WorkerId>) -> Vec<(Slot, u32)> {
        let mut found = std::mem::take(&mut self.found);
        found.clear();
        for overlap in overlaps {
            let lower = overlap.host | overlap.disk > 0;
            if overlap.device == 0 && !lower {
                continue;
            }
            let Some(slot) = self.lanes.slot(overlap.holder, &who, &self.fleet) else { continue };
            found.push((slot, overlap.device));
            if lower && self.fleet.heard[slot].tiers.is_some() {
                self.below.resize(self.fleet.width(), Below::default());
                let Overlap { device, host, disk, .. } = *overlap;
                self.below[slot] = self.below[slot].larger(Below { device, host, disk });
            }
        }
        found
    }

    /// Workers whose breaker is not closed.
    pub fn cut_off(&self, now: Duration) -> impl Iterator<Item = (&WorkerId, State)> {
        let life = |(slot, state)| self.fleet.life(slot).map(|(worker, _)| (worker, state));
        self.gate.cut_off(now).filter_map(life)
    }

    /// What became of a request, for its receipt and for what answers usually are.
    pub fn ended(&mut self, ticket: Ticket, outcome: Outcome) {
        self.answer_mean += (f64::from(outcome.answer_tokens) - self.answer_mean) * ANSWER_PACE;
        let regret_ms = self.oracle.ended(ticket, outcome.ttft_ms);
        self.receipts.ended(ticket, outcome, regret_ms);
    }

    /// One decision, while it is remembered.
    #[must_use]
    pub fn receipt(&self, ticket: Ticket) -> Option<Receipt> {
        self.receipts.get(ticket)
    }

    /// How good decisions were, as far as they were looked into.
    #[must_use]
    pub fn regret(&self) -> Regret {
        self.oracle.mean()
    }

    /// The last decisions about a request.
    #[must_use]
    pub fn explain(&self, request: RequestId) -> Vec<Receipt> {
        self.receipts.of(request)
    }

    /// The newest decisions, newest first, each with its chosen candidate alone.
    pub fn newest(&self) -> impl Iterator<Item = Receipt> + '_ {
        self.receipts.newest()
    }

    /// Writes down the chosen one and the next cheapest, term by term, before the request is counted anywhere.
    fn write_down(&mut self, ask: &Ask<'_>, choice: Choice, fed: bool, (now, draw): (Duration, u64)) {
        let Self { fleet, hits, below, policy, scratch, shown, receipts, oracle, gate, .. } = self;
        let question = Question { ask, fleet, hits, below, draw };
        scratch.cheapest(CANDIDATES_MAX, shown);
        if !shown.iter().any(|(slot, _)| *slot == choice.slot) {
            shown.truncate(CANDIDATES_MAX - 1);
            shown.push((choice.slot, choice.cost));
        }
        let ticket = Ticket(self.decisions + 1);
        let head = Head {
            request: ask.request,
            policy: policy.name,
            at: now,
            workers: u32::try_from(fleet.len()).unwrap_or(u32::MAX),
            prompt_tokens: ask.prompt_tokens,
            near_equals: choice.near_equals,
            chosen: shown.iter().position(|(slot, _)| *slot == choice.slot).unwrap_or_default(),
        };
        let predicted = |slot: Slot| Cost::default().judge(&question, slot).first_token();
        let entry = receipts.begin(ticket, head);
        for (slot, state) in gate.cut_off(now) {
            if let Some((worker, _)) = fleet.life(slot) {
                entry.cut_off(worker, state.label());
            }
        }
        for (slot, cost) in shown.iter() {
            let Some(life) = fleet.life(*slot) else { continue };
            let seen = Seen {
                life,
                hit_blocks: hits[*slot],
                in_flight: fleet.in_flight(*slot),
                queued_tokens: fleet.queued_tokens(*slot),
                cost: *cost,
                ttft_ms: predicted(*slot),
                lower: lower(&question, *slot),
            };
            entry.candidate(seen, |told| policy.explain(&question, *slot, told));
        }
        // With a second worker it is not what was predicted for one.
        if !fed && ticket.0.is_multiple_of(SHARE) {
            let others = shown.iter().filter(|(slot, _)| *slot != choice.slot);
            let work = |slot| Work { computed_tokens: question.computed_tokens(slot), load_ms: question.load(slot).ms };
            let others = others.map(|(slot, _)| (*slot, work(*slot)));
            oracle.follow(ticket, now, predicted(choice.slot), others);
        }
    }
}

/// What a candidate has on its slower tiers, for its receipt.
fn lower(question: &Question<'_>, slot: Slot) -> Option<Lower> {
    let below = question.below.get(slot).filter(|below| below.any())?.after(question.hits[slot]);
    let (rates, loaded) = (question.fleet.heard[slot].tiers?, question.load(slot).blocks);
    Some(Lower { host_blocks: below.host, disk_blocks: below.disk, loaded, rates })
}
