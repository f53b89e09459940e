//! How fast this worker's engine is, learned from its own steps. Pure.
//!
//! Called by the engine thread after each step; routers read the result in load reports.

use std::time::Duration;

use crate::route::score::Rates;

/// Weight of the newest step.
const NEWEST: f64 = 0.1;

/// What one step did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepFacts {
    /// How long it took.
    pub(crate) took: Duration,
    /// Prompt tokens it computed.
    pub(crate) prefilled: u64,
    /// Tokens it sampled.
    pub(crate) sampled: u64,
}

/// Rates, moving with every step.
#[derive(Debug, Default)]
pub(crate) struct RateBook {
    rates: Rates,
}

impl RateBook {
    pub(crate) fn rates(&self) -> Rates {
        self.rates
    }

    /// Learns from a step. A step that computes prompt tokens teaches the prefill rate, after what its decodes
    /// are known to cost; a step that only decodes teaches the decode rate.
    pub(crate) fn learn(&mut self, step: StepFacts) {
        let ms = step.took.as_secs_f64() * 1_000.0;
        let sampled = step.sampled as f64;
        if step.prefilled > 0 {
            let rest = (ms - sampled * self.rates.decode_ms_per_sequence).max(ms * 0.1);
            approach(&mut self.rates.prefill_ms_per_token, rest / step.prefilled as f64);
        } else if step.sampled > 0 {
            approach(&mut self.rates.decode_ms_per_sequence, ms / sampled);
        }
    }
}

fn approach(rate: &mut f64, seen: f64) {
    *rate += (seen - *rate) * NEWEST;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_steps_are_learned() {
        let mut book = RateBook::default();
        for _ in 0..200 {
            book.learn(StepFacts { took: Duration::from_millis(20), prefilled: 0, sampled: 10 });
            book.learn(StepFacts { took: Duration::from_millis(70), prefilled: 100, sampled: 10 });
        }
        let rates = book.rates();
        assert!((rates.decode_ms_per_sequence - 2.0).abs() < 0.01, "{rates:?}");
        assert!((rates.prefill_ms_per_token - 0.5).abs() < 0.01, "{rates:?}");
    }

    #[test]
    fn rates_stay_finite_and_not_negative() {
        let mut book = RateBook::default();
        for (took, prefilled, sampled) in [(0, 0, 0), (0, 1, 1_000_000), (1, 0, 1), (5_000, 1, 0)] {
            book.learn(StepFacts { took: Duration::from_millis(took), prefilled, sampled });
            let rates = book.rates();
            assert!(rates.prefill_ms_per_token.is_finite() && rates.prefill_ms_per_token >= 0.0);
            assert!(rates.decode_ms_per_sequence.is_finite() && rates.decode_ms_per_sequence >= 0.0);
        }
    }
}
