//! The simulated engine through the engine contract: the same promises as with a real model.

use std::{collections::HashMap, str::FromStr, time::Duration};

use tokenizers::Tokenizer;

use super::*;
use crate::{
    contract::{FinishReason, SamplingParams, SequenceId, SequenceRequest, StopParams, TokenLogprob},
    loader::EngineKind,
};

pub(super) fn options() -> ModelOptions {
    ModelOptions {
        kind: EngineKind::Simulated,
        path: None,
        served_name: None,
        threads: 1,
        kv_bytes: 8 << 20,
        sequences_max: 8,
        waiting_max: 64,
        batch_tokens_max: 64,
        kernel: crate::loader::KernelChoice::Auto,
        activations: crate::loader::Activations::default(),
    }
}

fn model() -> SimulatedModel {
    SimulatedModel::load(&options()).expect("loads")
}

fn encode(model: &SimulatedModel, text: &str) -> Vec<TokenId> {
    let tokenizer = Tokenizer::from_str(&model.bundle().tokenizer_json).expect("tokenizer");
    tokenizer.encode_fast(text, false).expect("encodes").get_ids().to_vec()
}

fn request(model: &SimulatedModel, id: u64, prompt: &[TokenId]) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(id),
        prompt: prompt.into(),
        answered: 0,
        hash_seed: model.card().hash_seed,
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max: 400, tokens_min: 0, token_ids: vec![], ignore_eos: false },
        logprobs: None,
        priority: 0,
    }
}

#[derive(Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<TokenId>,
    cached: u32,
    finish: Option<FinishReason>,
}

/// Steps until idle; the answers and the time it would have taken.
fn run(engine: &mut dyn Engine) -> (HashMap<u64, Answer>, Duration) {
    let (mut answers, mut time) = (HashMap::<u64, Answer>::new(), Duration::ZERO);
    for _ in 0..10_000 {
        let output = engine.step().expect("step");
        if output.idle {
            let load = engine.load();
            assert_eq!((load.running, load.waiting, load.prefill_tokens, load.blocks_pinned), (0, 0, 0, 0));
            return (answers, time);
        }
        time += output.takes;
        for delta in output.deltas {
            let answer = answers.entry(delta.id.0).or_default();
            assert_eq!(answer.finish, None, "nothing follows the end");
            assert_eq!(delta.cached_tokens.is_some(), answer.tokens.is_empty(), "told on the first delta");
            answer.cached += delta.cached_tokens.unwrap_or(0);
            answer.tokens.extend(delta.tokens.iter().map(|token| token.id));
            answer.finish = delta.finish;
        }
    }
    panic!("it does not end");
}

fn alone(model: &SimulatedModel, request: SequenceRequest) -> Answer {
    let mut engine = model.core_engine();
    let id = request.id.0;
    engine.submit(request).expect("room");
    run(&mut engine).0.remove(&id).expect("answered")
}

#[test]
fn an_answer_is_words_of_bounded_length() {
    let model = model();
    let tokenizer = Tokenizer::from_str(&model.bundle().tokenizer_json).expect("tokenizer");
    let mut lengths = std::collections::HashSet::new();
    for question in 0..40 {
        let prompt =
            encode(&model, &format!("<|im_start|>user\nquestion {question}<|im_end|>\n<|im_start|>assistant\n"));
        assert_eq!(prompt[0], bundle::START);
        let answer = alone(&model, request(&model, 1, &prompt));
        assert_eq!((answer.finish, answer.tokens.last()), (Some(FinishReason::Stop), Some(&bundle::END)));
        assert!((16..=200).contains(&answer.tokens.len()), "{}", answer.tokens.len());
        lengths.insert(answer.tokens.len());
        let text = tokenizer.decode(&answer.tokens, true).expect("decodes");
        assert!(text.chars().all(|c| c.is_ascii_alphabetic() || c == ' '), "{text:?}");
        assert!(text.starts_with(|c: char| c.is_ascii_uppercase()) && !text.contains("  "), "{text:?}");
    }
    assert!(lengths.len() > 20, "lengths vary: {lengths:?}");
}

#[test]
fn its_tokenizer_round_trips_any_text() {
    let model = model();
    let tokenizer = Tokenizer::from_str(&model.bundle().tokenizer_json).expect("tokenizer");
    for text in ["plain", " spaces  and\ttabs\n", "grüße 東京 🦜\u{200d}🔥", "\u{0}\u{1}\u{7f}", ""] {
        let ids = encode(&model, text);
        assert_eq!(ids.len(), text.len(), "a token is a byte");
        assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text);
    }
    assert_eq!(model.bundle().digest(), self::model().bundle().digest());
    assert_eq!(model.card().id.as_str(), "simulated");
}

