//! Nodes that come back: under their name, at another address, before their seed, all at once; bars B and C.

use std::time::Duration;

use crate::{
    harness::{Node, PATIENCE, ask, until},
    net::{
        eyes::{settled, settled_for},
        figures::seconds,
        lab::Lab,
    },
};

const GATEWAY: &[&str] = &["--role", "router,gateway"];
const HOLD: Duration = Duration::from_secs(2);

/// A seed and two workers that see each other.
async fn three(lab: &Lab) -> [Node; 3] {
    let nodes = [
        lab.start(0, "seed", &[], GATEWAY).await,
        lab.start(1, "w1", &[0], &[]).await,
        lab.start(2, "w2", &[0], &[]).await,
    ];
    let all: Vec<&Node> = nodes.iter().collect();
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &["seed", "w1", "w2"])).await;
    nodes
}

/// Whether these nodes see one alive at an address in a later life than `past`.
async fn later_life(lab: &Lab, nodes: &[&Node], name: &str, address: &str, past: u64) -> Result<(), String> {
    for node in nodes {
        let rows = lab.eyes.nodes(node).await.ok_or(format!("{} does not answer", node.name))?;
        let found: Vec<_> = rows.iter().filter(|row| row.name == name).collect();
        let [row] = found[..] else { return Err(format!("{} lists {found:?}", node.name)) };
        if row.state != "alive" || row.address != address || row.incarnation <= past {
            return Err(format!("{} sees {row:?}", node.name));
        }
    }
    Ok(())
}

