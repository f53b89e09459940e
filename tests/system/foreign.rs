//! A server of another kind, for tests: speaks what vLLM, SGLang, llama.cpp and OpenAI-like servers speak, with faults on command.
//!
//! It computes nothing: each token follows from the one before, so that an answer that is continued anywhere is the same answer.
//! Its KV events are those of vLLM: published in ZeroMQ's format, written by hand, with a replay socket. Used by the system tests and
//! by the engine's own.
#![allow(dead_code, reason = "each user needs a part of it")]

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::stream;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::broadcast,
    task::JoinSet,
};

/// Token ids are below it.
pub(crate) const SPAN: u64 = 200;
/// Tokens of its blocks.
pub(crate) const BLOCK: usize = 16;

/// The token after another one.
pub(crate) fn next(token: u64) -> u64 {
    (token * 7 + 3) % SPAN
}

/// So many tokens after a prompt.
pub(crate) fn answer(prompt: &[u64], count: usize) -> Vec<u64> {
    let first = next(prompt.last().copied().unwrap_or(0));
    std::iter::successors(Some(first), |token| Some(next(*token))).take(count).collect()
}

/// What is wrong with it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Wrong {
    Nothing,
    /// Every call gets this status.
    Status(u16),
    /// The connection breaks after so many tokens.
    Cut(usize),
    /// An event after so many tokens is not JSON.
    Malformed(usize),
    /// Every token is this one.
    Token(u64),
    /// Silent after so many tokens.
    Hang(usize),
    /// The model stops by itself after so many tokens, with this one.
    Stop(usize, u64),
    /// Not well, as it says itself.
    Ill,
}

