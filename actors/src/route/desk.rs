//! One model's decisions: choose a worker and count the request there in a single step.
//!
//! Called by the router shard, which holds a [`Desk`] behind a lock for some microseconds per request, and by the
//! cluster simulator. Choice and count are one step, so requests that arrive together see each other. A reservation
//! is counted until [`Desk::release`]; a worker that left or began a new life takes its own with it, and the late end of a
//! request there changes nothing. Never: I/O, a clock. Bounds: one entry per reservation held.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use starling_ids::{BlockHash, Incarnation, RequestId, WorkerId};

pub use super::gate::COOLING;
use super::{
    breaker::State,
    fleet::{Fleet, Heard, Places, Slot, Standing},
    gate::Gate,
    policy::{Choice, Policy, Question, Scratch, mix},
    queue::rooms::Rooms,
    receipt::{CANDIDATES_MAX, Judged, Outcome, Receipt, Receipts},
    split::{self, Source},
};
use crate::generate::KvSource;

/// How long a reservation that its worker has not confirmed counts beside the worker's own account: on its way, or lost.
const ON_THE_WAY: Duration = Duration::from_secs(2);

/// Answer tokens assumed before any answer has ended.
const ANSWER_PRIOR: f64 = 128.0;
/// Weight of one ended answer in the running mean.
const ANSWER_PACE: f64 = 0.02;

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The request.
    pub request: RequestId,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Tokens per block of this model.
    pub block_tokens: u32,
    /// Hashes of the prompt's full blocks.
    pub hashes: &'a [BlockHash],
    /// Sequences.
    pub choices: u32,
    /// Token budget of the answer, all choices together.
    pub answer_tokens_max: u32,
    /// How long answers to such requests usually are, tokens; set by the desk.
    pub answer_expected: f64,
    /// What keeps requests together, when the client says so.
    pub session: Option<&'a str>,
    /// Workers that refused or failed this request; never chosen.
    pub exclude: &'a [WorkerId],
    /// Those of them that failed; others avoid them for [`COOLING`].
    pub failed: &'a [WorkerId],
}

/// What was decided; the reservation is held until it is released.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Names the reservation.
    pub ticket: Ticket,
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Prefix blocks expected in its cache.
    pub hit_blocks: u32,
    /// Its cost and how many were as good.
    pub choice: Choice,
    /// Where its first blocks are to come from.
    pub source: Option<KvSource>,
}

/// Names one reservation of one desk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Held {
    request: RequestId,
    slot: Slot,
    sequences: u32,
    /// Prompt tokens and blocks still counted beside the worker's account.
    unreported: Option<(u64, u64)>,
    /// The reservation where its prompt is computed, until that is done.
    partner: Option<Ticket>,
}

/// A reservation that its worker's account does not cover.
#[derive(Debug, Clone, Copy)]
struct Recent {
    ticket: Ticket,
    at: Duration,
    /// Which of its worker's requests it is, once the worker has said so.
    number: Option<u64>,
}

/// See the module.
#[derive(Debug)]
pub struct Desk {
    fleet: Fleet,
    policy: Policy,
    held: HashMap<Ticket, Held>,
    /// Oldest first, by slot.
    recent: Vec<VecDeque<Recent>>,
    hits: Vec<u32>,
    eligible: Vec<Slot>,
    scratch: Scratch,
    receipts: Receipts,
    gate: Gate,
    decisions: u64,
    seed: u64,
    answer_mean: f64,
}

impl Desk {
    /// A desk without workers. Desks of different seeds break first ties differently.
    #[must_use]
    pub fn new(policy: Policy, seed: u64) -> Self {
        Self {
            fleet: Fleet::default(),
            policy,
            held: HashMap::new(),
            recent: Vec::new(),
            hits: Vec::new(),
            eligible: Vec::new(),
            scratch: Scratch::default(),
            receipts: Receipts::default(),
            gate: Gate::default(),
            decisions: 0,
            seed,
            answer_mean: ANSWER_PRIOR,
        }
    }

