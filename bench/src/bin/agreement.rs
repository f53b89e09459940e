//! How many greedy answers of the embedded engine are those of the reference, and how close a call the others are.
//!
//! `agreement [--model FILE] [--threads N] [--activations int8|int16] [--golden FILE]`
//! The reference is `greedy.jsonl`, which `reference.py` made. End tokens are never chosen, as there.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::{error::Error, path::PathBuf};

use serde::Deserialize;
use starling_bench::{activations, argument, model_path};
use starling_engine::{
    Engine, EngineKind, KernelChoice, LoadedModel, ModelOptions, SamplingParams, SequenceId, SequenceRequest,
    StopParams, embedded::EmbeddedModel,
};

/// One answer of the reference.
#[derive(Debug, Deserialize)]
struct Golden {
    name: String,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// How far each token was ahead of the second best, in logits.
    gaps: Vec<f32>,
}

/// The answer of `engine` to `case`, as many tokens as the reference's.
fn answer(engine: &mut dyn Engine, id: u64, case: &Golden) -> Result<Vec<u32>, Box<dyn Error>> {
    let card = engine.capabilities().card.clone();
    let ends = card.eos_ids.iter().map(|id| (*id, f32::NEG_INFINITY)).collect();
    engine.submit(SequenceRequest {
        id: SequenceId(id),
        prompt: case.prompt.as_slice().into(),
        answered: 0,
        hash_seed: card.hash_seed,
        sampling: SamplingParams { logit_bias: ends, ..SamplingParams::greedy() },
        stop: StopParams {
            tokens_max: u32::try_from(case.tokens.len())?,
            tokens_min: 0,
            token_ids: Vec::new(),
            ignore_eos: true,
        },
        logprobs: None,
        priority: 0,
    })?;
    let mut tokens = Vec::new();
    loop {
        let output = engine.step()?;
        tokens.extend(output.deltas.into_iter().flat_map(|delta| delta.tokens).map(|token| token.id));
        if output.idle {
            return Ok(tokens);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fallback = PathBuf::from("actors/engine/src/embedded/testdata/greedy.jsonl");
    let golden = std::fs::read_to_string(argument(&arguments, "--golden", fallback)?)?;
    let golden = golden.lines().map(serde_json::from_str).collect::<Result<Vec<Golden>, _>>()?;
    let options = ModelOptions {
        kind: EngineKind::Embedded,
        path: Some(argument(&arguments, "--model", model_path())?),
        served_name: None,
        threads: argument(&arguments, "--threads", 0)?,
        kv_bytes: 128 << 20,
        sequences_max: 1,
        waiting_max: 1,
        batch_tokens_max: 512,
        kernel: KernelChoice::Auto,
        activations: activations(&arguments)?,
    };
    let model = EmbeddedModel::load(&options, &mut |_| {})?;
    let mut engine = model.engine();
    let mut equal = 0;
    for (id, case) in (0u64..).zip(&golden) {
        let tokens = answer(&mut *engine, id, case)?;
        match tokens.iter().zip(&case.tokens).position(|(ours, theirs)| ours != theirs) {
            None => equal += 1,
            Some(at) => println!("{}: parts at token {at}, where the reference's gap is {}", case.name, case.gaps[at]),
        }
    }
    println!(
        "{:?}, {}: {equal} of {} answers equal the reference's",
        options.activations,
        model.kernels(),
        golden.len()
    );
    Ok(())
}