/// What it was asked, and how it is.
#[derive(Debug)]
pub(crate) struct Shared {
    wrong: Mutex<Wrong>,
    calls: Mutex<Vec<(String, Value)>>,
    /// Between two tokens.
    pause: Mutex<Duration>,
    /// Answers under way.
    pub(crate) open: AtomicUsize,
    /// Prefixes of prompts whose blocks it has, as hashes.
    stored: Mutex<Vec<u64>>,
    messages: Mutex<Vec<Vec<u8>>>,
    /// How many messages the subscribers miss from now on.
    pub(crate) lose: AtomicUsize,
    live: broadcast::Sender<(u64, Vec<u8>)>,
    /// SGLang repeats the whole answer in each event.
    pub(crate) repeats: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running server; dropping it kills it, with all its connections.
#[derive(Debug)]
pub(crate) struct Foreign {
    pub(crate) shared: Arc<Shared>,
    pub(crate) http: SocketAddr,
    pub(crate) events: SocketAddr,
    pub(crate) replay: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Foreign {
    /// On free ports.
    pub(crate) fn start() -> Self {
        Self::on([free(), free(), free()])
    }

    /// On these ports, which one that is gone had.
    pub(crate) fn at(ports: [u16; 3]) -> Self {
        Self::on(ports.map(|port| std::net::TcpListener::bind(("127.0.0.1", port)).unwrap()))
    }

    fn on(listeners: [std::net::TcpListener; 3]) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let shared = Arc::new(Shared {
            wrong: Mutex::new(Wrong::Nothing),
            calls: Mutex::default(),
            pause: Mutex::default(),
            open: AtomicUsize::new(0),
            stored: Mutex::default(),
            messages: Mutex::default(),
            lose: AtomicUsize::new(0),
            live: broadcast::channel(1_024).0,
            repeats: AtomicUsize::new(1),
        });
        let inside = runtime.enter();
        // The caller may be inside of a runtime, so nothing here waits.
        let [http, events, replay] = listeners.map(|listener| {
            listener.set_nonblocking(true).unwrap();
            TcpListener::from_std(listener).unwrap()
        });
        let addresses = [&http, &events, &replay].map(|listener| listener.local_addr().unwrap());
        let app = router().with_state(shared.clone());
        // Dropped with the runtime.
        drop(runtime.spawn(async move { axum::serve(http, app).await }));
        drop(runtime.spawn(accept(events, shared.clone(), publish)));
        drop(runtime.spawn(accept(replay, shared.clone(), repeat)));
        drop(inside);
        let [http, events, replay] = addresses;
        Self { shared, http, events, replay, runtime: Some(runtime) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    pub(crate) fn ports(&self) -> [u16; 3] {
        [self.http, self.events, self.replay].map(|address| address.port())
    }

    pub(crate) fn set(&self, wrong: Wrong) {
        *lock(&self.shared.wrong) = wrong;
    }

    pub(crate) fn pace(&self, pause: Duration) {
        *lock(&self.shared.pause) = pause;
    }

    /// Paths and bodies of the calls for answers.
    pub(crate) fn calls(&self) -> Vec<(String, Value)> {
        lock(&self.shared.calls).clone()
    }

    /// Those who hear what it publishes.
    pub(crate) fn listeners(&self) -> usize {
        self.shared.live.receiver_count()
    }

    /// Answers under way.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// Publishes that it forgot everything.
    pub(crate) fn clear(&self) {
        lock(&self.shared.stored).clear();
        self.shared.tell(&json!([["AllBlocksCleared"]]));
    }
}

impl Shared {
    /// Publishes a batch of events.
    pub(crate) fn tell(&self, events: &Value) {
        self.tell_bytes(rmp_serde::to_vec(&json!([1.5, events, 0])).unwrap());
    }

    /// Publishes a payload.
    pub(crate) fn tell_bytes(&self, payload: Vec<u8>) {
        let mut messages = lock(&self.messages);
        let number = messages.len() as u64;
        messages.push(payload.clone());
        let lost = self.lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        if !lost {
            // Without a subscriber nobody hears it.
            self.live.send((number, payload)).ok();
        }
    }

    /// Stores the blocks of a prompt; how many tokens of it were there.
    fn store(&self, prompt: &[u64]) -> usize {
        let mut stored = lock(&self.stored);
        let (mut parent, mut cached) = (None, 0);
        for (at, block) in prompt.chunks_exact(BLOCK).enumerate() {
            let hash = fnv(&prompt[..(at + 1) * BLOCK]);
            if stored.contains(&hash) {
                cached += BLOCK;
            } else {
                stored.push(hash);
                self.tell(&json!([["BlockStored", [hash], parent, block, BLOCK, null]]));
            }
            parent = Some(hash);
        }
        cached.min(prompt.len().saturating_sub(1))
    }
}

/// A listener on a port that the system gives to nobody who asks for any: one that is gone can have it again.
fn free() -> std::net::TcpListener {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let turn = NEXT.fetch_add(1, Ordering::SeqCst) + std::process::id() as usize * 61;
        let port = u16::try_from(20_000 + turn % 12_000).unwrap();
        if let Ok(listener) = std::net::TcpListener::bind(("127.0.0.1", port)) {
            return listener;
        }
    }
}

fn fnv(tokens: &[u64]) -> u64 {
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, |hash, token| (hash ^ token).wrapping_mul(0x0100_0000_01b3))
}

fn router() -> Router<Arc<Shared>> {
    let metrics = "vllm:num_requests_running{engine=\"0\"} 0.0\nvllm:num_requests_waiting{engine=\"0\"} 0.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"512\"} 1.0\n";
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(move || async move { metrics }))
        .route("/v1/models", get(|| async { Json(json!({"data": [{"id": "theirs", "max_model_len": 4_096}]})) }))
        .route("/v1/completions", post(|state, body| call(state, "/v1/completions", body)))
        .route("/generate", post(|state, body| call(state, "/generate", body)))
        .route("/completion", post(|state, body| call(state, "/completion", body)))
}

