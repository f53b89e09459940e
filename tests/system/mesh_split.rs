//! Networks that are cut, one way or both, and healed.

use std::time::{Duration, Instant};

use crate::{
    harness::{Node, PATIENCE, ask, client, until},
    net::{
        eyes::{settled, settled_for},
        figures::{bar, lasting, seconds},
        lab::Lab,
    },
};

const GATEWAY: &[&str] = &["--role", "router,gateway"];
const HOLD: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn mesh_two_halves_serve_apart_and_become_one_again() {
    let Some(lab) = Lab::new(6).await else { return };
    let names = ["g1", "g2", "w1", "w2", "w3", "w4"];
    let g1 = lab.start(0, "g1", &[], GATEWAY).await;
    let w1 = lab.start(1, "w1", &[0], &[]).await;
    let w2 = lab.start(2, "w2", &[0], &[]).await;
    let g2 = lab.start(3, "g2", &[0], GATEWAY).await;
    let w3 = lab.start(4, "w3", &[0, 3], &[]).await;
    let w4 = lab.start(5, "w4", &[0, 3], &[]).await;
    let all = [&g1, &w1, &w2, &g2, &w3, &w4];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    settled("eight instances", PATIENCE, || lab.eyes.same_instances(&all, 8)).await;
    lab.split(&[0, 1, 2], &[3, 4, 5]);
    let cut = Instant::now();
    let apart = lasting(20, 60);
    let mut answered = 0;
    let serve = async {
        while cut.elapsed() < apart {
            for gateway in [&g1, &g2] {
                let (status, body) = gateway.chat(&ask(&w1.model, &format!("{answered} apart"), 4)).await;
                assert_eq!(status, 200, "{}: {body}\n{}", gateway.name, gateway.tail());
                answered += 1;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        answered
    };
    let notice = async {
        let one = async || lab.eyes.one_cluster(&all[..3], &["g1", "w1", "w2"]).await;
        let other = async || lab.eyes.one_cluster(&all[3..], &["g2", "w3", "w4"]).await;
        settled("the first half is alone", PATIENCE, one).await;
        settled("the second half is alone", PATIENCE, other).await;
        let took = cut.elapsed();
        settled("its own instances", PATIENCE, || lab.eyes.same_instances(&all[..3], 4)).await;
        settled("its own instances", PATIENCE, || lab.eyes.same_instances(&all[3..], 4)).await;
        took
    };
    let (served, noticed) = tokio::join!(serve, notice);
    eprintln!("apart: {served} requests answered, both halves alone after {noticed:?}");
    lab.heal();
    let whole = settled_for("one cluster", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &names)).await;
    seconds(&format!("split 3|3 for {} s, healed: one cluster after", apart.as_secs()), whole, 15.0);
    let same = settled_for("no phantom", PATIENCE, HOLD, || lab.eyes.same_instances(&all, 8)).await;
    eprintln!("all instances, each once, {same:?} later");
    for gateway in [&g1, &g2] {
        let (status, body) = gateway.chat(&ask(&w1.model, "whole", 4)).await;
        assert_eq!(status, 200, "{body}");
    }
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_01_03_mesh_a_node_cut_off_past_its_death_knows_it_is_alone_and_comes_back() {
    let Some(lab) = Lab::new(3).await else { return };
    let a = lab.start(0, "a", &[], &["--role", "router"]).await;
    let b = lab.start(1, "b", &[0], &["--role", "worker"]).await;
    let c = lab.start(2, "c", &[0], &["--role", "gateway"]).await;
    let all = [&a, &b, &c];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &["a", "b", "c"])).await;
    let health = async || client().get(c.url("/health")).send().await.unwrap().status().as_u16();
    until("the gateway is ready", PATIENCE, async || health().await == 200).await;
    lab.split(&[2], &[0, 1]);
    let cut = Instant::now();
    settled("the cut node sees itself alone", PATIENCE, async || lab.eyes.one_cluster(&[&c], &["c"]).await).await;
    seconds("MEM-03: a cut node lists nobody else after", cut.elapsed(), 10.0);
    until("its gateway is not ready", Duration::from_secs(5), async || health().await == 503).await;
    settled("the others are two", PATIENCE, async || lab.eyes.one_cluster(&[&a, &b], &["a", "b"]).await).await;
    tokio::time::sleep(lasting(12, 60).saturating_sub(cut.elapsed())).await;
    lab.heal();
    let whole = settled_for("one cluster", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &["a", "b", "c"])).await;
    seconds("MEM-01: one node of three cut past its death, healed: one cluster after", whole, 15.0);
    until("the gateway is ready again", Duration::from_secs(5), async || health().await == 200).await;
    lab.done();
}

/// Ten nodes of which the last is cut one way: `mute` (nobody hears it) or deaf (it hears nobody).
async fn one_way(mute: bool) {
    let Some(lab) = Lab::new(10).await else { return };
    let mut nodes = vec![lab.start(0, "n0", &[], GATEWAY).await];
    let launched: Vec<_> = (1..10).map(|place| lab.launch(place, &format!("n{place}"), &[0], &[])).collect();
    nodes.extend(futures::future::join_all(launched.into_iter().map(|launched| launched.ready())).await);
    let all: Vec<&Node> = nodes.iter().collect();
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    settled_for("one cluster", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &names)).await;
    let watch = lab.eyes.watch(&all[..9], &names[..9]);
    let others: Vec<usize> = (0..9).collect();
    let (from, to): (&[usize], &[usize]) = if mute { (&[9], &others) } else { (&others, &[9]) };
    lab.one_way(from, to, true);
    let cut = Instant::now();
    let apart = lasting(20, 300);
    let mut failed = Vec::new();
    while cut.elapsed() < apart {
        let (status, body) = nodes[0].chat(&ask(&nodes[1].model, &format!("{:?}", cut.elapsed()), 4)).await;
        if status != 200 {
            failed.push((cut.elapsed(), body));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    eprintln!("requests that failed: {failed:?}");
    lab.heal();
    let whole = settled_for("one cluster", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &names)).await;
    let lapses = watch.end();
    let down: Vec<_> = lapses.iter().filter(|(lapse, _)| lapse.state == "down").collect();
    let suspected = lapses.len() - down.len();
    eprintln!("seen suspect or unreachable: {suspected} pairs; down: {down:?}");
    let how = if mute { "nobody hears one of ten" } else { "one of ten hears nobody" };
    let (secs, down) = (apart.as_secs(), down.len() as f64);
    seconds(&format!("{how}, {secs} s, mended: one cluster after"), whole, 15.0);
    bar(&format!("{how}, {secs} s: false downs among the other nine"), down, 0.0);
    bar(&format!("{how}, {secs} s: requests that failed"), failed.len() as f64, 0.0);
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_a_node_that_nobody_hears_takes_nobody_down() {
    one_way(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_a_node_that_hears_nobody_takes_nobody_down() {
    one_way(false).await;
}
