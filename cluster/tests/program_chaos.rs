//! Programs under fire: three nodes call one another in every way while nodes are killed and come back and actors die.
//!
//! Every call must end, with an answer or a typed error; when the fire is over, all ways work again, and what is counted
//! as open is back at zero. A process of its own, because gauges are counted per process. `STARLING_CHAOS_ROUNDS` sets
//! the number of deaths.
#![allow(clippy::unwrap_used)] // the helpers of a test are test code

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use metrics::{Counter, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use starling_cluster::{
    mesh::Mesh,
    program::{
        Actor, CallError, Endpoint, JoinConfig, Lifetime, Receiver, RemoteActor, Sender, ServedEndpoint, SpawnOptions,
        TellError, current_call, emit,
    },
    security::ClusterKey,
    stream::{Fault, FaultKind},
    supervise::Restart,
};
use tokio::{task::JoinSet, time::timeout};

/// Longest wait for any state.
const PATIENCE: Duration = Duration::from_secs(90);
/// Time allowed for each call.
const CALL_MAX: Duration = Duration::from_secs(3);
/// A call that has not ended by then hangs.
const HANGS: Duration = Duration::from_secs(30);

/// Sums of all gauges, by name.
#[derive(Clone, Default)]
struct Gauges(Arc<Mutex<BTreeMap<String, f64>>>);

struct OneGauge(Gauges, String);

impl GaugeFn for OneGauge {
    fn increment(&self, value: f64) {
        *self.0.0.lock().unwrap().entry(self.1.clone()).or_default() += value;
    }

    fn decrement(&self, value: f64) {
        self.increment(-value);
    }

    fn set(&self, _value: f64) {}
}

impl Recorder for Gauges {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(OneGauge(self.clone(), key.name().to_owned())))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// A small generator: the fire need not be random, only irregular.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// Adds up; dies of zero.
struct Sum(u64);

impl Actor for Sum {
    type Request = u64;
    type Reply = u64;

    async fn handle(&mut self, more: u64) -> Result<u64, Fault> {
        assert!(more > 0, "asked to die");
        self.0 += more;
        Ok(self.0)
    }
}

fn endpoint<Req, Resp>(mesh: &Mesh, name: &str) -> Endpoint<Req, Resp> {
    mesh.namespace("chaos").unwrap().component("c").unwrap().endpoint(name).unwrap()
}

/// A node and what it serves.
struct Running {
    mesh: Mesh,
    _served: Vec<ServedEndpoint>,
}

async fn start(key: &ClusterKey, name: &str, folder: &Path, seed: Option<&Mesh>) -> Running {
    let bind = "127.0.0.1:0".parse().unwrap();
    let mut config = JoinConfig::new(name).key(key.clone()).bind(bind).data_dir(folder.join(name));
    if let Some(seed) = seed {
        config = config.seed(seed.address().to_string());
    }
    let mesh = Mesh::join(config).await.unwrap();
    mesh.register_factory("sum", |from: u64| Ok(Sum(from)));
    let sum = mesh.spawn("sum", Restart::Permanent, || Sum(0)).await.unwrap();
    let one = endpoint::<u64, u64>(&mesh, "one").serve(move |more| {
        let sum = sum.clone();
        async move {
            assert!(current_call().is_some());
            if more % 7 == 3 {
                return Err(Fault::new(FaultKind::Overloaded, "not now"));
            }
            sum.ask(more).await
        }
    });
    let many = endpoint::<u64, u64>(&mesh, "many").serve_stream(|upto| async move {
        Ok(emit(move |out| async move {
            for n in 0..upto {
                out.send(n).await?;
                if n % 64 == 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            Ok(())
        }))
    });
    let both = endpoint::<u64, u64>(&mesh, "both").serve_duplex(both);
    Running { mesh, _served: vec![one.unwrap(), many.unwrap(), both.unwrap()] }
}

async fn both(mut numbers: Receiver<u64>, doubled: Sender<u64>) -> Result<(), Fault> {
    while let Some(number) = numbers.next().await {
        doubled.send(&(number? * 2)).await?;
    }
    Ok(())
}

/// What the calls came to.
#[derive(Default)]
struct Tally {
    answered: AtomicU64,
    failed: AtomicU64,
    kinds: Mutex<BTreeMap<String, u64>>,
}

impl Tally {
    fn note<T>(&self, what: &str, outcome: Result<T, String>) {
        match outcome {
            Ok(_) => self.answered.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                *self.kinds.lock().unwrap().entry(format!("{what}: {error}")).or_default() += 1;
                self.failed.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

/// The variant of an error, without its particulars.
fn kind(error: &CallError) -> String {
    let text = format!("{error:?}");
    text.split(['{', '"']).next().unwrap_or("").trim_end_matches([' ', '(']).to_owned()
}

async fn one(mesh: &Mesh, n: u64) -> Result<u64, CallError> {
    endpoint::<u64, u64>(mesh, "one").client().deadline(CALL_MAX).unary(&n).await
}

async fn many(mesh: &Mesh, n: u64) -> Result<(), CallError> {
    let mut answers = endpoint::<u64, u64>(mesh, "many").client().deadline(CALL_MAX).stream(&n).await?;
    let mut next = 0;
    while let Some(answer) = answers.next().await {
        assert_eq!(answer?, next, "answers come in order, none twice");
        next += 1;
        if n.is_multiple_of(5) && next == n / 2 {
            return Ok(());
        }
    }
    assert_eq!(next, n, "an end is only seen after everything");
    Ok(())
}

async fn conversation(mesh: &Mesh, n: u64) -> Result<(), CallError> {
    let mut call = endpoint::<u64, u64>(mesh, "both").client().deadline(CALL_MAX).duplex().await?;
    for number in 0..n {
        call.send(&number).await?;
        if n.is_multiple_of(3) {
            let answer = call.next().await;
            assert_eq!(answer.transpose()?, Some(number * 2));
        }
    }
    let rest = call.end().all().await?;
    assert_eq!(rest.len() as u64, if n.is_multiple_of(3) { 0 } else { n });
    Ok(())
}

/// Starts an actor somewhere, asks and tells it, and stops it or leaves that to its owner.
async fn remote(from: &Mesh, on: &Mesh, n: u64) -> Result<(), String> {
    let lifetime = if n.is_multiple_of(2) { Lifetime::Linked } else { Lifetime::Detached };
    let options = SpawnOptions { lifetime, limit: CALL_MAX, ..SpawnOptions::default() };
    let spawned = from.spawn_on_with::<Sum>(on.node(), "sum", &n, options).await;
    let sum: RemoteActor<Sum> = spawned.map_err(|error| format!("spawn {:?}", Fault::from(error).kind))?;
    for more in 1..10 {
        match sum.tell(&more) {
            Ok(()) | Err(TellError::Full | TellError::Directory(_) | TellError::Closed) => {}
            Err(error) => return Err(format!("tell {error}")),
        }
    }
    sum.client().deadline(CALL_MAX).unary(&1).await.map_err(|error| kind(&error))?;
    if n.is_multiple_of(4) {
        // Dies of it, and is started again.
        sum.client().deadline(CALL_MAX).unary(&0).await.map_err(|error| kind(&error)).ok();
    }
    sum.stop().await.map_err(|fault| format!("stop {:?}", fault.kind))?;
    Ok(())
}

type Shared = Arc<Mutex<Vec<Mesh>>>;

/// Calls without end, from one node to whoever answers.
async fn caller(number: u64, nodes: Shared, over: Arc<AtomicBool>, tally: Arc<Tally>) {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (number + 1));
    while !over.load(Ordering::Relaxed) {
        let (from, on) = {
            let nodes = nodes.lock().unwrap();
            (nodes[(number % 3) as usize].clone(), nodes[dice.roll(3) as usize].clone())
        };
        let n = 1 + dice.roll(400);
        let (what, work) = match dice.roll(4) {
            0 => ("unary", Box::pin(async { one(&from, n).await.map(drop).map_err(|error| kind(&error)) }) as Work<'_>),
            1 => ("stream", Box::pin(async { many(&from, n).await.map_err(|error| kind(&error)) }) as Work<'_>),
            2 => ("duplex", Box::pin(async { conversation(&from, n).await.map_err(|error| kind(&error)) }) as Work<'_>),
            _ => ("remote", Box::pin(remote(&from, &on, n)) as Work<'_>),
        };
        let Ok(outcome) = timeout(HANGS, work).await else { panic!("a {what} call from {from:?} hangs") };
        if outcome.is_err() {
            // A dead node refuses at once: do not make a busy loop of it.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tally.note(what, outcome);
    }
}

type Work<'a> = std::pin::Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

async fn until(what: &str, holds: impl Fn() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, poll).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"));
}

fn all_see_all(nodes: &[Running]) -> bool {
    let sees = |mesh: &Mesh, other: &Mesh| {
        let lives = mesh.snapshot().node(other.node()).map(|view| view.record.incarnation) == Some(other.incarnation());
        lives
            && endpoint::<u64, u64>(mesh, "one").list_instances().iter().filter(|view| view.is_callable()).count() == 3
    };
    nodes.iter().all(|from| nodes.iter().all(|to| sees(&from.mesh, &to.mesh)))
}

/// One death: of a node, which comes back, or of an actor.
async fn strike(dice: &mut Dice, nodes: &mut [Running], shared: &Shared, start_again: impl AsyncFn(&str) -> Running) {
    let at = 1 + dice.roll(2) as usize;
    match dice.roll(3) {
        0 | 1 => {
            let name = nodes[at].mesh.node().to_string();
            nodes[at].mesh.supervisor().stop_all().await.unwrap();
            if dice.roll(2) == 0 {
                let dead = nodes[at].mesh.node().clone();
                until("the dead node is down", || nodes[0].mesh.snapshot().node(&dead).is_none()).await;
            }
            nodes[at] = start_again(&name).await;
            shared.lock().unwrap()[at] = nodes[at].mesh.clone();
        }
        _ => {
            let path = ["handlers", "programs/sum", "links/a", "program-owners"][dice.roll(4) as usize];
            nodes[at].mesh.book().inject_panic(path).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_ends_and_nothing_is_left_open_while_nodes_and_actors_die() {
    let gauges = Gauges::default();
    metrics::set_global_recorder(gauges.clone()).ok().unwrap();
    let rounds = std::env::vars().find(|(key, _)| key == "STARLING_CHAOS_ROUNDS");
    let rounds: u32 = rounds.and_then(|(_, value)| value.parse().ok()).unwrap_or(8);
    let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
    let mut nodes = vec![start(&key, "a", folder.path(), None).await];
    for name in ["b", "c"] {
        nodes.push(start(&key, name, folder.path(), Some(&nodes[0].mesh)).await);
    }
    let first = nodes[0].mesh.clone();
    let start_again = async |name: &str| start(&key, name, folder.path(), Some(&first)).await;
    until("all see all", || all_see_all(&nodes)).await;
    let shared: Shared = Arc::new(Mutex::new(nodes.iter().map(|node| node.mesh.clone()).collect()));
    let (over, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::default()));
    let mut callers = JoinSet::new();
    for number in 0..9 {
        callers.spawn(caller(number, shared.clone(), over.clone(), tally.clone()));
    }
    let mut dice = Dice(0x5851_f42d_4c95_7f2d);
    for _ in 0..rounds {
        let before = tally.answered.load(Ordering::Relaxed);
        strike(&mut dice, &mut nodes, &shared, &start_again).await;
        until("calls are answered after a death", || tally.answered.load(Ordering::Relaxed) > before + 20).await;
    }
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = callers.join_next().await {
        ended.unwrap();
    }
    until("all see all again", || all_see_all(&nodes)).await;
    for node in &nodes {
        // Any instance, so each of them with some luck; a refusal is taken to the next one.
        for n in [1, 8, 15, 22] {
            one(&node.mesh, n).await.unwrap();
            many(&node.mesh, n).await.unwrap();
            conversation(&node.mesh, n).await.unwrap();
        }
    }
    let (answered, failed) = (&tally.answered, &tally.failed);
    println!(
        "{} answered, {} failed: {:#?}",
        answered.load(Ordering::Relaxed),
        failed.load(Ordering::Relaxed),
        tally.kinds
    );
    let open = |name: &str| gauges.0.lock().unwrap().get(name).copied().unwrap_or(0.0);
    for name in
        ["starling_streams_open", "starling_stream_credit_bytes_outstanding", "starling_program_requests_in_flight"]
    {
        until(&format!("{name} is back at zero, it was {}", open(name)), || open(name) == 0.0).await;
    }
    for node in nodes.iter().rev() {
        node.mesh.leave().await;
    }
    until("no subscription is left", || open("starling_subscriptions_open") == 0.0).await;
}
