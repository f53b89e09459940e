//! Tests over the default model, which `make model` brings.

use std::{collections::HashMap, path::PathBuf};

use serde::Deserialize;
use starling_ids::TokenId;
use tokenizers::Tokenizer;

use super::{super::EmbeddedModel, bits, dense, feed, slots};
use crate::{
    backend::{Backend, Batch, BatchItem},
    contract::{Engine, FinishReason, SampledToken, SamplingParams, SequenceId, SequenceRequest, StopParams},
    loader::{Activations, EngineKind, KernelChoice, LoadedModel, ModelOptions},
};

/// Where the default model is, as `make model` leaves it.
#[allow(clippy::disallowed_methods, reason = "tests find the model as the scripts do")]
fn model_path() -> PathBuf {
    let home = std::env::var("HOME").unwrap_or_default();
    let cached = PathBuf::from(home).join(".cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = std::env::var("STARLING_MODEL").map_or(cached, PathBuf::from);
    assert!(path.exists(), "{} is missing: run `make model` first", path.display());
    path
}

fn model(threads: usize) -> EmbeddedModel {
    model_with(threads, Activations::default())
}

fn model_with(threads: usize, activations: Activations) -> EmbeddedModel {
    let options = ModelOptions {
        kind: EngineKind::Embedded,
        path: Some(model_path()),
        served_name: None,
        threads,
        kv_bytes: 128 << 20,
        sequences_max: 32,
        waiting_max: 32,
        batch_tokens_max: 256,
        kernel: KernelChoice::Auto,
        activations,
    };
    EmbeddedModel::load(&options, &mut |_| {}).unwrap()
}

fn request(engine: &dyn Engine, id: u64, prompt: &[TokenId], tokens_max: u32, ignore_eos: bool) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(id),
        prompt: prompt.into(),
        answered: 0,
        hash_seed: engine.capabilities().card.hash_seed,
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max, tokens_min: 0, token_ids: Vec::new(), ignore_eos },
        logprobs: Some(2),
        priority: 0,
    }
}

/// Its tokens, those taken from the cache, and why it ended.
type Answer = (Vec<SampledToken>, Option<u32>, Option<FinishReason>);

/// Everything each sequence got.
fn run(engine: &mut dyn Engine) -> HashMap<u64, Answer> {
    let mut answers: HashMap<u64, Answer> = HashMap::new();
    loop {
        let output = engine.step().unwrap();
        for delta in output.deltas {
            let answer = answers.entry(delta.id.0).or_default();
            answer.0.extend(delta.tokens);
            answer.1 = answer.1.or(delta.cached_tokens);
            answer.2 = answer.2.or(delta.finish);
        }
        if output.idle {
            return answers;
        }
    }
}

#[test]
fn the_default_model_answers_a_sum_and_its_cache_changes_nothing() {
    let model = model(0);
    assert_eq!(model.card().id.as_str(), "SmolLM2-135M-Instruct");
    assert_eq!((model.card().vocab_size, model.card().context_length), (49_152, 8192));
    assert_eq!(model.card().eos_ids, [2, 0]);
    let tokenizer: Tokenizer = model.bundle().tokenizer_json.parse().unwrap();
    let text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                <|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n";
    let prompt = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let mut engine = model.engine();
    for id in 0..2 {
        let request = request(&*engine, id, &prompt, 20, false);
        engine.submit(request).unwrap();
        let (tokens, cached, finish) = run(&mut *engine).remove(&id).unwrap();
        let ids: Vec<TokenId> = tokens.iter().map(|token| token.id).collect();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "The answer to this classic math problem is 4.");
        assert_eq!(finish, Some(FinishReason::Stop));
        assert_eq!(cached, Some(if id == 0 { 0 } else { (prompt.len() as u32 - 1) / 16 * 16 }));
    }
}

#[derive(Deserialize)]
struct Tokenized {
    text: String,
    ids: Vec<TokenId>,
}

#[test]
fn token_ids_are_those_of_llama_cpp() {
    let cases: Vec<Tokenized> = serde_json::from_str(include_str!("../testdata/tokenizer.json")).unwrap();
    let model = model(1);
    let tokenizer: Tokenizer = model.bundle().tokenizer_json.parse().unwrap();
    for case in cases {
        assert_eq!(tokenizer.encode(case.text.as_str(), false).unwrap().get_ids(), case.ids, "{:?}", case.text);
    }
}

