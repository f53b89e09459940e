//! What a desk counts: reservations beside what the workers say themselves.
//!
//! Called by [`super::Desk`]'s own choice and by the shard as requests get on. A reservation is counted once: here until its
//! worker's account covers it, there afterwards. Bounds: one entry per reservation held.

use std::time::Duration;

use starling_ids::{Incarnation, RequestId, WorkerId};

use super::{
    super::{
        ask::missing,
        below::Below,
        fleet::{Heard, Slot, Standing},
        policy::{Choice, Question, by_its_account},
        rebalance::{Pace, Shift},
        split::Source,
    },
    Ask, Decision, Desk, Ticket,
};
use crate::generate::KvSource;

/// How long a request runs at least before it is asked to go elsewhere, again or for the first time.
const STAY: Duration = Duration::from_secs(3);

/// How long a reservation that its worker has not confirmed counts beside the worker's own account: on its way, or lost.
const ON_THE_WAY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Held {
    request: RequestId,
    slot: Slot,
    sequences: u32,
    /// Prompt tokens and blocks still counted beside the worker's account.
    unreported: Option<(u64, u64)>,
    /// The reservation where its prompt is computed, until that is done.
    partner: Option<Ticket>,
    /// When it was made.
    at: Duration,
    /// Its first token came and it was not asked to leave: it may be.
    stays: bool,
}

/// A reservation that its worker's account does not cover.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recent {
    ticket: Ticket,
    at: Duration,
    /// Which of its worker's requests it is, once the worker has said so.
    number: Option<u64>,
}

