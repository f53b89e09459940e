//! How fast the embedded engine prefills, decodes and answers with and without its cache.
//!
//! `engine [--model FILE] [--threads N] [--kernel auto|avx512|avx2|portable]
//!     [--activations int8|int16] [--runs N] [--only NAME,..] [--json]`
//! A figure is the median of the runs. Sequences run through the scheduler and the sampler, greedily, past any end
//! token, as `llama_cpp.py` runs them on llama.cpp.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::{error::Error, sync::Arc, time::Instant};

use serde::Serialize;
use starling_bench::{Seeded, Setting, activations, argument, cpu_seconds, median, model_path};
use starling_engine::{
    Engine, EngineKind, KernelChoice, LoadedModel, ModelOptions, SamplingParams, SequenceId, SequenceRequest,
    StopParams, embedded::EmbeddedModel,
};

const SEED: u64 = 20;
/// Prompt and answer of each sequence when decoding is measured.
const DECODE_PROMPT: usize = 16;
const DECODE_TOKENS: u32 = 128;
const BATCHES: [usize; 4] = [1, 4, 8, 16];
const PROMPTS: [usize; 3] = [128, 512, 2000];

/// One figure.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    unit: &'static str,
    /// By the clock on the wall.
    value: f64,
    /// Per CPU second of all threads: comparable on a busy machine when one thread computes.
    per_cpu_second: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    setting: Setting,
    load_ms: f64,
    figures: Vec<Figure>,
}

/// Runs sequences on one engine.
struct Runner {
    engine: Box<dyn Engine>,
    vocab: u32,
    prompts: Seeded,
    next_id: u64,
}

impl Runner {
    fn prompt(&mut self, len: usize) -> Arc<[u32]> {
        // Ids below 100 may be special tokens.
        (0..len).map(|_| 100 + self.prompts.below(self.vocab - 100)).collect()
    }

    fn submit(&mut self, prompt: Arc<[u32]>, tokens_max: u32) -> Result<(), Box<dyn Error>> {
        self.next_id += 1;
        let hash_seed = self.engine.capabilities().card.hash_seed;
        self.engine.submit(SequenceRequest {
            id: SequenceId(self.next_id),
            prompt,
            answered: 0,
            hash_seed,
            sampling: SamplingParams::greedy(),
            stop: StopParams { tokens_max, tokens_min: 0, token_ids: Vec::new(), ignore_eos: true },
            logprobs: None,
            priority: 0,
        })?;
        Ok(())
    }

    /// Steps until nothing is left; returns wall and CPU seconds.
    fn drain(&mut self) -> Result<(f64, f64), Box<dyn Error>> {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        while !self.engine.step()?.idle {}
        Ok((start.elapsed().as_secs_f64(), cpu_seconds() - cpu))
    }

    /// Tokens per second while the whole batch decodes: from everybody's first token to the end.
    fn decode(&mut self, batch: usize) -> Result<(f64, f64), Box<dyn Error>> {
        for _ in 0..batch {
            let prompt = self.prompt(DECODE_PROMPT);
            self.submit(prompt, DECODE_TOKENS)?;
        }
        let before = self.engine.load().tokens_generated;
        while self.engine.load().prefill_tokens > 0 || self.engine.load().waiting > 0 {
            self.engine.step()?;
        }
        let first = self.engine.load().tokens_generated - before;
        let (wall, cpu) = self.drain()?;
        let tokens = batch as f64 * f64::from(DECODE_TOKENS) - first as f64;
        Ok((tokens / wall, tokens / cpu))
    }

    fn prefill(&mut self, len: usize) -> Result<(f64, f64), Box<dyn Error>> {
        let prompt = self.prompt(len);
        self.submit(prompt, 1)?;
        let (wall, cpu) = self.drain()?;
        Ok((len as f64 / wall, len as f64 / cpu))
    }

    /// Milliseconds to the first token of a prompt of which all full blocks are in the cache.
    fn cached(&mut self, len: usize) -> Result<(f64, f64), Box<dyn Error>> {
        let prompt = self.prompt(len);
        self.submit(Arc::clone(&prompt), 1)?;
        self.drain()?;
        self.submit(prompt, 1)?;
        let (wall, cpu) = self.drain()?;
        Ok((wall * 1e3, cpu * 1e3))
    }
}

fn options(arguments: &[String]) -> Result<ModelOptions, String> {
    let kernel = match argument(arguments, "--kernel", "auto".to_owned())?.as_str() {
        "auto" => KernelChoice::Auto,
        "avx512" => KernelChoice::Avx512,
        "avx2" => KernelChoice::Avx2,
        "portable" => KernelChoice::Portable,
        other => return Err(format!("--kernel cannot be {other:?}")),
    };
    Ok(ModelOptions {
        kind: EngineKind::Embedded,
        path: Some(argument(arguments, "--model", model_path())?),
        served_name: None,
        threads: argument(arguments, "--threads", 0)?,
        kv_bytes: 512 << 20,
        sequences_max: 32,
        waiting_max: 64,
        batch_tokens_max: 512,
        kernel,
        activations: activations(arguments)?,
    })
}

fn measure(
    name: String,
    unit: &'static str,
    runs: usize,
    mut run: impl FnMut() -> Result<(f64, f64), Box<dyn Error>>,
) -> Result<Figure, Box<dyn Error>> {
    run()?;
    let values = (0..runs).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    let middle = |part: fn(&(f64, f64)) -> f64| median(&values.iter().map(part).collect::<Vec<_>>());
    Ok(Figure { name, unit, value: middle(|v| v.0), per_cpu_second: middle(|v| v.1) })
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = options(&arguments)?;
    let runs = argument(&arguments, "--runs", 3usize)?;
    let only = argument(&arguments, "--only", String::new())?;
    let start = Instant::now();
    let model = EmbeddedModel::load(&options, &mut |_| {})?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let vocab = model.card().vocab_size;
    let mut runner = Runner { engine: model.engine(), vocab, prompts: Seeded::new(SEED), next_id: 0 };
    let mut figures = Vec::new();
    let wanted = |name: &str| only.is_empty() || only.split(',').any(|only| only == name);
    for len in PROMPTS.into_iter().filter(|len| wanted(&format!("prefill_{len}"))) {
        figures.push(measure(format!("prefill_{len}"), "tokens/s", runs, || runner.prefill(len))?);
    }
    for batch in BATCHES.into_iter().filter(|batch| wanted(&format!("decode_b{batch}"))) {
        figures.push(measure(format!("decode_b{batch}"), "tokens/s", runs, || runner.decode(batch))?);
    }
    for len in PROMPTS.into_iter().filter(|len| wanted(&format!("cached_{len}"))) {
        figures.push(measure(format!("cached_{len}"), "ms", runs, || runner.cached(len))?);
    }
    let report = Report { setting: Setting::here(SEED, model.threads(), model.kernels()), load_ms, figures };
    if arguments.iter().any(|argument| argument == "--json") {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    println!("{:?}", report.setting);
    println!("load {:.0} ms", report.load_ms);
    for figure in &report.figures {
        println!(
            "{:<14} {:>9.1} {:<9} ({:.1} by CPU time)",
            figure.name, figure.value, figure.unit, figure.per_cpu_second
        );
    }
    Ok(())
}