    /// Decides nothing while every worker is taken by these bounds.
    #[must_use]
    pub fn with_rooms(mut self, rooms: Rooms) -> Self {
        self.gate.hold_back(rooms);
        self
    }

    /// Whether some worker has room for one more request. Always, without rooms.
    #[must_use]
    pub fn has_room(&self, now: Duration) -> bool {
        self.gate.has_room(&self.fleet, now)
    }

    /// Whether there is a worker that is not among these, with room or without.
    #[must_use]
    pub fn anyone_left(&self, without: &[WorkerId]) -> bool {
        self.fleet.workers().any(|(worker, _)| !without.contains(worker))
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
        let slot = self.fleet.seat(worker, incarnation, places);
        self.fleet.standing[slot] = standing;
        if self.recent.len() < self.fleet.width() {
            self.recent.resize_with(self.fleet.width(), VecDeque::new);
            self.hits.resize(self.fleet.width(), 0);
            self.gate.widen(self.fleet.width());
        }
        slot
    }

    /// A worker is gone, with all that is counted there.
    pub fn vacate(&mut self, worker: &WorkerId) {
        let Some(slot) = self.fleet.vacate(worker) else { return };
        self.held.retain(|_, held| held.slot != slot);
        self.recent[slot].clear();
        self.gate.wipe(slot);
        self.policy.vacated(slot);
    }

    /// Whether a worker may be chosen, as the directory and its silence say.
    pub fn set_standing(&mut self, worker: &WorkerId, standing: Standing) {
        if let Some(slot) = self.fleet.slot(worker) {
            self.fleet.standing[slot] = standing;
        }
    }

    /// A worker tells how busy it is. Reservations that it has confirmed and counts itself are not counted beside it any more,
    /// nor those that it should have confirmed long ago.
    pub fn hear(&mut self, worker: &WorkerId, incarnation: Incarnation, heard: Heard) {
        let Some(slot) = self.fleet.slot(worker) else { return };
        if self.fleet.life(slot).is_none_or(|(_, life)| *life != incarnation) {
            return;
        }
        self.fleet.hear(slot, heard);
        self.gate.heard(slot);
        let mut rest = std::mem::take(&mut self.recent[slot]);
        rest.retain(|recent| {
            let covered = match recent.number {
                Some(number) => number <= heard.admitted,
                None => recent.at + ON_THE_WAY <= heard.at,
            };
            if covered {
                self.cover(slot, recent.ticket);
            }
            !covered
        });
        self.recent[slot] = rest;
    }

    /// The worker took the request; it is its `number`th.
    pub fn confirm(&mut self, ticket: Ticket, number: u64) {
        let Some(slot) = self.held.get(&ticket).map(|held| held.slot) else { return };
        if number <= self.fleet.heard[slot].admitted {
            self.recent[slot].retain(|recent| recent.ticket != ticket);
            self.cover(slot, ticket);
        } else if let Some(recent) = self.recent[slot].iter_mut().find(|recent| recent.ticket == ticket) {
            recent.number = Some(number);
        }
    }

    /// Chooses a worker and counts the request there. `hits` are the workers that hold leading blocks of the prompt.
    /// `None` when no worker is left, or all are taken.
    pub fn decide(&mut self, ask: &Ask<'_>, hits: &[(Slot, u32)], now: Duration) -> Option<Decision> {
        let ask = Ask { answer_expected: self.answer_expected(ask.answer_tokens_max), ..*ask };
        self.gate.learn(&ask, &mut self.fleet, now);
        self.gate.list(&ask, &self.fleet, now, &mut self.eligible);
        let places = &self.fleet.places;
        if self.eligible.iter().any(|slot| places[*slot].role.decodes()) {
            self.eligible.retain(|slot| places[*slot].role.decodes());
        }
        for (slot, depth) in hits {
            if let Some(hit) = self.hits.get_mut(*slot) {
                *hit = *depth;
            }
        }
        let draw = mix(self.seed, self.decisions);
        let question = Question { ask: &ask, fleet: &self.fleet, hits: &self.hits, draw };
        let choice = self.policy.choose(&question, &self.eligible, &mut self.scratch);
        let receipt = choice.as_ref().map(|choice| self.receipt(&question, choice, now));
        let joint = choice.map(|choice| {
            let (slot, source) = split::join(&question, &self.eligible, choice.slot);
            (Choice { slot, ..choice }, source)
        });
        let decision = joint.and_then(|(choice, source)| self.reserve(&ask, choice, source, now));
        if let (Some(receipt), Some(decision)) = (receipt, &decision) {
            let source = decision.source.clone().map(|source| (decision.worker.clone(), source));
            self.receipts.push(decision.ticket, Receipt { source, ..receipt });
        }
        for (slot, _) in hits {
            if let Some(hit) = self.hits.get_mut(*slot) {
                *hit = 0;
            }
        }
        decision
    }