#[test]
fn cache_batch_and_continuation_do_not_change_an_answer() {
    let model = model();
    let prompts: Vec<Vec<TokenId>> =
        (0..8).map(|n| encode(&model, &format!("{} {n}", "a common beginning ".repeat(4)))).collect();
    let single: Vec<Answer> = prompts.iter().map(|prompt| alone(&model, request(&model, 1, prompt))).collect();
    let mut engine = model.core_engine();
    for round in 0..2 {
        for (n, prompt) in prompts.iter().enumerate() {
            engine.submit(request(&model, round * 8 + n as u64, prompt)).expect("room");
        }
        let (answers, _) = run(&mut engine);
        for (n, expected) in single.iter().enumerate() {
            let answer = &answers[&(round * 8 + n as u64)];
            assert_eq!((&answer.tokens, answer.finish), (&expected.tokens, expected.finish));
            assert!(round == 0 && n == 0 || answer.cached >= 64, "{round} {n}: {}", answer.cached);
        }
    }
    // A stream that goes on elsewhere from prompt and tokens so far.
    let (said, rest) = single[3].tokens.split_at(7);
    let moved = alone(&model, request(&model, 1, &[prompts[3].as_slice(), said].concat()));
    assert_eq!(moved.tokens, rest);
}

#[test]
fn a_small_pool_preempts_and_answers_all_the_same() {
    let model = SimulatedModel::load(&ModelOptions { kv_bytes: 0, ..options() }).expect("loads");
    assert_eq!(model.limits.kv_blocks, 64);
    let mut engine = model.core_engine();
    let prompts: Vec<Vec<TokenId>> = (0..8).map(|n| encode(&model, &format!("{n} {}", "x".repeat(110)))).collect();
    for (n, prompt) in prompts.iter().enumerate() {
        let mut request = request(&model, n as u64, prompt);
        (request.stop.tokens_max, request.stop.ignore_eos) = (120, true);
        engine.submit(request).expect("room");
    }
    let (answers, _) = run(&mut engine);
    assert!(engine.scheduler().preemptions() > 0, "the test is about preemption");
    for (n, prompt) in prompts.iter().enumerate() {
        let mut request = request(&model, 1, prompt);
        (request.stop.tokens_max, request.stop.ignore_eos) = (120, true);
        assert_eq!(answers[&(n as u64)].tokens, alone(&model, request).tokens);
    }
    engine.scheduler().check().expect("nothing is lost");
}

#[test]
fn blocks_move_to_another_engine_and_are_reused_there() {
    let model = model();
    let prompt = encode(&model, &"a long prompt ".repeat(8));
    let (mut here, mut there) = (model.core_engine(), model.core_engine());
    here.submit(request(&model, 1, &prompt)).expect("room");
    let (expected, _) = run(&mut here);
    let inventory = here.inventory();
    for (parent, hash) in &inventory {
        let block = here.export_block(*hash).expect("ready");
        assert_eq!((block.parent, block.bytes.len()), (*parent, model.layout().block_bytes()));
        let mut broken = block.clone();
        broken.layout_digest ^= 1;
        assert!(there.import_block(&broken).is_err());
        broken = block.clone();
        broken.bytes.pop();
        assert!(there.import_block(&broken).is_err());
        if parent.is_some() {
            broken = block.clone();
            broken.tokens[0] ^= 1;
            assert!(there.import_block(&broken).is_err());
        }
        assert_eq!(there.inventory().iter().filter(|(_, held)| held == hash).count(), 0);
        assert!(!there.import_block(&block).expect("taken").is_empty());
        assert!(there.import_block(&block).expect("here already").is_empty());
    }
    there.submit(request(&model, 2, &prompt)).expect("room");
    let (moved, _) = run(&mut there);
    assert_eq!(moved[&2].tokens, expected[&1].tokens);
    assert_eq!(moved[&2].cached as usize, (prompt.len() - 1) / 16 * 16);
    assert_eq!(there.export_block(starling_ids::BlockHash(1)), None);
    assert_eq!(there.clear_cache(), [starling_kv::events::KvEvent::Cleared]);
    assert_eq!(there.load().blocks_cached, 0);
}

#[test]
fn events_tell_what_the_inventory_holds() {
    let model = SimulatedModel::load(&ModelOptions { kv_bytes: 0, ..options() }).expect("loads");
    let mut engine = model.core_engine();
    let mut told = std::collections::HashSet::new();
    for n in 0..30 {
        engine.submit(request(&model, n, &encode(&model, &format!("{} {}", n / 3, "y".repeat(200))))).expect("room");
        loop {
            let output = engine.step().expect("step");
            for event in output.events {
                match event {
                    starling_kv::events::KvEvent::Stored { blocks, .. } => told.extend(blocks),
                    starling_kv::events::KvEvent::Removed { blocks } => {
                        blocks.iter().for_each(|hash| assert!(told.remove(hash)));
                    }
                    starling_kv::events::KvEvent::Cleared => told.clear(),
                    other => panic!("{other:?} without a lower tier"),
                }
            }
            if output.idle {
                break;
            }
        }
        let held: std::collections::HashSet<_> = engine.inventory().into_iter().map(|(_, hash)| hash).collect();
        assert_eq!(held, told);
    }
}

