//! Shell: A peer in another process: the test binary runs itself, and both talk over pipes.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use super::super::*;

pub(super) const REGION_BYTES: usize = 8 << 20;

/// `len` bytes, each 4 KiB of which begin with a word of their own.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word = |at: u64| (at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).to_le_bytes();
    let same: Vec<u8> = (0..512).flat_map(word).collect();
    let mut bytes = same.repeat(len.div_ceil(4096));
    bytes.chunks_mut(4096).zip(0..).for_each(|(chunk, at)| chunk[..8].copy_from_slice(&word(at << 20)));
    bytes.truncate(len);
    bytes
}

pub(super) fn token(number: u8) -> GrantToken {
    GrantToken([number; 16])
}

/// A transport to test, and for UCX the lanes to test it over and whether with one-sided operations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    pub(super) kind: TransportKind,
    pub(super) lanes: Option<&'static str>,
    pub(super) one_sided: bool,
}

/// The lanes of the other process.
const LANES: &str = "STARLING_TEST_LANES";
/// Set where the other process is to use one-sided operations.
const ONE_SIDED: &str = "STARLING_TEST_ONE_SIDED";

fn config(id: u128) -> FabricConfig {
    // A host's name is its own for ever: also the second host of one test has a new one.
    static HOSTS: AtomicU32 = AtomicU32::new(0);
    let id = (id << 64) | u128::from(HOSTS.fetch_add(1, Ordering::Relaxed)) << 32 | u128::from(std::process::id());
    let transports = vec![TransportKind::Mem, TransportKind::Shm, TransportKind::Tcp];
    FabricConfig { transports, ..FabricConfig::new(HostId(id), token(255)) }
}

/// A fabric without UCX, which takes a while to start.
pub(super) fn fabric(id: u128) -> Fabric {
    Fabric::start(config(id)).expect("the fabric starts")
}

fn with_ucx(id: u128, lanes: Option<&str>, one_sided: bool) -> Fabric {
    let mut config = config(id);
    config.transports.push(TransportKind::Ucx);
    let library = std::env::var_os("STARLING_UCX_LIB").map(Into::into);
    config.ucx = UcxConfig { library, lanes: lanes.map(str::to_owned), one_sided };
    Fabric::start(config).expect("the fabric starts")
}

/// A fabric that has this way; `None`, and a line in the list of what did not run, where this machine has not.
pub(super) fn fabric_for(id: u128, way: Way) -> Option<Fabric> {
    if way.kind != TransportKind::Ucx {
        return Some(fabric(id));
    }
    let fabric = with_ucx(id, way.lanes, way.one_sided);
    let Err(reason) = fabric.ucx() else { return Some(fabric) };
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let program = std::env::current_exe().expect("own path");
    let folder = program.ancestors().nth(3).expect("a target folder").join("tmp");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let list = std::fs::File::options().create(true).append(true).open(folder.join("skipped.txt"));
    let line = format!("starling-kv {test}: no UCX: {reason}\n");
    list.and_then(|mut list| list.write_all(line.as_bytes())).expect("the list can be written");
    None
}

/// The fabric that the test wants another process to have.
fn asked_for(id: u128) -> Fabric {
    match std::env::var_os(LANES) {
        None => fabric(id),
        Some(lanes) => {
            let lanes = lanes.to_str().filter(|lanes| !lanes.is_empty());
            with_ucx(id, lanes, std::env::var_os(ONE_SIDED).is_some())
        }
    }
}

/// The child's side: reads orders from standard input until it ends.
#[test]
#[ignore = "the other process of the tests of this module"]
fn peer_process() {
    let fabric = asked_for(2);
    let region = Region::shared("peer", REGION_BYTES).expect("memory");
    region.write(0, &pattern(7, REGION_BYTES)).expect("in bounds");
    let id = fabric.register(&region).expect("registered");
    let descriptor = fabric.describe(id, 0).expect("described");
    println!("\nPEER {}", serde_json::to_string(&descriptor).expect("json"));
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        match words[0] {
            "pull" | "push" => {
                let direction = if words[0] == "pull" { Direction::Pull } else { Direction::Push };
                let expires = Instant::now() + Duration::from_millis(number(4));
                let ranges = std::iter::once(number(2)..number(3)).collect();
                let grant = Grant { token: token(number(1) as u8), direction, region: id, ranges, expires };
                println!("PEER {}", fabric.grants().issue(grant).is_ok());
            }
            "sum" => {
                let mut bytes = vec![0; number(2) as usize];
                region.read(number(1), &mut bytes).expect("in bounds");
                println!("PEER {}", page_sum(&bytes));
            }
            "revoke" => println!("PEER {}", fabric.grants().revoke(token(number(1) as u8))),
            "uses" => println!("PEER {}", fabric.grants().in_flight(token(number(1) as u8))),
            other => panic!("no order {other}"),
        }
    }
}

