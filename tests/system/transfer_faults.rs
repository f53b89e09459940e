//! Either side of a transfer of KV blocks is killed, stopped or cut off at a moment that a seed chooses.
//!
//! Three real processes: a gateway, a worker that computes prompts, a worker that answers. The simulated engine's answers
//! depend on the bytes of its KV memory, so a wrong block is a wrong word. The moments are spread over a whole split
//! request: before its ticket, while it is opened, computed for, granted, pulled and completed, and after it.
//! `STARLING_TRANSFER_FAULTS=500` runs so many of each kind of network, `STARLING_TRANSFER_SEED` begins elsewhere.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{
    harness::{Cluster, Node, PATIENCE, ask_long, post, until},
    net::{figures::bar, lab::Lab},
};

/// What is zero on every process when nothing runs.
const AT_REST: [&str; 6] = [
    "starling_transfer_tickets_open",
    "starling_worker_kv_blocks_pinned",
    "starling_worker_sequences_running",
    "starling_worker_sequences_waiting",
    "starling_router_reservations",
    "starling_gateway_requests_in_flight",
];
/// A ticket's lease, the time between two looks at it, and what a busy machine adds.
const LEASE: Duration = Duration::from_secs(5);
/// Longest wait for the answer of a disturbed request.
const ANSWER: Duration = Duration::from_secs(30);
const WORKERS: [(&str, &str); 2] = [("giver", "prefill"), ("taker", "decode")];
/// Small steps, so that computing a prompt takes a while.
const SLOW: [&str; 4] = ["--workers", "1", "--batch-tokens-max", "64"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Killed,
    Stopped,
    Cut,
}

/// Where the processes live: on one machine, or each on a network address of its own.
enum Net {
    Near(Cluster),
    Far(Lab),
}

impl Net {
    fn cluster(&self) -> &Cluster {
        match self {
            Self::Near(cluster) => cluster,
            Self::Far(lab) => &lab.cluster,
        }
    }

    async fn start(&self, place: usize, name: &str, seed: Option<&Node>, args: &[&str]) -> Node {
        match self {
            Self::Far(lab) => lab.start(place, name, if seed.is_some() { &[0] } else { &[] }, args).await,
            Self::Near(cluster) => {
                let http = ["--http", "127.0.0.1:0"];
                let verb = match seed {
                    None => vec!["up", "--bind", "127.0.0.1:0"],
                    Some(seed) => vec!["join", &seed.address],
                };
                cluster.launch(name, &[&verb[..], &http].concat(), args).ready().await
            }
        }
    }
}

struct World {
    net: Net,
    gateway: Node,
    workers: [Node; 2],
    /// A cluster of its own, for the answer that is right.
    reference: Node,
    asked: u64,
    /// How long an undisturbed split request takes.
    whole: Duration,
}

/// One number after another, the same for the same seed.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[expect(clippy::disallowed_methods, reason = "the length of the loop is given by whoever runs it")]
fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

async fn start_worker(net: &Net, which: usize, gateway: &Node) -> Node {
    let (name, role) = WORKERS[which];
    let args = ["--role", "worker", "--worker-role", role];
    net.start(which + 1, name, Some(gateway), &[&args[..], &SLOW].concat()).await
}

impl World {
    async fn new(net: Net) -> Self {
        let gateway = net.start(0, "gateway", None, &["--role", "router,gateway"]).await;
        let workers = [start_worker(&net, 0, &gateway).await, start_worker(&net, 1, &gateway).await];
        let reference = net.cluster().up("reference", &SLOW).await;
        let mut world = Self { net, gateway, workers, reference, asked: 0, whole: Duration::from_secs(1) };
        world.splits().await;
        let body = world.question();
        let begun = Instant::now();
        let (status, answer) = world.gateway.chat(&body).await;
        assert_eq!(status, 200, "{answer}");
        world.whole = begun.elapsed();
        eprintln!("a split request takes {:?}", world.whole);
        world
    }

    /// A long prompt that no other one begins like.
    fn question(&mut self) -> Value {
        self.asked += 1;
        let at = self.asked;
        let words = (0..160).map(|word| format!("stone {at} beside {} and water", (word * word + at) % 97));
        ask_long(&self.reference.model, &format!("{at}: {}", words.collect::<Vec<_>>().join(", ")), 12)
    }

