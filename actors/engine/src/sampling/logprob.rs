//! Log-probabilities: log-softmax of the logits as the model gave them.
//!
//! Called by the sampler when a request asks for them.

use std::cmp::Ordering;

use starling_ids::TokenId;

use super::math;
use crate::contract::TokenLogprob;

/// ln p of `id`, and of the `count` likeliest tokens, best first, ties by lowest id. `max` is the highest logit.
pub(super) fn of(logits: &[f32], max: f32, id: TokenId, count: u8) -> (f32, Vec<TokenLogprob>) {
    let norm = f64::from(max) + math::exp_sum(logits, max, 1.0).ln();
    let logprob = |id: TokenId| {
        let logit = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit) - norm) as f32
    };
    let top = likeliest(logits, usize::from(count));
    (logprob(id), top.into_iter().map(|id| TokenLogprob { id, logprob: logprob(id) }).collect())
}

/// The ids of the `count` highest logits in one pass: few enough to keep sorted by hand.
fn likeliest(logits: &[f32], count: usize) -> Vec<TokenId> {
    let mut best: Vec<(f32, TokenId)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return Vec::new();
    }
    for (id, logit) in logits.iter().enumerate() {
        let enters = best.len() < count || best.last().is_some_and(|(last, _)| logit > last);
        if enters {
            let at = best.partition_point(|(other, _)| other.total_cmp(logit) != Ordering::Less);
            best.insert(at, (*logit, id as TokenId));
            best.truncate(count);
        }
    }
    best.into_iter().map(|(_, id)| id).collect()
}
