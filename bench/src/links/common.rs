//! What every carrier of the links benchmark shares: tokens, producers, consumers, and what is counted of them.
//!
//! Included by the benchmark and by the separate workspace `bench/peers`, so it uses small crates only. A carrier
//! implements [`Client`], [`Rx`] and [`Tx`]; everything that is timed happens here, the same for all of them.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "shared by two programs, used by nobody else")]

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub type Failure = Box<dyn Error + Send + Sync>;

/// One token as it travels: about 30 bytes of MessagePack.
#[derive(Debug, Serialize, Deserialize)]
pub struct Token<'a> {
    pub index: u32,
    pub id: u32,
    /// When it was sent, ns of the machine's monotonic clock, which both processes share.
    pub at: u64,
    pub text: &'a str,
}

/// What the opener asks a producer for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Which of the streams.
    pub stream: u32,
    /// Streams in all.
    pub streams: u32,
    /// Between two tokens of one stream; 0 means as fast as it goes.
    pub interval_us: u64,
}

#[must_use]
pub fn encode_plan(plan: Plan) -> Vec<u8> {
    rmp_serde::to_vec(&plan).unwrap_or_default()
}

#[must_use]
pub fn decode_plan(bytes: &[u8]) -> Option<Plan> {
    rmp_serde::from_slice(bytes).ok()
}

/// Appends an encoded token.
pub fn encode_token(index: u32, out: &mut Vec<u8>) {
    let token = Token { index, id: 4_000 + index % 40_000, at: now_ns(), text: " token" };
    // A vector takes all that is written to it.
    rmp_serde::encode::write(out, &token).unwrap_or_default();
}

/// ns of the monotonic clock.
#[must_use]
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Keeps this process, and all threads that it starts, on one core.
pub fn pin(core: usize) -> Result<(), Failure> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// One worker thread: a side has one core.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

/// CPU time of all threads of a process so far, ns.
#[must_use]
pub fn cpu_ns(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let times = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok());
    times.filter_map(|text| text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok())).sum()
}

/// Resident memory of a process, bytes.
#[must_use]
pub fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// The sending half of one stream of a carrier.
pub trait Tx: Send + 'static {
    /// False once nobody listens.
    fn send(&mut self, frame: Vec<u8>) -> impl Future<Output = bool> + Send;
}

/// The receiving half.
pub trait Rx: Send + 'static {
    fn recv(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

/// A carrier, seen from the side that opens streams and reads tokens.
pub trait Client: Clone + Send + Sync + 'static {
    type Rx: Rx;
    /// A stream of tokens.
    fn open(&self, plan: Plan) -> impl Future<Output = Result<Self::Rx, Failure>> + Send;
    /// The body comes back.
    fn call(&self, body: Vec<u8>) -> impl Future<Output = Result<Bytes, Failure>> + Send;
}

/// Sends tokens by the plan until nobody listens.
pub async fn produce(mut tx: impl Tx, plan: Plan) {
    let mut ticks = (plan.interval_us > 0).then(|| {
        let period = Duration::from_micros(plan.interval_us);
        // Spread over the period, in an order that is not the order of opening.
        let phase = period.mul_f64(f64::from(plan.stream.wrapping_mul(2_654_435_769)) / f64::from(u32::MAX));
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + phase, period);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        ticks
    });
    for index in 0.. {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let mut frame = Vec::with_capacity(40);
        encode_token(index, &mut frame);
        if !tx.send(frame).await {
            return;
        }
    }
}

/// Buckets of a histogram whose bucket widths grow with the value: 16 for each doubling, 6 % wide.
const BUCKETS: usize = 64 * 16;

/// What all consumers of one process count together.
pub struct Counts {
    tokens: AtomicU64,
    /// Sent-to-read times, in buckets.
    late: Vec<AtomicU32>,
    timed: AtomicBool,
    /// When each stream's last token came, ns; 0 for none.
    last: Vec<AtomicU64>,
    longest_gap: AtomicU64,
    watch_gaps: AtomicBool,
    pub opened: AtomicUsize,
    pub failed: AtomicUsize,
    /// The first stream does not read while this is set.
    pub stuck: AtomicBool,
    stuck_tokens: AtomicU64,
}

impl Counts {
    #[must_use]
    pub fn new(streams: u32, timed: bool) -> Arc<Self> {
        Arc::new(Self {
            tokens: AtomicU64::new(0),
            late: (0..BUCKETS).map(|_| AtomicU32::new(0)).collect(),
            timed: AtomicBool::new(timed),
            last: (0..streams).map(|_| AtomicU64::new(0)).collect(),
            longest_gap: AtomicU64::new(0),
            watch_gaps: AtomicBool::new(false),
            opened: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            stuck: AtomicBool::new(false),
            stuck_tokens: AtomicU64::new(0),
        })
    }

