//! What is listed when workers are gone.

use serde_json::Value;

use crate::harness::{Cluster, PATIENCE, client, until};

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
