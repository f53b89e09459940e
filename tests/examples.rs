//! The examples, run as people run them: each as processes of their own, to the end, with what they print.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use starling::{Actor, ActorEvent, CallError, DirectoryFault, Fault, JoinConfig, Mesh, NodeId};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

/// Longest wait for any line or end.
const PATIENCE: Duration = Duration::from_secs(60);

/// `target/PROFILE/examples/NAME`, which cargo builds beside this test.
fn example(name: &str) -> PathBuf {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_starling"));
    let path = program.with_file_name("examples").join(name);
    assert!(path.exists(), "{} is missing: run `cargo build --examples`", path.display());
    path
}

fn command(program: &Path, folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(folder).env_clear().env("HOME", folder).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

/// A process that serves until it is dropped.
struct Serving {
    address: String,
    child: Child,
    // Kept open: a closed pipe would end a process that prints.
    _stdout: Lines<BufReader<ChildStdout>>,
    fields: Vec<String>,
}

/// Starts a process and waits for its `ready` line.
async fn serve(program: &Path, folder: &Path, args: &[&str]) -> Serving {
    let mut child = command(program, folder, args).spawn().expect("it starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let ready = async {
        while let Some(line) = stdout.next_line().await.expect("lines") {
            if let Some(rest) = line.strip_prefix("ready ") {
                return rest.to_owned();
            }
        }
        panic!("{} {args:?} ended before it was ready", program.display());
    };
    let line = timeout(PATIENCE, ready).await.expect("ready in time");
    let fields: Vec<String> = line.split(' ').map(str::to_owned).collect();
    Serving { address: fields[0].clone(), child, _stdout: stdout, fields }
}

impl Serving {
    fn field(&self, name: &str) -> &str {
        let found = self.fields.iter().find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {name}= in {:?}", self.fields))
    }
}

/// Runs a process to its end and returns the lines it printed.
async fn run(program: &Path, folder: &Path, args: &[&str], input: &str) -> Vec<String> {
    let mut child = command(program, folder, args).stdin(Stdio::piped()).spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let work = async {
        stdin.write_all(input.as_bytes()).await.expect("it reads");
        drop(stdin);
        child.wait_with_output().await.expect("it ends")
    };
    let output = timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{args:?} does not end"));
    assert!(output.status.success(), "{args:?}: {}", output.status);
    String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn echo_answers_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let echo = example("echo");
    let server = serve(&echo, folder.path(), &["serve"]).await;
    let said = run(&echo, folder.path(), &["say", &server.address, "hello out there"], "").await;
    assert_eq!(said, ["hello out there"]);
}

#[tokio::test]
async fn word_count_streams_between_two_processes() {
    let folder = tempfile::tempdir().unwrap();
    let words = example("word_count");
    let server = serve(&words, folder.path(), &["serve"]).await;
    let text = "The sea, the sea.\n\nNobody owns it\n";
    let counted = run(&words, folder.path(), &["feed", &server.address], text).await;
    let expected = ["line of 4", "line of 0", "line of 3", "2 sea", "2 the", "1 it", "1 nobody", "1 owns"];
    assert_eq!(counted, expected);
    // More lines than any window holds.
    let many = "a b c\n".repeat(5_000);
    let counted = run(&words, folder.path(), &["feed", &server.address], &many).await;
    assert_eq!(counted.len(), 5_003);
    assert_eq!(counted.last().map(String::as_str), Some("5000 c"));
}

#[tokio::test]
async fn remote_spawn_dies_comes_back_and_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let program = example("remote_spawn");
    let host = serve(&program, folder.path(), &["host"]).await;
    let told = run(&program, folder.path(), &["spawn", &host.address], "").await;
    let expected = [
        "Some(Started)",
        "balance 105",
        "rejected: internal: the actor ended before it answered",
        "Some(Restarted { restarts: 1 })",
        "balance 101",
        "Some(Stopped(Asked))",
    ];
    assert_eq!(told, expected);
}

/// What the remote_spawn example's accounts are asked, as far as this test needs it.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
enum Order {
    Put(i64),
}

struct Account;

impl Actor for Account {
    type Request = Order;
    type Reply = i64;

