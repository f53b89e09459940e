//! How soon a peer that was killed or stopped is told of, and what an idle data plane costs.
//!
//! Called by `transfer faults` and `transfer idle`.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::json;
use starling_kv::transport::{Batch, Direction, Fabric, Page, Region, Session, TransferError, TransportKind};

use crate::{
    Failure,
    peer::{DIRECTIONS, Peer, fabric, memory, token},
};

/// What a transfer may take whose peer is stopped.
const DEADLINE: Duration = Duration::from_millis(500);
/// Bytes of a page of a transfer that is to be disturbed.
const PAGE: usize = 4 << 20;

/// Prints a line for each transport, direction and fault.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
pub(crate) fn measure(runs: usize) -> Result<(), Failure> {
    let here = fabric()?;
    let (local, _) = memory(&here)?;
    for kind in here.kinds().into_iter().filter(|kind| *kind != TransportKind::Mem) {
        for (direction, word) in DIRECTIONS {
            for (fault, name) in [(Signal::KILL, "killed"), (Signal::STOP, "stopped")] {
                let mut ms = Vec::new();
                let mut outcomes = Vec::new();
                for _ in 0..runs {
                    let Some((took, outcome)) = disturb(&here, &local, (kind, direction), fault)? else { break };
                    ms.push(took.as_secs_f64() * 1e3);
                    outcomes.push(outcome);
                }
                outcomes.sort();
                outcomes.dedup();
                if !ms.is_empty() {
                    let way = kind.to_string();
                    println!(
                        "{}",
                        json!({"way": way, "direction": word, "fault": name, "ms": ms, "outcomes": outcomes})
                    );
                }
            }
        }
    }
    Ok(())
}

/// Lets time pass.
#[allow(clippy::disallowed_methods, reason = "a measurement over a time; nothing says when a push is under way")]
fn pass(time: Duration) {
    thread::sleep(time);
}

/// Several GiB, pages over and over.
fn long(local: &Region, peer: &Peer, direction: Direction) -> Batch {
    let pages = vec![Page { local: 0, remote: 0, len: PAGE as u32 }; 8_000];
    Batch::new(direction, local, peer.descriptor.region, pages, token(direction))
}

/// Waits until a transfer moves bytes.
fn moving(session: &Session, batch: Batch) -> starling_kv::transport::Transfer {
    let pull = batch.direction == Direction::Pull;
    let transfer = session.post(batch);
    let until = Instant::now() + Duration::from_secs(10);
    while pull && transfer.pages_done() == 0 && transfer.outcome().is_none() && Instant::now() < until {
        thread::yield_now();
    }
    if !pull {
        // A push says nothing before its end.
        pass(Duration::from_millis(50));
    }
    transfer
}

/// One transfer whose peer meets the fault: how long after the signal (killed) or after its own deadline (stopped) it
/// ended, and how. `None` when the peer has not this transport.
fn disturb(
    here: &Fabric,
    local: &Region,
    (kind, direction): (TransportKind, Direction),
    fault: Signal,
) -> Result<Option<(Duration, String)>, Failure> {
    let peer = Peer::start()?;
    if peer.descriptor.address(kind).is_none() {
        return Ok(None);
    }
    let session = here.connect(&peer.descriptor, kind)?;
    let stopped = fault == Signal::STOP;
    let batch = long(local, &peer, direction).within(if stopped { DEADLINE } else { Duration::from_secs(60) });
    let posted = Instant::now();
    let transfer = moving(&session, batch);
    peer.signal(fault)?;
    let since = if stopped { posted + DEADLINE } else { Instant::now() };
    let outcome = match transfer.wait() {
        Ok(_) => "done before the fault".to_owned(),
        Err(TransferError::PeerGone) => "the peer is gone".to_owned(),
        Err(error) => error.to_string(),
    };
    Ok(Some((since.elapsed(), outcome)))
}

/// Prints the CPU that both ends of an idle session use, as shares of one core.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
pub(crate) fn idle(seconds: u64) -> Result<(), Failure> {
    let here = fabric()?;
    let (local, _) = memory(&here)?;
    for kind in here.kinds().into_iter().filter(|kind| *kind != TransportKind::Mem) {
        let peer = Peer::start()?;
        if peer.descriptor.address(kind).is_none() {
            continue;
        }
        let session = here.connect(&peer.descriptor, kind)?;
        let page = vec![Page { local: 0, remote: 0, len: PAGE as u32 }];
        session
            .post(Batch::new(Direction::Pull, &local, peer.descriptor.region, page, token(Direction::Pull)))
            .wait()?;
        let own = std::process::id();
        pass(Duration::from_millis(500));
        let before = (busy(own)?, busy(peer.id())?);
        pass(Duration::from_secs(seconds));
        let after = (busy(own)?, busy(peer.id())?);
        let share = |before: u64, after: u64| (after - before) as f64 / (seconds as f64 * 1e9);
        let (ours, theirs) = (share(before.0, after.0), share(before.1, after.1));
        println!("{}", json!({"way": kind.to_string(), "idle": {"initiator": ours, "owner": theirs}}));
    }
    Ok(())
}

/// CPU time of all threads of a process that live, ns.
fn busy(process: u32) -> Result<u64, Failure> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        sum += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(sum)
}
