//! How long a step would take: a curve over what it computes.
//!
//! Called by the simulated backend for each step. Never: looks at a clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A curve and how much faster than it the engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timing {
    /// What a step takes on the machine described.
    pub curve: Curve,
    /// Divides everything; above 0. 1 is as on that machine.
    pub speedup: f64,
}

/// What a step takes, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Curve {
    /// A sum over what is computed.
    Terms(Terms),
    /// A polynomial of prompt tokens plus one of cache use, as other simulators have it.
    Polynomial(Polynomial),
}

/// Constants of [`Curve::Terms`], milliseconds unless said otherwise; each finite and at least 0.
///
/// A step takes `step + prefill_token · p + attention_million · a / 10⁶ + decode_sequence · d + context_token · c`,
/// with p prefill tokens, a the (token, token before it) pairs among them, d decoding sequences and
/// c the tokens in their contexts. The defaults are those of a model of about 8 billion parameters on one large GPU:
/// 2,000 tokens of prompt take 48 ms, 64 sequences of 1,000 tokens decode in 12 ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Terms {
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
}

/// Constants of [`Curve::Polynomial`], constant first.
///
/// A step takes `p₀ + p₁ t + p₂ t²` when it computes t > 0 prompt tokens, and besides the larger of 1 and
/// `d₀ + d₁ u + d₂ u²` when sequences decode, with u the share of the cache that their contexts take up. The defaults are
/// the polynomials published with NVIDIA Dynamo's mock engine (Apache-2.0), fitted there to one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Polynomial {
    /// p₀, p₁, p₂.
    pub prefill: [f64; 3],
    /// d₀, d₁, d₂.
    pub decode: [f64; 3],
}

impl Default for Timing {
    fn default() -> Self {
        Self { curve: Curve::Terms(Terms::default()), speedup: 1.0 }
    }
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            step_ms: 7.0,
            prefill_token_ms: 0.02,
            attention_million_ms: 0.4,
            decode_sequence_ms: 0.03,
            context_token_ms: 0.000_05,
        }
    }
}

impl Default for Polynomial {
    fn default() -> Self {
        Self { prefill: [16.501_42, 1.518_344e-2, 4.209_989e-7], decode: [5.74, 54.01, -25.74] }
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
    /// Tokens that the cache holds when full.
    pub(super) cache_tokens: usize,
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
    /// The published polynomial at full speed.
    #[must_use]
    pub fn published() -> Self {
        Self { curve: Curve::Polynomial(Polynomial::default()), speedup: 1.0 }
    }

    /// The same timing, if its constants make sense.
    ///
    /// # Errors
    /// The first constant that does not.
    pub fn validated(self) -> Result<Self, TimingError> {
        let positive: Vec<(&'static str, f64)> = match self.curve {
            Curve::Terms(terms) => vec![
                ("step_ms", terms.step_ms),
                ("prefill_token_ms", terms.prefill_token_ms),
                ("attention_million_ms", terms.attention_million_ms),
                ("decode_sequence_ms", terms.decode_sequence_ms),
                ("context_token_ms", terms.context_token_ms),
            ],
            // The curvature of the decode polynomial may be negative; its value is never below 1 ms.
            Curve::Polynomial(Polynomial { prefill: [p0, p1, p2], decode: [d0, ..] }) => {
                vec![("prefill[0]", p0), ("prefill[1]", p1), ("prefill[2]", p2), ("decode[0]", d0)]
            }
        };
        for (name, value) in positive {
            if !(0.0..=60_000.0).contains(&value) {
                return Err(TimingError { name, value, bound: "0 to 60000" });
            }
        }
        if let Curve::Polynomial(Polynomial { decode: [_, d1, d2], .. }) = self.curve {
            for (name, value) in [("decode[1]", d1), ("decode[2]", d2)] {
                if !(-60_000.0..=60_000.0).contains(&value) {
                    return Err(TimingError { name, value, bound: "-60000 to 60000" });
                }
            }
        }
        if !(1e-3..=1e9).contains(&self.speedup) {
            return Err(TimingError { name: "speedup", value: self.speedup, bound: "0.001 to 1e9" });
        }
        Ok(self)
    }

    /// What a prompt of `tokens` takes that is alone on an idle engine with steps of `step_tokens`.
    #[must_use]
    pub fn prefill(&self, tokens: u64, step_tokens: u32) -> Duration {
        let (mut start, mut time) = (0, Duration::ZERO);
        while start < tokens {
            let count = (tokens - start).min(u64::from(step_tokens.max(1)));
            let pairs = count as f64 * (start as f64 + (count as f64 - 1.0) / 2.0);
            time += self.step(Work { prefill_tokens: count as usize, pairs, ..Work::default() });
            start += count;
        }
        time
    }

    /// The time of one step.
    pub(super) fn step(&self, work: Work) -> Duration {
        if work.prefill_tokens == 0 && work.decodes == 0 {
            return Duration::ZERO;
        }
        let ms = match &self.curve {
            Curve::Terms(terms) => terms.ms(&work),
            Curve::Polynomial(polynomial) => polynomial.ms(&work),
        };
        // Validated constants and bounded work: finite and far below the limit of a duration.
        Duration::try_from_secs_f64(ms / 1e3 / self.speedup).unwrap_or(Duration::MAX)
    }
}

impl Terms {
    fn ms(&self, work: &Work) -> f64 {
        self.step_ms
            + self.prefill_token_ms * work.prefill_tokens as f64
            + self.attention_million_ms * work.pairs / 1e6
            + self.decode_sequence_ms * work.decodes as f64
            + self.context_token_ms * work.context_tokens as f64
    }
}

impl Polynomial {
    fn ms(&self, work: &Work) -> f64 {
        let at = |[c0, c1, c2]: [f64; 3], x: f64| c0 + x * (c1 + x * c2);
        let prefill = if work.prefill_tokens == 0 { 0.0 } else { at(self.prefill, work.prefill_tokens as f64) };
        let used = work.context_tokens as f64 / work.cache_tokens.max(1) as f64;
        let decode = if work.decodes == 0 { 0.0 } else { at(self.decode, used.min(1.0)).max(1.0) };
        prefill + decode
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_polynomial_gives_its_published_values() {
        let ms = |work| Timing::published().step(work).as_secs_f64() * 1e3;
        let prefill = |prefill_tokens| Work { prefill_tokens, ..Work::default() };
        let decode = |context_tokens| Work { decodes: 8, context_tokens, cache_tokens: 1_000, ..Work::default() };
        assert!((ms(prefill(2_048)) - 49.4).abs() < 0.1);
        assert!((ms(prefill(8_192)) - 169.1).abs() < 0.1);
        assert!((ms(decode(100)) - 10.9).abs() < 0.1);
        assert!((ms(decode(900)) - 33.5).abs() < 0.1);
    }
}