async fn end(node: &mut Node) {
    node.signal("TERM").await;
    let ended = tokio::time::timeout(PATIENCE, node.child.wait()).await.expect("it ends").unwrap();
    assert_eq!(ended.code(), Some(0), "{}", node.tail());
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_b_a_killed_node_started_again_is_alive_within_seconds() {
    let Some(lab) = Lab::new(3).await else { return };
    let [seed, mut w1, w2] = three(&lab).await;
    w1.child.kill().await.unwrap();
    let again = lab.launch(1, "w1", &[0], &[]);
    let (rest, address) = ([&seed, &w2], lab.place(1).mesh());
    let back = settled_for("alive again", PATIENCE, HOLD, || later_life(&lab, &rest, "w1", &address, 1)).await;
    seconds("B: killed and started again at once, alive everywhere after its start", back, 3.0);
    let again = again.ready().await;
    settled("one cluster", PATIENCE, async || lab.eyes.one_cluster(&[&seed, &again, &w2], &["seed", "w1", "w2"]).await)
        .await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_b_a_node_started_again_after_it_was_declared_down_is_alive_within_seconds() {
    let Some(lab) = Lab::new(3).await else { return };
    let [seed, mut w1, w2] = three(&lab).await;
    w1.child.kill().await.unwrap();
    let (rest, address) = ([&seed, &w2], lab.place(1).mesh());
    settled("down", PATIENCE, || lab.eyes.one_cluster(&rest, &["seed", "w2"])).await;
    let again = lab.launch(1, "w1", &[0], &[]);
    let back = settled_for("alive again", PATIENCE, HOLD, || later_life(&lab, &rest, "w1", &address, 1)).await;
    seconds("B: killed, declared down, started again, alive everywhere after its start", back, 3.0);
    again.ready().await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_c_a_node_started_before_its_seed_joins_when_the_seed_is_there() {
    let Some(lab) = Lab::new(2).await else { return };
    let early = lab.start(1, "early", &[0], &[]).await;
    // Long enough that tries are as rare as they become.
    tokio::time::sleep(crate::net::figures::lasting(6, 60)).await;
    let seed = lab.start(0, "seed", &[], GATEWAY).await;
    let all = [&early, &seed];
    let joined = settled_for("joined", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &["early", "seed"])).await;
    seconds("C: the seed is ready, a waiting node has joined after", joined, 3.0);
    let served = async || seed.chat(&ask(&early.model, "hello", 4)).await.0 == 200;
    until("it serves", Duration::from_secs(5), served).await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_05_mesh_the_same_name_from_a_new_address_wins_within_seconds() {
    let Some(lab) = Lab::new(4).await else { return };
    let [seed, mut w1, w2] = three(&lab).await;
    let rest = [&seed, &w2];
    w1.child.kill().await.unwrap();
    let moved = format!("{}:7777", lab.place(1).ip);
    let launched = lab.launch(1, "w1", &[0], &["--bind", &moved]);
    let back = settled_for("another port", PATIENCE, HOLD, || later_life(&lab, &rest, "w1", &moved, 1)).await;
    seconds("killed, started at once on another port, alive everywhere after its start", back, 5.0);
    let mut w1 = launched.ready().await;
    end(&mut w1).await;
    let elsewhere = lab.place(3).mesh();
    let launched = lab.launch(3, "w1", &[0], &[]);
    let back = settled_for("another machine", PATIENCE, HOLD, || later_life(&lab, &rest, "w1", &elsewhere, 2)).await;
    seconds("ended, started at once on another machine, alive everywhere after its start", back, 5.0);
    let mut w1 = launched.ready().await;
    w1.child.kill().await.unwrap();
    let home = lab.place(1).mesh();
    let launched = lab.launch(1, "w1", &[0], &[]);
    let back = settled_for("back on the first", PATIENCE, HOLD, || later_life(&lab, &rest, "w1", &home, 3)).await;
    seconds("killed, started at once on the first machine, alive everywhere after its start", back, 5.0);
    let w1 = launched.ready().await;
    settled("one cluster", PATIENCE, async || lab.eyes.one_cluster(&[&seed, &w1, &w2], &["seed", "w1", "w2"]).await)
        .await;
    let served = async || seed.chat(&ask(&w1.model, "hello", 4)).await.0 == 200;
    until("it serves", Duration::from_secs(5), served).await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_06_mesh_a_new_name_at_an_old_address_replaces_the_old_one() {
    let Some(lab) = Lab::new(3).await else { return };
    let [seed, mut w1, w2] = three(&lab).await;
    w1.child.kill().await.unwrap();
    let renamed = lab.start(1, "other", &[0], &[]).await;
    let all = [&seed, &renamed, &w2];
    let names = ["other", "seed", "w2"];
    let took = settled_for("one entry", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &names)).await;
    seconds("a new name at an old address: one entry, the old name down after", took, 5.0);
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mem_16_mesh_a_node_that_left_joins_again_at_once() {
    let Some(lab) = Lab::new(3).await else { return };
    let [seed, mut w1, w2] = three(&lab).await;
    for past in 1..4 {
        end(&mut w1).await;
        let (rest, address) = ([&seed, &w2], lab.place(1).mesh());
        let launched = lab.launch(1, "w1", &[0], &[]);
        let hold = Duration::from_secs(1);
        let back = settled_for("alive", PATIENCE, hold, || later_life(&lab, &rest, "w1", &address, past)).await;
        seconds("left and started again, alive everywhere after its start", back, 3.0);
        w1 = launched.ready().await;
    }
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_twenty_nodes_restarted_at_once_find_each_other() {
    const COUNT: usize = 20;
    let Some(lab) = Lab::new(COUNT).await else { return };
    let names: Vec<String> = (0..COUNT).map(|n| format!("n{n:02}")).collect();
    // Seeds that name each other and nobody first: each node is given three of them.
    let start = |place: usize| {
        let role: &[&str] = if place < 3 { GATEWAY } else { &["--role", "worker"] };
        lab.launch(place, &names[place], &[0, 1, 2], role)
    };
    let all_ready = async || {
        let launched: Vec<_> = (0..COUNT).map(start).collect();
        futures::future::join_all(launched.into_iter().map(|launched| launched.ready())).await
    };
    let expected: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut nodes = all_ready().await;
    let all: Vec<&Node> = nodes.iter().collect();
    let took = settled_for("the first start", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &expected)).await;
    seconds("20 nodes started at once see each other after the last is ready", took, 10.0);
    for node in &mut nodes {
        node.child.start_kill().unwrap();
    }
    for node in &mut nodes {
        node.child.wait().await.unwrap();
    }
    let nodes = all_ready().await;
    let all: Vec<&Node> = nodes.iter().collect();
    let took = settled_for("all restarted", PATIENCE, HOLD, || lab.eyes.one_cluster(&all, &expected)).await;
    seconds("20 nodes killed and started again at once see each other after the last is ready", took, 10.0);
    settled("every instance once", PATIENCE, || lab.eyes.same_instances(&all, COUNT - 3 + 6)).await;
    lab.done();
}
