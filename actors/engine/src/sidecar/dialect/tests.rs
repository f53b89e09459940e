//! What is sent, and what is made of documented answers; the servers' own formats, event by event.

use std::sync::Arc;

use serde_json::{Value, json};
use starling_kv::hash::HashSeed;

use super::*;
use crate::{
    contract::{SamplingParams, SequenceId, StopParams, TokenLogprob},
    loader::LoadedModel,
    sidecar::tests::{request, simulated},
};

const SEED: HashSeed = HashSeed(5);

fn words() -> Arc<Words> {
    Arc::new(Words::new(simulated().bundle(), &[257], 258).expect("a tokenizer"))
}

fn body(dialect: Dialect, request: &SequenceRequest) -> Value {
    let words = words();
    let setting = Setting { model: Some("theirs"), words: &words, seed: SEED };
    write(dialect, request, &setting).expect("can be said").body
}

fn ids(chunk: &Chunk) -> Vec<TokenId> {
    chunk.tokens.iter().map(|token| token.id).collect()
}

fn wish() -> SequenceRequest {
    let sampling = SamplingParams {
        temperature: 0.5,
        top_p: 0.25,
        top_k: 7,
        min_p: 0.125,
        seed: u64::MAX,
        repetition_penalty: 1.5,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        logit_bias: vec![(9, -2.0)],
    };
    let stop = StopParams { tokens_max: 20, tokens_min: 6, token_ids: vec![11], ignore_eos: true };
    SequenceRequest { sampling, stop, answered: 2, hash_seed: HashSeed(6), logprobs: Some(2), ..request(1, &[3, 4, 5]) }
}

#[test]
fn vllm_is_told_every_wish() {
    let body = body(Dialect::Vllm, &wish());
    for (key, value) in [
        ("prompt", json!([3, 4, 5])),
        ("model", json!("theirs")),
        ("max_tokens", json!(20)),
        // Two of them are in the prompt.
        ("min_tokens", json!(4)),
        ("stop_token_ids", json!([11])),
        ("ignore_eos", json!(true)),
        ("temperature", json!(0.5)),
        ("top_p", json!(0.25)),
        ("top_k", json!(7)),
        ("min_p", json!(0.125)),
        ("repetition_penalty", json!(1.5)),
        ("presence_penalty", json!(0.5)),
        ("frequency_penalty", json!(-0.5)),
        ("logit_bias", json!({"9": -2.0})),
        ("logprobs", json!(2)),
        ("return_tokens_as_token_ids", json!(true)),
        ("return_token_ids", json!(true)),
        ("stream", json!(true)),
        ("cache_salt", json!("starling-00000000000000000000000000000006")),
    ] {
        assert_eq!(body[key], value, "{key}");
    }
    assert!(body["seed"].as_u64().is_some_and(|seed| i64::try_from(seed).is_ok()));
    let plain = self::body(Dialect::Vllm, &request(1, &[3]));
    assert!(["seed", "logprobs", "logit_bias", "cache_salt", "priority"].iter().all(|key| plain[key].is_null()));
}

#[test]
fn sglang_is_told_every_wish() {
    let body = body(Dialect::Sglang, &wish());
    let wishes = &body["sampling_params"];
    assert_eq!((&body["input_ids"], &body["stream"]), (&json!([3, 4, 5]), &json!(true)));
    assert_eq!((&wishes["max_new_tokens"], &wishes["min_new_tokens"]), (&json!(20), &json!(4)));
    assert_eq!((&wishes["stop_token_ids"], &wishes["logit_bias"]), (&json!([11]), &json!({"9": -2.0})));
    assert_eq!((&body["top_logprobs_num"], &body["return_logprob"]), (&json!(2), &json!(true)));
    assert_eq!(body["extra_key"], "starling-00000000000000000000000000000006");
    let plain = self::body(Dialect::Sglang, &request(1, &[3]));
    assert_eq!(plain["sampling_params"]["top_k"], -1);
    assert!(plain["extra_key"].is_null() && plain["return_logprob"].is_null());
}

