//! Tests over the default model, which `make model` brings.

use std::path::PathBuf;

use starling_ids::TokenId;
use tokenizers::Tokenizer;

use super::super::EmbeddedModel;
use crate::{
    backend::{Backend, Batch, BatchItem, BlockSlot, Row},
    loader::{EngineKind, KernelChoice, LoadedModel, ModelOptions},
};

/// Where the default model is, as `make model` leaves it.
#[allow(clippy::disallowed_methods)]
fn model_path() -> PathBuf {
    let home = std::env::var("HOME").unwrap_or_default();
    let cached = PathBuf::from(home).join(".cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = std::env::var("STARLING_MODEL").map_or(cached, PathBuf::from);
    assert!(path.exists(), "{} is missing: run `make model` first", path.display());
    path
}

fn options(threads: usize, kernel: KernelChoice) -> ModelOptions {
    ModelOptions {
        kind: EngineKind::Embedded,
        path: Some(model_path()),
        served_name: None,
        threads,
        kv_bytes: 64 << 20,
        sequences_max: 16,
        waiting_max: 16,
        batch_tokens_max: 512,
        kernel,
    }
}

fn greedy(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map_or(0, |(id, _)| id as TokenId)
}

#[test]
fn the_default_model_answers_a_sum() {
    let model = EmbeddedModel::load(&options(0, KernelChoice::Auto), &mut |_| {}).unwrap();
    assert_eq!(model.card().id.as_str(), "SmolLM2-135M-Instruct");
    let tokenizer: Tokenizer = model.bundle().tokenizer_json.parse().unwrap();
    let text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                <|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n";
    let mut tokens = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let prompt = tokens.len();
    let (mut backend, _) = model.backend().unwrap();
    let blocks: Vec<BlockSlot> = (0..10).map(BlockSlot).collect();
    let mut start = 0;
    while tokens.len() < prompt + 20 && !tokens[prompt..].iter().any(|id| model.card().eos_ids.contains(id)) {
        let item = BatchItem { tokens: &tokens[start..], start, blocks: &blocks, wants_logits: true };
        let computed = backend.forward(&Batch { items: vec![item] }).unwrap();
        let Row::Dense(logits) = computed.rows[0] else { panic!("a real model gives logits") };
        start = tokens.len();
        tokens.push(greedy(logits));
    }
    let answer = tokenizer.decode(&tokens[prompt..], true).unwrap();
    assert_eq!(answer, "The answer to this classic math problem is 4.");
}
