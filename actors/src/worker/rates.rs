//! How fast this worker's engine is, learned from its own steps. Pure.
//!
//! Called by the engine thread after each step; routers read the result in load reports. A step is taken to last
//! `step + decode · d` for d sampled tokens, and `more + prefill · p` besides when it computes p prompt tokens. Steps without a
//! prompt teach the first line, what the others take beyond it the second: each the least squares of its last steps. `more` is
//! not told, as it is paid wherever a prompt goes; without it the many short prompts of conversations would make a token, and
//! so every cached prefix, seem ten times as dear as it is. A line is right after some ten steps, however far the
//! prior was: were it not, workers that have had much to do would look faster than equal ones that have not.

use std::time::Duration;

use crate::route::rates::Rates;

/// Steps of one kind that count; older ones fade.
const MEMORY: f64 = 256.0;

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

/// A straight line through points, older ones fading.
#[derive(Debug, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    fn learn(&mut self, x: f64, y: f64) {
        let keep = 1.0 - 1.0 / MEMORY;
        self.weight = self.weight * keep + 1.0;
        self.x = self.x * keep + x;
        self.y = self.y * keep + y;
        self.xx = self.xx * keep + x * x;
        self.xy = self.xy * keep + x * y;
    }

    /// Where it begins and how steep it is, neither below zero. Points that all lie at one x say nothing of that: they are
    /// then taken to lie on a line of this steepness, given their means.
    fn fit(&self, guess: impl Fn(f64, f64) -> f64) -> (f64, f64) {
        if self.weight <= 0.0 {
            return (0.0, 0.0);
        }
        let (x, y) = (self.x / self.weight, self.y / self.weight);
        let variance = (self.xx / self.weight - x * x).max(0.0);
        let covariance = self.xy / self.weight - x * y;
        // As much evidence as a spread of a twentieth of the mean.
        let doubt = (x / 20.0).powi(2).max(1e-9);
        let slope = ((covariance + doubt * guess(x, y)) / (variance + doubt)).max(0.0);
        let begin = y - slope * x;
        if begin >= 0.0 { (begin, slope) } else { (0.0, (self.xy / self.xx.max(1e-9)).max(0.0)) }
    }
}

/// Rates, moving with every step.
#[derive(Debug, Default)]
pub struct RateBook {
    decoding: Line,
    prefilling: Line,
    steps: u32,
}

impl RateBook {
    /// What was learned; `None` before there were enough steps.
    pub fn rates(&self) -> Option<Rates> {
        (self.steps >= STEPS_MIN).then(|| self.fitted())
    }

    /// Learns from a step.
    pub fn learn(&mut self, step: StepFacts) {
        if step.prefilled == 0 && step.sampled == 0 {
            return;
        }
        self.steps = self.steps.saturating_add(1);
        // Token counts of a step are small; the conversions are exact.
        let (prefilled, sampled) = (step.prefilled as f64, step.sampled as f64);
        let took = step.took.as_secs_f64() * 1_000.0;
        if step.prefilled == 0 {
            self.decoding.learn(sampled, took);
        } else {
            let (begin, slope) = self.decode_line();
            self.prefilling.learn(prefilled, (took - begin - slope * sampled).max(0.0));
        }
    }

    fn decode_line(&self) -> (f64, f64) {
        // Batches of one size say nothing of what a sequence adds.
        self.decoding.fit(|_, _| 0.0)
    }

    fn fitted(&self) -> Rates {
        let (step_ms, decode_ms_per_sequence) = self.decode_line();
        // Prompts of one length: all of their time is put down to their tokens.
        let (_, prefill_ms_per_token) = self.prefilling.fit(|x, y| y / x.max(1.0));
        Rates { prefill_ms_per_token, decode_ms_per_sequence, step_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(ms: f64, prefilled: u64, sampled: u64) -> StepFacts {
        StepFacts { took: Duration::from_secs_f64(ms / 1_000.0), prefilled, sampled }
    }

    #[test]
    fn a_mix_of_steps_teaches_all_parts() {
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

    /// A fifth of the steps compute a short follow-up, one of fifteen a long first prompt, on a machine that takes 16 ms more
    /// for a step with any prompt in it.
    fn conversations(book: &mut RateBook, steps: u64) {
        for at in 0..steps {
            let sampled = 5 + at * 7 % 15;
            let prefilled = match at % 30 {
                0 | 15 => 1_200 + at * 37 % 1_800,
                1 | 7 | 11 | 16 | 21 | 26 => 50 + at * 13 % 100,
                _ => 0,
            };
            let more = if prefilled > 0 { 16.0 } else { 0.0 };
            book.learn(step(6.0 + more + 0.015 * prefilled as f64 + 0.1 * sampled as f64, prefilled, sampled));
        }
    }

    #[test]
    fn many_short_prompts_do_not_make_a_token_dear() {
        let mut book = RateBook::default();
        conversations(&mut book, 1_500);
        let rates = book.rates().expect("enough steps");
        assert!((0.0148..0.0155).contains(&rates.prefill_ms_per_token), "{rates:?}");
        assert!((rates.step_ms - 6.0).abs() < 0.3, "{rates:?}");
        assert!((rates.decode_ms_per_sequence - 0.1).abs() < 0.02, "{rates:?}");
    }

    #[test]
    fn bal_a_worker_that_had_little_to_do_looks_as_fast_as_its_equals() {
        let (mut little, mut much) = (RateBook::default(), RateBook::default());
        conversations(&mut little, u64::from(STEPS_MIN));
        conversations(&mut much, 5_000);
        let (little, much) = (little.rates().expect("enough steps"), much.rates().expect("enough steps"));
        assert_eq!(little.near(much), much, "{little:?}");
    }

    #[test]
    fn a_long_pause_between_prompts_forgets_nothing_of_them() {
        let mut book = RateBook::default();
        conversations(&mut book, 600);
        let before = book.rates().expect("enough steps");
        (0..20_000u32).for_each(|at| book.learn(step(6.0 + 0.1 * f64::from(at % 9), 0, u64::from(at % 9).max(1))));
        let after = book.rates().expect("enough steps");
        assert!((before.prefill_ms_per_token - after.prefill_ms_per_token).abs() < 1e-9, "{before:?} {after:?}");
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
            let rates = book.fitted();
            for rate in [rates.step_ms, rates.prefill_ms_per_token, rates.decode_ms_per_sequence] {
                assert!(rate.is_finite() && rate >= 0.0, "{rates:?}");
            }
        }
    }
}
