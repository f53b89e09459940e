//! What a request would cost on a worker, in milliseconds.
//!
//! Called by [`super::decide`]. Cost is the wait behind prompt tokens queued there, the prefill of what its
//! cache lacks, the time lost by sharing the batch, the wait for a place in it, and the harm done to answers
//! that run there already. Never: a clock, a worker's name.

use serde::{Deserialize, Serialize};

/// Answer tokens assumed when a request allows more; most answers end long before their budget.
pub const ANSWER_TOKENS_EXPECTED: u32 = 128;

/// Share of a prefill that each running answer feels; chunked prefill lets decodes go on beside it.
const HARM_SHARE: f64 = 0.1;

/// How fast a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Milliseconds to compute one prompt token.
    pub prefill_ms_per_token: f64,
    /// Milliseconds that one more sequence adds to a decode step.
    pub decode_ms_per_sequence: f64,
    /// Milliseconds of a step whatever it computes.
    pub step_ms: f64,
}

impl Default for Rates {
    /// What a small model on a few CPU cores does; replaced by what the worker reports.
    fn default() -> Self {
        Self { prefill_ms_per_token: 1.0, decode_ms_per_sequence: 4.0, step_ms: 8.0 }
    }
}

impl Rates {
    /// The mean of what was learned; the prior when nothing was.
    #[must_use]
    pub fn common(learned: impl Iterator<Item = Self>) -> Self {
        let (mut sum, mut count) = (Self { prefill_ms_per_token: 0.0, decode_ms_per_sequence: 0.0, step_ms: 0.0 }, 0.0);
        for rates in learned {
            sum.prefill_ms_per_token += rates.prefill_ms_per_token;
            sum.decode_ms_per_sequence += rates.decode_ms_per_sequence;
            sum.step_ms += rates.step_ms;
            count += 1.0;
        }
        if count < 1.0 {
            return Self::default();
        }
        Self {
            prefill_ms_per_token: sum.prefill_ms_per_token / count,
            decode_ms_per_sequence: sum.decode_ms_per_sequence / count,
            step_ms: sum.step_ms / count,
        }
    }

    /// These rates with each that is within a factor of two of the common one taken as that: equal machines learn
    /// slightly different numbers, and a worker must not win by noise.
    #[must_use]
    pub fn near(self, common: Self) -> Self {
        let settle = |own: f64, common: f64| if own * 2.0 >= common && own <= common * 2.0 { common } else { own };
        Self {
            prefill_ms_per_token: settle(self.prefill_ms_per_token, common.prefill_ms_per_token),
            decode_ms_per_sequence: settle(self.decode_ms_per_sequence, common.decode_ms_per_sequence),
            step_ms: settle(self.step_ms, common.step_ms),
        }
    }
}

/// All that the cost depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Facts {
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens expected in the worker's cache.
    pub hit_tokens: u32,
    /// Token budget of the answer, all choices together.
    pub answer_tokens_max: u32,
    /// Sequences in flight there, running and waiting.
    pub in_flight: u32,
    /// Prompt tokens queued there, not computed yet.
    pub queued_tokens: u64,
    /// Places in its batch; 0 when not known.
    pub sequences_max: u32,
    /// Its rates.
    pub rates: Rates,
}

/// The terms of a cost, milliseconds each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    /// Until the prompt tokens queued before it are computed.
    pub queue: f64,
    /// Computing the prompt tokens its cache lacks.
    pub prefill: f64,
    /// Decoding beside the sequences in flight.
    pub decode: f64,
    /// Waiting for a place in a full batch.
    pub place: f64,
    /// What the others in the batch lose by this prefill.
    pub harm: f64,
}

impl Terms {
    /// The cost, milliseconds.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.queue + self.prefill + self.decode + self.place + self.harm
    }

    /// The part of the cost that is an estimate of this request's own prefill: how far off the whole may easily be.
    #[must_use]
    pub fn uncertain(&self) -> f64 {
        self.prefill + self.harm
    }
}

/// The cost of a request on a worker.
#[must_use]
pub fn cost(facts: &Facts) -> Terms {
    let rates = facts.rates;
    let missed = f64::from(facts.prompt_tokens.saturating_sub(facts.hit_tokens));
    let answer = f64::from(facts.answer_tokens_max.clamp(1, ANSWER_TOKENS_EXPECTED));
    let prefill = missed * rates.prefill_ms_per_token;
    let place = match facts.sequences_max {
        0 => 0.0,
        places => {
            let full_step = rates.step_ms + f64::from(places) * rates.decode_ms_per_sequence;
            let turns = f64::from((facts.in_flight + 1).saturating_sub(places)) / f64::from(places);
            turns * answer * full_step
        }
    };
    Terms {
        // Token counts stay far below 2^52, where this conversion would start to round.
        queue: facts.queued_tokens as f64 * rates.prefill_ms_per_token,
        prefill,
        decode: f64::from(facts.in_flight) * rates.decode_ms_per_sequence * answer,
        place,
        harm: f64::from(facts.in_flight) * prefill * HARM_SHARE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            prompt_tokens: 1_000,
            hit_tokens: 0,
            answer_tokens_max: 64,
            in_flight: 0,
            queued_tokens: 0,
            sequences_max: 8,
            rates: Rates::default(),
        }
    }

    #[test]
    fn a_hit_saves_its_prefill_and_nothing_else() {
        let cold = cost(&facts());
        let warm = cost(&Facts { hit_tokens: 960, ..facts() });
        assert!((cold.total() - warm.total() - 960.0).abs() < 1e-9);
        assert!((cold.decode - warm.decode).abs() < 1e-9);
    }

    #[test]
    fn load_outweighs_a_small_hit_and_a_large_hit_outweighs_a_little_load() {
        let idle = cost(&facts());
        let busy_small_hit = cost(&Facts { hit_tokens: 16, in_flight: 4, ..facts() });
        let busy_large_hit = cost(&Facts { hit_tokens: 992, in_flight: 2, ..facts() });
        assert!(busy_small_hit.total() > idle.total());
        assert!(busy_large_hit.total() < idle.total());
    }

    #[test]
    fn a_full_batch_costs_more_than_a_place_in_it() {
        let last_place = cost(&Facts { in_flight: 7, ..facts() });
        let waits = cost(&Facts { in_flight: 8, ..facts() });
        assert!(last_place.place.abs() < 1e-9);
        assert!(waits.place > 0.0);
    }

    #[test]
    fn equal_machines_have_equal_rates_and_others_keep_theirs() {
        let with = |prefill_ms_per_token| Rates { prefill_ms_per_token, ..Rates::default() };
        let common = Rates::common([with(0.9), with(1.1), with(1.0)].into_iter());
        assert!((common.prefill_ms_per_token - 1.0).abs() < 1e-9);
        assert_eq!(with(0.9).near(common), with(1.1).near(common));
        assert_eq!(with(0.1).near(common), with(0.1));
        assert_eq!(Rates::common(std::iter::empty()), Rates::default());
    }

    #[test]
    fn more_of_anything_never_costs_less() {
        let base = cost(&facts()).total();
        for worse in [
            Facts { prompt_tokens: 2_000, ..facts() },
            Facts { in_flight: 1, ..facts() },
            Facts { queued_tokens: 1, ..facts() },
        ] {
            assert!(cost(&worse).total() > base);
        }
    }
}
