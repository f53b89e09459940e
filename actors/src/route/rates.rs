//! How fast a worker is.
//!
//! Learned by each worker from its own steps, told in its load reports, used by the cost of [`super::policy`]. Pure.

use serde::{Deserialize, Serialize};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_machines_have_equal_rates_and_others_keep_theirs() {
        let with = |prefill_ms_per_token| Rates { prefill_ms_per_token, ..Rates::default() };
        let common = Rates::common([with(0.9), with(1.1), with(1.0)].into_iter());
        assert!((common.prefill_ms_per_token - 1.0).abs() < 1e-9);
        assert_eq!(with(0.9).near(common), with(1.1).near(common));
        assert_eq!(with(0.1).near(common), with(0.1));
        assert_eq!(Rates::common(std::iter::empty()), Rates::default());
    }
}