#[test]
fn llama_cpp_and_text_servers_are_told_what_they_can_hear() {
    let wish = wish();
    let told = body(Dialect::LlamaCpp, &wish);
    assert_eq!((&told["n_predict"], &told["repeat_penalty"]), (&json!(20), &json!(1.5)));
    assert_eq!((&told["logit_bias"], &told["repeat_last_n"]), (&json!([[9, -2.0]]), &json!(23)));
    assert!(told["seed"].as_u64().is_some_and(|seed| seed < u64::from(u32::MAX)));
    assert_eq!(unsupported(Dialect::Vllm, &wish, SEED), None);
    assert_eq!(unsupported(Dialect::Sglang, &wish, SEED), None);
    assert_eq!(unsupported(Dialect::LlamaCpp, &wish, SEED), Some("cache_salt"));
    let unsalted = SequenceRequest { hash_seed: SEED, ..wish };
    assert_eq!(unsupported(Dialect::LlamaCpp, &unsalted, SEED), Some("min_tokens"));
    let mut text = SequenceRequest { hash_seed: SEED, logprobs: None, ..request(1, &[3]) };
    assert_eq!(unsupported(Dialect::OpenAi, &text, SEED), None);
    text.stop.token_ids = vec![1];
    assert_eq!(unsupported(Dialect::OpenAi, &text, SEED), Some("stop_token_ids"));
    let words = words();
    let prompt = words.tokens("Hello, <|im_start|>é").expect("tokens");
    assert_eq!(body(Dialect::OpenAi, &request(1, &prompt))["prompt"], "Hello, <|im_start|>é");
}

#[test]
fn a_salt_names_its_seed_and_other_salts_name_none() {
    let salt = salt(&wish(), SEED).expect("salted");
    assert_eq!(seed_of(&salt), Some(HashSeed(6)));
    assert!([None, seed_of("tenant"), seed_of("starling-6")].iter().all(Option::is_none));
}

#[test]
fn a_vllm_answer_is_kept_whole_until_its_usage_has_come() {
    let mut reader = reader(Dialect::Vllm, &request(1, &[3]), &words());
    let event = |ids: Value, logprobs: Value, reason: Value| {
        json!({"id": "cmpl-1", "choices": [{
            "index": 0, "text": "x", "logprobs": logprobs, "finish_reason": reason, "stop_reason": null, "token_ids": ids,
            "prompt_token_ids": [3],
        }]})
    };
    let told = json!({
        "tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"token_id:7": -0.5}, {"token_id:9": -1.0, "token_id:8": -1.5, "token_id:1": -0.25}],
    });
    let chunk = reader.read(&event(json!([7, 8]), told, Value::Null)).expect("read");
    assert_eq!(ids(&chunk), [7, 8]);
    assert_eq!((chunk.tokens[1].logprob, chunk.tokens[1].top[0]), (Some(-1.5), TokenLogprob { id: 1, logprob: -0.25 }));
    let last = reader.read(&event(json!([257]), Value::Null, json!("stop"))).expect("read");
    assert_eq!(last, Chunk::default());
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}}});
    assert_eq!(reader.read(&usage), Ok(Chunk::default()));
    let end = reader.close();
    assert_eq!((ids(&end), end.cached, end.end), (vec![257], Some(48), Some(End::Stop { told: true })));
}

