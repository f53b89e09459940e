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
    weights: Vec<f32>,
    /// (logit, id), likeliest first.
    candidates: Vec<(f32, TokenId)>,
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
        let scale = 1.0 / params.temperature;
        let chance = uniform(params.seed, position);
        let top_k = params.top_k as usize;
        let keeps_all = (top_k == 0 || top_k >= logits.len()) && params.top_p >= 1.0;
        self.weights.clear();
        self.weights.extend(logits.iter().map(|logit| math::exp((logit - max) * scale)));
        if keeps_all {
            return draw_in_order(&self.weights, params.min_p, chance);
        }
        let top_k = if top_k == 0 { logits.len() } else { top_k.min(logits.len()) };
        for cut in CUTS {
            if self.gather(logits, cut, Filter { top_k, top_p: params.top_p, min_p: params.min_p }) {
                break;
            }
        }
        self.draw_candidate(chance)
    }

    /// Candidates above the cut that pass the filters, likeliest first. False when the cut was too high to tell.
    fn gather(&mut self, logits: &[f32], cut: f32, filter: Filter) -> bool {
        self.candidates.clear();
        let near = self.weights.iter().enumerate().filter(|(_, weight)| **weight > cut);
        self.candidates.extend(near.map(|(id, _)| (logits[id], id as TokenId)));
        let last = cut == 0.0;
        // The cut is on rounded weights, the order on logits: the lowest of the gathered might tie with one outside.
        let complete = self.candidates.len() >= filter.top_k || filter.top_k >= logits.len();
        if !complete && !last {
            return false;
        }
        if filter.top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(filter.top_k - 1, likelier);
            self.candidates.truncate(filter.top_k);
        }
        self.candidates.sort_unstable_by(likelier);
        let bounded = filter.top_k < logits.len();
        let total: f64 = if bounded { self.mass() } else { self.weights.iter().map(|weight| f64::from(*weight)).sum() };
        let wanted = f64::from(filter.top_p.max(0.0)) * total;
        let mut mass = 0.0;
        let enough = self.candidates.iter().position(|(_, id)| {
            mass += f64::from(self.weights[*id as usize]);
            mass >= wanted
        });
        match enough {
            Some(index) => self.candidates.truncate(index + 1),
            None if !last && !bounded => return false,
            None => {}
        }
        let (weights, highest) = (&self.weights, 1.0);
        let kept = self.candidates.partition_point(|(_, id)| weights[*id as usize] >= filter.min_p * highest);
        self.candidates.truncate(kept.max(1));
        true
    }

    fn mass(&self) -> f64 {
        self.candidates.iter().map(|(_, id)| f64::from(self.weights[*id as usize])).sum()
    }

    fn draw_candidate(&self, chance: f64) -> TokenId {
        let mut left = chance * self.mass();
        for (_, id) in &self.candidates {
            left -= f64::from(self.weights[*id as usize]);
            if left < 0.0 {
                return *id;
            }
        }
        // Rounding left a crumb.
        self.candidates.last().map_or(0, |(_, id)| *id)
    }
}

#[derive(Debug, Clone, Copy)]
struct Filter {
    /// At least 1.
    top_k: usize,
    top_p: f32,
    min_p: f32,
}

/// Likelier first, ties by lowest id.
fn likelier(a: &(f32, TokenId), b: &(f32, TokenId)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
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