async fn health(State(shared): State<Arc<Shared>>) -> StatusCode {
    if *lock(&shared.wrong) == Wrong::Ill { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

/// How it writes an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tongue {
    Vllm,
    Sglang,
    LlamaCpp,
    Text,
}

/// One answer under way.
struct Run {
    shared: Arc<Shared>,
    tongue: Tongue,
    tokens: Vec<u64>,
    logprobs: bool,
    stopped: bool,
    prompt: usize,
    cached: usize,
    said: usize,
    /// What is still to be sent behind the tokens.
    rest: Vec<String>,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn call(State(shared): State<Arc<Shared>>, path: &'static str, Json(body): Json<Value>) -> Response {
    lock(&shared.calls).push((path.to_owned(), body.clone()));
    let wrong = lock(&shared.wrong).clone();
    if let Wrong::Status(status) = wrong {
        let error = json!({"error": {"message": "as you wished", "type": "test", "code": status}});
        return (StatusCode::from_u16(status).unwrap(), Json(error)).into_response();
    }
    let (prompt, budget, tongue) = match path {
        "/generate" => (&body["input_ids"], &body["sampling_params"]["max_new_tokens"], Tongue::Sglang),
        "/completion" => (&body["prompt"], &body["n_predict"], Tongue::LlamaCpp),
        _ if body["prompt"].is_string() => (&body["prompt"], &body["max_tokens"], Tongue::Text),
        _ => (&body["prompt"], &body["max_tokens"], Tongue::Vllm),
    };
    let prompt: Vec<u64> =
        prompt.as_array().map(|ids| ids.iter().filter_map(Value::as_u64).collect()).unwrap_or_default();
    let mut tokens = answer(&prompt, budget.as_u64().unwrap_or(16) as usize);
    let mut stopped = false;
    match wrong {
        Wrong::Token(odd) => tokens.fill(odd),
        Wrong::Stop(after, end) if after < tokens.len() => {
            tokens.truncate(after);
            tokens.push(end);
            stopped = true;
        }
        _ => {}
    }
    let cached = shared.store(&prompt);
    shared.open.fetch_add(1, Ordering::SeqCst);
    let logprobs = body["logprobs"].is_u64();
    let prompt = prompt.len();
    let mut run = Run { shared, tongue, tokens, logprobs, stopped, prompt, cached, said: 0, rest: Vec::new() };
    run.rest = run.tail();
    let body = Body::from_stream(stream::unfold(run, step));
    ([("content-type", "text/event-stream")], body).into_response()
}

impl Run {
    /// What comes after the last token, last first.
    fn tail(&self) -> Vec<String> {
        let done = "data: [DONE]\n\n".to_owned();
        match self.tongue {
            Tongue::Vllm => {
                let usage = json!({
                    "prompt_tokens": self.prompt, "prompt_tokens_details": {"cached_tokens": self.cached},
                });
                vec![done, format!("data: {}\n\n", json!({"choices": [], "usage": usage}))]
            }
            Tongue::LlamaCpp => {
                let kind = if self.stopped { "eos" } else { "limit" };
                let last = json!({
                    "content": "", "tokens": [], "stop": true, "stop_type": kind, "tokens_predicted": self.tokens.len(),
                });
                vec![format!("data: {last}\n\n")]
            }
            _ => vec![done],
        }
    }

    fn event(&self, at: usize) -> Value {
        let (token, last) = (self.tokens[at], at + 1 == self.tokens.len());
        let reason = if self.stopped { "stop" } else { "length" };
        let reason = if last { json!(reason) } else { Value::Null };
        let text = if last && self.stopped { String::new() } else { format!(" {token}") };
        match self.tongue {
            Tongue::Vllm => {
                let logprobs = self.logprobs.then(|| {
                    let name = format!("token_id:{token}");
                    json!({"tokens": [&name], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:1": -2.0, name: -0.5}]})
                });
                let choice = json!({
                    "index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason, "token_ids": [token],
                });
                json!({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
            }
            Tongue::Sglang => {
                let from = if self.shared.repeats.load(Ordering::SeqCst) > 0 { 0 } else { at };
                let reason = match reason.as_str() {
                    None => Value::Null,
                    Some("stop") => json!({"type": "stop", "matched": token}),
                    Some(_) => json!({"type": "length", "length": self.tokens.len()}),
                };
                let meta = json!({
                    "id": "1", "finish_reason": reason, "prompt_tokens": self.prompt, "completion_tokens": at + 1,
                    "cached_tokens": self.cached,
                });
                json!({"text": text, "output_ids": self.tokens[from..=at], "meta_info": meta})
            }
            Tongue::LlamaCpp => json!({
                "index": 0, "content": text, "tokens": [token], "stop": false, "tokens_predicted": at + 1,
                "tokens_evaluated": self.prompt, "timings": {"cache_n": self.cached, "prompt_n": self.prompt - self.cached},
            }),
            Tongue::Text => json!({"choices": [{"index": 0, "text": " word", "finish_reason": reason}]}),
        }
    }
}

async fn step(mut run: Run) -> Option<(Result<Bytes, io::Error>, Run)> {
    let (wrong, pause) = (lock(&run.shared.wrong).clone(), *lock(&run.shared.pause));
    let (said, cut) = (run.said, |run| Some((Err(io::Error::other("cut")), run)));
    match wrong {
        Wrong::Cut(after) if said >= after => return cut(run),
        Wrong::Hang(after) if said >= after => std::future::pending::<()>().await,
        Wrong::Malformed(after) if said == after => {
            run.said += 1;
            return Some((Ok(Bytes::from_static(b"data: {\"choices\": [\n\n")), run));
        }
        _ => {}
    }
    if said >= run.tokens.len() {
        let text = run.rest.pop()?;
        return Some((Ok(text.into()), run));
    }
    tokio::time::sleep(pause).await;
    let text = format!("data: {}\n\n", run.event(said));
    run.said += 1;
    Some((Ok(text.into()), run))
}

async fn accept<F: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    shared: Arc<Shared>,
    serve: fn(TcpStream, Arc<Shared>) -> F,
) {
    let mut served = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        served.spawn(serve(stream, shared.clone()));
    }
}

/// Greeting and READY of one side of ZMTP 3.0, both ways.
async fn shake(stream: &mut TcpStream, kind: &[u8]) -> io::Result<()> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(kind.len() as u8);
    ready.extend_from_slice(kind);
    stream.write_all(&[&[4, ready.len() as u8], &ready[..]].concat()).await?;
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await?;
    frame(stream).await.map(drop)
}

/// A short frame: flags and body.
async fn frame(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).await?;
    let mut body = vec![0; head[1].into()];
    stream.read_exact(&mut body).await?;
    Ok((head[0], body))
}

fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, body) in frames.iter().enumerate() {
        bytes.push(if at + 1 < frames.len() { 3 } else { 2 });
        bytes.extend_from_slice(&(body.len() as u64).to_be_bytes());
        bytes.extend_from_slice(body);
    }
    bytes
}

async fn publish(mut stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    shake(&mut stream, b"PUB").await?;
    let (_, wish) = frame(&mut stream).await?;
    assert_eq!(wish.first(), Some(&1), "a subscription");
    let mut live = shared.live.subscribe();
    while let Ok((number, payload)) = live.recv().await {
        stream.write_all(&message(&[b"kv-events", &number.to_be_bytes(), &payload])).await?;
    }
    Ok(())
}

async fn repeat(mut stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    shake(&mut stream, b"ROUTER").await?;
    loop {
        let (flags, empty) = frame(&mut stream).await?;
        assert_eq!((flags, empty.len()), (1, 0), "a delimiter comes first");
        let (_, from) = frame(&mut stream).await?;
        let from = u64::from_be_bytes(from[..].try_into().expect("a number"));
        let messages = lock(&shared.messages).clone();
        for (number, payload) in messages.iter().enumerate().skip(usize::try_from(from).unwrap_or(usize::MAX)) {
            stream.write_all(&message(&[b"", &(number as u64).to_be_bytes(), payload])).await?;
        }
        stream.write_all(&message(&[b"", &u64::MAX.to_be_bytes(), b""])).await?;
    }
}
