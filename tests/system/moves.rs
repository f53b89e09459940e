//! Blocks and running requests that go from one node to another: the same texts, nothing computed twice.

use std::time::Duration;

use futures::future::join_all;
use serde_json::Value;

use crate::harness::{Cluster, Node, PATIENCE, ask_long, model, until};

const STREAMS: usize = 8;
const TOKENS: u32 = 240;

/// A front node without a worker, and two workers of the real model.
async fn three(cluster: &Cluster, options: &[&str]) -> [Node; 3] {
    let path = model();
    let front = cluster.up("front", &["--role", "router,gateway"]).await;
    let mut args = vec!["--role", "worker", "--http", "127.0.0.1:0", "--engine", "embedded", "--workers", "1"];
    args.extend(["--model", path.to_str().unwrap()]);
    args.extend(options);
    let one = cluster.join("one", &[&front.address], &args).await;
    let two = cluster.join("two", &[&front.address], &args).await;
    for node in [&one, &two] {
        until("it serves", PATIENCE, async || cluster.serving_workers(&node.name, &front).await == 1).await;
    }
    [front, one, two]
}

/// Whether the node lists an instance with this label.
async fn sees(cluster: &Cluster, node: &Node, label: &str) -> bool {
    let key = cluster.key();
    let out = cluster.run(&["instances", "--node", &node.address, "--key-file", key.to_str().unwrap()]).await;
    String::from_utf8_lossy(&out.stdout).contains(label)
}

/// Runs a verb at a node.
async fn verb(cluster: &Cluster, node: &Node, words: &[&str]) {
    let key = cluster.key();
    let mut all = words.to_vec();
    all.extend(["--node", &node.address, "--key-file", key.to_str().unwrap()]);
    let out = cluster.run(&all).await;
    assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn chat(node: &Node, kind: usize, salt: &str) -> Value {
    let name = ["river", "stone", "cloud", "amber", "field", "north", "light", "copper"][kind % STREAMS];
    let story = "It was old, and it was known to all who lived beside it. ".repeat(6);
    let mut body = ask_long(&node.model, &format!("Tell a story of the {name}. {story}"), TOKENS);
    body["cache_salt"] = salt.into();
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_streams_of_a_drained_worker_go_on_at_another_node_and_no_token_is_computed_twice() {
    let cluster = Cluster::new().await;
    let [mut front, one, two] = three(&cluster, &[]).await;
    front.model.clone_from(&one.model);
    let front = front;
    let whole = join_all((0..STREAMS).map(async |kind| front.stream(&chat(&front, kind, "whole")).await.rest().await));
    let whole = whole.await;
    // One that computes prompts takes no whole requests; most begin at the other one.
    verb(&cluster, &front, &["role", "two/0", "prefill"]).await;
    until("the role is seen", PATIENCE, async || sees(&cluster, &front, "role=prefill").await).await;
    let begin = (0..STREAMS).map(async |kind| {
        let mut stream = front.stream(&chat(&front, kind, "moved")).await;
        (stream.first_text().await, stream)
    });
    let streams = join_all(begin).await;
    let running = one.metric("starling_worker_sequences_running", "").await;
    assert!(running > 0.0, "some are in the middle");
    verb(&cluster, &front, &["role", "two/0", "both"]).await;
    let rest = join_all(streams.into_iter().map(async |(first, stream)| (first, stream.rest().await)));
    let (told, ()) = futures::join!(rest, verb(&cluster, &front, &["drain", "one/0"]));
    for ((first, told), whole) in told.iter().zip(&whole) {
        assert!(told.done && told.error.is_none(), "{told:?}");
        assert_eq!((format!("{first}{}", told.text), &told.finish), (whole.text.clone(), &whole.finish));
    }
    let moved = front.metric("starling_gateway_moved_total", "outcome=\"moved\"").await;
    assert!(moved >= running, "{moved} of {running} went on elsewhere");
    for node in [&one, &two] {
        assert_eq!(node.metric("starling_worker_tokens_recomputed_total", "").await, 0.0, "{}", node.name);
        let zero = async |name: &str| {
            let at_rest = async || node.metric(name, "").await == 0.0;
            until(name, Duration::from_secs(5), at_rest).await;
        };
        zero("starling_worker_kv_blocks_pinned").await;
        zero("starling_transfer_tickets_open").await;
    }
    assert!(two.metric("starling_worker_tokens_generated_total", "").await > 0.0);
}
