//! The gateway's edge over real sockets: clients that leave or half close, slow readers, workers that fail or restart.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use starling::{
    ClusterConfig, KeyRing, Mesh,
    worker::{Backend, Batch, BlockSlot, Computed, EngineError, NodeOptions, Role, Row, TextModel, WorkerRole},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    harness::{Cluster, Node, PATIENCE, ask, ask_long, client, until},
    net::figures::{bar, lasting},
};

/// A chat as it goes over the wire.
fn request(body: &Value) -> String {
    let body = body.to_string();
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = true.into();
    body
}

async fn connect(node: &Node) -> TcpStream {
    TcpStream::connect(&node.http).await.unwrap()
}

/// Waits until nothing is in flight.
async fn idle(node: &Node, after: &str) {
    for name in [
        "starling_worker_sequences_running",
        "starling_worker_sequences_waiting",
        "starling_gateway_permits_in_use",
        "starling_gateway_requests_in_flight",
        "starling_router_reservations",
    ] {
        let zero = async || node.metric(name, "").await == 0.0;
        until(&format!("{name} is 0 after {after}"), Duration::from_secs(5), zero).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cnt_05_over_sockets_a_client_that_leaves_cancels_in_every_window() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &["--workers", "1", "--sequences-max", "1"]).await;
    let long = streamed(ask_long(&node.model, "a long story", 1500));
    let running = async |count: f64| {
        let as_many = async || node.metric("starling_worker_sequences_running", "").await == count;
        until("it runs", PATIENCE, as_many).await;
    };

    let whole = request(&long);
    let mut socket = connect(&node).await;
    socket.write_all(&whole.as_bytes()[..whole.len() - 20]).await.unwrap();
    drop(socket);
    idle(&node, "a client left in its body").await;

    // The only place is taken, so the second one waits for its first token.
    let mut holder = connect(&node).await;
    holder.write_all(whole.as_bytes()).await.unwrap();
    running(1.0).await;
    for body in [streamed(ask(&node.model, "in the queue", 4)), ask(&node.model, "in the queue, unary", 4)] {
        let mut socket = connect(&node).await;
        socket.write_all(request(&body).as_bytes()).await.unwrap();
        let waiting = async |count: f64| node.metric("starling_worker_sequences_waiting", "").await == count;
        until("it waits", PATIENCE, async || waiting(1.0).await).await;
        drop(socket);
        until("it no longer waits", Duration::from_secs(5), async || waiting(0.0).await).await;
    }
    let mut buffer = [0; 64];
    holder.read_exact(&mut buffer).await.unwrap();
    drop(holder);
    idle(&node, "a client left in its stream").await;

    let mut socket = connect(&node).await;
    socket.write_all(request(&ask_long(&node.model, "unary", 1500)).as_bytes()).await.unwrap();
    running(1.0).await;
    drop(socket);
    idle(&node, "a client left its unary request").await;

    // A client that only closes its sending side looks the same on the wire until something is written to it, and counts
    // as gone too; a unary request would otherwise compute for nobody to its end.
    for body in [streamed(ask_long(&node.model, "half", 1500)), ask_long(&node.model, "half, unary", 1500)] {
        let mut socket = connect(&node).await;
        socket.write_all(request(&body).as_bytes()).await.unwrap();
        running(1.0).await;
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let closed = socket.read_to_end(&mut answer);
        let closed = tokio::time::timeout(Duration::from_secs(5), closed).await;
        assert!(closed.is_ok(), "a half-closed connection is not left open");
    }
    idle(&node, "half-closed clients").await;
    assert!(node.metric("starling_gateway_cancelled_total", "").await >= 4.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lif_08_over_sockets_health_is_quick_beside_many_slow_readers() {
    let cluster = Cluster::new().await;
    let args = ["--workers", "2", "--sequences-max", "512", "--waiting-max", "1024"];
    let node = cluster.up("one", &args).await;
    let count = lasting(300, 1500).as_secs() as usize;
    let body = request(&streamed(ask_long(&node.model, "slowly", 2000)));
    let mut readers = Vec::new();
    for _ in 0..count {
        let mut socket = connect(&node).await;
        socket.write_all(body.as_bytes()).await.unwrap();
        readers.push(socket);
    }
    let in_flight = async || node.metric("starling_gateway_requests_in_flight", "").await >= count as f64;
    until("all are in flight", PATIENCE, in_flight).await;
    let health = client();
    let mut times = Vec::new();
    let begun = Instant::now();
    let mut buffer = [0; 16];
    while begun.elapsed() < Duration::from_secs(4) {
        // Each reads a few bytes now and then, and never keeps up.
        for socket in readers.iter_mut().step_by(10) {
            if let Err(error) = socket.try_read(&mut buffer) {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "a slow reader was cut off");
            }
        }
        let asked = Instant::now();
        let status = health.get(node.url("/health")).send().await.unwrap().status();
        assert_eq!(status, 200);
        times.push(asked.elapsed().as_secs_f64() * 1000.0);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    times.sort_by(f64::total_cmp);
    // The slowest of a hundred is the scheduler's on a busy machine; the bar is for the run in full.
    bar(&format!("/health beside {count} slow readers, median, ms"), times[times.len() / 2], 100.0);
    bar(&format!("/health beside {count} slow readers, slowest, ms"), times[times.len() - 1], 1000.0);
    drop(readers);
    idle(&node, "all slow readers left").await;
}

/// Says `a` until its step number `fails_at`, then fails; the engine is made anew after that.
struct Fragile {
    steps: Arc<AtomicU32>,
    fails_at: Arc<AtomicU32>,
}

impl Backend for Fragile {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        if self.steps.fetch_add(1, SeqCst) == self.fails_at.load(SeqCst) {
            return Err(EngineError::Step("the device is lost".to_owned()));
        }
        let asked = batch.items.iter().filter(|item| item.wants_logits);
        let rows = asked.map(|_| Row::Token(TextModel::token(b'a'))).collect();
        Ok(Computed { rows, takes: Duration::from_millis(2) })
    }

    fn read_block(&self, _slot: BlockSlot) -> Vec<u8> {
        Vec::new()
    }

    fn write_block(&mut self, _slot: BlockSlot, _bytes: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn err_05_over_sockets_a_worker_that_fails_once_costs_a_pause_and_no_token() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let key = KeyRing::load(&cluster.key()).unwrap();
    let config = ClusterConfig::program("fragile", key).unwrap().seed(&gateway.address);
    let mesh = Mesh::join(ClusterConfig { data_dir: cluster.data_dir("fragile"), ..config }).await.unwrap();
    let (steps, fails_at) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(u32::MAX)));
    let shared = (steps.clone(), fails_at.clone());
    let make = move || Fragile { steps: shared.0.clone(), fails_at: shared.1.clone() };
    let model = Arc::new(TextModel::new("fragile", make).unwrap());
    let role = WorkerRole { model, engine: "fragile".to_owned(), count: 1, duty: Role::Both };
    let worker = starling::worker::Node::start(&mesh, NodeOptions { worker: Some(role), ..NodeOptions::default() })
        .await
        .unwrap();
    worker.ready().await;
    let body = ask_long("fragile", "go on", 12);
    let well = async || gateway.chat(&body).await.0 == 200;
    for at in [0, 5] {
        until("it serves", PATIENCE, well).await;
        for stream in [false, true] {
            until("it serves again", PATIENCE, well).await;
            steps.store(0, SeqCst);
            fails_at.store(at, SeqCst);
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let answer = client().post(gateway.url("/v1/chat/completions")).json(&body).send().await.unwrap();
            let status = answer.status().as_u16();
            let text = answer.text().await.unwrap();
            fails_at.store(u32::MAX, SeqCst);
            eprintln!("fails at step {at}, stream {stream}: {status} {text:.300}");
            // The request goes on in the engine's next life; who asked sees a pause and every token.
            assert_eq!(status, 200, "{text}");
            assert!(!text.contains("\"error\"") && text.contains("\"finish_reason\":\"length\""), "{text}");
            assert_eq!(text.contains("[DONE]"), stream, "{text}");
            for name in ["starling_router_reservations", "starling_gateway_permits_in_use", "starling_streams_open"] {
                let zero = async || gateway.metric(name, "").await == 0.0;
                until(&format!("{name} is 0"), Duration::from_secs(5), zero).await;
            }
        }
    }
    worker.stop().await;
    mesh.leave().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cnt_03_over_sockets_the_late_end_of_an_earlier_life_leaves_the_new_one_alone() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let with_http = ["--http", "127.0.0.1:0"];
    let mut old = cluster.join("w1", &[&gateway.address], &with_http).await;
    until("it serves", PATIENCE, async || cluster.serving_workers("w1", &gateway).await == 1).await;
    let mut slow = Vec::new();
    for n in 0..4 {
        let mut events = gateway.stream(&ask_long(&old.model, &format!("{n} slow"), 1500)).await;
        events.first_text().await;
        slow.push(events);
    }
    let w2 = cluster.join("w2", &[&gateway.address], &with_http).await;
    until("it serves", PATIENCE, async || cluster.serving_workers("w2", &gateway).await == 1).await;
    // The old life is only frozen: its requests end when it thaws, long after the new life has begun.
    old.signal("STOP").await;
    let gone = async || cluster.serving_workers("w1", &gateway).await == 0;
    until("it is down", PATIENCE, gone).await;
    let args = ["--http", "127.0.0.1:0", "--name", "w1"];
    let new = cluster.join("w1-again", &[&gateway.address], &args).await;
    until("it serves", PATIENCE, async || cluster.serving_workers("w1", &gateway).await == 1).await;
    old.signal("CONT").await;
    for events in slow {
        let told = events.rest().await;
        assert!(told.error.is_some() || told.done, "{told:?}");
    }
    let ended = tokio::time::timeout(PATIENCE, old.child.wait()).await.expect("the old one ends").unwrap();
    assert_eq!(ended.code(), Some(1), "{}", old.tail());
    until("nothing is reserved", Duration::from_secs(5), async || {
        gateway.metric("starling_router_reservations", "").await == 0.0
    })
    .await;
    for n in 0..20 {
        let (status, body) = gateway.chat(&ask(&w2.model, &format!("{n} {n} and so on"), 1)).await;
        assert_eq!(status, 200, "{body}");
        assert!(gateway.metric("starling_router_reservations", "").await >= 0.0);
        // The router knows of nothing at either of them: what the old life ended is not taken off the new one's account.
        let seen = candidates(&cluster, &gateway).await;
        let idle = |one: &Value| one["in_flight"] == 0 && one["queued_tokens"] == 0;
        assert!(seen.len() == 2 && seen.iter().all(idle), "{seen:?}");
    }
    let before = [generated(&new).await, generated(&w2).await];
    let prompts: Vec<Value> = (0..8).map(|n| ask_long(&w2.model, &format!("{n} at once"), 40)).collect();
    let all = futures::future::join_all(prompts.iter().map(|prompt| gateway.chat(prompt))).await;
    assert!(all.iter().all(|(status, _)| *status == 200), "{all:?}");
    let share = [generated(&new).await - before[0], generated(&w2).await - before[1]];
    assert!(share.iter().all(|part| *part >= 80.0), "8 answers of 40 tokens went {share:?}");
}