    async fn handle(&mut self, _order: Order) -> Result<i64, Fault> {
        unreachable!("it runs on the other node")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_follows_an_actor_is_told_when_its_host_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = serve(&example("remote_spawn"), folder.path(), &["host"]).await;
    let config = JoinConfig::new("watcher").key_file(folder.path().join("cluster.key")).seed(&host.address);
    let mesh = Mesh::join(config.data_dir(folder.path().join("watcher"))).await.unwrap();
    let node = NodeId::new("host").unwrap();
    mesh.wait_for_node(&node, PATIENCE).await.unwrap();
    let account = mesh.spawn_on::<Account>(&node, "account", &1).await.unwrap();
    assert_eq!(account.ask(&Order::Put(1)).await.unwrap(), 2);
    let mut life = account.monitor();
    assert_eq!(timeout(PATIENCE, life.next()).await.unwrap(), Some(ActorEvent::Started));
    let killed = Instant::now();
    host.child.kill().await.unwrap();
    assert_eq!(timeout(PATIENCE, life.next()).await.unwrap(), Some(ActorEvent::NodeDown));
    println!("told {:.2} s after the kill", killed.elapsed().as_secs_f64());
    assert_eq!(life.next().await, None);
    assert!(matches!(account.ask(&Order::Put(1)).await.unwrap_err(), CallError::Directory(DirectoryFault::Down(_))));
    mesh.leave().await;
}

#[tokio::test]
async fn a_custom_worker_answers_through_the_gateway_in_under_sixty_lines() {
    let source = include_str!("../examples/custom_worker.rs");
    assert!(source.lines().count() < 60, "the example has {} lines", source.lines().count());
    let folder = tempfile::tempdir().unwrap();
    let starling = std::env::var_os("STARLING_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_starling").into());
    let args = ["up", "--name", "front", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", "front"];
    let roles = ["--role", "gateway", "--role", "router"];
    let front = serve(Path::new(&starling), folder.path(), &[&args[..], &roles[..]].concat()).await;
    let seed = front.field("node");
    let _worker = serve(&example("custom_worker"), folder.path(), &[seed, "front/cluster.key"]).await;

    let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
    let url = format!("http://{}/v1/chat/completions", front.field("http"));
    let body = serde_json::json!({"model": "alphabet", "messages": [{"role": "user", "content": "Go"}]});
    let answer = async {
        loop {
            let response = client.post(&url).json(&body).send().await.expect("the gateway answers");
            let status = response.status().as_u16();
            let answer: serde_json::Value = response.json().await.expect("JSON");
            if status == 200 {
                return answer;
            }
            // The news of the model takes a gossip round; until then it is unknown or unavailable.
            assert!(matches!(status, 404 | 503), "{answer}");
            tokio::task::yield_now().await;
        }
    };
    let answer = timeout(PATIENCE, answer).await.expect("an answer in time");
    assert_eq!(answer["choices"][0]["message"]["content"], "abcdefghijklmnopqrstuvwxyz", "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_custom_scorer_decides_in_a_router_of_its_own_in_forty_lines() {
    let source = include_str!("../examples/custom_scorer.rs");
    assert!(source.lines().count() <= 40, "the example has {} lines", source.lines().count());
    let folder = tempfile::tempdir().unwrap();
    let starling = std::env::var_os("STARLING_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_starling").into());
    let starling = Path::new(&starling);
    let up = ["up", "--name", "grid", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", "grid"];
    let simulated = ["--engine", "simulated", "--workers", "1"];
    let roles = ["--role", "gateway", "--role", "worker", "--label", "power=grid"];
    let front = serve(starling, folder.path(), &[&up[..], &roles, &simulated].concat()).await;
    let (seed, key) = (front.field("node"), "grid/cluster.key");
    let join = ["join", seed, "--key-file", key, "--name", "sun", "--data-dir", "sun", "--label", "power=sun"];
    let _sun = serve(starling, folder.path(), &[&join[..], &simulated].concat()).await;
    let _router = serve(&example("custom_scorer"), folder.path(), &[seed, key]).await;

    let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
    let url = format!("http://{}/v1/chat/completions", front.field("http"));
    let body = serde_json::json!({
        "model": front.field("model"), "max_tokens": 2, "messages": [{"role": "user", "content": "Go"}]
    });
    let ask = async || {
        let request = client.post(&url).header("x-starling-receipt", "1").json(&body);
        let response = request.send().await.expect("the gateway answers");
        let receipt = response.headers().get("x-starling-receipt").cloned();
        let receipts: serde_json::Value =
            receipt.map_or(serde_json::Value::Null, |line| serde_json::from_slice(line.as_bytes()).expect("JSON"));
        // Empty while the gateway has not heard of the router, and decides by itself.
        receipts[0].clone()
    };
    let both = async {
        loop {
            let receipt = ask().await;
            if receipt["workers"] == 2 {
                return receipt;
            }
            tokio::task::yield_now().await;
        }
    };
    let mut receipt = timeout(PATIENCE, both).await.expect("the router knows both workers in time");
    for _ in 0..8 {
        assert_eq!(receipt["policy"], "composed");
        let candidates = receipt["candidates"].as_array().expect("a list");
        let chosen = &candidates[usize::try_from(receipt["chosen"].as_u64().expect("a number")).expect("small")];
        assert_eq!(chosen["worker"]["node"], "sun", "{receipt}");
        let grid = candidates.iter().find(|candidate| candidate["worker"]["node"] == "grid").expect("was judged too");
        let terms = grid["terms"].as_array().expect("terms");
        assert!(terms.iter().any(|term| term[0] == "grid" && term[1] == 2000.0), "{grid}");
        receipt = ask().await;
    }
}
