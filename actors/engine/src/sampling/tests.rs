//! Sampling against arithmetic done by hand and against the distribution it promises.

use std::sync::Arc;

use starling_ids::TokenId;
use starling_kv::hash::HashSeed;

use super::*;
use crate::contract::{SamplingParams, SequenceId, SequenceRequest, StopParams};

fn chooser_for(prompt: &[TokenId], sampling: SamplingParams, vocab: u32) -> Chooser {
    Chooser::new(&request(prompt, sampling), &[0], vocab)
}

fn request(prompt: &[TokenId], sampling: SamplingParams) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(1),
        prompt: Arc::from(prompt),
        answered: 0,
        hash_seed: HashSeed(0),
        sampling,
        stop: StopParams { tokens_max: 10, tokens_min: 0, token_ids: vec![], ignore_eos: false },
        logprobs: None,
        priority: 0,
    }
}

fn hot(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..SamplingParams::greedy() }
}

/// Counts of `draws` tokens at consecutive positions.
fn histogram(logits: &[f32], params: &SamplingParams, draws: u64) -> Vec<u64> {
    let chooser = chooser_for(&[1], params.clone(), logits.len() as u32);
    let mut sampler = Sampler::default();
    let mut counts = vec![0; logits.len()];
    for position in 0..draws {
        counts[sampler.choose(logits, &chooser, position).expect("finite").id as usize] += 1;
    }
    counts
}

/// χ² of counts against probabilities, over the tokens that can occur.
fn chi_square(counts: &[u64], probabilities: &[f64]) -> f64 {
    let draws: u64 = counts.iter().sum();
    let pairs = counts.iter().zip(probabilities);
    pairs.clone().for_each(|(count, p)| assert!(*p > 0.0 || *count == 0, "a filtered token was drawn"));
    pairs
        .filter(|(_, p)| **p > 0.0)
        .map(|(count, p)| (*count as f64 - draws as f64 * p).powi(2) / (draws as f64 * p))
        .sum()
}

fn softmax(logits: &[f32], temperature: f64, keep: impl Fn(usize) -> bool) -> Vec<f64> {
    let weights: Vec<f64> = logits
        .iter()
        .enumerate()
        .map(|(id, logit)| if keep(id) { (f64::from(*logit) / temperature).exp() } else { 0.0 })
        .collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

const LOGITS: [f32; 8] = [0.0, 1.0, 2.0, 2.0, -1.0, 0.5, 1.5, -3.0];
/// χ² with up to 7 degrees of freedom exceeds this with a chance of 1 in 100 000; seeds are fixed, so it never does.
const CHI_SQUARE_MAX: f64 = 34.0;

#[test]
fn draws_follow_the_softmax_at_any_temperature() {
    for temperature in [0.5, 1.0, 2.0] {
        for seed in [0, 1, u64::MAX] {
            let counts = histogram(&LOGITS, &SamplingParams { seed, ..hot(temperature) }, 20_000);
            let x = chi_square(&counts, &softmax(&LOGITS, f64::from(temperature), |_| true));
            assert!(x < CHI_SQUARE_MAX, "temperature {temperature} seed {seed}: {x}, {counts:?}");
        }
    }
}

#[test]
fn filters_keep_what_they_say() {
    // Likeliest first: 2, 3 (tie, lower id first), 6, 1, 5, 0, 4, 7.
    let p = softmax(&LOGITS, 1.0, |_| true);
    assert!(p[2] + p[3] < 0.6 && p[2] + p[3] + p[6] > 0.6);
    let cases: [(SamplingParams, &[usize]); 6] = [
        (SamplingParams { top_k: 1, ..hot(1.0) }, &[2]),
        (SamplingParams { top_k: 3, ..hot(1.0) }, &[2, 3, 6]),
        (SamplingParams { top_p: 0.6, ..hot(1.0) }, &[2, 3, 6]),
        (SamplingParams { top_p: 1e-6, ..hot(1.0) }, &[2]),
        (SamplingParams { min_p: 0.5, ..hot(1.0) }, &[2, 3, 6]),
        (SamplingParams { top_k: 6, top_p: 0.99, min_p: 0.2, ..hot(1.0) }, &[2, 3, 6, 1, 5]),
    ];
    for (params, kept) in cases {
        let counts = histogram(&LOGITS, &params, 10_000);
        let x = chi_square(&counts, &softmax(&LOGITS, 1.0, |id| kept.contains(&id)));
        assert!(x < CHI_SQUARE_MAX, "{params:?}: {x}, {counts:?}");
    }
}

#[test]
fn a_large_vocabulary_is_cut_like_a_sorted_one() {
    let logits: Vec<f32> =
        (0..50_000u32).map(|id| (uniform(9, u64::from(id)) * 20.0) as f32 - (id % 7) as f32).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let p = softmax(&logits, 1.5, |_| true);
    for (top_k, top_p) in [(0u32, 0.9f32), (0, 0.999), (40, 1.0), (1000, 0.95), (30_000, 0.99)] {
        let params = SamplingParams { top_k, top_p, ..hot(1.5) };
        let within = if top_k == 0 { logits.len() } else { top_k as usize };
        let total: f64 = order[..within].iter().map(|id| p[*id]).sum();
        let mut mass = 0.0;
        let kept: std::collections::HashSet<usize> = order[..within]
            .iter()
            .take_while(|id| {
                let before = mass;
                mass += p[**id];
                before < f64::from(top_p) * total * (1.0 + 1e-5)
            })
            .copied()
            .collect();
        let chooser = chooser_for(&[1], params, 50_000);
        let mut sampler = Sampler::default();
        for position in 0..300 {
            let id = sampler.choose(&logits, &chooser, position).expect("finite").id;
            assert!(kept.contains(&(id as usize)), "top_k {top_k} top_p {top_p}: {id}");
        }
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let params = SamplingParams { seed: 42, top_p: 0.9, ..hot(0.8) };
    let chooser = chooser_for(&[1], params.clone(), 8);
    let run = |range: std::ops::Range<u64>| -> Vec<TokenId> {
        let mut sampler = Sampler::default();
        range.map(|position| sampler.choose(&LOGITS, &chooser, position).expect("finite").id).collect()
    };
    let whole = run(5..65);
    assert_eq!(whole[20..], run(25..65), "continued where it was cut");
    let other = histogram(&LOGITS, &SamplingParams { seed: 43, ..params }, 60);
    assert_ne!(other, histogram(&LOGITS, &SamplingParams { seed: 42, top_p: 0.9, ..hot(0.8) }, 60));
}

#[test]
fn greedy_takes_the_highest_and_the_lowest_id_of_equals() {
    let chooser = chooser_for(&[1], SamplingParams::greedy(), 8);
    assert_eq!(Sampler::default().choose(&LOGITS, &chooser, 0).expect("finite").id, 2);
}

#[test]
fn penalties_match_hand_computed_logits() {
    let params = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(5, 1.25), (4, -100.0)],
        ..SamplingParams::greedy()
    };
    let mut chooser = chooser_for(&[1, 4], params, 8);
    for token in [2, 2, 7] {
        chooser.accept(token);
    }
    let mut logits = LOGITS;
    chooser.apply(&mut logits);
    // 1: 1 ÷ 2. 2: 2 ÷ 2 - 0.5 - 2 · 0.25. 4: -1 · 2 - 100. 5: 0.5 + 1.25. 7: -3 · 2 - 0.5 - 0.25. Others as they were.
    assert_eq!(logits, [0.0, 0.5, 0.0, 2.0, -102.0, 1.75, 1.5, -6.75]);
    assert_eq!(Sampler::default().choose(&LOGITS, &chooser, 9).expect("finite").id, 3);
}