#[test]
fn what_vllm_should_not_say_is_named() {
    let mut reader = reader(Dialect::Vllm, &request(1, &[3]), &words());
    let old = json!({"choices": [{"text": "Hi", "finish_reason": null}]});
    assert!(reader.read(&old).unwrap_err().contains("0.10.2"));
    let odd = json!({"choices": [{"text": "Hi", "finish_reason": null, "token_ids": [1, -5]}]});
    assert!(reader.read(&odd).unwrap_err().contains("-5 is no token id"));
    let aborted = json!({"choices": [{"text": "", "finish_reason": "abort", "token_ids": []}]});
    assert!(reader.read(&aborted).unwrap_err().contains("abort"));
    let error = json!({"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}});
    let end = reader.read(&error).expect("read").end;
    assert_eq!(end, Some(End::Fault(SequenceFault::Gone("out of memory".to_owned()))));
    assert_eq!(reader.close().end, None);
}

#[test]
fn sglang_repeats_or_goes_on_and_leaves_the_end_token_out_or_not() {
    for repeats in [true, false] {
        let mut reader = reader(Dialect::Sglang, &request(1, &[3]), &words());
        let event = |ids: &[u32], total: usize, reason: Value| {
            let meta =
                json!({"finish_reason": reason, "prompt_tokens": 1, "completion_tokens": total, "cached_tokens": 16});
            json!({"text": "", "output_ids": ids, "meta_info": meta})
        };
        let first = reader.read(&event(&[7], 1, Value::Null)).expect("read");
        assert_eq!((ids(&first), first.cached), (vec![7], Some(16)));
        let more: &[u32] = if repeats { &[7, 8, 9] } else { &[8, 9] };
        let second = reader.read(&event(more, 3, Value::Null)).expect("read");
        assert_eq!((ids(&second), second.cached), (vec![8, 9], None));
        let stop = json!({"type": "stop", "matched": 257});
        let last: &[u32] = if repeats { &[7, 8, 9] } else { &[] };
        let end = reader.read(&event(last, 3, stop)).expect("read");
        assert_eq!((ids(&end), end.end), (vec![257], Some(End::Stop { told: true })));
    }
    let mut reader = reader(Dialect::Sglang, &request(1, &[3]), &words());
    let abort = json!({"type": "abort", "message": "too long", "status_code": 400});
    let event = json!({"text": "", "output_ids": [], "meta_info": {"finish_reason": abort, "completion_tokens": 0}});
    let end = reader.read(&event).expect("read").end;
    assert_eq!(end, Some(End::Fault(SequenceFault::Refused("too long".to_owned()))));
    let lost = json!({"text": "", "output_ids": [1], "meta_info": {"finish_reason": null, "completion_tokens": 5}});
    assert!(reader.read(&lost).unwrap_err().contains("5"));
}

#[test]
fn llama_cpp_swallows_tokens_of_long_characters_and_they_are_found_again() {
    let words = words();
    let mut reader = reader(Dialect::LlamaCpp, &request(1, &[3]), &words);
    let event = |text: &str, ids: &[u32], total: usize| json!({"content": text, "tokens": ids, "stop": false, "tokens_predicted": total, "timings": {"cache_n": 3}});
    let whole = words.tokens("🌟").expect("tokens");
    assert_eq!(whole.len(), 4);
    let star = reader.read(&event("🌟", &whole[3..], 4)).expect("read");
    assert_eq!((ids(&star), star.cached), (whole, Some(3)));
    let plain = reader.read(&event("x", &[88], 5)).expect("read");
    assert_eq!((ids(&plain), plain.cached), (vec![88], None));
    // An end token is kept back until the server says that it was one.
    assert_eq!(ids(&reader.read(&event("", &[257], 6)).expect("read")), Vec::<u32>::new());
    let last = json!({"content": "", "tokens": [], "stop": true, "stop_type": "eos", "tokens_predicted": 6});
    let end = reader.read(&last).expect("read");
    assert_eq!((ids(&end), end.end), (vec![257], Some(End::Stop { told: true })));
}

#[test]
fn a_token_without_text_that_ended_nothing_comes_with_the_next() {
    let words = words();
    let mut reader = reader(Dialect::LlamaCpp, &request(1, &[3]), &words);
    let event = |text: &str, id: u32, total: usize| json!({"content": text, "tokens": [id], "stop": false, "tokens_predicted": total});
    assert!(reader.read(&event("", 256, 1)).expect("read").tokens.is_empty());
    assert_eq!(ids(&reader.read(&event("x", 88, 2)).expect("read")), [256, 88]);
    let last = json!({"content": "", "tokens": [], "stop": true, "stop_type": "limit", "tokens_predicted": 2});
    assert_eq!(reader.read(&last).expect("read").end, Some(End::Length));
}

#[test]
fn text_becomes_the_tokens_of_the_models_own_tokenizer() {
    let words = words();
    let mut reader = reader(Dialect::OpenAi, &request(1, &[3]), &words);
    let event = |text: &str, reason: Value| json!({"choices": [{"index": 0, "text": text, "finish_reason": reason}]});
    let chunk = reader.read(&event(" naïve", Value::Null)).expect("read");
    assert_eq!(ids(&chunk), words.tokens(" naïve").expect("tokens"));
    let end = reader.read(&event("", json!("stop"))).expect("read");
    assert_eq!(end.end, Some(End::Stop { told: false }));
    assert!(words.joins_anywhere());
}

#[test]
fn errors_are_found_however_they_are_wrapped() {
    for (value, text) in [
        (json!({"error": {"message": "a", "code": 400}}), Some("a")),
        (json!({"error": "b"}), Some("b")),
        (json!({"message": "c", "object": "error"}), Some("c")),
        (json!({"detail": "d"}), Some("d")),
        (json!({"detail": [{"msg": "e"}]}), Some("[{\"msg\":\"e\"}]")),
        (json!({"ok": true}), None),
    ] {
        assert_eq!(message(&value).as_deref(), text);
    }
    assert_eq!(request(1, &[3]).id, SequenceId(1));
}
