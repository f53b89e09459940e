//! Running requests that leave a worker of another process: one that became much slower than others, one whose role changes.
//! The texts are those of requests that nothing disturbed, and no token is computed twice.

use std::time::Duration;

use futures::future::join_all;
use serde_json::Value;
use tokio::time::timeout;

use crate::harness::{Cluster, Events, Node, PATIENCE, Told, ask_long, until};

const STREAMS: usize = 8;
/// Long beside what a slow worker takes before it is left: 600 steps of 0.14 s.
const TOKENS: u32 = 600;
/// Long beside what a role's change takes on a busy machine: 10 s and more.
const TOKENS_OF_ROLES: u32 = 1_500;

/// A front node, and two nodes with a simulated worker each.
struct Three {
    cluster: Cluster,
    front: Node,
    workers: [Node; 2],
    /// Of each answer.
    tokens: u32,
}

impl Three {
    async fn start(tokens: u32) -> Self {
        let cluster = Cluster::new().await;
        let mut front = cluster.up("front", &["--role", "router,gateway"]).await;
        let args = ["--role", "worker", "--http", "127.0.0.1:0", "--workers", "1"];
        let one = cluster.join("one", &[&front.address], &args).await;
        let two = cluster.join("two", &[&front.address], &args).await;
        for node in [&one, &two] {
            until("it serves", PATIENCE, async || cluster.serving_workers(&node.name, &front).await == 1).await;
        }
        front.model.clone_from(&one.model);
        Self { cluster, front, workers: [one, two], tokens }
    }

    /// Runs a verb at the front node.
    async fn verb(&self, words: &[&str]) {
        let key = self.cluster.key();
        let mut all = words.to_vec();
        all.extend(["--node", &self.front.address, "--key-file", key.to_str().unwrap()]);
        let out = self.cluster.run(&all).await;
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn chat(&self, kind: usize, salt: &str) -> Value {
        let mut body = ask_long(&self.front.model, &format!("{kind}: tell a story of the sea"), self.tokens);
        body["cache_salt"] = salt.into();
        body
    }

    /// Answers that nothing disturbs.
    async fn whole(&self) -> Vec<Told> {
        join_all((0..STREAMS).map(async |kind| self.front.stream(&self.chat(kind, "whole")).await.rest().await)).await
    }

    /// Answers that have begun, some at each worker: a busy machine makes one look slow, and it gets nobody. Then once more.
    async fn begin(&self) -> Vec<(String, Events)> {
        for turn in 0..5 {
            let salt = format!("moved {turn}");
            let begin = async |kind| {
                let mut stream = self.front.stream(&self.chat(kind, &salt)).await;
                (stream.first_text().await, stream)
            };
            let streams = join_all((0..STREAMS).map(begin)).await;
            let [one, two] = &self.workers;
            let both = async || self.running(one).await > 1.0 && self.running(two).await > 1.0;
            if timeout(Duration::from_secs(2), until("they have work", PATIENCE, both)).await.is_ok() {
                return streams;
            }
            join_all(streams.into_iter().map(async |(_, stream)| stream.rest().await)).await;
        }
        panic!("one of the workers was never given two of {STREAMS}");
    }

    async fn running(&self, node: &Node) -> f64 {
        node.metric("starling_worker_sequences_running", "").await
    }

    async fn moved(&self) -> f64 {
        self.front.metric("starling_gateway_moved_total", "outcome=\"moved\"").await
    }

    /// Reads the answers to their ends: all of them are whole, and nothing is left behind.
    async fn end(&self, streams: Vec<(String, Events)>, whole: &[Told]) {
        let told = join_all(streams.into_iter().map(async |(first, stream)| (first, stream.rest().await))).await;
        for ((first, told), whole) in told.iter().zip(whole) {
            assert!(told.done && told.error.is_none(), "{told:?}");
            assert_eq!((format!("{first}{}", told.text), &told.finish), (whole.text.clone(), &whole.finish));
        }
        for node in &self.workers {
            assert_eq!(node.metric("starling_worker_tokens_recomputed_total", "").await, 0.0, "{}", node.name);
            for name in ["starling_worker_kv_blocks_pinned", "starling_transfer_tickets_open"] {
                let at_rest = async || node.metric(name, "").await == 0.0;
                until(name, Duration::from_secs(10), at_rest).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn running_requests_leave_a_worker_that_became_much_slower_than_another() {
    let three = Three::start(TOKENS).await;
    let whole = three.whole().await;
    let streams = three.begin().await;
    let asked = async || three.front.metric("starling_router_rebalanced_total", "").await;
    // Twenty times as slow: far from the factor of two that makes requests leave, also where a busy machine slows the other one.
    three.verb(&["fault", "one/0", "slow=20"]).await;
    until("two went elsewhere", PATIENCE, async || three.moved().await >= 2.0).await;
    assert!(asked().await >= 2.0, "their shard asked them to");
    three.verb(&["fault", "one/0", "none"]).await;
    three.end(streams, &whole).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_requests_leave_a_worker_whose_role_changes_under_load() {
    let three = Three::start(TOKENS_OF_ROLES).await;
    let whole = three.whole().await;
    let streams = three.begin().await;
    let there = three.running(&three.workers[0]).await;
    three.verb(&["role", "one/0", "prefill"]).await;
    until("it answers nobody", PATIENCE, async || three.running(&three.workers[0]).await == 0.0).await;
    assert!(three.moved().await > 0.0, "{there} ran there");
    // New ones are answered by the other one, and by both when it may again.
    three.verb(&["role", "one/0", "both"]).await;
    three.end(streams, &whole).await;
}