impl Desk {
    /// A worker is gone, with all that is counted there.
    pub fn vacate(&mut self, worker: &WorkerId) {
        let Some(slot) = self.fleet.vacate(worker) else { return };
        let gone = self.held.iter().filter(|(_, held)| held.slot == slot);
        let (tickets, partners): (Vec<Ticket>, Vec<_>) = gone.map(|(ticket, held)| (*ticket, held.partner)).unzip();
        tickets.into_iter().for_each(|ticket| self.overlay.forget(ticket));
        self.held.retain(|_, held| held.slot != slot);
        // Nobody computes a prompt for a worker that is gone.
        for partner in partners.into_iter().flatten() {
            self.release(partner);
        }
        self.recent[slot].clear();
        self.gate.wipe(slot);
        self.lanes.clear();
        self.policy.vacated(slot);
        self.oracle.vacated(slot);
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
        let (fleet, answer) = (&self.fleet, self.answer_mean);
        self.oracle.heard(slot, heard.at, |missed| by_its_account(fleet, slot, missed, answer));
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

    /// A request's first token came back. True when that closes its worker's breaker.
    pub fn prefilled(&mut self, ticket: Ticket) -> bool {
        let Some(held) = self.held.get_mut(&ticket) else { return false };
        held.stays = true;
        let (slot, partner) = (held.slot, held.partner.take());
        self.overlay.computed(ticket);
        self.policy.prefilled(held.request, slot);
        if let Some(partner) = partner {
            self.release(partner);
        }
        let closes = self.gate.worked(slot);
        if closes {
            // What it was not given while it was cut off is no debt: it would be paid all at once to one that just came back.
            self.fleet.rejoin(slot);
        }
        closes
    }

    /// A running request that should go on at another worker, and why; the same one is named once.
    pub fn rebalance(&mut self, now: Duration) -> Option<(Ticket, Shift)> {
        let paces: Vec<Pace> = (0..self.fleet.width()).filter_map(|slot| self.pace(slot)).collect();
        let shift = self.balance.look(&paces, now)?;
        let may = |held: &Held| held.slot == shift.from && held.stays && now.saturating_sub(held.at) >= STAY;
        // The youngest has most likely the least to carry and the most to say.
        let (ticket, _) = self.held.iter().filter(|(_, held)| may(held)).max_by_key(|(ticket, _)| **ticket)?;
        let ticket = *ticket;
        if let Some(held) = self.held.get_mut(&ticket) {
            held.stays = false;
        }
        if let Some((worker, _)) = self.fleet.life(shift.to) {
            self.receipts.shifted(ticket, worker.clone(), (shift.from_ms, shift.to_ms));
        }
        Some((ticket, shift))
    }

    /// How long steps take at a worker, by its own account. `None` before it gave one.
    fn pace(&self, slot: Slot) -> Option<Pace> {
        let fleet = &self.fleet;
        fleet.life(slot).filter(|_| fleet.reported[slot])?;
        let (heard, rates, places) = (&fleet.heard[slot], &fleet.rates[slot], &fleet.places[slot]);
        let prompts = heard.prefill_tokens.min(u64::from(places.step_tokens));
        let base = rates.step_ms + prompts as f64 * rates.prefill_ms_per_token;
        let step = |running: u32| base + f64::from(running) * rates.decode_ms_per_sequence;
        let sound = fleet.standing[slot] == Standing::Sound && heard.link.block_bytes > 0;
        Some(Pace {
            slot,
            step_ms: step(heard.running),
            more_ms: step(heard.running + 1),
            running: heard.running,
            waiting: heard.waiting,
            takes: sound && places.role.decodes() && fleet.in_flight(slot) < places.sequences,
        })
    }

    /// Its worker failed a request before the first token. True when that opens its breaker.
    pub fn failed(&mut self, ticket: Ticket, now: Duration) -> bool {
        self.held.get(&ticket).is_some_and(|held| self.gate.failed(held.slot, now))
    }

    /// Gives a reservation back. False when it was given back before, or its worker's life is over.
    pub fn release(&mut self, ticket: Ticket) -> bool {
        let Some(slot) = self.held.get(&ticket).map(|held| held.slot) else { return false };
        self.cover(slot, ticket);
        self.recent[slot].retain(|recent| recent.ticket != ticket);
        self.gate.released(slot, ticket);
        self.overlay.forget(ticket);
        let Some(held) = self.held.remove(&ticket) else { return false };
        self.fleet.requests[slot] -= 1;
        self.fleet.sequences[slot] -= held.sequences;
        self.fleet.refresh(slot);
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
        self.fleet.refresh(slot);
    }

    pub(super) fn reserve(
        &mut self,
        ask: &Ask<'_>,
        choice: Choice,
        source: Option<Source>,
        now: Duration,
    ) -> Option<Decision> {
        let slot = choice.slot;
        let (worker, incarnation) = self.fleet.life(slot)?.clone();
        let hit_blocks = self.hits[slot];
        let (mut tokens, blocks) = missing(ask, hit_blocks);
        if self.by_ms && self.below.get(slot).is_some_and(Below::any) {
            // What it loads is not computed, though it needs room all the same.
            let question = Question { ask, fleet: &self.fleet, hits: &self.hits, below: &self.below, draw: 0 };
            tokens = u64::from(question.computed_tokens(slot));
        }
        let sequences = ask.choices.max(1);
        let computed_tokens = match source {
            Some(source) if source.compute => missing(ask, self.hits[source.slot]).0,
            Some(source) => missing(ask, hit_blocks.max(source.blocks)).0.min(tokens),
            None => tokens,
        };
        // The prompt counts where it is computed; its blocks where they stay.
        let partner = source.filter(|source| source.compute);
        let tokens = if partner.is_some() { 1 } else { tokens };
        let ticket = self.count(ask.request, slot, (sequences, tokens, blocks), now);
        self.fleet.give(slot, tokens, ask.answer_expected * f64::from(sequences), now);
        let partner = partner.map(|source| {
            let load = missing(ask, self.hits[source.slot]);
            self.fleet.give(source.slot, load.0, 0.0, now);
            self.count(ask.request, source.slot, (1, load.0, load.1), now)
        });
        if let Some(held) = self.held.get_mut(&ticket) {
            held.partner = partner;
        }
        self.gate.sent(slot, ticket, now);
        if self.by_ms && source.is_none() {
            self.overlay.expect(ticket, slot, ask.hashes);
        }
        self.policy.reserved(ask, slot, hit_blocks);
        let source = source.and_then(|source| {
            let (worker, incarnation) = self.fleet.life(source.slot)?.clone();
            let Source { compute, blocks, reads, .. } = source;
            // A float that does not fit is the largest number, one that is none is 0.
            let reading_ms = (reads.wait_ms + reads.ms).ceil() as u32;
            Some(KvSource { worker, incarnation, compute, blocks, host: reads.host, disk: reads.disk, reading_ms })
        });
        Some(Decision { ticket, worker, incarnation, hit_blocks, computed_tokens, choice, source })
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
        self.fleet.refresh(slot);
        self.recent[slot].push_back(Recent { ticket, at: now, number: None });
        self.held.insert(
            ticket,
            Held { request, slot, sequences, unreported: Some((tokens, blocks)), partner: None, at: now, stays: false },
        );
        ticket
    }
}