    /// One frame of a stream was read.
    pub fn took(&self, stream: u32, frame: &[u8]) {
        let Ok(token) = rmp_serde::from_slice::<Token<'_>>(frame) else {
            self.failed.fetch_add(1, Relaxed);
            return;
        };
        self.tokens.fetch_add(1, Relaxed);
        if !self.timed.load(Relaxed) {
            return;
        }
        let now = now_ns();
        self.late[bucket(now.saturating_sub(token.at))].fetch_add(1, Relaxed);
        if let Some(last) = self.last.get(stream as usize) {
            let before = last.swap(now, Relaxed);
            if before > 0 && self.watch_gaps.load(Relaxed) {
                self.longest_gap.fetch_max(now - before, Relaxed);
            }
        }
    }

    fn forget_times(&self) {
        self.late.iter().for_each(|count| count.store(0, Relaxed));
        self.longest_gap.store(0, Relaxed);
        self.last.iter().for_each(|last| last.store(0, Relaxed));
    }

    fn percentile(&self, share: f64) -> f64 {
        let counts: Vec<u64> = self.late.iter().map(|count| u64::from(count.load(Relaxed))).collect();
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let wanted = (counts.iter().sum::<u64>() as f64 * share) as u64;
        let mut seen = 0;
        let found = counts.iter().position(|count| {
            seen += count;
            seen > wanted
        });
        found.map_or(0.0, |at| lower_bound(at) / 1_000.0)
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(16);
    let exponent = 63 - ns.leading_zeros();
    (exponent as usize * 16 + ((ns >> (exponent - 4)) & 15) as usize).min(BUCKETS - 1)
}

#[allow(clippy::cast_precision_loss)]
fn lower_bound(bucket: usize) -> f64 {
    2f64.powi(i32::try_from(bucket / 16).unwrap_or(0)) * (1.0 + (bucket % 16) as f64 / 16.0)
}