    /// A request's first token came back. True when that closes its worker's breaker.
    pub fn prefilled(&mut self, ticket: Ticket) -> bool {
        let Some(held) = self.held.get_mut(&ticket) else { return false };
        let (slot, partner) = (held.slot, held.partner.take());
        self.policy.prefilled(held.request, slot);
        if let Some(partner) = partner {
            self.release(partner);
        }
        self.gate.worked(slot)
    }

    /// Its worker failed a request before the first token. True when that opens its breaker.
    pub fn failed(&mut self, ticket: Ticket, now: Duration) -> bool {
        self.held.get(&ticket).is_some_and(|held| self.gate.failed(held.slot, now))
    }

    /// Workers whose breaker is not closed.
    pub fn cut_off(&self, now: Duration) -> impl Iterator<Item = (&WorkerId, State)> {
        let life = |(slot, state)| self.fleet.life(slot).map(|(worker, _)| (worker, state));
        self.gate.cut_off(now).filter_map(life)
    }

    /// How long the request waited in the queue before it was decided, for its receipt.
    pub fn waited(&mut self, ticket: Ticket, time: Duration) {
        self.receipts.waited(ticket, time);
    }

    /// What became of a request, for its receipt and for what answers usually are.
    pub fn ended(&mut self, ticket: Ticket, outcome: Outcome) {
        self.answer_mean += (f64::from(outcome.answer_tokens) - self.answer_mean) * ANSWER_PACE;
        self.receipts.ended(ticket, outcome);
    }

    /// The last decisions about a request.
    #[must_use]
    pub fn explain(&self, request: RequestId) -> Vec<Receipt> {
        self.receipts.of(request)
    }

    /// Gives a reservation back. False when it was given back before, or its worker's life is over.
    pub fn release(&mut self, ticket: Ticket) -> bool {
        let Some(slot) = self.held.get(&ticket).map(|held| held.slot) else { return false };
        self.cover(slot, ticket);
        self.recent[slot].retain(|recent| recent.ticket != ticket);
        self.gate.released(slot, ticket);
        let Some(held) = self.held.remove(&ticket) else { return false };
        self.fleet.requests[slot] -= 1;
        self.fleet.sequences[slot] -= held.sequences;
        self.policy.released(held.request, slot);
        if let Some(partner) = held.partner {
            self.release(partner);
        }
        true
    }

    /// Takes a reservation out of what is counted as not reported.
    fn cover(&mut self, slot: Slot, ticket: Ticket) {
        let Some(held) = self.held.get_mut(&ticket) else { return };
        let Some((tokens, blocks)) = held.unreported.take() else { return };
        self.fleet.unreported[slot] -= held.sequences;
        self.fleet.unreported_tokens[slot] -= tokens;
        self.fleet.unreported_blocks[slot] -= blocks;
    }

