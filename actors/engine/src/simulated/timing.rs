//! How long a step would take: a polynomial in what it computes.
//!
//! Called by the simulated backend for each step. Never: looks at a clock.

use std::time::Duration;

use thiserror::Error;

/// Constants of the timing model, milliseconds unless said otherwise; each finite and at least 0.
///
/// A step takes `step + prefill_token · p + attention_million · a / 10⁶ + decode_sequence · d + context_token · c`,
/// divided by `speedup`, with p prefill tokens, a the (token, token before it) pairs among them, d decoding sequences and
/// c the tokens in their contexts. The defaults are those of a model of about 8 billion parameters on one large GPU:
/// 2,000 tokens of prompt take 48 ms, 64 sequences of 1,000 tokens decode in 12 ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Every step that computes anything: launches and one pass over the weights.
    pub step_ms: f64,
    /// Each prompt token.
    pub prefill_token_ms: f64,
    /// Each million pairs of a prompt token and a token before it.
    pub attention_million_ms: f64,
    /// Each sequence that decodes.
    pub decode_sequence_ms: f64,
    /// Each token in the context of a sequence that decodes.
    pub context_token_ms: f64,
    /// Divides everything; above 0. 1 is as on the machine the constants describe.
    pub speedup: f64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            step_ms: 7.0,
            prefill_token_ms: 0.02,
            attention_million_ms: 0.4,
            decode_sequence_ms: 0.03,
            context_token_ms: 0.000_05,
            speedup: 1.0,
        }
    }
}

/// A constant that makes no sense.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("timing {name} is {value}, it must be finite and {bound}")]
pub struct TimingError {
    /// Which.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// What would be right.
    pub bound: &'static str,
}

/// What a step computes, as far as time is concerned.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Work {
    /// Prompt tokens.
    pub(super) prefill_tokens: usize,
    /// (prompt token, token before it) pairs.
    pub(super) pairs: f64,
    /// Sequences that decode.
    pub(super) decodes: usize,
    /// Tokens before the decoded ones.
    pub(super) context_tokens: usize,
}

impl Work {
    /// One item more: `count` tokens from position `start` on.
    pub(super) fn add(&mut self, start: usize, count: usize) {
        if count == 1 && start > 0 {
            self.decodes += 1;
            self.context_tokens += start;
        } else {
            self.prefill_tokens += count;
            self.pairs += count as f64 * (start as f64 + (count as f64 - 1.0) / 2.0);
        }
    }
}

impl Timing {
    /// The same timing, if its constants make sense.
    ///
    /// # Errors
    /// The first constant that does not.
    pub fn validated(self) -> Result<Self, TimingError> {
        let constants = [
            ("step_ms", self.step_ms),
            ("prefill_token_ms", self.prefill_token_ms),
            ("attention_million_ms", self.attention_million_ms),
            ("decode_sequence_ms", self.decode_sequence_ms),
            ("context_token_ms", self.context_token_ms),
        ];
        for (name, value) in constants {
            if !(0.0..=60_000.0).contains(&value) {
                return Err(TimingError { name, value, bound: "0 to 60000" });
            }
        }
        if !(1e-3..=1e9).contains(&self.speedup) {
            return Err(TimingError { name: "speedup", value: self.speedup, bound: "0.001 to 1e9" });
        }
        Ok(self)
    }

    /// The time of one step.
    pub(super) fn step(&self, work: Work) -> Duration {
        if work == Work::default() {
            return Duration::ZERO;
        }
        let ms = self.step_ms
            + self.prefill_token_ms * work.prefill_tokens as f64
            + self.attention_million_ms * work.pairs / 1e6
            + self.decode_sequence_ms * work.decodes as f64
            + self.context_token_ms * work.context_tokens as f64;
        // Validated constants and bounded work: finite and far below the limit of a duration.
        Duration::try_from_secs_f64(ms / 1e3 / self.speedup).unwrap_or(Duration::MAX)
    }
}
