//! Replays an operation log on one index and times it; the same code for ours and for a peer's.
//!
//! One thread asks and hands over the events, as a router does; the index applies them on its own threads. The time
//! ends when the last event has been applied. Standard library alone.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use super::{
    cpu,
    heap::live_bytes,
    log::{Log, Op},
    oracle::Oracle,
};

/// An index as the replay sees it.
pub trait Subject {
    /// An event, ready to be handed over.
    type Event;
    /// A chain, ready to be asked for.
    type Query;

    /// Makes an event of a store or a removal.
    fn event(&self, log: &Log, op: &Op) -> Self::Event;
    /// Makes a question.
    fn query(&self, chain: &[u32]) -> Self::Query;
    /// Asks; the number of workers in the answer.
    fn find(&mut self, query: &Self::Query) -> usize;
    /// Asks; (worker, depth) of each worker that holds something, by worker.
    fn scores(&mut self, query: &Self::Query) -> Vec<(u32, u32)>;
    /// Hands an event over.
    fn enqueue(&mut self, event: Self::Event);
    /// Returns when all events handed over have been applied.
    fn drain(&mut self);
}

/// An operation made ready, with the number of its blocks.
enum Ready<S: Subject> {
    Ask(S::Query, usize),
    Tell(S::Event, usize),
}

fn ready<S: Subject>(subject: &S, log: &Log) -> Vec<Ready<S>> {
    let one = |op: &Op| match op {
        Op::Find { chain } => Ready::Ask(subject.query(&log.blocks[chain.clone()]), chain.len()),
        _ => Ready::Tell(subject.event(log, op), op.len()),
    };
    log.ops.iter().map(one).collect()
}

/// What a closed loop took.
#[derive(Debug, Clone, Copy)]
pub struct Closed {
    /// Block operations.
    pub blocks: usize,
    /// From the first operation to the end of the last.
    pub elapsed: Duration,
    /// CPU time of all threads in between.
    pub cpu: Duration,
    /// Until the asking thread had handed over everything.
    pub handed_over: Duration,
}

/// All operations as fast as they go; `asking` decides whether the questions are part of it.
pub fn closed<S: Subject>(subject: &mut S, log: &Log, asking: bool) -> Closed {
    let operations = ready(subject, log);
    let mut blocks = 0;
    let cpu = cpu::used();
    let began = Instant::now();
    for operation in operations {
        match operation {
            Ready::Ask(query, len) if asking => {
                blocks += len;
                black_box(subject.find(&query));
            }
            Ready::Ask(..) => {}
            Ready::Tell(event, len) => {
                blocks += len;
                subject.enqueue(event);
            }
        }
    }
    let handed_over = began.elapsed();
    subject.drain();
    let elapsed = began.elapsed();
    Closed { blocks, elapsed, cpu: cpu::used().saturating_sub(cpu), handed_over }
}

/// What a paced replay saw.
#[derive(Debug, Clone)]
pub struct Paced {
    /// Time of each lookup in ns, sorted.
    pub lookups: Vec<u64>,
    /// How far behind its time the last operation was.
    pub behind: Duration,
    /// From the last operation until all events were applied.
    pub drain: Duration,
}

