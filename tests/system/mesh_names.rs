//! Names that clash, and addresses that are not what they seem.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;

use crate::{
    harness::{Cluster, Node, PATIENCE, ask, until},
    net::{
        eyes::{settled, settled_for},
        figures::seconds,
        forward::Forward,
        lab::Lab,
    },
};

const GATEWAY: &[&str] = &["--role", "router,gateway"];
const HOLD: Duration = Duration::from_secs(2);

/// Waits for a process that is ready to end by itself; its exit code.
async fn ends(node: &mut Node) -> Option<i32> {
    tokio::time::timeout(PATIENCE, node.child.wait()).await.expect("it ends").unwrap().code()
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_07_mesh_a_second_node_of_a_living_name_is_refused_and_the_first_unharmed() {
    let Some(lab) = Lab::new(4).await else { return };
    let g = lab.start(0, "g", &[], GATEWAY).await;
    let w1 = lab.start(1, "w1", &[0], &[]).await;
    let all = [&g, &w1];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &["g", "w1"])).await;
    let watch = lab.eyes.watch(&all, &["g", "w1"]);
    let (code, log) = lab.launch(2, "copy", &[0], &["--name", "w1"]).outcome().await.expect_err("the name is taken");
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("--name") && log.contains(&lab.place(1).mesh()), "it says where the other is: {log}");
    assert_eq!(watch.end(), [], "the first one was alive all the time");
    let (status, body) = g.chat(&ask(&w1.model, "hello", 4)).await;
    assert_eq!(status, 200, "{body}");
    until("the first one is told", Duration::from_secs(5), async || w1.tail().contains(&lab.place(2).ip.to_string()))
        .await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_07_mesh_two_living_nodes_of_one_name_are_both_told_and_one_goes_on() {
    let Some(lab) = Lab::new(4).await else { return };
    let g1 = lab.start(0, "g1", &[], GATEWAY).await;
    let g2 = lab.start(1, "g2", &[0], GATEWAY).await;
    let gateways = [&g1, &g2];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&gateways, &["g1", "g2"])).await;
    // Apart, each half lets a w1 in; together, there are two.
    lab.split(&[0, 2], &[1, 3]);
    let mut here = lab.start(2, "here", &[0], &["--name", "w1"]).await;
    let mut there = lab.start(3, "there", &[1], &["--name", "w1"]).await;
    let first = [&g1, &here];
    settled("w1 on one side", PATIENCE, || lab.eyes.one_cluster(&first, &["g1", "w1"])).await;
    let second = [&g2, &there];
    settled("w1 on the other side", PATIENCE, || lab.eyes.one_cluster(&second, &["g2", "w1"])).await;
    lab.heal();
    let ended = tokio::select! {
        code = ends(&mut here) => (code, 0),
        code = ends(&mut there) => (code, 1),
    };
    let (loser, survivor) = if ended.1 == 0 { (&here, &there) } else { (&there, &here) };
    assert_eq!(ended.0, Some(1), "{}", loser.tail());
    assert!(loser.tail().contains("--name"), "the one that ends says why: {}", loser.tail());
    let rest = [&g1, &g2, survivor];
    let took = settled_for("one w1", PATIENCE, HOLD, || lab.eyes.one_cluster(&rest, &["g1", "g2", "w1"])).await;
    seconds("two nodes of one name meet: one is left and seen everywhere after the other ended", took, 15.0);
    for gateway in gateways {
        let (status, body) = gateway.chat(&ask(&survivor.model, "hello", 4)).await;
        assert_eq!(status, 200, "{body}");
    }
    let address = loser.address.clone();
    until("the one that stays is told", Duration::from_secs(5), async || survivor.tail().contains(&address)).await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_07_mesh_two_nodes_of_one_name_started_at_once_on_two_seeds_leave_one() {
    let Some(lab) = Lab::new(4).await else { return };
    let g1 = lab.start(0, "g1", &[], GATEWAY).await;
    let g2 = lab.start(1, "g2", &[0], GATEWAY).await;
    settled("one cluster", PATIENCE, async || lab.eyes.one_cluster(&[&g1, &g2], &["g1", "g2"]).await).await;
    let here = lab.launch(2, "here", &[0], &["--name", "w1"]);
    let there = lab.launch(3, "there", &[1], &["--name", "w1"]);
    let (here, there) = tokio::join!(here.outcome(), there.outcome());
    let mut ready: Vec<Node> = Vec::new();
    for outcome in [here, there] {
        match outcome {
            Ok(node) => ready.push(node),
            Err((code, log)) => {
                assert_eq!(code, Some(1), "{log}");
                assert!(log.contains("--name"), "{log}");
            }
        }
    }
    assert!(!ready.is_empty(), "both refused: nobody serves under the name");
    if let [a, b] = &mut ready[..] {
        let code = tokio::select! { code = ends(a) => code, code = ends(b) => code };
        assert_eq!(code, Some(1));
        let gone = ready.iter_mut().position(|node| node.child.try_wait().unwrap().is_some()).unwrap();
        let gone = ready.remove(gone);
        assert!(gone.tail().contains("--name"), "{}", gone.tail());
    }
    let rest = [&g1, &g2, &ready[0]];
    settled_for("one w1", PATIENCE, HOLD, || lab.eyes.one_cluster(&rest, &["g1", "g2", "w1"])).await;
    let (status, body) = g1.chat(&ask(&ready[0].model, "hello", 4)).await;
    assert_eq!(status, 200, "{body}");
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_13_mesh_a_wildcard_bind_picks_the_address_of_its_network_or_refuses() {
    let Some(lab) = Lab::new(3).await else { return };
    let g = lab.start(0, "g", &[], &["--role", "router,gateway", "--bind", "0.0.0.0:7400"]).await;
    assert_eq!(g.address, lab.place(0).mesh());
    let w = lab.start(1, "w", &[0], &["--bind", "0.0.0.0:0"]).await;
    assert!(w.address.starts_with(&format!("{}:", lab.place(1).ip)), "{}", w.address);
    settled("one cluster", PATIENCE, async || lab.eyes.one_cluster(&[&g, &w], &["g", "w"]).await).await;
    let served = async || g.chat(&ask(&w.model, "hello", 4)).await.0 == 200;
    until("it serves", Duration::from_secs(5), served).await;
    // A machine with loopback and nothing else.
    lab.unplug(2);
    for args in [vec!["--bind", "0.0.0.0:7400"], vec!["--bind", "[::]:7400"]] {
        let args: Vec<&str> = args.into_iter().chain(["--http", "127.0.0.1:0"]).collect();
        let (code, log) = lab.launch(2, "alone", &[], &args).outcome().await.expect_err("nothing can be advertised");
        assert_eq!(code, Some(1), "{log}");
        assert!(log.contains("--advertise"), "{log}");
    }
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_14_mesh_a_node_behind_translated_addresses_is_reached_at_the_outer_one() {
    let Some(lab) = Lab::new(4).await else { return };
    let g = lab.start(0, "g", &[], GATEWAY).await;
    let outer = format!("{}:7400", lab.nat(1, 7500, 7400));
    let inner = format!("{}:7500", lab.place(1).ip);
    let behind = ["--bind", &inner, "--advertise", &outer, "--http", "none"];
    let w = lab.start(1, "w", &[0], &behind).await;
    assert_eq!(w.address, outer);
    // A third one, which joins by the outer address alone.
    let r = lab.launch_to(2, "r", &[&outer], &["--role", "router"]).ready().await;
    let all = [&g, &w, &r];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &["g", "r", "w"])).await;
    let rows = lab.eyes.nodes(&r).await.unwrap();
    assert!(rows.iter().any(|row| row.name == "w" && row.address == outer), "{rows:?}");
    for n in 0..6 {
        let (status, body) = g.chat(&ask(&w.model, &format!("{n} through the wall"), 4)).await;
        assert_eq!(status, 200, "{body}");
    }
    let key = lab.cluster.key();
    let args = ["actors", "--json", "--node", &g.address, "--key-file", key.to_str().unwrap()];
    let out = lab.run(0, &args).await;
    let actors: Value = serde_json::from_slice(&out.stdout).unwrap();
    let of = |name: &str| actors["actors"].as_array().unwrap().iter().filter(|row| row["node"] == name).count();
    assert!(of("w") > 5 && of("r") > 5 && actors["missing"].as_array().unwrap().is_empty(), "{actors}");
    let watch = lab.eyes.watch(&all, &["g", "r", "w"]);
    tokio::time::sleep(HOLD).await;
    assert_eq!(watch.end(), []);
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_14_a_node_behind_a_forwarded_port_is_dialled_at_the_forwarded_one() {
    let cluster = Cluster::new().await;
    let g = cluster.up("g", GATEWAY).await;
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let inner = SocketAddr::from(([127, 0, 0, 1], port));
    let forward = Forward::to(inner).await;
    let (bind, advertise) = (inner.to_string(), forward.address.to_string());
    let w = cluster.join("w", &[&g.address], &["--bind", &bind, "--advertise", &advertise]).await;
    assert_eq!(w.address, advertise);
    until("it serves", PATIENCE, async || cluster.serving_workers("w", &g).await == 1).await;
    let (status, body) = g.chat(&ask(&w.model, "hello", 4)).await;
    assert_eq!(status, 200, "{body}");
    let (connections, datagrams) = forward.carried();
    assert!(connections > 0 && datagrams > 0, "{connections} connections, {datagrams} datagrams came that way");
}