    /// Waits until requests are split again.
    async fn splits(&mut self) {
        let begun = Instant::now();
        loop {
            let split = "kind=\"split\",outcome=\"complete\"";
            let before = self.workers[1].metric("starling_worker_sourced_total", split).await;
            let question = self.question();
            let first = self.gateway.chat(&question).await;
            // Just after a fault the gateway may know of no worker yet.
            let after = self.workers[1].metric("starling_worker_sourced_total", split).await;
            if first.0 == 200 && after > before {
                return;
            }
            if begun.elapsed() >= 2 * PATIENCE {
                let rows = self.net.cluster().rows("instances", &self.gateway).await;
                panic!("no request is split: {first:?}\n{rows}\n{}", self.gateway.tail());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn inject(&self, fault: Fault, which: usize) {
        match (fault, &self.net) {
            (Fault::Killed, _) => self.workers[which].signal("KILL").await,
            (Fault::Stopped, _) => self.workers[which].signal("STOP").await,
            (Fault::Cut, Net::Far(lab)) => lab.split(&[which + 1], &[0, 2 - which]),
            (Fault::Cut, Net::Near(_)) => unreachable!("one machine has no network to cut"),
        }
    }

    async fn undo(&mut self, fault: Fault, which: usize) {
        match (fault, &self.net) {
            (Fault::Killed, net) => {
                self.workers[which].child.wait().await.unwrap();
                self.workers[which] = start_worker(net, which, &self.gateway).await;
            }
            (Fault::Stopped, _) => self.workers[which].signal("CONT").await,
            (Fault::Cut, Net::Far(lab)) => lab.heal(),
            (Fault::Cut, Net::Near(_)) => {}
        }
    }

    /// How long until nothing is held at a process.
    async fn at_rest(&self, node: &Node) -> Duration {
        let zero = async || {
            for name in AT_REST {
                if node.metric(name, "").await != 0.0 {
                    return false;
                }
            }
            true
        };
        until(&format!("{} holds nothing", node.name), LEASE + PATIENCE, zero).await
    }

    /// One disturbed request. How long after its answer the others held something, and the disturbed one after its return.
    #[expect(
        clippy::disallowed_methods,
        reason = "the answer is read while its worker is disturbed, and awaited below"
    )]
    async fn disturb(&mut self, fault: Fault, which: usize, after: Duration) -> (Duration, Duration) {
        let body = self.question();
        let (status, right) = self.reference.chat(&body).await;
        assert_eq!(status, 200, "{right}");
        let url = self.gateway.url("/v1/chat/completions");
        let answer = tokio::spawn(async move { post(&url, &body).await });
        // The moment is the test: nothing can be waited for instead.
        tokio::time::sleep(after).await;
        self.inject(fault, which).await;
        let answered = tokio::time::timeout(ANSWER, answer).await;
        let (status, answer) = answered.unwrap_or_else(|_| panic!("no answer\n{}", self.gateway.tail())).unwrap();
        assert_eq!(status, 200, "{answer}\n{}", self.gateway.tail());
        let text = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
        assert_eq!(text(&answer), text(&right), "another answer\n{}", self.gateway.tail());
        let other = self.at_rest(&self.workers[1 - which]).await.max(self.at_rest(&self.gateway).await);
        self.undo(fault, which).await;
        let own = self.at_rest(&self.workers[which]).await;
        for node in self.workers.iter_mut().chain([&mut self.gateway]) {
            assert!(node.child.try_wait().unwrap().is_none(), "{} ended by itself\n{}", node.name, node.tail());
        }
        (other, own)
    }
}

/// Runs of one kind of network; in each, one of `faults` meets one side at one moment.
async fn faults(net: Net, kinds: &[Fault], usual: u64) {
    let mut world = World::new(net).await;
    let (runs, first) = (number("STARLING_TRANSFER_FAULTS", usual), number("STARLING_TRANSFER_SEED", 1));
    let (mut slowest, mut counts) = ([Duration::ZERO; 2], std::collections::BTreeMap::<String, u32>::new());
    for seed in first..first + runs {
        let mut state = seed;
        let which = (seed % 2) as usize;
        let fault = kinds[(seed / 2) as usize % kinds.len()];
        let after = world.whole.mul_f64(1.1 * (next(&mut state) % 1_000) as f64 / 1_000.0);
        eprintln!("seed {seed}: the {} is {fault:?} after {after:?}", WORKERS[which].0);
        let (other, own) = world.disturb(fault, which, after).await;
        slowest = [slowest[0].max(other), slowest[1].max(own)];
        *counts.entry(format!("{} {fault:?}", WORKERS[which].0)).or_default() += 1;
        world.splits().await;
    }
    eprintln!("{runs} runs: {counts:?}; slowest to rest: others {:?}, disturbed {:?}", slowest[0], slowest[1]);
    bar("transfer faults: others hold something after the answer, s", slowest[0].as_secs_f64(), LEASE.as_secs_f64());
    bar("transfer faults: the disturbed hold something after, s", slowest[1].as_secs_f64(), LEASE.as_secs_f64());
}

#[tokio::test(flavor = "multi_thread")]
async fn xfr_06_killed_and_stopped_at_any_moment_of_a_transfer_leaves_nothing_behind() {
    let net = Net::Near(Cluster::new().await);
    faults(net, &[Fault::Killed, Fault::Stopped], 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn xfr_06_killed_stopped_and_cut_off_at_any_moment_of_a_transfer_leaves_nothing_behind() {
    let Some(lab) = Lab::new(3).await else { return };
    faults(Net::Far(lab), &[Fault::Cut, Fault::Stopped, Fault::Killed], 6).await;
}
