//! Blocks that a worker no longer has on its device are read from its slower tiers for another one that pulls them.
//!
//! The simulated engine's answers depend on the bytes of its KV memory, so a wrong block is a wrong text.

use std::time::Duration;

use serde_json::Value;

use crate::harness::{Cluster, Events, Node, PATIENCE, ask_long, post, until};

/// Room for some 4,000 tokens, one place.
const SMALL: [&str; 6] = ["--workers", "1", "--sequences-max", "1", "--kv-mib", "16"];

/// A prompt of well over a thousand tokens, of which the device of the giver holds two, that no other one begins like.
fn question(model: &str, kind: usize) -> Value {
    let words = (0..75).map(|word| format!("stone {kind} beside {}", (word * word + kind) % 97));
    ask_long(model, &format!("{kind}: {}", words.collect::<Vec<_>>().join(", ")), 12)
}

async fn said(node: &Node, body: &Value) -> Value {
    let (status, answer) = node.chat(body).await;
    assert_eq!(status, 200, "{answer}\n{}", node.tail());
    answer["choices"][0]["message"]["content"].clone()
}

/// What `starling why` says of the newest request.
async fn why(cluster: &Cluster, front: &Node) -> String {
    let newest = cluster.rows("requests", front).await["requests"][0]["request"].as_str().unwrap().to_owned();
    let key = cluster.key();
    let out = cluster.run(&["why", &newest, "--node", &front.address, "--key-file", key.to_str().unwrap()]).await;
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// A gateway, a worker whose slower tier has what left its device and which is slow now, and one that is idle.
struct World {
    cluster: Cluster,
    front: Node,
    giver: Node,
    taker: Node,
    /// Prompts that the giver has on its slower tier alone, and their texts.
    left: Vec<(Value, Value)>,
    /// The answer that takes the giver's place.
    _busy: Events,
}

impl World {
    /// So many prompts leave the device of the giver for this tier.
    async fn new(tier: &str, prompts: usize) -> Self {
        let cluster = Cluster::new().await;
        let mut front = cluster.up("front", &["--role", "router,gateway"]).await;
        let folder = cluster.path().join("blocks");
        let option = if tier == "host" { ["--kv-host", "64MiB"] } else { ["--kv-disk", folder.to_str().unwrap()] };
        let worker = ["--role", "worker", "--http", "127.0.0.1:0"];
        let giver = cluster.join("giver", &[&front.address], &[&worker[..], &SMALL, &option].concat()).await;
        until("the giver serves", PATIENCE, async || cluster.serving_workers("giver", &front).await == 1).await;
        front.model.clone_from(&giver.model);
        let mut left = Vec::new();
        for kind in 1..=prompts {
            let body = question(&front.model, kind);
            left.push((said(&front, &body).await, body));
        }
        // As many others as fill its device twice.
        let stored = async || giver.metric("starling_kv_tier_stored_blocks_total", &format!("tier=\"{tier}\"")).await;
        let first = stored().await;
        let cached = async || giver.metric("starling_worker_kv_blocks_cached", "").await;
        for kind in 100..160 {
            if stored().await > first + 1.5 * cached().await {
                break;
            }
            said(&front, &question(&front.model, kind)).await;
        }
        assert!(stored().await > first + 1.5 * cached().await, "nothing leaves the device\n{}", giver.tail());
        // Its one place is taken for long, it is slow, and another worker comes.
        let busy = front.stream(&ask_long(&front.model, "Tell a long story.", 1_000)).await;
        let key = cluster.key();
        let slow = ["fault", "giver/0", "slow=300", "--node", &front.address, "--key-file", key.to_str().unwrap()];
        assert!(cluster.run(&slow).await.status.success());
        let taker = cluster.join("taker", &[&front.address], &[&worker[..], &["--workers", "1"]].concat()).await;
        until("the taker serves", PATIENCE, async || cluster.serving_workers("taker", &front).await == 1).await;
        // By its answer the router has heard of the taker, and of how fast it is.
        said(&front, &question(&front.model, 200)).await;
        Self { cluster, front, giver, taker, left, _busy: busy }
    }

    /// Pulls that the taker has made and that brought all they were to.
    async fn pulls(&self) -> f64 {
        self.taker.metric("starling_worker_sourced_total", "kind=\"pull\",outcome=\"complete\"").await
    }

    /// No ticket is open at any of these.
    async fn at_rest(&self, nodes: &[&Node]) {
        for node in nodes {
            let none = async || node.metric("starling_transfer_tickets_open", "").await == 0.0;
            until("no ticket is open", PATIENCE, none).await;
        }
    }
}

/// Blocks that have left the device of the giver for this tier are pulled from there by the taker, and why is told.
async fn pulled_from(tier: &str, words: &str) {
    let world = World::new(tier, 3).await;
    let World { front, giver, taker, left, .. } = &world;
    let prefilled = async || taker.metric("starling_worker_tokens_prefilled_total", "").await;
    let mut told = String::new();
    for (text, body) in left {
        let before = prefilled().await;
        assert_eq!(said(front, body).await, *text, "another text\n{}", taker.tail());
        told = why(&world.cluster, front).await;
        if world.pulls().await > 0.0 {
            let computed = prefilled().await - before;
            assert!(computed < 500.0, "{computed} tokens: what was pulled was not computed\n{told}");
            break;
        }
    }
    assert!(world.pulls().await > 0.0, "nothing was pulled:\n{told}\n{}\n{}", taker.tail(), giver.tail());
    assert!(told.contains(words), "{told}");
    let raised = giver.metric("starling_transfer_raised_blocks_total", &format!("outcome=\"{tier}\"")).await;
    assert!(raised > 16.0, "{raised} blocks were read for the taker");
    world.at_rest(&[giver, taker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_in_a_peers_host_memory_are_pulled_between_processes() {
    pulled_from("host", "from its host memory").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_on_a_peers_disk_are_pulled_between_processes() {
    pulled_from("disk", "from its disk").await;
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the answer is read while its giver is disturbed, and awaited below")]
async fn xfr_06_a_giver_stopped_or_killed_while_it_reads_from_its_disk_costs_no_answer() {
    let world = World::new("disk", 4).await;
    let World { front, giver, taker, left, .. } = &world;
    for (at, (text, body)) in left.iter().enumerate() {
        let (url, asked) = (front.url("/v1/chat/completions"), body.clone());
        let answer = tokio::spawn(async move { post(&url, &asked).await });
        // The moment is the test: nothing can be waited for instead.
        tokio::time::sleep(Duration::from_millis(3 * at as u64 * at as u64)).await;
        let last = at + 1 == left.len();
        giver.signal(if last { "KILL" } else { "STOP" }).await;
        let (status, told) = answer.await.unwrap();
        assert_eq!(status, 200, "{told}\n{}", front.tail());
        assert_eq!(told["choices"][0]["message"]["content"], *text, "another text\n{}", taker.tail());
        if !last {
            giver.signal("CONT").await;
            world.at_rest(&[giver]).await;
            until("it is back", PATIENCE, async || world.cluster.serving_workers("giver", front).await == 1).await;
        }
        world.at_rest(&[taker]).await;
    }
}
