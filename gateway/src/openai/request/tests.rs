//! What is read, and which field a refusal names.

use serde_json::json;

use super::*;

fn chat(extra: Value) -> Result<ChatRequest, ValidateError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in extra.as_object().expect("an object") {
        body[key] = value.clone();
    }
    ChatRequest::parse(body.to_string().as_bytes())
}

fn completion(extra: Value) -> Result<CompletionRequest, ValidateError> {
    let mut body = json!({"model": "m", "prompt": "hi"});
    for (key, value) in extra.as_object().expect("an object") {
        body[key] = value.clone();
    }
    CompletionRequest::parse(body.to_string().as_bytes())
}

#[test]
fn every_supported_field_is_read() {
    let request = chat(json!({
        "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -1,
        "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"5": -100},
        "stop": "x", "stop_token_ids": [3], "ignore_eos": true, "min_tokens": 2, "n": 3, "logprobs": true,
        "top_logprobs": 4, "stream": true, "stream_options": {"include_usage": true}, "user": "u",
        "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "cache_salt": "s", "skip_special_tokens": false,
    }))
    .expect("all supported");
    let expected = Params {
        model: "m".into(),
        tokens_max: Some(Budget { tokens: 7, param: "max_completion_tokens" }),
        tokens_min: 2,
        temperature: 0.0,
        top_p: 0.5,
        top_k: 0,
        min_p: 0.1,
        seed: Some(u64::MAX),
        repetition_penalty: 1.5,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(5, -100.0)],
        stops: vec!["x".into()],
        stop_token_ids: vec![3],
        ignore_eos: true,
        skip_special: false,
        choices: 3,
        logprobs: Some(4),
        delivery: Delivery::Stream { include_usage: true },
        cache_salt: Some("s".into()),
        priority: None,
    };
    assert_eq!(request.params, expected);
}

#[test]
fn req_03_a_token_budget_is_at_least_one_and_the_newer_name_wins() {
    for field in ["max_tokens", "max_completion_tokens"] {
        for bad in [json!(0), json!(-1), json!(1e20), json!("5"), json!(2.5), json!(true)] {
            let error = chat(json!({ field: bad })).expect_err("refused");
            assert_eq!(error.param(), Some(field), "{error}");
        }
        assert_eq!(chat(json!({ field: null })).expect("default").params.tokens_max, None);
    }
    let both = chat(json!({"max_tokens": 5, "max_completion_tokens": 9})).expect("both");
    assert_eq!(both.params.tokens_max, Some(Budget { tokens: 9, param: "max_completion_tokens" }));
}

#[test]
fn req_04_one_cap_on_stop_strings() {
    let stops = |count: usize| chat(json!({"stop": vec!["x"; count]})).map(|request| request.params.stops.len());
    assert_eq!((stops(1), stops(STOPS_MAX)), (Ok(1), Ok(STOPS_MAX)));
    assert_eq!(chat(json!({"stop": null})).expect("none").params.stops.len(), 0);
    let bad = [json!(vec!["x"; STOPS_MAX + 1]), json!(""), json!([""]), json!("x".repeat(10_000))];
    for stop in bad {
        assert_eq!(chat(json!({ "stop": stop })).expect_err("refused").param(), Some("stop"));
    }
}

#[test]
fn req_12_prompts_come_in_all_four_forms_and_suffix_is_refused() {
    use PromptInput::{Text, Tokens};
    let prompts = |value: Value| completion(json!({ "prompt": value })).map(|request| request.prompts);
    assert_eq!(prompts(json!("a")), Ok(vec![Text("a".into())]));
    assert_eq!(prompts(json!(["a", "b"])), Ok(vec![Text("a".into()), Text("b".into())]));
    assert_eq!(prompts(json!([1, 2])), Ok(vec![Tokens(vec![1, 2])]));
    assert_eq!(prompts(json!([[1], [2]])), Ok(vec![Tokens(vec![1]), Tokens(vec![2])]));
    for bad in [json!([]), json!(5), json!({}), json!([1, "a"])] {
        assert_eq!(prompts(bad).expect_err("refused").param(), Some("prompt"));
    }
    assert_eq!(prompts(json!([[]])).expect_err("refused").param(), Some("prompt[0]"));
    assert!(completion(json!({"echo": true, "best_of": 1})).is_ok_and(|request| request.echo));
    for (field, value) in [("suffix", json!("x")), ("best_of", json!(2)), ("echo", json!(1)), ("tools", json!([1]))] {
        assert_eq!(completion(json!({ field: value })).expect_err("refused").param(), Some(field));
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let fields = [
        ("tools", json!([{"type": "function"}])),
        ("tool_choice", json!("required")),
        ("parallel_tool_calls", json!(true)),
        ("functions", json!([{"name": "f"}])),
        ("response_format", json!({"type": "json_object"})),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({})),
        ("prediction", json!({})),
        ("reasoning_effort", json!("low")),
        ("web_search_options", json!({})),
        ("store", json!(true)),
        ("service_tier", json!("flex")),
        ("guided_json", json!({})),
        ("echo", json!(true)),
    ];
    for (field, value) in fields {
        let error = chat(json!({ field: value })).expect_err(field);
        assert_eq!(error.param(), Some(field));
        assert!(error.code().ends_with("_parameter"), "{error}");
        assert!(chat(json!({ field: null })).is_ok(), "null is absent: {field}");
    }
    assert_eq!(
        chat(json!({"stream_options": {"include_usage": true}})).expect_err("no stream").param(),
        Some("stream_options")
    );
    let unknown = chat(json!({"stream": true, "stream_options": {"x": 1}})).expect_err("unknown");
    assert_eq!(unknown.param(), Some("stream_options.x"));
}
