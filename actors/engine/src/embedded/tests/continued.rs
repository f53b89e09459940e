//! An answer that broke on another engine and goes on here says what it would have said, wherever it was cut.

use starling_ids::TokenId;

use super::tiny::{Store, Tiny};
use crate::{
    contract::{Engine, FinishReason, SamplingParams, SequenceId, SequenceRequest, StopParams},
    loader::{KernelChoice, LoadedModel},
};

const PROMPT: [TokenId; 21] = [40, 81, 7, 200, 133, 12, 55, 90, 40, 41, 42, 43, 250, 251, 252, 5, 6, 7, 100, 101, 102];
const TOKENS_MAX: u32 = 40;

/// The answer's new tokens and why it ended.
fn answer(
    engine: &mut dyn Engine,
    said: &[TokenId],
    (sampling, stop): (&SamplingParams, &StopParams),
) -> (Vec<TokenId>, FinishReason) {
    let (mut sampling, mut stop) = (sampling.clone(), stop.clone());
    // What a second choice of the same request draws with.
    sampling.seed = sampling.seed.wrapping_add(1);
    stop.tokens_max -= said.len() as u32;
    let request = SequenceRequest {
        id: SequenceId(1 + said.len() as u64),
        prompt: [&PROMPT[..], said].concat().into(),
        answered: said.len() as u32,
        hash_seed: engine.capabilities().card.hash_seed,
        sampling,
        stop,
        logprobs: None,
        priority: 0,
    };
    engine.submit(request).unwrap();
    let mut tokens = Vec::new();
    loop {
        for delta in engine.step().unwrap().deltas {
            tokens.extend(delta.tokens.iter().map(|token| token.id));
            if let Some(finish) = delta.finish {
                return (tokens, finish);
            }
        }
    }
}

/// Ways to choose that remember what was said, each beside when to end.
fn memories() -> Vec<(SamplingParams, StopParams)> {
    let end = StopParams { tokens_max: TOKENS_MAX, tokens_min: 0, token_ids: Vec::new(), ignore_eos: true };
    let greedy = SamplingParams::greedy();
    let drawn = SamplingParams { temperature: 1.3, seed: 77, ..greedy.clone() };
    let counted = SamplingParams { presence_penalty: 1.5, frequency_penalty: 0.9, ..greedy.clone() };
    let late = StopParams { tokens_min: 25, token_ids: (0..150).collect(), ignore_eos: false, ..end.clone() };
    vec![
        (greedy.clone(), end.clone()),
        (counted.clone(), end.clone()),
        (SamplingParams { repetition_penalty: 1.4, ..greedy.clone() }, end.clone()),
        (SamplingParams { top_k: 20, top_p: 0.9, min_p: 0.01, ..drawn.clone() }, end.clone()),
        (SamplingParams { temperature: 0.8, seed: 3, ..counted }, end),
        (SamplingParams { logit_bias: vec![(9, 4.0)], repetition_penalty: 1.2, ..drawn }, late.clone()),
        (greedy, late),
    ]
}

#[test]
fn an_answer_goes_on_from_every_cut_as_if_it_had_not_been_cut() {
    let model = Tiny::new(11).load(Store::Q8_0, 1, KernelChoice::Auto);
    for (at, (sampling, stop)) in memories().iter().enumerate() {
        let (whole, finish) = answer(&mut *model.engine(), &[], (sampling, stop));
        assert!(whole.len() >= stop.tokens_min.max(20) as usize, "way {at}: {} tokens", whole.len());
        // One engine remembers blocks of earlier cuts, the other computes all anew.
        let mut warm = model.engine();
        for cut in 1..whole.len() {
            let expected = (whole[cut..].to_vec(), finish);
            assert_eq!(answer(&mut *warm, &whole[..cut], (sampling, stop)), expected, "way {at}, cut at {cut}");
            if cut % 8 == 1 {
                let fresh = answer(&mut *model.engine(), &whole[..cut], (sampling, stop));
                assert_eq!(fresh, expected, "way {at}, cut at {cut}, without a cache");
            }
        }
    }
}
