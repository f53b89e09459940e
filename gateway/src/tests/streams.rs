//! Streams and their folds: TXT faults over HTTP.

use std::sync::Arc;

use serde_json::{Value, json};
use starling_actors::{
    engine::{FinishReason, SampledToken, TokenLogprob},
    generate::GenerateFrame,
};

use super::client::{Local, Remote, read_to_end};
use crate::{
    GatewayConfig,
    fixtures::{
        IM_END, byte,
        cluster::{Cluster, Plan},
        frame,
    },
};

fn saying(frames: Vec<GenerateFrame>) -> Arc<Cluster> {
    Cluster::new(move |_| Plan::frames(frames.clone()))
}

#[tokio::test]
async fn txt_01_and_05_a_stream_is_whole_text_one_finish_usage_and_done() {
    let text = "삼겹살🙂é";
    let cluster = Cluster::new(move |_| Plan::text(text, FinishReason::Stop));
    let reply = Local::new(&cluster).chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    assert_eq!(reply.headers["content-type"], "text/event-stream");
    assert_eq!(reply.streamed(1), [(text.to_owned(), vec!["stop".to_owned()])]);
    let events = reply.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert!(events[..events.len() - 2].iter().all(|event| event["usage"].is_null()));
    let end = &events[events.len() - 3..];
    assert_eq!(end[0]["choices"][0]["finish_reason"], "stop");
    assert_eq!(end[1]["choices"], json!([]));
    assert_eq!(end[1]["usage"]["completion_tokens"], text.len() + 1);
    assert_eq!(end[2], "[DONE]");
}

#[tokio::test]
async fn txt_03_and_07_stops_and_one_token_answers_are_the_same_both_ways() {
    let cases = [
        (json!({"stop": ["re", "he"]}), Plan::text("there", FinishReason::Stop), ("t", "stop")),
        (json!({"stop": ["he", "re"]}), Plan::text("there", FinishReason::Length), ("t", "stop")),
        (json!({"max_tokens": 1}), Plan::text("a", FinishReason::Length), ("a", "length")),
        (
            json!({"max_tokens": 1}),
            Plan::frames(vec![frame(0, &[byte(0xC3)], Some(FinishReason::Length))]),
            ("\u{FFFD}", "length"),
        ),
    ];
    for (fields, plan, (text, finish)) in cases {
        let crate::fixtures::cluster::Frames::List(list) = plan.frames else { unreachable!("a list") };
        let frames: Vec<_> = list.into_iter().map(|frame| frame.expect("good")).collect();
        let local = Local::new(&saying(frames));
        let unary = local.chat(fields.clone()).await.json();
        assert_eq!(unary["choices"][0]["message"]["content"], text);
        assert_eq!(unary["choices"][0]["finish_reason"], finish);
        let mut streaming = fields;
        streaming["stream"] = json!(true);
        let reply = local.chat(streaming).await;
        assert_eq!(reply.streamed(1), [(text.to_owned(), vec![finish.to_owned()])]);
    }
}

#[tokio::test]
async fn a_stop_text_ends_the_work_and_not_only_the_reply() {
    let cluster = Cluster::new(|_| Plan::hang(vec![frame(0, &[byte(b'a'), byte(b'.'), byte(b'b')], None)]));
    let reply = Local::new(&cluster).chat(json!({"stop": "."})).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "a");
    assert_eq!(reply["usage"]["completion_tokens"], 2);
    cluster.running(0).await;
}

#[tokio::test]
async fn txt_08_and_13_choices_keep_apart_and_add_up() {
    let frames = vec![
        frame(1, &[byte(0xC3)], None),
        frame(0, &[byte(b'a'), byte(b'b')], None),
        frame(1, &[byte(0xA9)], None),
        frame(0, &[byte(b'c')], Some(FinishReason::Length)),
        frame(1, &[byte(b'x'), byte(b'y'), IM_END], Some(FinishReason::Stop)),
    ];
    let local = Local::new(&saying(frames));
    let unary = local.chat(json!({"n": 2})).await.json();
    let texts: Vec<_> = (0..2).map(|index| unary["choices"][index]["message"]["content"].clone()).collect();
    assert_eq!(texts, ["abc", "éxy"]);
    assert_eq!(unary["usage"]["completion_tokens"], 8);
    let stream = local.chat(json!({"n": 2, "stream": true})).await;
    let expected = [("abc".to_owned(), vec!["length".to_owned()]), ("éxy".to_owned(), vec!["stop".to_owned()])];
    assert_eq!(stream.streamed(2), expected);
    let roles = stream.events().iter().filter(|event| event["choices"][0]["delta"]["role"].is_string()).count();
    assert_eq!(roles, 2);
}

