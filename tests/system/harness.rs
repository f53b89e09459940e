//! Starts real nodes, talks to them as a client does, and kills them when the test ends.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::StreamExt;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdout, Command},
};

/// Longest wait for any single state, generous because machines are slow; bars are checked by their own figures.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// One cluster at a time in this process, so that measured seconds mean something under plain `cargo test` too.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The program under test.
pub(crate) fn binary() -> OsString {
    std::env::var_os("STARLING_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_starling").into())
}

/// The real model.
pub(crate) fn model() -> PathBuf {
    let given = std::env::var_os("STARLING_TEST_MODEL").map(PathBuf::from);
    let path = given.unwrap_or_else(|| {
        let home = PathBuf::from(std::env::var_os("HOME").expect("HOME is set"));
        home.join(".cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    });
    assert!(path.exists(), "{} is missing: run `make model`", path.display());
    path
}

/// A temporary folder with a key, in which nodes live.
#[derive(Debug)]
pub(crate) struct Cluster {
    dir: tempfile::TempDir,
    _one: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Makes the folder and the key.
    pub(crate) async fn new() -> Self {
        let one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = Self { dir: tempfile::tempdir().unwrap(), _one: one };
        let key = cluster.key();
        let made = cluster.run(&["keys", "new", key.to_str().unwrap()]).await;
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        cluster
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The logs of a test that failed: short, or whole in a folder that stays when `STARLING_TEST_KEEP` is set.
    fn show_logs(&mut self) {
        for entry in std::fs::read_dir(self.path()).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "log") {
                eprintln!("--- {}\n{}", path.display(), tail(&path));
            }
        }
        if std::env::var_os("STARLING_TEST_KEEP").is_some() {
            self.dir.disable_cleanup(true);
        }
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.path().join("cluster.key")
    }

    pub(crate) fn data_dir(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// A command with an environment of its own: nothing of the developer's settings reaches it.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        self.command_in(None, args)
    }

    /// The same inside a network namespace. `ip` becomes the program, so its process id is the program's.
    fn command_in(&self, namespace: Option<&str>, args: &[&str]) -> Command {
        let mut command = match namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(binary());
                command
            }
            None => Command::new(binary()),
        };
        command.args(args).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.path()).env("RUST_BACKTRACE", "1").kill_on_drop(true).stdin(Stdio::null());
        command
    }

    /// Runs a verb to its end.
    pub(crate) async fn run(&self, args: &[&str]) -> Output {
        self.run_in(None, args).await
    }

    /// Runs a verb to its end inside a network namespace.
    pub(crate) async fn run_in(&self, namespace: Option<&str>, args: &[&str]) -> Output {
        let running = self.command_in(namespace, args).output();
        tokio::time::timeout(PATIENCE, running).await.expect("the verb ends").expect("it starts")
    }

    /// A node with the simulated engine unless `args` say otherwise.
    pub(crate) async fn up(&self, name: &str, args: &[&str]) -> Node {
        let mut all = vec!["up", "--bind", "127.0.0.1:0"];
        if !args.contains(&"--http") {
            all.extend(["--http", "127.0.0.1:0"]);
        }
        self.start(name, &all, args).await
    }

    /// A node that joins the given ones.
    pub(crate) async fn join(&self, name: &str, seeds: &[&str], args: &[&str]) -> Node {
        let mut all = vec!["join"];
        all.extend(seeds);
        self.start(name, &all, args).await
    }

    /// Starts a node and does not wait for it.
    pub(crate) fn launch(&self, name: &str, verb: &[&str], args: &[&str]) -> Launched {
        self.launch_in(None, name, verb, args)
    }

    /// The same inside a network namespace.
    pub(crate) fn launch_in(&self, namespace: Option<&str>, name: &str, verb: &[&str], args: &[&str]) -> Launched {
        let (dir, key) = (self.data_dir(name), self.key());
        let mut all: Vec<&str> = verb.to_vec();
        all.extend(["--data-dir", dir.to_str().unwrap()]);
        if !args.contains(&"--name") {
            all.extend(["--name", name]);
        }
        if !args.contains(&"--key-file") {
            all.extend(["--key-file", key.to_str().unwrap()]);
        }
        if !args.contains(&"--engine") {
            all.extend(["--engine", "simulated"]);
        }
        let level = std::env::var_os("STARLING_TEST_LOG_LEVEL").unwrap_or_else(|| "info".into());
        let level = level.to_str().expect("a log level").to_owned();
        if !args.contains(&"--log-level") {
            all.extend(["--log-level", &level]);
        }
        all.extend(args);
        let log = self.path().join(format!("{name}.log"));
        let stderr = std::fs::File::options().create(true).append(true).open(&log).unwrap();
        let mut child =
            self.command_in(namespace, &all).stdout(Stdio::piped()).stderr(stderr).spawn().expect("the program starts");
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Launched { child, stdout, log }
    }

    async fn start(&self, name: &str, verb: &[&str], args: &[&str]) -> Node {
        self.launch(name, verb, args).ready().await
    }

    /// Rows of an inspection verb, asked at a node.
    pub(crate) async fn rows(&self, verb: &str, node: &Node) -> Value {
        let key = self.key();
        let out = self.run(&[verb, "--json", "--node", &node.address, "--key-file", key.to_str().unwrap()]).await;
        if !out.status.success() {
            return Value::Null;
        }
        serde_json::from_slice(&out.stdout).expect("--json prints JSON")
    }

    /// Whether another node lists any instance of a node.
    pub(crate) async fn lists(&self, of: &str, seen_by: &Node) -> bool {
        let rows = self.rows("instances", seen_by).await;
        rows.as_array().is_none_or(|rows| rows.iter().any(|row| row["node"] == of))
    }

    /// Serving workers of a node, as another node sees them.
    pub(crate) async fn serving_workers(&self, of: &str, seen_by: &Node) -> usize {
        let rows = self.rows("instances", seen_by).await;
        let rows = rows.as_array().cloned().unwrap_or_default();
        let serving = |row: &&Value| {
            row["node"] == of
                && row["kind"] == "worker"
                && row["lifecycle"] == "serving"
                && row["node_state"] == "alive"
        };
        rows.iter().filter(serving).count()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
    }
}

