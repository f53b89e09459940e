//! From logits to the next token.
//!
//! Called by the engine once for each sequence that gets a token. Steps, in this order: repetition, presence and
//! frequency penalties, logit bias, stop tokens masked, temperature, top-k, top-p, min-p, draw. Log-probabilities are
//! of the logits as they came. Never: reads a clock or a random source: the draw at a position is a function of seed
//! and position alone. Bounds: scratch memory of a few numbers for each vocabulary entry, kept and reused.

mod chooser;
mod draw;
mod filter;
mod logprob;
mod math;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use chooser::Chooser;
pub use draw::uniform;

use crate::contract::SampledToken;
use filter::Scratch;

/// Logits that name no token: one is not a number or infinitely high, or all are infinitely low.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("logits are not finite")]
pub struct NotFinite;

/// Chooses tokens; holds scratch memory and nothing else.
#[derive(Debug, Default)]
pub struct Sampler {
    scratch: Scratch,
}

impl Sampler {
    /// The next token for the position after the sequence's last one. `logits` has one entry per vocabulary entry.
    ///
    /// The caller tells `chooser` with [`Chooser::accept`] when it takes the token.
    pub fn choose(&mut self, logits: &[f32], chooser: &Chooser, position: u64) -> Result<SampledToken, NotFinite> {
        let params = chooser.params();
        let greedy = params.temperature.is_nan() || params.temperature < filter::TEMPERATURE_MIN;
        let raw_max = math::finite_max(logits).ok_or(NotFinite)?;
        let id = if chooser.changes_logits() {
            let changed = self.scratch.copy(logits);
            chooser.apply(changed);
            let max = math::finite_max(changed).ok_or(NotFinite)?;
            if greedy { math::first_at(changed, max) } else { self.scratch.draw_changed(params, max, position) }
        } else if greedy {
            math::first_at(logits, raw_max)
        } else {
            self.scratch.draw(logits, params, raw_max, position)
        };
        let Some(wanted) = chooser.logprobs() else { return Ok(SampledToken { id, logprob: None, top: Vec::new() }) };
        let (logprob, top) = logprob::of(logits, raw_max, id, wanted);
        Ok(SampledToken { id, logprob: Some(logprob), top })
    }
}
