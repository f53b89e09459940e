//! Faults of simulated engines on command, and what the cluster makes of them.

use std::{process::Output, time::Duration};

use crate::harness::{Cluster, Node, PATIENCE, ask, ask_long, until};

async fn fault(cluster: &Cluster, at: &Node, args: [&str; 2]) -> Output {
    let key = cluster.key();
    let verb = ["fault", args[0], args[1], "--node", &at.address, "--key-file", key.to_str().unwrap()];
    cluster.run(&verb).await
}

/// Commands a fault; what the verb says.
async fn commanded(cluster: &Cluster, at: &Node, args: [&str; 2]) -> String {
    let done = fault(cluster, at, args).await;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_that_told_wrong_events_is_repaired_bucket_by_bucket() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &["--fault", "wrong-events"]).await;
    let (status, body) =
        node.chat(&ask(&node.model, "a story about a lighthouse keeper and the sea ".repeat(8).as_str(), 4)).await;
    assert_eq!(status, 200, "{body}");
    let inventories = node.metric("starling_index_resyncs_total", "").await;
    let repaired = async || node.metric("starling_index_repairs_total", "").await > 0.0;
    until("the digests show it", Duration::from_secs(20), repaired).await;
    assert_eq!(commanded(&cluster, &node, ["one/0", "none"]).await, "one/0: wrong-events before, none now\n");
    assert_eq!(node.metric("starling_index_resyncs_total", "").await, inventories, "buckets alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commanded_crash_and_a_refusal_cost_no_answer() {
    let cluster = Cluster::new().await;
    let node = cluster.up("two", &["--workers", "2"]).await;
    until("both serve", PATIENCE, async || cluster.serving_workers("two", &node).await == 2).await;
    let mut streams = Vec::new();
    for n in 0..4 {
        let mut events = node.stream(&ask_long(&node.model, &format!("{n}: a story"), 300)).await;
        events.first_text().await;
        streams.push(events);
    }
    assert_eq!(commanded(&cluster, &node, ["two/1", "crash"]).await, "two/1: none before, crash now\n");
    let told = futures::future::join_all(streams.into_iter().map(|events| events.rest())).await;
    assert!(told.iter().all(|told| told.error.is_none() && told.done), "{told:?}");
    until("it serves again", PATIENCE, async || cluster.serving_workers("two", &node).await == 2).await;
    // A crash is one crash.
    assert_eq!(commanded(&cluster, &node, ["two/0", "reject"]).await, "two/0: none before, reject now\n");
    for n in 0..6 {
        let (status, body) = node.chat(&ask(&node.model, &format!("{n}: hello"), 2)).await;
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(commanded(&cluster, &node, ["two/1", "slow=2"]).await, "two/1: none before, slow=2 now\n");
    // Three bytes of one character, then the end: all that anybody is told.
    commanded(&cluster, &node, ["two/1", "say=158,224,105"]).await;
    commanded(&cluster, &node, ["two/0", "say=158,224,105"]).await;
    let (status, body) = node.chat(&ask(&node.model, "say it", 9)).await;
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (200, &"\u{20ac}".into()), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_commands_say_what_would_be_right() {
    let cluster = Cluster::new().await;
    let node = cluster.up("three", &[]).await;
    for (args, code, text) in [
        (["three/0", "slow=0"], 2, "slow=FACTOR"),
        (["three/0", "explode"], 2, "wrong-events"),
        (["three/7", "hang"], 1, "no worker 7 here"),
        (["three", "hang"], 1, "NODE/INDEX"),
    ] {
        let done = fault(&cluster, &node, args).await;
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.code() == Some(code) && said.contains(text), "{args:?}: {:?} {said}", done.status);
    }
    let refused = cluster.run(&["up", "--engine", "embedded", "--fault", "hang"]).await;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("--engine simulated"), "{said}");
}