/// What a taker takes from: a descriptor as JSON.
const TAKE: &str = "STARLING_TEST_TAKE";

/// A third process that reads for ever from the owner it was told of, with grant 1.
#[test]
#[ignore = "the third process of the tests of this module"]
fn taker_process() {
    let descriptor = std::env::var_os(TAKE).expect("a descriptor");
    let descriptor: Descriptor = serde_json::from_str(descriptor.to_str().expect("text")).expect("json");
    let fabric = asked_for(3);
    let kind = descriptor.offers.last().expect("an offer").kind;
    let session = fabric.connect(&descriptor, kind).expect("a session");
    let local = Region::private(REGION_BYTES).expect("memory");
    let transfer = session.post(super::endless(&local, &descriptor, Direction::Pull, token(1)));
    super::running(&transfer);
    println!("\nPEER {:?}", transfer.outcome().is_none());
    println!("PEER ended: {:?}", transfer.wait());
}

/// Starts a taker and kills it while it takes.
pub(super) fn kill_a_taker(way: Way, owner: &Descriptor) {
    let offers = owner.offers.iter().filter(|offer| offer.kind == way.kind).cloned().collect();
    let owner = Descriptor { offers, ..owner.clone() };
    let mut command = this_program("taker_process", way);
    command.env(TAKE, serde_json::to_string(&owner).expect("json")).stdin(Stdio::null());
    let mut child = command.spawn().expect("the taker starts");
    let mut answers = BufReader::new(child.stdout.take().expect("piped"));
    assert_eq!(answer(&mut answers), "true", "it takes");
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
}

/// This program as another process of a test.
fn this_program(test: &str, way: Way) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(["--exact", &format!("transport::tests::peer::{test}"), "--ignored", "--nocapture"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    if way.kind == TransportKind::Ucx {
        command.env(LANES, way.lanes.unwrap_or_default());
    }
    if way.one_sided {
        command.env(ONE_SIDED, "1");
    }
    command
}

/// The parent's side.
pub(super) struct Peer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    pub(super) descriptor: Descriptor,
}

impl Peer {
    pub(super) fn start(way: Way) -> Self {
        let mut command = this_program("peer_process", way);
        let mut child = command.spawn().expect("the peer starts");
        let orders = child.stdin.take().expect("piped");
        let mut answers = BufReader::new(child.stdout.take().expect("piped"));
        let descriptor = serde_json::from_str(&answer(&mut answers)).expect("a descriptor");
        Self { child, orders, answers, descriptor }
    }

    pub(super) fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("the peer listens");
        answer(&mut self.answers)
    }

    /// Waits until nobody uses these grants: the owner learns it from a message or a closed socket, a moment later.
    pub(super) fn unused(&mut self, grants: &[u8]) {
        let give_up = Instant::now() + Duration::from_secs(20);
        while grants.iter().any(|grant| self.order(&format!("uses {grant}")) != "0") {
            assert!(Instant::now() < give_up, "the owner's count of uses stays up");
        }
    }

    pub(super) fn grant(&mut self, direction: &str, number: u8, range: std::ops::Range<usize>, lease_ms: u64) {
        let order = format!("{direction} {number} {} {} {lease_ms}", range.start, range.end);
        assert_eq!(self.order(&order), "true");
    }

    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the peer is ours");
    }

    /// Returns when it stands still.
    pub(super) fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
        let pid = rustix::process::Pid::from_child(&self.child);
        let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED)
            .expect("it is our child")
            .expect("it stopped");
        assert!(status.stopped());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }
}

fn answer(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(from.read_line(&mut line).expect("readable") > 0, "the peer ended");
        if let Some((_, answer)) = line.trim_end().split_once("PEER ") {
            return answer.to_owned();
        }
    }
}
