//! How fast this worker's engine is, learned from its own steps. Pure.
//!
//! Called by the engine thread after each step; routers read the result in load reports. A step is taken to last
//! `step + prefill · p + decode · d` for p prompt tokens and d sampled ones; the three are moved towards each step
//! seen, in proportion to their share in it (normalised least mean squares), and never below zero.

use std::time::Duration;

use crate::route::rates::Rates;

/// How far a step moves the rates towards explaining it.
const PACE: f64 = 0.1;

/// Sizes of a usual step, so that the three parts learn equally fast.
const USUAL_PREFILL: f64 = 64.0;
const USUAL_DECODE: f64 = 4.0;

/// What one step did.
#[derive(Debug, Clone, Copy)]
pub struct StepFacts {
    /// How long it took.
    pub took: Duration,
    /// Prompt tokens it computed.
    pub prefilled: u64,
    /// Tokens it sampled.
    pub sampled: u64,
}

/// Steps before the rates are told to anybody.
const STEPS_MIN: u32 = 50;

/// Rates, moving with every step.
#[derive(Debug, Default)]
pub struct RateBook {
    rates: Rates,
    steps: u32,
}

impl RateBook {
    /// What was learned; `None` before there were enough steps.
    pub fn rates(&self) -> Option<Rates> {
        (self.steps >= STEPS_MIN).then_some(self.rates)
    }

    /// Learns from a step.
    pub fn learn(&mut self, step: StepFacts) {
        // Token counts of a step are small; the conversions are exact.
        let (prefill, decode) = (step.prefilled as f64 / USUAL_PREFILL, step.sampled as f64 / USUAL_DECODE);
        if step.prefilled == 0 && step.sampled == 0 {
            return;
        }
        self.steps = self.steps.saturating_add(1);
        let rates = &mut self.rates;
        let expected = rates.step_ms
            + rates.prefill_ms_per_token * USUAL_PREFILL * prefill
            + rates.decode_ms_per_sequence * USUAL_DECODE * decode;
        let missed = step.took.as_secs_f64() * 1_000.0 - expected;
        let pull = PACE * missed / (1.0 + prefill * prefill + decode * decode);
        rates.step_ms = (rates.step_ms + pull).max(0.0);
        rates.prefill_ms_per_token = (rates.prefill_ms_per_token + pull * prefill / USUAL_PREFILL).max(0.0);
        rates.decode_ms_per_sequence = (rates.decode_ms_per_sequence + pull * decode / USUAL_DECODE).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(ms: f64, prefilled: u64, sampled: u64) -> StepFacts {
        StepFacts { took: Duration::from_secs_f64(ms / 1_000.0), prefilled, sampled }
    }

    #[test]
    fn a_mix_of_steps_teaches_all_three() {
        let mut book = RateBook::default();
        for at in 0..4_000u64 {
            let (prefilled, sampled) = ((at % 3) * 100, 1 + at % 8);
            book.learn(step(7.0 + 0.25 * prefilled as f64 + 0.5 * sampled as f64, prefilled, sampled));
        }
        let rates = book.rates().expect("enough steps");
        assert!((rates.step_ms - 7.0).abs() < 0.2, "{rates:?}");
        assert!((rates.prefill_ms_per_token - 0.25).abs() < 0.01, "{rates:?}");
        assert!((rates.decode_ms_per_sequence - 0.5).abs() < 0.05, "{rates:?}");
    }

    #[test]
    fn equal_steps_are_explained_whatever_the_parts() {
        let mut book = RateBook::default();
        for _ in 0..500 {
            book.learn(step(30.0, 0, 1));
        }
        let rates = book.rates().expect("enough steps");
        assert!((rates.step_ms + rates.decode_ms_per_sequence - 30.0).abs() < 0.1, "{rates:?}");
    }

    #[test]
    fn a_few_steps_are_no_knowledge() {
        let mut book = RateBook::default();
        (1..STEPS_MIN).for_each(|_| book.learn(step(1.0, 0, 1)));
        assert_eq!(book.rates(), None);
        book.learn(step(1.0, 0, 1));
        assert!(book.rates().is_some());
    }

    #[test]
    fn rates_stay_finite_and_not_negative() {
        let mut book = RateBook::default();
        for (ms, prefilled, sampled) in [(0.0, 0, 0), (0.0, 1, 1_000_000), (1.0, 0, 1), (5_000.0, 1, 0), (0.0, 9, 9)] {
            book.learn(step(ms, prefilled, sampled));
            let rates = book.rates;
            for rate in [rates.step_ms, rates.prefill_ms_per_token, rates.decode_ms_per_sequence] {
                assert!(rate.is_finite() && rate >= 0.0, "{rates:?}");
            }
        }
    }
}
