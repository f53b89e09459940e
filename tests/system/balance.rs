//! What is listed and what is known when workers are gone, or out of reach.

use serde_json::Value;

use crate::harness::{Cluster, PATIENCE, ask, client, until};

#[tokio::test(flavor = "multi_thread")]
async fn ded_05_models_are_listed_from_what_the_gateway_knows() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let mut first = cluster.join("w1", &[&gateway.address], &["--served-name", "model"]).await;
    let second = cluster.join("w2", &[&gateway.address], &["--served-name", "model"]).await;
    let both =
        async || cluster.serving_workers("w1", &gateway).await + cluster.serving_workers("w2", &gateway).await == 2;
    until("both workers serve", PATIENCE, both).await;
    let listed = async || {
        let response = client().get(gateway.url("/v1/models")).send().await.expect("the gateway answers");
        assert_eq!(response.status(), 200);
        let list: Value = response.json().await.expect("JSON");
        list["data"].as_array().expect("a list").iter().map(|model| model["id"].to_string()).collect::<Vec<_>>()
    };
    first.child.kill().await.expect("it runs");
    // While nobody knows of it yet, and afterwards.
    let gone = async || {
        assert_eq!(listed().await, ["\"model\""]);
        !cluster.lists("w1", &gateway).await
    };
    until("the dead one leaves the tables", PATIENCE, gone).await;
    assert_eq!(listed().await, ["\"model\""]);
    drop(second);
}

#[tokio::test(flavor = "multi_thread")]
async fn idx_05_a_link_that_breaks_costs_no_inventory() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let worker = cluster.join("w1", &[&gateway.address], &[]).await;
    until("it serves", PATIENCE, async || cluster.serving_workers("w1", &gateway).await == 1).await;
    let blocks = async || gateway.metric("starling_index_blocks", "").await;
    let asked = async |about: &str| {
        let prompt = about.repeat(20);
        let served = async || gateway.chat(&ask(&worker.model, &prompt, 2)).await.0 == 200;
        until("it answers", PATIENCE, served).await;
    };
    asked("the sea and the moon ").await;
    until("its blocks are known", PATIENCE, async || blocks().await > 0.0).await;
    let (before, inventories) = (blocks().await, gateway.metric("starling_index_resyncs_total", "").await);
    let key = cluster.key();
    let args = ["debug", "panic", "links/w1", "--node", &gateway.address, "--key-file", key.to_str().unwrap()];
    let out = cluster.run(&args).await;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    asked("a mountain far away from both ").await;
    until("the stream goes on", PATIENCE, async || blocks().await > before).await;
    assert_eq!(gateway.metric("starling_index_resyncs_total", "").await, inventories);
}
