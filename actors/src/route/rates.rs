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

/// The sum of what workers have learned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Learned {
    sum: Rates,
    count: usize,
}

impl Default for Learned {
    fn default() -> Self {
        Self { sum: Rates { prefill_ms_per_token: 0.0, decode_ms_per_sequence: 0.0, step_ms: 0.0 }, count: 0 }
    }
}

impl Learned {
    /// One worker's rates changed.
    pub(super) fn replace(&mut self, before: Option<Rates>, now: Option<Rates>) {
        if let Some(before) = before {
            self.add(before, -1.0);
            self.count = self.count.saturating_sub(1);
        }
        if let Some(now) = now {
            self.add(now, 1.0);
            self.count += 1;
        }
    }

    /// Workers that have learned theirs.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The mean; the prior when nothing was learned.
    pub(super) fn mean(&self) -> Rates {
        if self.count == 0 {
            return Rates::default();
        }
        let count = self.count as f64;
        Rates {
            prefill_ms_per_token: self.sum.prefill_ms_per_token / count,
            decode_ms_per_sequence: self.sum.decode_ms_per_sequence / count,
            step_ms: self.sum.step_ms / count,
        }
    }

    fn add(&mut self, rates: Rates, sign: f64) {
        self.sum.prefill_ms_per_token += sign * rates.prefill_ms_per_token;
        self.sum.decode_ms_per_sequence += sign * rates.decode_ms_per_sequence;
        self.sum.step_ms += sign * rates.step_ms;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_machines_have_equal_rates_and_others_keep_theirs() {
        let with = |prefill_ms_per_token| Rates { prefill_ms_per_token, ..Rates::default() };
        let mut learned = Learned::default();
        assert_eq!(learned.mean(), Rates::default());
        [with(0.9), with(7.0), with(1.0)].into_iter().for_each(|rates| learned.replace(None, Some(rates)));
        learned.replace(Some(with(7.0)), Some(with(1.1)));
        let common = learned.mean();
        assert!((common.prefill_ms_per_token - 1.0).abs() < 1e-9);
        assert_eq!(with(0.9).near(common), with(1.1).near(common));
        assert_eq!(with(0.1).near(common), with(0.1));
    }
}
