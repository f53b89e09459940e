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

/// The ids of the `count` highest logits: few enough to keep sorted by hand.
fn likeliest(logits: &[f32], count: usize) -> Vec<TokenId> {
    if count == 0 {
        return Vec::new();
    }
    let mut best: Vec<(f32, TokenId)> = Vec::with_capacity(count + 1);
    let enter = |best: &mut Vec<(f32, TokenId)>, id: usize, logit: f32| {
        if best.len() < count || best.last().is_some_and(|(last, _)| logit > *last) {
            let place = best.partition_point(|(other, _)| other.total_cmp(&logit) != Ordering::Less);
            best.insert(place, (logit, id as TokenId));
            best.truncate(count);
        }
    };
    let (chunks, rest) = logits.as_chunks::<{ math::BLOCK }>();
    for (at, chunk) in chunks.iter().enumerate() {
        // Once the list is full, few blocks hold a logit that enters it.
        let worst = best.last().filter(|_| best.len() == count).map(|(logit, _)| *logit);
        if worst.is_none_or(|worst| math::block_max(chunk) > worst) {
            chunk.iter().enumerate().for_each(|(lane, logit)| enter(&mut best, at * math::BLOCK + lane, *logit));
        }
    }
    rest.iter().enumerate().for_each(|(lane, logit)| enter(&mut best, chunks.len() * math::BLOCK + lane, *logit));
    best.into_iter().map(|(_, id)| id).collect()
}
