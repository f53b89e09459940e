//! What a request would cost on a worker, in milliseconds: the default of Starling.
//!
//! The time until its first token there, plus what the requests that run there lose by it. Every term is time, so that a
//! hit, a queue, a slow machine and a full cache weigh against each other by what they do to somebody's clock.

use super::{Question, Scorer};
use crate::route::fleet::Slot;

/// Weight of what others lose: their tokens come later by this prefill, each of them.
const HARM: f64 = 0.25;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Weight of what running answers lose, 0 to 10.
    pub harm: f64,
}

impl Default for Cost {
    fn default() -> Self {
        Self { harm: HARM }
    }
}

/// The terms of a cost, milliseconds each.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Terms {
    /// Until the prompt tokens queued before it are computed, in steps that also decode.
    pub queue: f64,
    /// Computing the prompt tokens that the cache lacks.
    pub prefill: f64,
    /// Waiting for a place in a full batch.
    pub place: f64,
    /// Waiting for KV blocks.
    pub blocks: f64,
    /// What running answers lose.
    pub harm: f64,
}

impl Terms {
    /// Their sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.queue + self.prefill + self.place + self.blocks + self.harm
    }
}

impl Cost {
    /// Term by term.
    #[must_use]
    pub fn judge(&self, question: &Question<'_>, slot: Slot) -> Terms {
        let Question { ask, fleet, .. } = question;
        let (rates, places) = (fleet.rates[slot], fleet.places[slot]);
        let in_flight = f64::from(fleet.in_flight(slot));
        // Token counts stay far below 2^52, where these conversions would start to round.
        let queued = fleet.queued_tokens(slot) as f64;
        let missed = f64::from(question.missed_tokens(slot));
        let decoding = in_flight.min(f64::from(places.sequences.max(1)));
        let step = rates.step_ms + decoding * rates.decode_ms_per_sequence;
        let step_tokens = f64::from(places.step_tokens.max(1));
        let steps = |tokens: f64| (tokens / step_tokens).ceil();
        let prefill = missed * rates.prefill_ms_per_token + steps(missed) * step;
        let answer = ask.answer_expected.max(1.0);
        let turn = answer * step;
        let over = in_flight + 1.0 - f64::from(places.sequences);
        let place = if places.sequences > 0 && over > 0.0 { over / f64::from(places.sequences) * turn } else { 0.0 };
        Terms {
            queue: queued * rates.prefill_ms_per_token + steps(queued) * step,
            prefill,
            place,
            blocks: self.wait_for_blocks(question, slot, turn),
            harm: self.harm * decoding * missed * rates.prefill_ms_per_token / answer.min(64.0),
        }
    }

    /// Blocks come back as answers end: all that are taken in one answer's time.
    fn wait_for_blocks(self, question: &Question<'_>, slot: Slot, turn: f64) -> f64 {
        let Question { ask, fleet, hits, .. } = question;
        let total = f64::from(fleet.places[slot].blocks);
        if total <= 0.0 {
            return 0.0;
        }
        let taken = fleet.blocks(slot) as f64;
        let tokens = f64::from(ask.prompt_tokens) + ask.answer_expected;
        let needed = (tokens / f64::from(ask.block_tokens.max(1))).ceil() - f64::from(hits[slot]);
        let lacking = taken + needed.max(0.0) - total;
        if lacking > 0.0 && taken > 0.0 { lacking / taken * turn } else { 0.0 }
    }
}

impl Scorer for Cost {
    fn name(&self) -> &'static str {
        "ms"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        self.judge(question, slot).total()
    }

    fn terms(&self, question: &Question<'_>, slot: Slot) -> Vec<(&'static str, f64)> {
        let Terms { queue, prefill, place, blocks, harm } = self.judge(question, slot);
        vec![("queue", queue), ("prefill", prefill), ("place", place), ("blocks", blocks), ("harm", harm)]
    }
}