#[tokio::test]
async fn txt_12_log_probabilities_are_one_per_token_both_ways() {
    let text = "aE삼b";
    let frames: Vec<_> = text
        .bytes()
        .enumerate()
        .map(|(at, b)| GenerateFrame {
            tokens: vec![SampledToken {
                id: byte(b),
                logprob: Some(-(at as f32)),
                top: vec![
                    TokenLogprob { id: byte(b), logprob: -0.5 },
                    TokenLogprob { id: byte(b'z'), logprob: f32::NEG_INFINITY },
                ],
            }],
            ..frame(0, &[], (at + 1 == text.len()).then_some(FinishReason::Length))
        })
        .collect();
    let local = Local::new(&saying(frames));
    let fields = json!({"logprobs": true, "top_logprobs": 2, "stop": ["END"]});
    let unary = local.chat(fields.clone()).await.json();
    let entries = unary["choices"][0]["logprobs"]["content"].as_array().expect("entries").clone();
    assert_eq!(entries.len(), text.len());
    let bytes: Vec<Value> = entries.iter().map(|entry| entry["bytes"][0].clone()).collect();
    assert_eq!(bytes, text.bytes().map(Value::from).collect::<Vec<_>>());
    assert_eq!(entries[1]["top_logprobs"][1], json!({"token": "z", "logprob": -9999, "bytes": [b'z']}));
    let mut streaming = fields;
    streaming["stream"] = json!(true);
    let streamed: Vec<Value> = local
        .chat(streaming)
        .await
        .events()
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(streamed, entries);
    let raw = local.completions(json!({"logprobs": 1})).await.json();
    let logprobs = &raw["choices"][0]["logprobs"];
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 2, 2, 3]));
    assert_eq!(logprobs["tokens"].as_array().expect("tokens").len(), text.len());
    assert_eq!(logprobs["top_logprobs"][0]["a"], -0.5);
    // Bytes that are no text have names of their own, so that none hides another.
    assert_eq!(logprobs["tokens"][2], "bytes:\\xec");
    assert_eq!(logprobs["top_logprobs"][2], json!({"bytes:\\xec": -0.5, "z": -9999}));
}

#[tokio::test]
async fn txt_12_the_chosen_token_is_among_the_likeliest_of_a_raw_completion() {
    let token = |id, top| SampledToken { id, logprob: Some(-3.0), top };
    let tokens =
        vec![token(byte(b'a'), vec![TokenLogprob { id: byte(b'b'), logprob: -0.5 }]), token(byte(b'c'), Vec::new())];
    let frames = vec![GenerateFrame { tokens, ..frame(0, &[], Some(FinishReason::Length)) }];
    let raw = Local::new(&saying(frames)).completions(json!({"logprobs": 1})).await.json();
    assert_eq!(raw["choices"][0]["logprobs"]["top_logprobs"], json!([{"b": -0.5, "a": -3}, {"c": -3}]));
}

#[tokio::test]
async fn txt_14_a_stream_is_a_well_formed_chunked_body() {
    let cluster = Cluster::new(|_| Plan::text("hello", FinishReason::Stop));
    let remote = Remote::new(&cluster, GatewayConfig::default()).await;
    let raw = read_to_end(remote.ask(json!({"stream": true})).await).await;
    let (head, mut rest) = raw.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("transfer-encoding: chunked"), "{head}");
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").expect("a chunk size");
        let size = usize::from_str_radix(size, 16).expect("hexadecimal");
        body.push_str(&after[..size]);
        rest = after[size..].strip_prefix("\r\n").expect("a chunk's end");
        if size == 0 {
            break;
        }
    }
    assert!(rest.is_empty() && body.ends_with("data: [DONE]\n\n"), "{body}");
}

#[tokio::test]
async fn silence_is_broken_by_comments_and_ended_by_the_deadline() {
    let cluster = Cluster::new(|_| Plan::hang(vec![frame(0, &[byte(b'a')], None)]));
    let config = GatewayConfig { keep_alive_ms: 100, request_ms_max: 1_000, ..Default::default() };
    let local = Local::with(&cluster, config);
    let reply = local.chat(json!({"stream": true})).await;
    assert!(reply.text().contains(": keep-alive\n\n"));
    assert_eq!(reply.events().last().expect("an error")["error"]["code"], "deadline_exceeded");
    let unary = local.chat(json!({})).await;
    assert_eq!(unary.status, 504);
    cluster.running(0).await;
}
