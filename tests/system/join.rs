//! Three processes become one cluster, in any order, and answer as one process does.

use std::time::Duration;

use serde_json::json;

use crate::harness::{Cluster, Node, PATIENCE, ask, model, until};

/// A free port for a seed that is not there yet.
fn free_port() -> u16 {
    // UDP and TCP of one number are needed; a port free for TCP is rarely taken for UDP.
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn sees_all(cluster: &Cluster, node: &Node, names: &[&str]) -> bool {
    let rows = cluster.rows("nodes", node).await;
    let alive = rows.as_array().into_iter().flatten().filter(|row| row["state"] == "alive");
    let alive: Vec<&str> = alive.filter_map(|row| row["name"].as_str()).collect();
    names.iter().all(|name| alive.contains(name))
}

#[tokio::test(flavor = "multi_thread")]
async fn three_processes_join_in_any_order() {
    let cluster = Cluster::new().await;
    let (a, b) = (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    // Workers first; both seeds are still silent.
    let w1 = cluster.launch("w1", &["join", &a, &b], &[]);
    let w2 = cluster.launch("w2", &["join", &b, &a], &["--bind", &b]);
    let gateway = cluster.launch("gw", &["join", &b], &["--role", "router,gateway", "--bind", &a]);
    let (w1, w2, gateway) = (w1.ready().await, w2.ready().await, gateway.ready().await);
    for node in [&w1, &w2, &gateway] {
        let all = async || sees_all(&cluster, node, &["w1", "w2", "gw"]).await;
        let took = until("every node sees every node", PATIENCE, all).await;
        eprintln!("{} saw all after {took:?}", node.name);
    }
    let served = async || gateway.chat(&ask(&w1.model, "hello", 4)).await.0 == 200;
    until("the gateway serves the workers' model", Duration::from_secs(5), served).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_worker_gets_traffic_within_two_seconds_of_ready() {
    let cluster = Cluster::new().await;
    let first = cluster.up("one", &["--workers", "1"]).await;
    let second = cluster.join("two", &[&first.address], &["--http", "127.0.0.1:0"]).await;
    let number = std::sync::atomic::AtomicU32::new(0);
    let busy = async || {
        let n = number.fetch_add(4, std::sync::atomic::Ordering::Relaxed);
        let bodies: Vec<_> = (n..n + 4).map(|n| ask(&first.model, &format!("{n} is a number"), 2)).collect();
        futures::future::join_all(bodies.iter().map(|body| first.chat(body))).await;
        second.metric("starling_worker_tokens_generated_total", "").await > 0.0
    };
    let took = until("the new worker gets traffic", Duration::from_secs(2), busy).await;
    eprintln!("traffic after {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_goes_to_the_worker_that_holds_its_prefix() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let w1 = cluster.join("w1", &[&gateway.address], &["--http", "127.0.0.1:0"]).await;
    let w2 = cluster.join("w2", &[&gateway.address], &["--http", "127.0.0.1:0"]).await;
    let both =
        async || cluster.serving_workers("w1", &gateway).await + cluster.serving_workers("w2", &gateway).await == 2;
    until("both workers serve", PATIENCE, both).await;
    let story = "The river bends to the east before it meets the hills. ".repeat(30);
    for turn in 0..6 {
        let (status, body) = gateway.chat(&ask(&w1.model, &format!("{story} Question {turn}?"), 4)).await;
        assert_eq!(status, 200, "{body}\n{}", gateway.tail());
        let cached = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let prompt = body["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(turn == 0 || cached * 10 > prompt * 8, "turn {turn}: {cached} of {prompt} tokens were cached");
        // The index learns of stored blocks by events; the next turn may come before them only in a test.
        let indexed = async || gateway.metric("starling_index_blocks", "").await * 16.0 >= prompt as f64 * 0.8;
        until("the index knows the blocks", Duration::from_secs(5), indexed).await;
    }
    let (a, b) = (
        w1.metric("starling_worker_tokens_prefilled_total", "").await,
        w2.metric("starling_worker_tokens_prefilled_total", "").await,
    );
    assert!(a == 0.0 || b == 0.0, "one worker computed everything: {a} and {b}");
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_answers_are_equal_in_one_process_and_in_three() {
    let cluster = Cluster::new().await;
    let path = model();
    let real = ["--engine", "embedded", "--model", path.to_str().unwrap(), "--workers", "1", "--kv-mib", "128"];
    let prompts = [
        "Name three rivers.",
        "Write a Python function that adds two numbers.",
        "Was ist ein Schwarm?",
        "Explain gravity to a child in two sentences.",
        "List the planets.",
        "私の名前は",
        "Continue: one, two, three,",
        "Who wrote Hamlet?",
    ];
    let bodies: Vec<_> = prompts.iter().map(|prompt| ask("PLACEHOLDER", prompt, 32)).collect();
    let answers = async |node: &Node, model: &str| {
        let bodies: Vec<_> = bodies
            .iter()
            .cloned()
            .map(|mut body| {
                body["model"] = json!(model);
                body
            })
            .collect();
        let all = futures::future::join_all(bodies.iter().map(|body| node.chat(body))).await;
        let text = |(status, body): (u16, serde_json::Value)| {
            assert_eq!(status, 200, "{body}");
            body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        all.into_iter().map(text).collect::<Vec<_>>()
    };
    let one = cluster.up("one", &real).await;
    let alone = answers(&one, &one.model).await;
    drop(one);
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let w1 = cluster.join("w1", &[&gateway.address], &real).await;
    let _w2 = cluster.join("w2", &[&gateway.address], &real).await;
    let both =
        async || cluster.serving_workers("w1", &gateway).await + cluster.serving_workers("w2", &gateway).await == 2;
    until("both workers serve", PATIENCE, both).await;
    assert_eq!(answers(&gateway, &w1.model).await, alone);
}