    /// The chosen one and the next cheapest, term by term.
    fn receipt(&self, question: &Question<'_>, choice: &Choice, now: Duration) -> Receipt {
        let chosen = (choice.slot, choice.cost);
        let mut shown = self.scratch.cheapest(CANDIDATES_MAX);
        if !shown.iter().any(|(slot, _)| *slot == choice.slot) {
            shown.truncate(CANDIDATES_MAX - 1);
            shown.push(chosen);
        }
        let judged = |(slot, cost): &(Slot, f64)| {
            let (worker, incarnation) = self.fleet.life(*slot)?.clone();
            let terms = self.policy.explain(question, *slot).into_iter();
            Some(Judged {
                worker,
                incarnation,
                hit_blocks: question.hits[*slot],
                in_flight: self.fleet.in_flight(*slot),
                queued_tokens: self.fleet.queued_tokens(*slot),
                cost: *cost,
                terms: terms.map(|(name, value)| (name.to_owned(), value)).collect(),
            })
        };
        Receipt {
            request: question.ask.request,
            policy: self.policy.name.clone(),
            at: now,
            workers: u32::try_from(self.fleet.len()).unwrap_or(u32::MAX),
            prompt_tokens: question.ask.prompt_tokens,
            chosen: shown.iter().position(|(slot, _)| *slot == choice.slot).unwrap_or_default(),
            candidates: shown.iter().filter_map(judged).collect(),
            near_equals: choice.near_equals,
            outcome: None,
            cut_off: self.cut_off(now).map(|(worker, state)| (worker.clone(), state.label().to_owned())).collect(),
            waited_ms: 0.0,
            source: None,
        }
    }

    fn reserve(&mut self, ask: &Ask<'_>, choice: Choice, source: Option<Source>, now: Duration) -> Option<Decision> {
        let slot = choice.slot;
        let (worker, incarnation) = self.fleet.life(slot)?.clone();
        let hit_blocks = self.hits[slot];
        let (tokens, blocks) = missing(ask, hit_blocks);
        let sequences = ask.choices.max(1);
        // The prompt counts where it is computed; its blocks where they stay.
        let partner = source.filter(|source| source.compute).map(|source| {
            let load = missing(ask, self.hits[source.slot]);
            self.count(ask.request, source.slot, (1, load.0, load.1), now)
        });
        let tokens = if partner.is_some() { 1 } else { tokens };
        let ticket = self.count(ask.request, slot, (sequences, tokens, blocks), now);
        if let Some(held) = self.held.get_mut(&ticket) {
            held.partner = partner;
        }
        self.gate.sent(slot, ticket, now);
        self.policy.reserved(ask, slot, hit_blocks);
        let source = source.and_then(|source| {
            let (worker, incarnation) = self.fleet.life(source.slot)?.clone();
            Some(KvSource { worker, incarnation, compute: source.compute, blocks: source.blocks })
        });
        Some(Decision { ticket, worker, incarnation, hit_blocks, choice, source })
    }

    /// Counts sequences, prompt tokens and blocks at a worker until the ticket is released.
    fn count(&mut self, request: RequestId, slot: Slot, load: (u32, u64, u64), now: Duration) -> Ticket {
        let (sequences, tokens, blocks) = load;
        self.decisions += 1;
        self.fleet.chosen[slot] = self.decisions;
        let ticket = Ticket(self.decisions);
        self.fleet.requests[slot] += 1;
        self.fleet.sequences[slot] += sequences;
        self.fleet.unreported[slot] += sequences;
        self.fleet.unreported_tokens[slot] += tokens;
        self.fleet.unreported_blocks[slot] += blocks;
        self.recent[slot].push_back(Recent { ticket, at: now, number: None });
        self.held.insert(ticket, Held { request, slot, sequences, unreported: Some((tokens, blocks)), partner: None });
        ticket
    }
}

/// Prompt tokens that a worker with so many leading blocks lacks, and the blocks that they take.
fn missing(ask: &Ask<'_>, hit_blocks: u32) -> (u64, u64) {
    let hit_tokens = u64::from(hit_blocks) * u64::from(ask.block_tokens);
    let tokens = u64::from(ask.prompt_tokens).saturating_sub(hit_tokens).max(1);
    (tokens, tokens.div_ceil(u64::from(ask.block_tokens.max(1))))
}
