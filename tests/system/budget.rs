//! A tenant's budget over two gateways, as their clients see it.

use std::time::Instant;

use serde_json::Value;

use crate::harness::{Cluster, Node, PATIENCE, ask, client, until};

/// Tokens per minute: 10 a second, 150 at once.
const BUDGET: f64 = 600.0;

/// Tokens left and until when they are all back, as a reply tells; within what the budget allows.
fn told(reply: &reqwest::Response) -> f64 {
    let header = |name: &str| reply.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(header("x-ratelimit-limit-tokens"), "600");
    assert!(header("x-ratelimit-reset-tokens").ends_with('s'));
    let left: f64 = header("x-ratelimit-remaining-tokens").parse().unwrap();
    assert!((0.0..=BUDGET / 4.0).contains(&left), "{left}");
    left
}

/// Asks until it is refused; the tokens that it got, and the refusal.
async fn spend(gateway: &Node, model: &str, key: &str) -> (f64, reqwest::Response) {
    let mut tokens = 0.0;
    loop {
        let request = client().post(gateway.url("/v1/chat/completions")).bearer_auth(key);
        let reply = request.json(&ask(model, "hello", 5)).send().await.unwrap();
        let left = told(&reply);
        if reply.status() != 200 {
            assert!(left <= 20.0, "{left} left, and refused");
            return (tokens, reply);
        }
        let body: Value = reply.json().await.unwrap();
        tokens += body["usage"]["total_tokens"].as_f64().unwrap();
        assert!(tokens < 5_000.0, "nobody refuses");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_spent_its_budget_at_one_gateway_is_refused_at_the_other() {
    let cluster = Cluster::new().await;
    let keys = cluster.path().join("api-keys");
    let lines = "key-of-search tenant=search budget=600\nkey-of-ads tenant=ads budget=600\nkey-of-nobody\n";
    std::fs::write(&keys, lines).unwrap();
    let args = ["--api-keys-file", keys.to_str().unwrap()];
    let one = cluster.up("one", &args).await;
    let two = [&["--role", "gateway", "--http", "127.0.0.1:0"], &args[..]].concat();
    let two = cluster.join("two", &[&one.address], &two).await;
    until("the second gateway is ready", PATIENCE, async || {
        client().get(two.url("/health")).send().await.is_ok_and(|reply| reply.status() == 200)
    })
    .await;
    let begun = Instant::now();
    let (first, refused) = spend(&one, &one.model, "key-of-search").await;
    let (second, _) = spend(&two, &one.model, "key-of-search").await;
    // Ten a second, what may be spent at once for two owners at most, and one request of each gateway.
    let bound = 2.0 * (BUDGET / 60.0 * begun.elapsed().as_secs_f64() + BUDGET / 4.0) + 2.0 * 200.0;
    assert!(first > 0.0 && first + second <= bound, "{first} and {second} tokens, bound {bound}");
    assert_eq!(refused.status(), 429);
    let wait: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=600).contains(&wait), "{wait}");
    let body: Value = refused.json().await.unwrap();
    assert_eq!(
        (&body["error"]["type"], &body["error"]["code"]),
        (&"rate_limit_error".into(), &"rate_limit_exceeded".into())
    );
    assert!(body["error"]["message"].as_str().unwrap().contains("search"), "{body}");
    assert!(one.metric("starling_budget_granted_tokens_total", "").await > 0.0);
    assert!(one.metric("starling_budget_refused_total", "").await > 0.0);
    // Neither another tenant nor a key without a budget is held back.
    assert!(spend(&two, &one.model, "key-of-ads").await.0 > 0.0);
    for _ in 0..20 {
        let request = client().post(two.url("/v1/chat/completions")).bearer_auth("key-of-nobody");
        let reply = request.json(&ask(&one.model, "hello", 5)).send().await.unwrap();
        assert_eq!(reply.status(), 200);
        assert!(!reply.headers().contains_key("x-ratelimit-limit-tokens"), "without a budget there is none to tell");
    }
}
