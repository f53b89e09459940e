//! A panic in any actor restarts that actor, and the node keeps serving.

use std::time::Duration;

use serde_json::Value;

use crate::harness::{Cluster, Node, PATIENCE, ask, until};

async fn actors(cluster: &Cluster, node: &Node) -> Vec<Value> {
    let all = cluster.rows("actors", node).await;
    all["actors"]
        .as_array()
        .cloned()
        .unwrap_or_default()
        .into_iter()
        .filter(|row| row["node"] == node.name.as_str())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_any_actor_restarts_it_and_the_node_serves_on() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &[]).await;
    let peer = cluster.join("two", &[&node.address], &[]).await;
    let served = async || cluster.serving_workers("two", &node).await == 1;
    until("the second node serves", PATIENCE, served).await;
    let key = cluster.key();
    let rows = actors(&cluster, &node).await;
    assert!(!rows.is_empty());
    let mut kinds: Vec<String> = Vec::new();
    for row in rows {
        let (path, kind) = (row["path"].as_str().unwrap().to_owned(), row["kind"].as_str().unwrap().to_owned());
        // One of each kind; supervisors restart their whole subtree and have their own tests.
        // The link of the asking tool is gone with its question.
        if kind == "supervisor" || kinds.contains(&kind) || path.contains("client") {
            continue;
        }
        let args = ["debug", "panic", &path, "--node", &node.address, "--key-file", key.to_str().unwrap()];
        let out = cluster.run(&args).await;
        assert!(out.status.success(), "{path}: {}", String::from_utf8_lossy(&out.stderr));
        let restarted = async || {
            let rows = actors(&cluster, &node).await;
            let row = rows.iter().find(|row| row["path"] == path.as_str());
            // A link is not restarted: a new one is dialled when it is needed, and counts from zero.
            let anew = |row: &Value| kind == "link" || row["restarts"].as_u64() > Some(0);
            row.map_or(kind == "link", |row| anew(row) && row["state"] == "running")
        };
        until(&format!("{path} is restarted"), Duration::from_secs(10), restarted).await;
        let serving = async || node.chat(&ask(&node.model, &format!("after {kind}"), 4)).await.0 == 200;
        until(&format!("the node serves after a panic of {path}"), Duration::from_secs(10), serving).await;
        kinds.push(kind);
    }
    eprintln!("panicked: {kinds:?}");
    assert!(kinds.len() >= 4, "{kinds:?}");
    let (status, body) = peer_chat(&node, &peer).await;
    assert_eq!(status, 200, "{body}");
}

/// A last request through the gateway, after all faults, with both nodes as members.
async fn peer_chat(node: &Node, peer: &Node) -> (u16, Value) {
    node.chat(&ask(&peer.model, "all done", 4)).await
}
