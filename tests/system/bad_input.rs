//! Forty malformed requests: each gets a 4xx with the OpenAI envelope and the field's name, and the node lives.

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::harness::{Cluster, Node, ask, post};

/// (what is wrong, the body, the field that the answer must name)
fn chats(model: &str) -> Vec<(&'static str, Value, &'static str)> {
    let with = |field: &str, value: Value| {
        let mut body = ask(model, "hi", 4);
        body[field] = value;
        body
    };
    let message = |message: Value| json!({"model": model, "messages": [message]});
    vec![
        ("no messages", json!({"model": model}), "messages"),
        ("messages is empty", json!({"model": model, "messages": []}), "messages"),
        ("messages is a string", json!({"model": model, "messages": "hi"}), "messages"),
        ("messages is null", json!({"model": model, "messages": null}), "messages"),
        ("a message is a number", message(json!(7)), "messages"),
        ("a message has no role", message(json!({"content": "x"})), "messages"),
        ("an unknown role", message(json!({"role": "boss", "content": "x"})), "messages"),
        ("content is a number", message(json!({"role": "user", "content": 5})), "messages"),
        ("an unknown content part", message(json!({"role": "user", "content": [{"type": "smell"}]})), "messages"),
        ("no model", json!({"messages": [{"role": "user", "content": "x"}]}), "model"),
        ("model is a number", with("model", json!(1)), "model"),
        ("unknown model", with("model", json!("gpt-99")), "model"),
        ("model is empty", with("model", json!("")), "model"),
        ("temperature is text", with("temperature", json!("hot")), "temperature"),
        ("temperature is negative", with("temperature", json!(-1)), "temperature"),
        ("temperature is above 2", with("temperature", json!(2.5)), "temperature"),
        ("top_p is 0", with("top_p", json!(0)), "top_p"),
        ("top_p is above 1", with("top_p", json!(1.5)), "top_p"),
        ("max_tokens is 0", with("max_tokens", json!(0)), "max_tokens"),
        ("max_tokens is negative", with("max_tokens", json!(-5)), "max_tokens"),
        ("max_tokens is a fraction", with("max_tokens", json!(1.5)), "max_tokens"),
        ("n is 0", with("n", json!(0)), "n"),
        ("n is a hundred", with("n", json!(100)), "n"),
        ("stream is text", with("stream", json!("yes")), "stream"),
        (
            "stop has too many",
            with("stop", json!(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q"])),
            "stop",
        ),
        ("stop is a number", with("stop", json!(3)), "stop"),
        (
            "top_logprobs above 20",
            json!({"model": model, "messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        ("presence_penalty above 2", with("presence_penalty", json!(3)), "presence_penalty"),
        ("frequency_penalty below -2", with("frequency_penalty", json!(-3)), "frequency_penalty"),
        ("logit_bias above 100", with("logit_bias", json!({"5": 101})), "logit_bias"),
        ("logit_bias of no token", with("logit_bias", json!({"five": 1})), "logit_bias"),
        ("seed is text", with("seed", json!("lucky")), "seed"),
    ]
}

/// Sends raw bytes as the body of a chat; status and parsed body.
async fn raw(node: &Node, head: &str, body: &[u8]) -> (u16, Value) {
    let (mut from, mut to) = TcpStream::connect(&node.http).await.unwrap().into_split();
    // Both at once: the server may answer and close before it has read all of a body that is too large.
    let write = async {
        to.write_all(head.as_bytes()).await?;
        to.write_all(body).await
    };
    let mut answer = Vec::new();
    let (written, read) = tokio::join!(write, from.read_to_end(&mut answer));
    if let Err(error) = written.and(read) {
        eprintln!("the server closed early, after {} bytes of its answer: {error}", answer.len());
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let start = answer.find("\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let json = answer[start..].find('{').map_or("", |at| &answer[start + at..]);
    let json = json.rfind('}').map_or("", |end| &json[..=end]);
    (status, serde_json::from_str(json).unwrap_or(Value::String(answer)))
}

fn head(length: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    )
}

/// A 4xx with `error.message`, `error.type`, `error.param`, `error.code`.
fn check(what: &str, status: u16, body: &Value, field: Option<&str>) {
    assert!((400..500).contains(&status), "{what}: status {status}: {body}");
    let error = &body["error"];
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{what}: no message: {body}");
    assert!(error["type"].is_string(), "{what}: no type: {body}");
    assert!(error.get("param").is_some() && error.get("code").is_some(), "{what}: envelope is not whole: {body}");
    if let Some(field) = field {
        let named = error["param"].as_str().unwrap_or_default();
        assert!(named.starts_with(field), "{what}: names {named:?}, not {field}: {body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forty_malformed_requests_are_refused_by_name() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &[]).await;
    let mut sent = 0;
    for (what, body, field) in chats(&node.model) {
        let (status, answer) = node.chat(&body).await;
        check(what, status, &answer, Some(field));
        sent += 1;
    }
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    let huge = format!("{{\"model\": \"{}\"}}", "x".repeat(80 << 20));
    let invalid = b"{\"model\": \"\xff\xfe\", \"messages\": []}".to_vec();
    let bodies: [(&str, Vec<u8>); 7] = [
        ("empty body", Vec::new()),
        ("not JSON", b"hello".to_vec()),
        ("half a JSON", b"{\"model\": ".to_vec()),
        ("a JSON list", b"[]".to_vec()),
        ("invalid UTF-8", invalid),
        ("deep nesting", deep.into_bytes()),
        ("huge body", huge.into_bytes()),
    ];
    for (what, body) in bodies {
        let (status, answer) = raw(&node, &head(body.len()), &body).await;
        check(what, status, &answer, None);
        sent += 1;
    }
    let (status, answer) = post(&node.url("/v1/nothing-here"), &json!({})).await;
    check("unknown path", status, &answer, None);
    assert_eq!(sent + 1, 40);
    let (status, body) = node.chat(&ask(&node.model, "still here?", 4)).await;
    assert_eq!(status, 200, "{body}");
}