/// The workers that were looked at for the newest request.
async fn candidates(cluster: &Cluster, at: &Node) -> Vec<Value> {
    let newest = cluster.rows("requests", at).await["requests"][0]["request"].as_str().unwrap().to_owned();
    let key = cluster.key();
    let args = ["why", &newest, "--json", "--node", &at.address, "--key-file", key.to_str().unwrap()];
    let told: Value = serde_json::from_slice(&cluster.run(&args).await.stdout).expect("--json prints JSON");
    told["receipts"][0][1]["candidates"].as_array().cloned().unwrap_or_default()
}

/// Tokens that a worker has generated.
async fn generated(node: &Node) -> f64 {
    node.metric("starling_worker_tokens_generated_total", "").await
}

#[tokio::test(flavor = "multi_thread")]
async fn lif_04_over_sockets_a_model_that_is_listed_can_be_asked_at_once() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    for round in 0..5 {
        let model = format!("model-{round}");
        let launched = cluster.launch(&model, &["join", &gateway.address], &["--served-name", &model]);
        let listed = async || {
            let list = client().get(gateway.url("/v1/models")).send().await.unwrap().text().await.unwrap();
            list.contains(&model)
        };
        let begun = Instant::now();
        while !listed().await {
            assert!(begun.elapsed() < PATIENCE, "{model} is never listed");
        }
        let (status, body) = gateway.chat(&ask(&model, "first sight", 2)).await;
        assert_eq!(status, 200, "{body}");
        drop(launched.ready().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bal_02_over_sockets_eight_at_once_are_shared_evenly() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let workers = [
        cluster.join("w1", &[&gateway.address], &["--http", "127.0.0.1:0"]).await,
        cluster.join("w2", &[&gateway.address], &["--http", "127.0.0.1:0"]).await,
    ];
    for worker in &workers {
        until("it serves", PATIENCE, async || cluster.serving_workers(&worker.name, &gateway).await == 1).await;
    }
    let mut first = gateway.stream(&ask_long(&workers[0].model, "one ahead", 3000)).await;
    first.first_text().await;
    let opened = (0..8).map(async |n| {
        let mut events = gateway.stream(&ask_long(&workers[0].model, &format!("{n} at once"), 3000)).await;
        events.first_text().await;
        events
    });
    let streams = futures::future::join_all(opened).await;
    let mut running = Vec::new();
    for worker in &workers {
        running.push(worker.metric("starling_worker_sequences_running", "").await);
    }
    eprintln!("running: {running:?}");
    assert!(running.iter().all(|count| (4.0..=5.0).contains(count)), "nine streams went {running:?}");
    drop((first, streams));
}

#[tokio::test(flavor = "multi_thread")]
async fn bal_03_over_sockets_paced_requests_use_every_worker() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let mut workers = Vec::new();
    for name in ["w1", "w2", "w3", "w4"] {
        workers.push(cluster.join(name, &[&gateway.address], &["--http", "127.0.0.1:0"]).await);
    }
    for worker in &workers {
        until("it serves", PATIENCE, async || cluster.serving_workers(&worker.name, &gateway).await == 1).await;
    }
    for n in 0..200 {
        let (status, body) = gateway.chat(&ask(&workers[0].model, &format!("{n} is one of many prompts"), 1)).await;
        assert_eq!(status, 200, "{body}");
    }
    let mut share = Vec::new();
    for worker in &workers {
        share.push(generated(worker).await);
    }
    eprintln!("200 paced requests went {share:?}");
    assert!(share.iter().all(|part| (30.0..=70.0).contains(part)), "200 paced requests went {share:?}");
}