/// One line of `greedy.jsonl`, which `bench/reference.py golden` made: llama.cpp on the file's weights widened to f32,
/// with f32 keys and values and without flash attention, so that no activation is rounded. It chose no end tokens.
#[derive(Deserialize)]
struct Greedy {
    name: String,
    text: String,
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    /// How far each token was ahead of the second best, in logits.
    gaps: Vec<f32>,
}

/// A gap that counts as a near-tie.
const GAP_OF_A_TIE: f32 = 0.05;

/// For each reference answer the first token that differs, if any. Greedy answers are functions of what is before, so
/// the reference's own tokens can be fed: an answer is equal when each next token is.
fn first_differences(model: &EmbeddedModel, cases: &[Greedy]) -> Vec<Option<usize>> {
    let (mut backend, _) = model.backend().unwrap();
    let best = |logits: &[f32]| {
        let allowed = (0..logits.len()).filter(|id| !model.card().eos_ids.contains(&(*id as TokenId)));
        allowed.max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as TokenId
    };
    let mut starts = Vec::new();
    let mut first = 0;
    let mut differences = Vec::new();
    for case in cases {
        let count = (case.prompt.len() + case.tokens.len()).div_ceil(16) as u32;
        let blocks = slots(first, count);
        let token = best(&feed(&mut backend, &blocks, &case.prompt, 0, 256));
        differences.push((token != case.tokens[0]).then_some(0));
        starts.push(blocks);
        first += count;
    }
    for step in 0..cases[0].tokens.len() - 1 {
        let items = cases.iter().zip(&starts).map(|(case, blocks)| {
            let (tokens, start) = (&case.tokens[step..=step], case.prompt.len() + step);
            BatchItem { tokens, start, blocks, wants_logits: true }
        });
        let computed = backend.forward(&Batch { items: items.collect() }).unwrap();
        for ((difference, case), row) in differences.iter_mut().zip(cases).zip(&computed.rows) {
            let differs = best(&dense(*row)) != case.tokens[step + 1];
            *difference = difference.or_else(|| differs.then_some(step + 1));
        }
    }
    differences
}

#[test]
fn eighteen_of_twenty_greedy_answers_are_the_references_and_the_rest_part_at_near_ties() {
    let cases = include_str!("../testdata/greedy.jsonl").lines().map(|line| serde_json::from_str(line).unwrap());
    let cases: Vec<Greedy> = cases.collect();
    assert_eq!(cases.len(), 20);
    let model = model(0);
    let tokenizer: Tokenizer = model.bundle().tokenizer_json.parse().unwrap();
    for case in &cases {
        assert_eq!(tokenizer.encode(case.text.as_str(), false).unwrap().get_ids(), case.prompt, "prompt {}", case.name);
        assert_eq!((case.tokens.len(), case.gaps.len()), (32, 32));
    }
    let differences = first_differences(&model, &cases);
    let equal = differences.iter().filter(|difference| difference.is_none()).count();
    for (case, at) in cases.iter().zip(&differences).filter_map(|(case, at)| Some((case, (*at)?))) {
        let gap = case.gaps[at];
        println!("{}: parts at token {at}, where the reference's gap is {gap}", case.name);
        assert!(gap < GAP_OF_A_TIE, "{}: token {at} differs at a gap of {gap}", case.name);
    }
    println!("{equal} of 20 answers are equal");
    assert!(equal >= 18, "{equal} of 20 answers are equal");
}

#[test]
fn chunks_and_threads_change_no_bit_of_the_default_model() {
    let tokens: Vec<TokenId> = (0..150u32).map(|i| 100 + i * 7919 % 40_000).collect();
    let blocks = slots(2, 10);
    let expected = bits(&feed(&mut model(1).backend().unwrap().0, &blocks, &tokens, 0, 512));
    let two = model(2);
    for chunk in [7, 64, 512] {
        let logits = feed(&mut two.backend().unwrap().0, &blocks, &tokens, 0, chunk);
        assert_eq!(bits(&logits), expected, "chunks of {chunk}");
    }
}
