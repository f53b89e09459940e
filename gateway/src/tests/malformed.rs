//! Forty wrong requests: each 4xx, in the envelope, with the field's name; and the gateway serves on.

use serde_json::json;
use starling_actors::engine::FinishReason;

use super::client::{Local, chat_body};
use crate::fixtures::cluster::{Cluster, Plan};

#[tokio::test]
async fn every_malformed_request_is_refused_by_the_fields_name() {
    let cluster = Cluster::new(|_| Plan::text("x", FinishReason::Stop));
    let local = Local::new(&cluster);
    let deep = format!(r#"{{"model":"m","messages":{}{}}}"#, "[".repeat(1000), "]".repeat(1000));
    let raw: [(&[u8], u16, Option<&str>); 9] = [
        (b"", 400, None),
        (b"nonsense", 400, None),
        (b"[]", 400, None),
        (b"{\"model\":\"m\",", 400, None),
        (b"{\"model\":\"\xff\xfe\"}", 400, Some("model")),
        (br#"{"model":"m","messages":[{"role":"user","content":"\ud800"}]}"#, 400, Some("messages")),
        (deep.as_bytes(), 400, Some("messages")),
        (br#"{"model":"m","prompt":"x"}"#, 400, Some("messages")),
        (br#"{"messages":[{"role":"user","content":"x"}]}"#, 400, Some("model")),
    ];
    for (body, status, param) in raw {
        let reply = local.post("/v1/chat/completions", body.to_vec()).await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert_eq!((reply.status.as_u16(), reply.error_param().as_deref()), (status, param), "{shown}");
    }
    let fields = [
        (json!({"model": 5}), 400, "model"),
        (json!({"model": "unknown"}), 404, "model"),
        (json!({"messages": []}), 400, "messages"),
        (json!({"messages": null}), 400, "messages"),
        (json!({"messages": "hi"}), 400, "messages"),
        (json!({"messages": [5]}), 400, "messages[0]"),
        (json!({"messages": [{"role": "user"}]}), 400, "messages[0].content"),
        (json!({"messages": [{"role": 7, "content": "x"}]}), 400, "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": {"a": 1}}]}), 400, "messages[0].content"),
        (json!({"messages": vec![json!({"role": "user", "content": "x"}); 4097]}), 400, "messages"),
        (json!({"max_tokens": "abc"}), 400, "max_tokens"),
        (json!({"max_tokens": 0}), 400, "max_tokens"),
        (json!({"max_completion_tokens": -3}), 400, "max_completion_tokens"),
        (json!({"max_tokens": 1_000_000}), 400, "max_tokens"),
        (json!({"min_tokens": 5, "max_tokens": 4}), 400, "min_tokens"),
        (json!({"temperature": "hot"}), 400, "temperature"),
        (json!({"temperature": 2.1}), 400, "temperature"),
        (json!({"top_p": 0}), 400, "top_p"),
        (json!({"top_p": 1.5}), 400, "top_p"),
        (json!({"top_k": -2}), 400, "top_k"),
        (json!({"min_p": -0.1}), 400, "min_p"),
        (json!({"seed": "x"}), 400, "seed"),
        (json!({"n": 0}), 400, "n"),
        (json!({"n": 17}), 400, "n"),
        (json!({"stop": ["a", 5]}), 400, "stop[1]"),
        (json!({"stop": vec!["x"; 17]}), 400, "stop"),
        (json!({"stop_token_ids": [99_999]}), 400, "stop_token_ids"),
        (json!({"logit_bias": {"x": 1}}), 400, "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), 400, "logit_bias"),
        (json!({"logit_bias": {"99999": 1}}), 400, "logit_bias"),
        (json!({"presence_penalty": 3}), 400, "presence_penalty"),
        (json!({"repetition_penalty": 0}), 400, "repetition_penalty"),
        (json!({"logprobs": 3}), 400, "logprobs"),
        (json!({"top_logprobs": 3}), 400, "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), 400, "top_logprobs"),
        (json!({"stream": "yes"}), 400, "stream"),
        (json!({"stream_options": {"include_usage": true}}), 400, "stream_options"),
        (json!({"response_format": {"type": "json_object"}}), 400, "response_format"),
        (json!({"tools": [{"type": "function"}]}), 400, "tools"),
        (json!({"metadata": 5}), 400, "metadata"),
        (json!({"n": 2, "best_of": 3}), 400, "best_of"),
        (json!({"no_such_field": 1}), 400, "no_such_field"),
    ];
    assert!(raw.len() + fields.len() >= 40);
    for (extra, status, param) in fields {
        let reply = local.post("/v1/chat/completions", chat_body(extra.clone())).await;
        assert_eq!(
            (reply.status.as_u16(), reply.error_param().as_deref()),
            (status, Some(param)),
            "{}",
            extra.to_string().chars().take(120).collect::<String>()
        );
    }
    for name in ["%ff", "%00", "%20"] {
        let reply = local.get(&format!("/v1/models/{name}")).await;
        assert_eq!((reply.status.as_u16(), reply.error_param().as_deref()), (400, Some("model")), "{name}");
    }
    assert!(cluster.calls().is_empty(), "no worker was asked");
    assert_eq!(local.chat(json!({"best_of": 1})).await.status, 200);
    assert_eq!(local.chat(json!({})).await.status, 200);
}