/// A process that may not be ready yet.
#[derive(Debug)]
pub(crate) struct Launched {
    child: Child,
    stdout: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Launched {
    /// Waits until it is ready or has ended; in the second case its exit code and the end of its log.
    pub(crate) async fn outcome(mut self) -> Result<Node, (Option<i32>, String)> {
        let mut first = String::new();
        let readable = async {
            // An empty read is the end of the process.
            while self.stdout.read_line(&mut first).await.unwrap_or(0) > 0 && !first.contains("ready ") {}
        };
        tokio::time::timeout(PATIENCE, readable).await.expect("it is ready or it ends");
        if let Some(ready) = first.lines().find(|line| line.starts_with("ready ")) {
            return Ok(self.node(ready));
        }
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("it ends").unwrap();
        Err((ended.code(), tail(&self.log)))
    }

    /// Waits for the `ready` line.
    pub(crate) async fn ready(mut self) -> Node {
        let mut line = String::new();
        let wait = async {
            loop {
                line.clear();
                if self.stdout.read_line(&mut line).await.unwrap_or(0) == 0 {
                    panic!("the node ended before it was ready:\n{}", tail(&self.log));
                }
                if line.starts_with("ready ") {
                    break line.trim().to_owned();
                }
            }
        };
        let Ok(line) = tokio::time::timeout(PATIENCE, wait).await else {
            panic!("no `ready` line within {PATIENCE:?}:\n{}", tail(&self.log));
        };
        self.node(&line)
    }

    /// The node of a `ready` line.
    fn node(self, line: &str) -> Node {
        let field = |name: &str| {
            let found = line.split(' ').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            found.unwrap_or_else(|| panic!("no {name}= in {line}")).to_owned()
        };
        let (name, address, http, model) = (field("name"), field("node"), field("http"), field("model"));
        Node {
            pid: self.child.id().unwrap(),
            child: self.child,
            name,
            address,
            http,
            model,
            log: self.log,
            _stdout: self.stdout,
        }
    }
}

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) address: String,
    /// Its HTTP address, `-` without one.
    pub(crate) http: String,
    pub(crate) model: String,
    pub(crate) pid: u32,
    pub(crate) child: Child,
    log: PathBuf,
    // Kept open: a closed pipe would end a process that prints.
    _stdout: BufReader<ChildStdout>,
}