/// Reads one stream until it ends.
pub async fn consume(mut rx: impl Rx, stream: u32, counts: Arc<Counts>) {
    while let Some(frame) = rx.recv().await {
        counts.took(stream, &frame);
        if stream == 0 {
            counts.stuck_tokens.fetch_add(1, Relaxed);
            while counts.stuck.load(Relaxed) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// What a run is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub streams: u32,
    pub interval_us: u64,
    pub warm: Duration,
    pub measure: Duration,
    /// A second measurement follows, with the first stream's reader stuck.
    pub stuck: bool,
}

/// What one side saw. Missing figures are zero.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    pub tokens_per_s: f64,
    /// CPU of both processes for one token, ns.
    pub cpu_ns: f64,
    pub source_cpu_ns: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Resident memory of both processes, bytes.
    pub resident: f64,
    /// Before any stream was open.
    pub resident_before: f64,
    /// Share of their rate that the others keep while one reader is stuck.
    pub kept: f64,
    /// Longest silence of any stream that is read, ms, in the last measurement.
    pub longest_gap_ms: f64,
    pub calls_per_s: f64,
}

struct Mark {
    at: Instant,
    tokens: u64,
    cpu: (u64, u64),
}

impl Mark {
    fn now(counts: &Counts, source: u32) -> Self {
        let tokens = counts.tokens.load(Relaxed) - counts.stuck_tokens.load(Relaxed);
        Self { at: Instant::now(), tokens, cpu: (cpu_ns(source), cpu_ns(std::process::id())) }
    }
}

/// Opens streams, reads them, and measures between two marks.
pub async fn measure_streams(client: impl Client, run: Run, source: u32) -> Result<Report, Failure> {
    let paced = run.interval_us > 0;
    let counts = Counts::new(run.streams, paced);
    let before = both_resident(source);
    let mut readers = tokio::task::JoinSet::new();
    for stream in 0..run.streams {
        let plan = Plan { stream, streams: run.streams, interval_us: run.interval_us };
        readers.spawn(read_one(client.clone(), plan, counts.clone()));
        if stream % 256 == 255 {
            wait_for(|| counts.opened.load(Relaxed) + 256 > stream as usize, "streams open").await?;
        }
    }
    wait_for(|| counts.opened.load(Relaxed) + counts.failed.load(Relaxed) == run.streams as usize, "streams open")
        .await?;
    measure(&counts, run, source, before).await
}

async fn read_one(client: impl Client, plan: Plan, counts: Arc<Counts>) {
    match client.open(plan).await {
        Ok(rx) => {
            counts.opened.fetch_add(1, Relaxed);
            consume(rx, plan.stream, counts).await;
        }
        Err(error) => {
            eprintln!("open: {error}");
            counts.failed.fetch_add(1, Relaxed);
        }
    }
}

/// Measures what `counts` sees.
pub async fn measure(counts: &Counts, run: Run, source: u32, before: f64) -> Result<Report, Failure> {
    tokio::time::sleep(run.warm).await;
    let mut report = window(counts, run, source).await;
    report.resident_before = before;
    if run.stuck {
        let alone = report.tokens_per_s;
        counts.stuck.store(true, Relaxed);
        tokio::time::sleep(Duration::from_millis(300)).await;
        report = Report { resident_before: before, ..window(counts, run, source).await };
        report.kept = report.tokens_per_s / alone;
    }
    if counts.failed.load(Relaxed) > 0 {
        return Err(format!("{} streams or tokens failed", counts.failed.load(Relaxed)).into());
    }
    Ok(report)
}

#[allow(clippy::cast_precision_loss)]
async fn window(counts: &Counts, run: Run, source: u32) -> Report {
    counts.forget_times();
    counts.watch_gaps.store(run.stuck, Relaxed);
    let from = Mark::now(counts, source);
    tokio::time::sleep(run.measure).await;
    let to = Mark::now(counts, source);
    let tokens = (to.tokens - from.tokens) as f64;
    let (of_source, of_sink) = ((to.cpu.0 - from.cpu.0) as f64, (to.cpu.1 - from.cpu.1) as f64);
    Report {
        tokens_per_s: tokens / (to.at - from.at).as_secs_f64(),
        cpu_ns: (of_source + of_sink) / tokens,
        source_cpu_ns: of_source / tokens,
        p50_us: counts.percentile(0.5),
        p99_us: counts.percentile(0.99),
        resident: both_resident(source),
        longest_gap_ms: counts.longest_gap.load(Relaxed) as f64 / 1e6,
        ..Report::default()
    }
}

#[allow(clippy::cast_precision_loss)]
#[must_use]
pub fn both_resident(source: u32) -> f64 {
    (resident(source) + resident(std::process::id())) as f64
}

/// Calls one at a time, then 64 at a time.
pub async fn measure_calls(client: impl Client, calls: u32, source: u32) -> Result<Report, Failure> {
    let body = vec![7; 64];
    for _ in 0..calls / 10 {
        client.call(body.clone()).await?;
    }
    let mut times = Vec::new();
    for _ in 0..calls {
        let start = Instant::now();
        let reply = client.call(body.clone()).await?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
        if reply != body {
            return Err("another body came back".into());
        }
    }
    times.sort_by(f64::total_cmp);
    let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or(0.0);
    let (start, cpu) = (Instant::now(), cpu_ns(source) + cpu_ns(std::process::id()));
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let (client, body) = (client.clone(), body.clone());
        callers.spawn(async move {
            for _ in 0..calls / 16 {
                client.call(body.clone()).await?;
            }
            Ok::<_, Failure>(())
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended??;
    }
    let done = f64::from(calls / 16 * 64);
    #[allow(clippy::cast_precision_loss)]
    let cpu = (cpu_ns(source) + cpu_ns(std::process::id()) - cpu) as f64;
    Ok(Report {
        p50_us: at(50),
        p99_us: at(99),
        calls_per_s: done / start.elapsed().as_secs_f64(),
        cpu_ns: cpu / done,
        ..Report::default()
    })
}

/// Waits for a state, at most 20 s.
pub async fn wait_for(holds: impl Fn() -> bool, what: &str) -> Result<(), Failure> {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > Duration::from_secs(20) {
            return Err(format!("not within 20 s: {what}").into());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// What a side is told on its command line.
#[derive(Debug, Clone)]
pub struct SideArgs {
    pub carrier: String,
    pub source: bool,
    /// Where the source listens, and its process.
    pub address: Option<std::net::SocketAddr>,
    pub pid: u32,
    pub run: Run,
    /// Calls instead of streams.
    pub calls: u32,
}

impl SideArgs {
    /// `side source|sink --carrier NAME [--address A --pid P] [--streams N --interval US --warm MS --measure MS
    /// --stuck 1] [--calls N]`
    pub fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let text = |name: &str| {
            let at = arguments.iter().position(|argument| argument == name)?;
            arguments.get(at + 1).cloned()
        };
        let number = |name: &str| text(name).map_or(Ok(0), |value| value.parse::<u64>());
        let millis = |name: &str| number(name).map(Duration::from_millis);
        Ok(Self {
            carrier: text("--carrier").unwrap_or_default(),
            source: arguments.iter().any(|argument| argument == "source"),
            address: text("--address").map(|address| address.parse()).transpose()?,
            pid: u32::try_from(number("--pid")?)?,
            run: Run {
                streams: u32::try_from(number("--streams")?)?,
                interval_us: number("--interval")?,
                warm: millis("--warm")?,
                measure: millis("--measure")?,
                stuck: number("--stuck")? > 0,
            },
            calls: u32::try_from(number("--calls")?)?,
        })
    }
}

/// What a sink does once it is connected.
pub async fn run_sink(client: impl Client, args: SideArgs) -> Result<Report, Failure> {
    if args.calls > 0 {
        return measure_calls(client, args.calls, args.pid).await;
    }
    measure_streams(client, args.run, args.pid).await
}