#[test]
fn stops_minimum_and_logprobs_hold_without_logits() {
    let model = model();
    let prompt = encode(&model, "how long is this");
    let plain = alone(&model, request(&model, 1, &prompt));
    let mut short = request(&model, 1, &prompt);
    short.stop.tokens_max = 5;
    assert_eq!(
        alone(&model, short),
        Answer { tokens: plain.tokens[..5].to_vec(), cached: 0, finish: Some(FinishReason::Length) }
    );
    let mut stopped = request(&model, 1, &prompt);
    stopped.stop.token_ids = vec![plain.tokens[3]];
    let until = plain.tokens.iter().position(|token| *token == plain.tokens[3]).expect("said") + 1;
    assert_eq!(alone(&model, stopped).tokens, plain.tokens[..until]);
    let mut least = request(&model, 1, &prompt);
    least.stop.tokens_min = plain.tokens.len() as u32 + 20;
    let longer = alone(&model, least);
    assert!(longer.tokens.len() > plain.tokens.len() + 20);
    assert!(!longer.tokens[..plain.tokens.len() + 20].contains(&bundle::END));
    let mut engine = model.core_engine();
    engine.submit(SequenceRequest { logprobs: Some(2), ..request(&model, 1, &prompt[..3]) }).expect("room");
    let delta = engine.step().expect("step").deltas.remove(0);
    let token = &delta.tokens[0];
    assert_eq!((token.logprob, token.top.as_slice()), (Some(0.0), &[TokenLogprob { id: token.id, logprob: 0.0 }][..]));
}

#[test]
fn a_cancelled_sequence_says_nothing_more() {
    let model = model();
    let mut engine = model.core_engine();
    engine.submit(request(&model, 1, &encode(&model, &"long ".repeat(40)))).expect("room");
    engine.submit(request(&model, 2, &encode(&model, "other"))).expect("room");
    engine.step().expect("step");
    assert!(engine.cancel(SequenceId(1)) && !engine.cancel(SequenceId(1)));
    let (answers, _) = run(&mut engine);
    assert!(!answers.contains_key(&1) && answers[&2].finish == Some(FinishReason::Stop));
}

#[test]
fn time_follows_work_and_the_cache_saves_it() {
    let timing = Timing::default();
    let of = |items: &[(usize, usize)]| {
        let mut work = timing::Work::default();
        items.iter().for_each(|(start, count)| work.add(*start, *count));
        timing.step(work).as_secs_f64() * 1e3
    };
    assert!((of(&[(0, 2_000)]) - (7.0 + 40.0 + 0.4 * 1.999)).abs() < 1e-6);
    assert!((of(&[(1_000, 1); 64]) - (7.0 + 64.0 * 0.03 + 64_000.0 * 0.000_05)).abs() < 1e-6);
    assert_eq!(of(&[]), 0.0);
    let model =
        SimulatedModel::with_timing(&ModelOptions { batch_tokens_max: 4_096, ..options() }, timing).expect("loads");
    let prompt = encode(&model, &"z".repeat(1_600));
    let mut engine = model.core_engine();
    let mut first_token = |id: u64| {
        let mut request = request(&model, id, &prompt);
        request.stop.tokens_max = 1;
        engine.submit(request).expect("room");
        run(&mut engine).1
    };
    let (cold, warm) = (first_token(1), first_token(2));
    assert!(warm < cold / 4, "{cold:?} {warm:?}");
    let terms = |terms| Timing { curve: Curve::Terms(terms), ..timing };
    for (timing, name) in [
        (terms(Terms { step_ms: f64::NAN, ..Terms::default() }), "step_ms"),
        (terms(Terms { decode_sequence_ms: -1.0, ..Terms::default() }), "decode_sequence_ms"),
        (Timing { speedup: 0.0, ..timing }, "speedup"),
    ] {
        let error = SimulatedModel::with_timing(&options(), timing).expect_err(name);
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn states_survive_their_bytes() {
    let state = State { digest: u64::MAX - 3, anchor: 1 << 60, run: 7, word: 95, offset: 3, ended: 1 };
    assert_eq!(text::State::from_bytes(&state.to_bytes()), state);
}

use text::State;