impl Node {
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    /// Sends a signal by name: `STOP`, `CONT`, `TERM`.
    pub(crate) async fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.pid.to_string()]).status().await;
        assert!(sent.is_ok_and(|status| status.success()), "kill -{name} {}", self.pid);
    }

    /// The end of its log.
    pub(crate) fn tail(&self) -> String {
        tail(&self.log)
    }

    /// Sum over all series of a metric whose line contains `filter`.
    pub(crate) async fn metric(&self, name: &str, filter: &str) -> f64 {
        let text = client().get(self.url("/metrics")).send().await.unwrap().text().await.unwrap();
        let series = text.lines().filter(|line| line.starts_with(name) && line.contains(filter));
        let named = series.filter(|line| matches!(line.as_bytes().get(name.len()), Some(b' ' | b'{')));
        named.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    /// Resident memory in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// One unary chat.
    pub(crate) async fn chat(&self, body: &Value) -> (u16, Value) {
        post(&self.url("/v1/chat/completions"), body).await
    }

    /// One streamed chat, not read yet.
    pub(crate) async fn stream(&self, body: &Value) -> Events {
        stream_from(&self.url("/v1/chat/completions"), body).await
    }
}

/// One streamed chat at an address, not read yet.
pub(crate) async fn stream_from(url: &str, body: &Value) -> Events {
    let mut body = body.clone();
    body["stream"] = true.into();
    let response = client().post(url).json(&body).send().await.unwrap();
    assert_eq!(response.status().as_u16(), 200, "{}", response.text().await.unwrap());
    Events { bytes: response.bytes_stream().boxed(), pending: Vec::new() }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// A client that uses no proxy.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(120)).build().unwrap()
}

/// Posts JSON; status and body.
pub(crate) async fn post(url: &str, body: &Value) -> (u16, Value) {
    let response = client().post(url).json(body).send().await.expect("the gateway answers");
    let status = response.status().as_u16();
    let text = response.text().await.expect("a body");
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// A greedy chat with one user message.
pub(crate) fn ask(model: &str, text: &str, tokens: u32) -> Value {
    serde_json::json!({
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
    })
}

/// A chat whose answer is exactly this long, whatever the model would say.
pub(crate) fn ask_long(model: &str, text: &str, tokens: u32) -> Value {
    let mut body = ask(model, text, tokens);
    body["ignore_eos"] = true.into();
    body
}

/// The events of a streamed answer.
pub(crate) struct Events {
    bytes: futures::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    pending: Vec<u8>,
}

/// How a stream ended.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Told {
    /// All text.
    pub(crate) text: String,
    /// `finish_reason` of the first choice.
    pub(crate) finish: Option<String>,
    /// The error event.
    pub(crate) error: Option<Value>,
    /// `[DONE]` was seen.
    pub(crate) done: bool,
}

impl Events {
    /// The data of the next event; `None` at the end of the body, however it came.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.pending.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.pending.drain(..end + 2).collect();
                let text = String::from_utf8(event).expect("events are UTF-8");
                if let Some(data) = text.lines().find_map(|line| line.strip_prefix("data:")) {
                    return Some(data.trim().to_owned());
                }
                continue;
            }
            let Some(Ok(bytes)) = self.bytes.next().await else { return None };
            self.pending.extend_from_slice(&bytes);
        }
    }

    /// Reads up to the first text.
    pub(crate) async fn first_text(&mut self) -> String {
        while let Some(data) = self.next().await {
            let event: Value = serde_json::from_str(&data).unwrap_or_default();
            if let Some(text) = event["choices"][0]["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
                return text.to_owned();
            }
        }
        panic!("the stream ended without text");
    }

    /// Reads to the end.
    pub(crate) async fn rest(mut self) -> Told {
        let mut told = Told::default();
        while let Some(data) = self.next().await {
            if data == "[DONE]" {
                told.done = true;
                continue;
            }
            let event: Value = serde_json::from_str(&data).expect("events are JSON");
            if event.get("error").is_some() {
                told.error = Some(event["error"].clone());
            }
            told.text += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            if let Some(reason) = event["choices"][0]["finish_reason"].as_str() {
                told.finish = Some(reason.to_owned());
            }
        }
        told
    }
}

/// Asks until the answer is yes; how long it took. Fails with `what` after `within`.
pub(crate) async fn until<F: Future<Output = bool>>(
    what: &str,
    within: Duration,
    mut state: impl FnMut() -> F,
) -> Duration {
    let begun = Instant::now();
    loop {
        if state().await {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < within, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
