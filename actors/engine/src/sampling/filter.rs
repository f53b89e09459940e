//! Temperature, top-k, top-p, min-p and the draw.
//!
//! Called by the sampler with finite logits and their maximum. It looks at few tokens: those near the likeliest first,
//! more only when the filters ask for more. Never: sorts a whole vocabulary unless the filters keep it.

use std::cmp::Ordering;

use starling_ids::TokenId;

use super::{draw::uniform, math};
use crate::contract::SamplingParams;

/// Below this the choice is greedy: the division would only overflow.
pub(super) const TEMPERATURE_MIN: f32 = 1e-5;

/// Shares of the likeliest token's weight above which candidates are gathered, one after the other until the filters
/// are content. The last one takes all.
const CUTS: [f32; 4] = [1.0 / 64.0, 1.0 / 16_384.0, 1e-9, 0.0];

/// Memory that is used again for each token.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    changed: Vec<f32>,
    /// One weight per vocabulary entry; the likeliest has 1.
    weights: Vec<f32>,
    /// Likeliest first.
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    logit: f32,
    weight: f32,
    id: TokenId,
}

impl Scratch {
    /// A copy of the logits to change.
    pub(super) fn copy(&mut self, logits: &[f32]) -> &mut [f32] {
        self.changed.clear();
        self.changed.extend_from_slice(logits);
        &mut self.changed
    }

    /// Draws from the copy.
    pub(super) fn draw_changed(&mut self, params: &SamplingParams, max: f32, position: u64) -> TokenId {
        let changed = std::mem::take(&mut self.changed);
        let token = self.draw(&changed, params, max, position);
        self.changed = changed;
        token
    }

    /// Draws from `logits`, whose maximum is `max`.
    pub(super) fn draw(&mut self, logits: &[f32], params: &SamplingParams, max: f32, position: u64) -> TokenId {
        let chance = uniform(params.seed, position);
        let top_k = if params.top_k == 0 { logits.len() } else { logits.len().min(params.top_k as usize) };
        let temperature = params.temperature;
        let filter = Filter { max, temperature, top_k, top_p: params.top_p, min_p: params.min_p };
        if top_k == logits.len() && params.top_p >= 1.0 {
            self.weights.clear();
            self.weights.extend(logits.iter().map(|logit| filter.weight(*logit)));
            return draw_in_order(&self.weights, params.min_p, chance);
        }
        // Top-p is a share of what top-k left; without top-k, of everything.
        let all = (top_k == logits.len()).then(|| math::exp_sum(logits, max, 1.0 / temperature));
        for cut in CUTS {
            if self.gather(logits, cut, filter, all) {
                break;
            }
        }
        self.draw_candidate(chance)
    }

    /// Candidates above the cut that pass the filters, likeliest first. False when the cut was too high to tell.
    fn gather(&mut self, logits: &[f32], cut: f32, filter: Filter, all: Option<f64>) -> bool {
        let last = cut == 0.0;
        self.candidates.clear();
        let candidates = &mut self.candidates;
        math::above(logits, filter.max + cut.ln() * filter.temperature, |id, logit| {
            candidates.push(Candidate { logit, weight: filter.weight(logit), id });
        });
        if all.is_none() && self.candidates.len() < filter.top_k && !last {
            return false;
        }
        if filter.top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(filter.top_k - 1, likelier);
            self.candidates.truncate(filter.top_k);
        }
        self.candidates.sort_unstable_by(likelier);
        let wanted = f64::from(filter.top_p.max(0.0)) * all.unwrap_or_else(|| self.mass());
        let mut mass = 0.0;
        let enough = self.candidates.iter().position(|candidate| {
            mass += f64::from(candidate.weight);
            mass >= wanted
        });
        match enough {
            Some(index) => self.candidates.truncate(index + 1),
            None if !last && all.is_some() => return false,
            None => {}
        }
        // The likeliest has weight 1, so min-p is a weight.
        let kept = self.candidates.partition_point(|candidate| candidate.weight >= filter.min_p);
        self.candidates.truncate(kept.max(1));
        true
    }

    fn mass(&self) -> f64 {
        self.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
    }

    fn draw_candidate(&self, chance: f64) -> TokenId {
        let mut left = chance * self.mass();
        for candidate in &self.candidates {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding left a crumb.
        self.candidates.last().map_or(0, |candidate| candidate.id)
    }
}

#[derive(Debug, Clone, Copy)]
struct Filter {
    max: f32,
    temperature: f32,
    /// 1 to the size of the vocabulary.
    top_k: usize,
    top_p: f32,
    min_p: f32,
}

impl Filter {
    /// The weight of a token at this temperature.
    #[inline]
    fn weight(&self, logit: f32) -> f32 {
        math::exp((logit - self.max) * (1.0 / self.temperature))
    }
}

/// Likelier first, ties by lowest id.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Draws by weight in order of ids; weights below `min_p` (a share of the highest, which is 1) count as 0.
fn draw_in_order(weights: &[f32], min_p: f32, chance: f64) -> TokenId {
    let kept = |weight: &f32| if *weight >= min_p { f64::from(*weight) } else { 0.0 };
    let total: f64 = weights.iter().map(kept).sum();
    let mut left = chance * total;
    let mut last = 0;
    for (id, weight) in weights.iter().map(kept).enumerate() {
        if weight > 0.0 {
            left -= weight;
            last = id as TokenId;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}