#[test]
fn presence_and_frequency_leave_the_prompt_alone() {
    let params = SamplingParams { presence_penalty: 2.0, frequency_penalty: 2.0, ..SamplingParams::greedy() };
    let chooser = chooser_for(&[2, 3], params, 8);
    let mut logits = LOGITS;
    chooser.apply(&mut logits);
    assert_eq!(logits, LOGITS);
}

#[test]
fn stop_tokens_wait_for_tokens_min() {
    let mut wanted = request(&[1], hot(1.0));
    wanted.stop = StopParams { tokens_max: 9, tokens_min: 2, token_ids: vec![2], ignore_eos: false };
    let mut chooser = Chooser::new(&wanted, &[3], 8);
    let mut sampler = Sampler::default();
    for _ in 0..2 {
        for position in 0..200 {
            let id = sampler.choose(&LOGITS, &chooser, position).expect("finite").id;
            assert!(id != 2 && id != 3);
        }
        assert_eq!(chooser.nearest_allowed(2), 4);
        chooser.accept(6);
    }
    assert!((0..200).any(|position| sampler.choose(&LOGITS, &chooser, position).expect("finite").id == 2));
    assert_eq!(chooser.nearest_allowed(2), 2);
}

#[test]
fn broken_logits_fail_and_harm_nobody_else() {
    let chooser = chooser_for(&[1], hot(1.0), 40);
    let mut sampler = Sampler::default();
    for (at, bad) in [(0, f32::NAN), (17, f32::NAN), (39, f32::NAN), (3, f32::INFINITY)] {
        let mut logits = vec![0.5; 40];
        logits[at] = bad;
        assert_eq!(sampler.choose(&logits, &chooser, 0), Err(NotFinite));
    }
    assert_eq!(sampler.choose(&[f32::NEG_INFINITY; 40], &chooser, 0), Err(NotFinite));
    let mut one = vec![f32::NEG_INFINITY; 40];
    one[21] = -7.0;
    assert_eq!(sampler.choose(&one, &chooser, 0).expect("finite").id, 21);
}

#[test]
fn logprobs_are_log_softmax_of_the_raw_logits() {
    let mut wanted = request(&[1], SamplingParams { logit_bias: vec![(7, 50.0)], ..SamplingParams::greedy() });
    wanted.logprobs = Some(3);
    let chooser = Chooser::new(&wanted, &[0], 8);
    let token = Sampler::default().choose(&LOGITS, &chooser, 0).expect("finite");
    let right = softmax(&LOGITS, 1.0, |_| true);
    assert_eq!(token.id, 7);
    assert!((f64::from(token.logprob.expect("asked for")) - right[7].ln()).abs() < 1e-6);
    assert_eq!(token.top.iter().map(|top| top.id).collect::<Vec<_>>(), [2, 3, 6]);
    for top in token.top {
        assert!((f64::from(top.logprob) - right[top.id as usize].ln()).abs() < 1e-6);
    }
}

#[test]
fn the_exponential_is_close_and_ends_at_zero() {
    for step in 0..8_700 {
        let x = -(step as f32) / 100.0;
        let (got, right) = (f64::from(math::exp(x)), f64::from(x).exp());
        assert!((got / right - 1.0).abs() < 3e-7, "{x}: {got} {right}");
    }
    assert_eq!((math::exp(0.0), math::exp(-88.0), math::exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
}
