//! Workers in front of servers of another kind: answers go on when a server is killed, and requests go where its KV events say.

use std::{path::PathBuf, time::Duration};

use serde_json::{Value, json};

use crate::{
    foreign::{Foreign, Wrong, answer},
    harness::{Cluster, Node, PATIENCE, model, post, stream_from, until},
};

/// Two nodes, a worker each, in front of two servers.
struct Pair {
    cluster: Cluster,
    nodes: [Node; 2],
    servers: [Foreign; 2],
}

fn flags(server: &Foreign) -> Vec<String> {
    let (events, replay) = (format!("tcp://{}", server.events), format!("tcp://{}", server.replay));
    let model: PathBuf = model();
    let model = model.to_str().unwrap();
    let flags =
        ["--engine", "vllm", "--engine-url", &server.url(), "--engine-events", &events, "--engine-replay", &replay];
    flags.into_iter().chain(["--model", model]).map(str::to_owned).collect()
}

impl Pair {
    async fn new() -> Self {
        let cluster = Cluster::new().await;
        let servers = [Foreign::start(), Foreign::start()];
        let [first, second] = [&servers[0], &servers[1]].map(flags);
        let first: Vec<&str> = first.iter().map(String::as_str).collect();
        let second: Vec<&str> = second.iter().map(String::as_str).collect();
        let up = cluster.up("a", &first).await;
        let join = cluster.join("b", &[&up.address], &second).await;
        let pair = Self { cluster, nodes: [up, join], servers };
        until("both workers serve, as the first node sees it", PATIENCE, async || pair.serving().await == 2).await;
        pair
    }

    async fn serving(&self) -> usize {
        self.cluster.serving_workers("a", &self.nodes[0]).await
            + self.cluster.serving_workers("b", &self.nodes[0]).await
    }

    fn ask(&self, prompt: &[u64], tokens: u32) -> Value {
        json!({
            "model": self.nodes[0].model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        })
    }

    fn url(&self) -> String {
        self.nodes[0].url("/v1/completions")
    }

    /// Which server has been asked for a prompt that begins so, how often.
    fn asked(&self, server: usize, begins: &[u64]) -> usize {
        let prompts = self.servers[server].calls().into_iter().map(|(_, body)| body["prompt"].clone());
        let begins = |prompt: &Value| {
            let ids: Vec<u64> = prompt.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
            ids.starts_with(begins)
        };
        prompts.filter(begins).count()
    }
}

fn prompt(kind: u64, len: u64) -> Vec<u64> {
    (0..len).map(|at| (at * 13 + kind * 101 + 5) % 199).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_s_answer_goes_on_at_another() {
    let mut pair = Pair::new().await;
    pair.servers.iter().for_each(|server| server.pace(Duration::from_millis(20)));
    let wanted = {
        let (status, whole) = post(&pair.url(), &pair.ask(&prompt(1, 40), 60)).await;
        assert_eq!(status, 200, "{whole}");
        whole["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let mut events = stream_from(&pair.url(), &pair.ask(&prompt(1, 40), 60)).await;
    let mut text = String::new();
    let mut finish = None;
    let mut killed = None;
    while let Some(data) = events.next().await {
        let Ok(event) = serde_json::from_str::<Value>(&data) else { continue };
        assert!(event.get("error").is_none(), "{event}");
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        finish = event["choices"][0]["finish_reason"].as_str().map(str::to_owned).or(finish);
        if killed.is_none() && text.len() > 20 {
            let busy = pair.servers.iter().position(|server| server.open() > 0).expect("one is answering");
            let ports = pair.servers[busy].ports();
            // Its successor listens on other ports until it is put back.
            drop(std::mem::replace(&mut pair.servers[busy], Foreign::start()));
            killed = Some((busy, ports));
        }
    }
    let (busy, ports) = killed.expect("killed within the answer");
    assert_eq!((text, finish.as_deref()), (wanted, Some("length")));
    assert!(pair.asked(1 - busy, &prompt(1, 40)) > 0, "the other one went on");
    until("its worker is out of routing", PATIENCE, async || pair.serving().await == 1).await;
    pair.servers[busy] = Foreign::at(ports);
    until("its worker is back", PATIENCE, async || pair.serving().await == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_events_lead_to_the_worker_that_has_the_prefix() {
    let pair = Pair::new().await;
    for server in &pair.servers {
        until("its events are heard", PATIENCE, async || server.listeners() == 1).await;
    }
    // Long enough that computing it is dearer than a place in a queue.
    let shared = prompt(3, 640);
    let (status, first) = post(&pair.url(), &pair.ask(&shared, 4)).await;
    assert_eq!(status, 200, "{first}");
    let holder = (0..2).find(|server| pair.asked(*server, &shared) == 1).expect("somebody computed it");
    let known = async || pair.nodes[0].metric("starling_index_blocks", "").await >= 40.0;
    until("the router knows the holder's blocks", PATIENCE, known).await;
    for turn in 0..4 {
        let mut longer = shared.clone();
        longer.extend(answer(&prompt(turn, 8), 12));
        let (status, told) = post(&pair.url(), &pair.ask(&longer, 4)).await;
        assert_eq!(status, 200, "{told}");
    }
    assert_eq!((pair.asked(holder, &shared), pair.asked(1 - holder, &shared)), (5, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_says_of_a_request_reaches_its_client() {
    let pair = Pair::new().await;
    pair.servers.iter().for_each(|server| server.set(Wrong::Status(400)));
    let (status, told) = post(&pair.url(), &pair.ask(&prompt(1, 20), 4)).await;
    assert_eq!((status, told["error"]["type"].as_str()), (400, Some("invalid_request_error")), "{told}");
    let calls: usize = pair.servers.iter().map(|server| server.calls().len()).sum();
    assert_eq!(calls, 1, "no other server would do better");
    pair.servers[0].set(Wrong::Nothing);
    pair.servers[1].set(Wrong::Status(503));
    for kind in 0..6 {
        let (status, told) = post(&pair.url(), &pair.ask(&prompt(kind, 20), 4)).await;
        assert_eq!(status, 200, "one without room leaves it to the other: {told}");
    }
}
