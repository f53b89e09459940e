//! One node answers: streaming, unary, completions, models, cancel; with the simulated and with the real engine.

use std::time::Duration;

use serde_json::json;

use crate::harness::{Cluster, PATIENCE, ask, ask_long, client, model, post, until};

#[tokio::test(flavor = "multi_thread")]
async fn one_node_answers_a_chat_with_the_simulated_engine() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &[]).await;
    let (status, body) = node.chat(&ask(&node.model, "hello", 16)).await;
    assert_eq!(status, 200, "{body}\n{}", node.tail());
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["usage"]["completion_tokens"], 16, "{body}");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let told = node.stream(&ask(&node.model, "hello", 16)).await.rest().await;
    assert!(told.done && told.error.is_none(), "{told:?}");
    assert_eq!(told.text, body["choices"][0]["message"]["content"].as_str().unwrap(), "streaming and unary agree");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_model_answers_and_reuses_a_prefix() {
    let cluster = Cluster::new().await;
    let path = model();
    let node = cluster.up("one", &["--engine", "embedded", "--model", path.to_str().unwrap(), "--workers", "1"]).await;
    let (status, body) = node.chat(&ask(&node.model, "What is the capital of France? Answer briefly.", 24)).await;
    assert_eq!(status, 200, "{body}\n{}", node.tail());
    let text = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.contains("Paris"), "{text}");
    let (_, again) = node.chat(&ask(&node.model, "What is the capital of France? Answer briefly.", 24)).await;
    assert_eq!(again["choices"][0]["message"]["content"], text, "a cached prefix changes nothing");
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= 16 && cached % 16 == 0, "{again}");
    let told = node.stream(&ask(&node.model, "What is the capital of France? Answer briefly.", 24)).await.rest().await;
    assert_eq!(told.text, text);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_health_and_completions_answer() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &["--served-name", "test model"]).await;
    let list: serde_json::Value = client().get(node.url("/v1/models")).send().await.unwrap().json().await.unwrap();
    assert_eq!(list["data"][0]["id"], "test model");
    for path in ["/health", "/live", "/metrics"] {
        assert_eq!(client().get(node.url(path)).send().await.unwrap().status(), 200, "{path}");
    }
    let body = json!({"model": "test model", "prompt": "once", "max_tokens": 8, "temperature": 0});
    let (status, body) = post(&node.url("/v1/completions"), &body).await;
    assert_eq!((status, &body["object"]), (200, &json!("text_completion")), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_the_worker() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &[]).await;
    let mut events = node.stream(&ask_long(&node.model, "a long story", 1500)).await;
    events.first_text().await;
    let runs = async || node.metric("starling_worker_sequences_running", "").await >= 1.0;
    until("the sequence is counted", Duration::from_secs(2), runs).await;
    drop(events);
    let idle = async || node.metric("starling_worker_sequences_running", "").await == 0.0;
    let took = until("the sequence is cancelled", Duration::from_secs(2), idle).await;
    eprintln!("cancelled after {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_signal_finishes_what_runs_and_ends_in_order() {
    let cluster = Cluster::new().await;
    let mut node = cluster.up("one", &[]).await;
    let mut events = node.stream(&ask_long(&node.model, "a story", 200)).await;
    events.first_text().await;
    node.signal("TERM").await;
    let told = events.rest().await;
    assert!(told.done && told.finish.is_some(), "the running answer is whole: {told:?}");
    let ended = tokio::time::timeout(PATIENCE, node.child.wait()).await.expect("it ends").unwrap();
    assert!(ended.success(), "{ended}\n{}", node.tail());
    assert!(!cluster.data_dir("one").join("node.json").exists());
}
