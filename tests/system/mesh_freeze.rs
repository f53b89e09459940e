//! Nodes that are frozen, thawed and killed, on a network of their own: bars A, D and E of the mesh.

use std::time::{Duration, Instant};

use crate::{
    harness::{Node, PATIENCE, ask, model},
    net::{
        eyes::{settled, settled_for},
        figures::{bar, lasting, seconds},
        lab::Lab,
    },
};

const GATEWAY: &[&str] = &["--role", "router,gateway"];
/// A state that holds this long has settled.
const HOLD: Duration = Duration::from_secs(2);

/// Asks a gateway again and again for a time; the slowest answer. Fails at the first that is not an answer.
async fn serves(gateway: &Node, model: &str, lasting: Duration) -> Duration {
    let (begun, mut slowest, mut count) = (Instant::now(), Duration::ZERO, 0);
    while begun.elapsed() < lasting {
        let asked = Instant::now();
        let (status, body) = gateway.chat(&ask(model, &format!("{count} and on"), 4)).await;
        assert_eq!(status, 200, "{body}\n{}", gateway.tail());
        slowest = slowest.max(asked.elapsed());
        count += 1;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    eprintln!("{} answered {count} requests, the slowest in {slowest:?}", gateway.name);
    slowest
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_a_a_frozen_node_is_alive_everywhere_soon_after_it_thaws() {
    let Some(lab) = Lab::new(5).await else { return };
    let first = lab.start(0, "n0", &[], GATEWAY).await;
    let mut nodes = vec![first];
    for (place, name) in [(1, "n1"), (2, "n2"), (3, "n3"), (4, "n4")] {
        nodes.push(lab.start(place, name, &[0], &[]).await);
    }
    let all: Vec<&Node> = nodes.iter().collect();
    let names = ["n0", "n1", "n2", "n3", "n4"];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    let others: Vec<&Node> = nodes.iter().filter(|node| node.name != "n2").collect();
    let watch = lab.eyes.watch(&others, &["n0", "n1", "n3", "n4"]);
    nodes[2].signal("STOP").await;
    let frozen = Instant::now();
    let without = ["n0", "n1", "n3", "n4"];
    settled("the frozen node is down", PATIENCE, || lab.eyes.one_cluster(&others, &without)).await;
    eprintln!("down everywhere after {:?}", frozen.elapsed());
    let freeze = lasting(20, 60);
    tokio::time::sleep(freeze.saturating_sub(frozen.elapsed())).await;
    nodes[2].signal("CONT").await;
    // It must also stay so: the news that it was down is still on its way, and its own timers are late.
    let back = settled_for("alive everywhere", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &names)).await;
    seconds(&format!("A: frozen {} s, alive everywhere after thawing", freeze.as_secs()), back, 5.0);
    let told: Vec<_> = watch.end().into_iter().filter(|(lapse, _)| lapse.state == "down").collect();
    eprintln!("others seen down: {told:?}");
    bar("A: others declared down by the freeze", told.len() as f64, 0.0);
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_d_a_frozen_gateways_workers_stay_and_serve() {
    let Some(lab) = Lab::new(4).await else { return };
    let g1 = lab.start(0, "g1", &[], GATEWAY).await;
    // The real engine: what a user would notice.
    let path = model();
    let real = ["--engine", "embedded", "--model", path.to_str().unwrap(), "--threads", "1", "--kv-mib", "64"];
    let w1 = lab.start(1, "w1", &[0], &real).await;
    let w2 = lab.start(2, "w2", &[0], &real).await;
    let g2 = lab.start(3, "g2", &[0], GATEWAY).await;
    let all = [&g1, &w1, &w2, &g2];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &["g1", "g2", "w1", "w2"])).await;
    settled("all instances", PATIENCE, || lab.eyes.same_instances(&all, 6)).await;
    let rest = [&w1, &w2, &g2];
    let watch = lab.eyes.watch(&rest, &["w1", "w2", "g2"]);
    g1.signal("STOP").await;
    let freeze = lasting(12, 60);
    let slowest = serves(&g2, &w1.model, freeze).await;
    bar("D: slowest answer of the other gateway meanwhile, s", slowest.as_secs_f64(), 5.0);
    g1.signal("CONT").await;
    let names = ["g1", "g2", "w1", "w2"];
    let back = settled_for("alive everywhere", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &names)).await;
    seconds("D: the frozen gateway is back everywhere", back, 5.0);
    let gone: Vec<_> = watch.end().into_iter().filter(|(lapse, _)| lapse.state == "down").collect();
    bar("D: workers that left a table", gone.len() as f64, 0.0);
    settled("all instances", PATIENCE, || lab.eyes.same_instances(&all, 6)).await;
    serves(&g1, &w1.model, Duration::from_secs(1)).await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_e_a_killed_node_is_down_everywhere_within_seconds() {
    let Some(lab) = Lab::new(5).await else { return };
    let mut nodes = vec![lab.start(0, "n0", &[], GATEWAY).await];
    for (place, name) in [(1, "n1"), (2, "n2"), (3, "n3"), (4, "n4")] {
        nodes.push(lab.start(place, name, &[0], &[]).await);
    }
    let all: Vec<&Node> = nodes.iter().collect();
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &["n0", "n1", "n2", "n3", "n4"])).await;
    nodes[3].child.kill().await.unwrap();
    let rest: Vec<&Node> = nodes.iter().filter(|node| node.name != "n3").collect();
    let names = ["n0", "n1", "n2", "n4"];
    let down = settled_for("down everywhere", PATIENCE, HOLD, || lab.eyes.one_cluster(&rest, &names)).await;
    seconds("E: killed, down everywhere", down, 5.0);
    lab.done();
}
