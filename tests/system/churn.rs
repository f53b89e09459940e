//! Nodes that leave, lose what they knew, freeze or come with another key, as real processes.

use std::time::{Duration, Instant};

use crate::harness::{Cluster, Node, PATIENCE, ask, ask_long, until};

/// A worker with an HTTP server, for its metrics.
async fn worker(cluster: &Cluster, name: &str, seed: &Node) -> Node {
    let node = cluster.join(name, &[&seed.address], &["--http", "127.0.0.1:0"]).await;
    until("the worker serves", PATIENCE, async || cluster.serving_workers(name, seed).await == 1).await;
    node
}

/// What one node says of another: state and incarnation.
async fn seen(cluster: &Cluster, of: &str, by: &Node) -> Option<(String, u64)> {
    let rows = cluster.rows("nodes", by).await;
    let row = rows.as_array()?.iter().find(|row| row["name"] == of)?.clone();
    Some((row["state"].as_str()?.to_owned(), row["incarnation"].as_u64()?))
}

async fn end(node: &mut Node) -> Option<i32> {
    node.signal("TERM").await;
    tokio::time::timeout(PATIENCE, node.child.wait()).await.expect("it ends").unwrap().code()
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_05_a_first_node_that_lost_its_data_folder_comes_back_above_its_past() {
    let cluster = Cluster::new().await;
    let mut first = cluster.up("first", &["--role", "router"]).await;
    let address = first.address.clone();
    let args = ["up", "--bind", &address, "--http", "127.0.0.1:0"];
    first.child.kill().await.unwrap();
    let mut second = cluster.launch("first", &args, &["--role", "router"]).ready().await;
    let other = worker(&cluster, "w1", &second).await;
    assert_eq!(seen(&cluster, "first", &other).await.map(|(_, incarnation)| incarnation), Some(2));
    second.child.kill().await.unwrap();
    let down = async || seen(&cluster, "first", &other).await.is_none();
    until("the first node is down", Duration::from_secs(10), down).await;
    // No seeds to ask and no counter to read: it starts in incarnation 1, which the others know to be over.
    std::fs::remove_dir_all(cluster.data_dir("first")).unwrap();
    let third = cluster.launch("first", &args, &["--role", "router"]).ready().await;
    let back = async || {
        let incarnation = seen(&cluster, "first", &other).await.map(|(_, incarnation)| incarnation);
        incarnation > Some(2) && seen(&cluster, "w1", &third).await.is_some()
    };
    let took = until("it is back in a later life", Duration::from_secs(20), back).await;
    eprintln!("back {took:?} after ready");
}

#[tokio::test(flavor = "multi_thread")]
async fn lif_01_a_worker_told_to_end_finishes_its_streams_and_takes_no_new_ones() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let mut w1 = worker(&cluster, "w1", &gateway).await;
    let w2 = worker(&cluster, "w2", &gateway).await;
    let mut streams = Vec::new();
    for n in 0..6 {
        let mut events = gateway.stream(&ask_long(&w1.model, &format!("{n}: a long story"), 700)).await;
        events.first_text().await;
        streams.push(events);
    }
    assert!(w1.metric("starling_worker_sequences_running", "").await > 0.0);
    let ending = end(&mut w1);
    let others = async {
        until("it takes nothing new", PATIENCE, async || cluster.serving_workers("w1", &gateway).await == 0).await;
        for n in 0..5 {
            let (status, body) = gateway.chat(&ask(&w2.model, &format!("{n}: meanwhile"), 2)).await;
            assert_eq!(status, 200, "{body}");
        }
    };
    let told = futures::future::join_all(streams.into_iter().map(|events| events.rest()));
    let (code, (), told) = tokio::join!(ending, others, told);
    assert_eq!(code, Some(0));
    assert!(told.iter().all(|told| told.error.is_none() && told.done && told.finish.is_some()), "{told:?}");
    let gone = async || seen(&cluster, "w1", &gateway).await.is_none();
    until("its goodbye is heard", Duration::from_secs(1), gone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lif_02_a_gateway_told_to_end_finishes_what_it_has_begun() {
    let cluster = Cluster::new().await;
    let mut gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let w1 = worker(&cluster, "w1", &gateway).await;
    let mut streams = Vec::new();
    for n in 0..10 {
        let mut events = gateway.stream(&ask_long(&w1.model, &format!("{n}: a story"), 400)).await;
        events.first_text().await;
        streams.push(events);
    }
    gateway.signal("TERM").await;
    let refused = async || gateway.chat(&ask(&w1.model, "too late", 2)).await.0 == 503;
    let told = futures::future::join_all(streams.into_iter().map(|events| events.rest()));
    let (_, told) = tokio::join!(until("new requests are refused", Duration::from_secs(2), refused), told);
    assert!(told.iter().all(|told| told.error.is_none() && told.done), "{told:?}");
    assert_eq!(tokio::time::timeout(PATIENCE, gateway.child.wait()).await.unwrap().unwrap().code(), Some(0));
    let idle = async || w1.metric("starling_worker_sequences_running", "").await == 0.0;
    until("the worker is idle", Duration::from_secs(5), idle).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn actors_are_asked_over_sessions_and_a_frozen_member_is_named_not_waited_for() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let w1 = worker(&cluster, "w1", &gateway).await;
    let all = cluster.rows("actors", &gateway).await;
    let of = |node: &str| all["actors"].as_array().unwrap().iter().filter(|row| row["node"] == node).count();
    assert!(of("gw") > 5 && of("w1") > 5, "{all}");
    assert!(gateway.metric("starling_sessions_open", "").await >= 1.0, "the other process was asked over a session");
    w1.signal("STOP").await;
    let asked = Instant::now();
    let all = cluster.rows("actors", &gateway).await;
    let took = asked.elapsed();
    w1.signal("CONT").await;
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(all["missing"][0]["node"], "w1", "{all}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_router_costs_seconds_not_requests() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "gateway"]).await;
    let routers = [
        cluster.join("r1", &[&gateway.address], &["--role", "router"]).await,
        cluster.join("r2", &[&gateway.address], &["--role", "router"]).await,
    ];
    let w1 = worker(&cluster, "w1", &gateway).await;
    for router in &routers {
        router.signal("STOP").await;
        for n in 0..4 {
            let asked = Instant::now();
            let (status, body) = gateway.chat(&ask(&w1.model, &format!("{n} {} is frozen", router.name), 2)).await;
            assert_eq!(status, 200, "{body}");
            assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        }
        router.signal("CONT").await;
        let back = async || seen(&cluster, &router.name, &gateway).await.is_some_and(|(state, _)| state == "alive");
        until("the router is back", Duration::from_secs(10), back).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_another_key_stays_out_and_both_operators_can_read_why() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &["--role", "router"]).await;
    assert_eq!(node.metric("starling_gossip_members", "").await, 1.0, "a lone node is a member");
    let other = cluster.path().join("other.key");
    let made = cluster.run(&["keys", "new", other.to_str().unwrap()]).await;
    assert!(made.status.success());
    let args = ["--key-file", other.to_str().unwrap()];
    let stranger = cluster.launch("stranger", &["join", &node.address], &args).ready().await;
    let told = async || stranger.tail().contains("no seed answers") && node.tail().contains("another cluster key");
    until("both logs say so", Duration::from_secs(15), told).await;
    assert_eq!(node.metric("starling_gossip_members", "").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_13_a_node_bound_to_every_address_is_reached_under_one_of_them() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let wild = cluster.join("wild", &[&gateway.address], &["--bind", "0.0.0.0:0"]).await;
    assert!(!wild.address.starts_with("0.0.0.0"), "{}", wild.address);
    until("it serves", PATIENCE, async || cluster.serving_workers("wild", &gateway).await == 1).await;
    let (status, body) = gateway.chat(&ask(&wild.model, "hello", 2)).await;
    assert_eq!(status, 200, "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lif_07_workers_that_come_and_go_leave_nothing_behind() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let open_files = || std::fs::read_dir(format!("/proc/{}/fd", gateway.pid)).unwrap().count();
    let actors = async || {
        let all = cluster.rows("actors", &gateway).await;
        let rows = all["actors"].as_array().unwrap();
        rows.iter().filter(|row| !row["path"].as_str().unwrap().contains("client")).count()
    };
    let (files, before) = (open_files(), actors().await);
    for round in 0..6 {
        let names: Vec<String> = (0..4).map(|n| format!("w{round}-{n}")).collect();
        let starts = names.iter().map(async |name| cluster.join(name, &[&gateway.address], &[]).await);
        let mut nodes = futures::future::join_all(starts).await;
        let listed = async || cluster.serving_workers(&names[0], &gateway).await == 1;
        until("a worker is listed", PATIENCE, listed).await;
        let (status, body) = gateway.chat(&ask(&nodes[0].model, &format!("round {round}"), 2)).await;
        assert_eq!(status, 200, "{body}");
        for (n, node) in nodes.iter_mut().enumerate() {
            if n % 2 == 0 {
                assert_eq!(end(node).await, Some(0));
            } else {
                node.child.kill().await.unwrap();
            }
        }
    }
    let alone = async || cluster.rows("nodes", &gateway).await.as_array().is_some_and(|rows| rows.len() == 1);
    until("all have left the table", PATIENCE, alone).await;
    until("as many actors as before", Duration::from_secs(10), async || actors().await == before).await;
    // The asking tool's own connection may still be closing.
    let closed = async || open_files() <= files + 2;
    until("as many open files as before", Duration::from_secs(10), closed).await;
}
