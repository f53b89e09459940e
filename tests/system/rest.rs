//! After load everything counted is back at zero, and memory is flat.

use std::time::Duration;

use crate::harness::{Cluster, Node, ask, ask_long, until};

/// What must be zero on every node when nothing runs.
const ZERO_AT_REST: &[&str] = &[
    "starling_gateway_requests_in_flight",
    "starling_gateway_permits_in_use",
    "starling_router_reservations",
    "starling_worker_sequences_running",
    "starling_worker_sequences_waiting",
    "starling_worker_kv_blocks_pinned",
    "starling_streams_open",
    "starling_stream_credit_bytes_outstanding",
];

async fn at_rest(node: &Node) {
    for name in ZERO_AT_REST {
        let zero = async || node.metric(name, "").await == 0.0;
        until(&format!("{name} of {} is 0", node.name), Duration::from_secs(10), zero).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_zero_at_rest_after_finished_cancelled_and_refused_requests() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--workers", "1"]).await;
    let worker = cluster.join("w1", &[&gateway.address], &["--http", "127.0.0.1:0"]).await;
    let served = async || cluster.serving_workers("w1", &gateway).await == 1;
    until("the worker serves", Duration::from_secs(10), served).await;
    for round in 0..10 {
        let bodies: Vec<_> = (0..8).map(|n| ask(&gateway.model, &format!("{round} {n} words"), 12)).collect();
        futures::future::join_all(bodies.iter().map(|body| gateway.chat(body))).await;
        let mut left = gateway.stream(&ask_long(&gateway.model, "someone leaves", 900)).await;
        left.first_text().await;
        drop(left);
        gateway.chat(&ask("no such model", "x", 1)).await;
        gateway.chat(&ask(&gateway.model, "", 0)).await;
    }
    at_rest(&gateway).await;
    at_rest(&worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_flat_over_two_thousand_short_requests() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &["--kv-mib", "32"]).await;
    let load = async |from: u32, count: u32| {
        for start in (from..from + count).step_by(20) {
            let bodies: Vec<_> = (start..start + 20).map(|n| ask(&node.model, &format!("request {n}"), 4)).collect();
            let answers = futures::future::join_all(bodies.iter().map(|body| node.chat(body))).await;
            assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
        }
    };
    // Caches, pools and thread stacks fill first.
    load(0, 600).await;
    let before = node.resident_kib();
    load(600, 2_000).await;
    let after = node.resident_kib();
    eprintln!("resident: {before} KiB, then {after} KiB");
    assert!(after < before + 6 * 1024 + before / 50, "grew from {before} to {after} KiB");
    at_rest(&node).await;
}
