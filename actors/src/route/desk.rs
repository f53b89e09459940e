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

use super::{
    fleet::{Fleet, Heard, Places, Slot, Standing},
    policy::{Choice, Policy, Question, Scratch, mix},
};

/// How long a worker that failed a request is used only when there is no other.
pub const COOLING: Duration = Duration::from_millis(500);

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
}

/// Names one reservation of one desk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Held {
    request: RequestId,
    slot: Slot,
    sequences: u32,
    /// Still counted as not reported.
    unreported: Option<(u64, u64)>,
}

/// See the module.
#[derive(Debug)]
pub struct Desk {
    fleet: Fleet,
    policy: Policy,
    held: HashMap<Ticket, Held>,
    /// Reservations that their worker's account does not cover, oldest first, by slot.
    recent: Vec<VecDeque<(Ticket, RequestId, Duration)>>,
    hits: Vec<u32>,
    eligible: Vec<Slot>,
    scratch: Scratch,
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
            decisions: 0,
            seed,
            answer_mean: ANSWER_PRIOR,
        }
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
        }
        slot
    }

    /// A worker is gone, with all that is counted there.
    pub fn vacate(&mut self, worker: &WorkerId) {
        let Some(slot) = self.fleet.vacate(worker) else { return };
        self.held.retain(|_, held| held.slot != slot);
        self.recent[slot].clear();
        self.policy.vacated(slot);
    }

    /// A worker tells how busy it is. `admitted` are the requests that its engine took since its last account: they are in
    /// it now. Whatever was reserved longer than `lag` before it is in it too, or never came.
    pub fn hear(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        heard: Heard,
        admitted: &[RequestId],
        lag: Duration,
    ) {
        let Some(slot) = self.fleet.slot(worker) else { return };
        if self.fleet.life(slot).is_none_or(|(_, life)| *life != incarnation) {
            return;
        }
        self.fleet.hear(slot, heard);
        let mut rest = std::mem::take(&mut self.recent[slot]);
        rest.retain(|(ticket, request, at)| {
            let covered = admitted.contains(request) || *at + lag <= heard.at;
            if covered {
                self.cover(slot, *ticket);
            }
            !covered
        });
        self.recent[slot] = rest;
    }

    /// Chooses a worker and counts the request there. `hits` are the workers that hold leading blocks of the prompt.
    /// `None` when no worker is left.
    pub fn decide(&mut self, ask: &Ask<'_>, hits: &[(Slot, u32)], now: Duration) -> Option<Decision> {
        let ask = Ask { answer_expected: self.answer_mean.min(f64::from(ask.answer_tokens_max.max(1))), ..*ask };
        for worker in ask.failed {
            if let Some(slot) = self.fleet.slot(worker) {
                self.fleet.cooling[slot] = now + COOLING;
            }
        }
        self.list_eligible(&ask, now);
        for (slot, depth) in hits {
            if let Some(hit) = self.hits.get_mut(*slot) {
                *hit = *depth;
            }
        }
        let draw = mix(self.seed, self.decisions);
        let question = Question { ask: &ask, fleet: &self.fleet, hits: &self.hits, draw };
        let choice = self.policy.choose(&question, &self.eligible, &mut self.scratch);
        let decision = choice.and_then(|choice| self.reserve(&ask, choice, now));
        for (slot, _) in hits {
            if let Some(hit) = self.hits.get_mut(*slot) {
                *hit = 0;
            }
        }
        decision
    }

    /// A request's first token came back.
    pub fn prefilled(&mut self, ticket: Ticket) {
        if let Some(held) = self.held.get(&ticket) {
            self.policy.prefilled(held.request, held.slot);
        }
    }

    /// Gives a reservation back; `answer` is how many tokens the request got, when it ended well. False when it was given
    /// back before, or its worker's life is over.
    pub fn release(&mut self, ticket: Ticket, answer: Option<u32>) -> bool {
        if let Some(tokens) = answer {
            self.answer_mean += (f64::from(tokens) - self.answer_mean) * ANSWER_PACE;
        }
        let Some(held) = self.held.remove(&ticket) else { return false };
        let slot = held.slot;
        if held.unreported.is_some() {
            self.held.insert(ticket, held);
            self.cover(slot, ticket);
            self.recent[slot].retain(|(at, ..)| *at != ticket);
            return self.release(ticket, None);
        }
        self.fleet.requests[slot] -= 1;
        self.fleet.sequences[slot] -= held.sequences;
        self.policy.released(held.request, slot);
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

    /// Slots that may be chosen: doubtful and cooling ones only when all are.
    fn list_eligible(&mut self, ask: &Ask<'_>, now: Duration) {
        let fleet = &self.fleet;
        let sound = |slot: &Slot| fleet.standing[*slot] == Standing::Sound && fleet.cooling[*slot] <= now;
        self.eligible.clear();
        self.eligible.extend((0..fleet.width()).filter(sound));
        let left = |slot: &Slot| fleet.life(*slot).is_some_and(|(worker, _)| !ask.exclude.contains(worker));
        if self.eligible.is_empty() || (!ask.exclude.is_empty() && !self.eligible.iter().any(left)) {
            let present = |slot: &Slot| matches!(fleet.standing[*slot], Standing::Sound | Standing::Doubtful);
            self.eligible.clear();
            self.eligible.extend((0..fleet.width()).filter(present));
        }
    }

    fn reserve(&mut self, ask: &Ask<'_>, choice: Choice, now: Duration) -> Option<Decision> {
        let slot = choice.slot;
        let (worker, incarnation) = self.fleet.life(slot)?.clone();
        self.decisions += 1;
        self.fleet.chosen[slot] = self.decisions;
        let (ticket, hit_blocks) = (Ticket(self.decisions), self.hits[slot]);
        let hit_tokens = u64::from(hit_blocks) * u64::from(ask.block_tokens);
        let tokens = u64::from(ask.prompt_tokens).saturating_sub(hit_tokens).max(1);
        let blocks = tokens.div_ceil(u64::from(ask.block_tokens.max(1)));
        let sequences = ask.choices.max(1);
        self.fleet.requests[slot] += 1;
        self.fleet.sequences[slot] += sequences;
        self.fleet.unreported[slot] += sequences;
        self.fleet.unreported_tokens[slot] += tokens;
        self.fleet.unreported_blocks[slot] += blocks;
        self.recent[slot].push_back((ticket, ask.request, now));
        let unreported = Some((tokens, blocks));
        self.held.insert(ticket, Held { request: ask.request, slot, sequences, unreported });
        self.policy.reserved(ask, slot, hit_blocks);
        Some(Decision { ticket, worker, incarnation, hit_blocks, choice })
    }
}