/// Operations at a rate in block operations per second; each lookup is timed.
pub fn paced<S: Subject>(subject: &mut S, log: &Log, rate: f64) -> Paced {
    let operations = ready(subject, log);
    let mut lookups = Vec::with_capacity(operations.len());
    let (mut done, mut behind) = (0usize, Duration::ZERO);
    let began = Instant::now();
    for operation in operations {
        let due = Duration::from_secs_f64(done as f64 / rate);
        let mut now = began.elapsed();
        while now < due {
            std::hint::spin_loop();
            now = began.elapsed();
        }
        behind = now - due;
        match operation {
            Ready::Ask(query, len) => {
                done += len;
                let asked = Instant::now();
                black_box(subject.find(&query));
                lookups.push(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
            Ready::Tell(event, len) => {
                done += len;
                subject.enqueue(event);
            }
        }
    }
    let ended = Instant::now();
    subject.drain();
    lookups.sort_unstable();
    Paced { lookups, behind, drain: ended.elapsed() }
}

/// Every question of the log asked of the index at rest, in order: the time of each in ns, sorted, and of all together.
pub fn at_rest<S: Subject>(subject: &mut S, log: &Log) -> (Vec<u64>, Duration) {
    subject.drain();
    let chains = log.ops.iter().filter_map(|op| match op {
        Op::Find { chain } => Some(&log.blocks[chain.clone()]),
        _ => None,
    });
    let queries: Vec<S::Query> = chains.map(|chain| subject.query(chain)).collect();
    let mut lookups = Vec::with_capacity(queries.len());
    for query in &queries {
        let asked = Instant::now();
        black_box(subject.find(query));
        lookups.push(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    let began = Instant::now();
    for query in &queries {
        black_box(subject.find(query));
    }
    let all = began.elapsed();
    lookups.sort_unstable();
    (lookups, all)
}

/// Every question asked once all events before it have been applied; the time of each in ns, sorted.
pub fn in_order<S: Subject>(subject: &mut S, log: &Log) -> Vec<u64> {
    let mut lookups = Vec::new();
    for operation in ready(subject, log) {
        match operation {
            Ready::Ask(query, _) => {
                subject.drain();
                let asked = Instant::now();
                black_box(subject.find(&query));
                lookups.push(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
            Ready::Tell(event, _) => subject.enqueue(event),
        }
    }
    lookups.sort_unstable();
    lookups
}

/// Heap of an index.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Bytes per (worker, block) pair before the first removal, and how many pairs.
    pub before: (f64, usize),
    /// The same after the last operation.
    pub after: (f64, usize),
}

/// Replays while nothing but the index grows. `subject` is made when called, so that its own size counts.
pub fn memory<S: Subject>(make: impl FnOnce() -> S, log: &Log) -> Memory {
    let mut oracle = Oracle::new(log.workers);
    let first_removal = log.ops.iter().position(|op| matches!(op, Op::Remove { .. })).unwrap_or(log.ops.len());
    log.ops[..first_removal].iter().for_each(|op| oracle.apply(log, op));
    let pairs_before = oracle.memberships();
    log.ops[first_removal..].iter().for_each(|op| oracle.apply(log, op));
    let pairs_after = oracle.memberships();
    drop(oracle);
    let base = live_bytes();
    let mut subject = make();
    let mut bytes_before = 0;
    for (at, op) in log.ops.iter().enumerate() {
        if at == first_removal {
            subject.drain();
            bytes_before = live_bytes() - base;
        }
        if !matches!(op, Op::Find { .. }) {
            let event = subject.event(log, op);
            subject.enqueue(event);
            if at % 64 == 0 {
                subject.drain();
            }
        }
    }
    subject.drain();
    let bytes_after = live_bytes() - base;
    if first_removal == log.ops.len() {
        bytes_before = bytes_after;
    }
    let per = |bytes: isize, pairs: usize| (bytes as f64 / pairs.max(1) as f64, pairs);
    Memory { before: per(bytes_before, pairs_before), after: per(bytes_after, pairs_after) }
}

/// Compares with the oracle at rest, `samples` times over the log: (asked, wrong).
pub fn check<S: Subject>(subject: &mut S, log: &Log, samples: usize) -> (usize, usize) {
    let mut oracle = Oracle::new(log.workers);
    let asks = log.ops.iter().filter(|op| matches!(op, Op::Find { .. })).count();
    let every = (asks / samples.max(1)).max(1);
    let (mut seen, mut asked, mut wrong) = (0, 0, 0);
    for op in &log.ops {
        if let Op::Find { chain } = op {
            seen += 1;
            if seen % every == 0 {
                subject.drain();
                let chain = &log.blocks[chain.clone()];
                let query = subject.query(chain);
                asked += 1;
                wrong += usize::from(subject.scores(&query) != oracle.scores(chain));
            }
            continue;
        }
        oracle.apply(log, op);
        let event = subject.event(log, op);
        subject.enqueue(event);
    }
    (asked, wrong)
}

/// The value below which this share of sorted values lies.
#[must_use]
pub fn quantile(sorted: &[u64], share: f64) -> u64 {
    let at = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or(0)
}
