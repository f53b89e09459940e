//! The transports of this project, each with checksums, both ways.
//!
//! Called by `transfer ours`. A transport that this machine or the other process has not is left out, so a new one
//! appears by itself.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use starling_kv::transport::{
    Batch, Checksums, Direction, Fabric, Page, Region, RegionId, Session, TransportKind, page_sum,
};

use crate::{
    Failure,
    loads::{Chance, LOADS, Load, MEMORY, line},
    peer::{DIRECTIONS, Peer, fabric, grant, memory, pattern, token},
};

/// Bytes of a page when all of the memory is moved.
const WALK: usize = 1 << 20;

/// What one transfer moves between.
struct Ends {
    session: Session,
    /// Where pulls go.
    into: Region,
    /// Where pushes come from; nothing changes it.
    from: Region,
    remote: RegionId,
    /// What `from` holds, and the other side until the first push, in memory that no transfer touches.
    bytes: Arc<[u8]>,
}

/// Prints a line for each transport, direction and load.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
pub(crate) fn measure(only: &[String]) -> Result<(), Failure> {
    let here = fabric()?;
    let ((into, _), (from, _)) = (memory(&here)?, memory(&here)?);
    let bytes: Arc<[u8]> = pattern().into();
    for kind in here.kinds() {
        if !only.is_empty() && !only.contains(&kind.to_string()) {
            continue;
        }
        let mut chance = Chance::new(5);
        let ends = |session, remote| Ends {
            session,
            into: into.clone(),
            from: from.clone(),
            remote,
            bytes: Arc::clone(&bytes),
        };
        with_peer(&here, kind, ends, |ends| {
            for (direction, word) in DIRECTIONS {
                walk(ends, direction)?;
                for load in LOADS {
                    let took = repeat(ends, direction, load, &mut chance)?;
                    println!("{}", line(&kind.to_string(), word, load, &took));
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Runs `act` on a session with the other side: another process, or another data plane of this one for `mem`.
fn with_peer(
    here: &Fabric,
    kind: TransportKind,
    ends: impl Fn(Session, RegionId) -> Ends,
    mut act: impl FnMut(&Ends) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if kind == TransportKind::Mem {
        let there = fabric()?;
        let (_memory, remote) = memory(&there)?;
        grant(&there, remote)?;
        return act(&ends(here.connect(&there.describe(remote, 0)?, kind)?, remote));
    }
    let peer = Peer::start()?;
    if peer.descriptor.address(kind).is_none() {
        return Ok(());
    }
    act(&ends(here.connect(&peer.descriptor, kind)?, peer.descriptor.region))
}

/// Moves all of the memory once, as a pool in use has been: a mapping that is new is filled at the first touch.
fn walk(ends: &Ends, direction: Direction) -> Result<(), Failure> {
    let local = if direction == Direction::Pull { &ends.into } else { &ends.from };
    let page = |at: usize| Page { local: at as u64, remote: at as u64, len: WALK as u32 };
    let pages = (0..MEMORY).step_by(WALK).map(page).collect();
    ends.session.post(Batch::new(direction, local, ends.remote, pages, token(direction))).wait()?;
    Ok(())
}

/// The times of the transfers of one load, after one that is not counted.
fn repeat(ends: &Ends, direction: Direction, load: Load, chance: &mut Chance) -> Result<Vec<Duration>, Failure> {
    let mut took = Vec::with_capacity(load.repeats);
    for _ in 0..=load.repeats {
        took.push(once(ends, direction, chance.pages(load), load.page)?);
    }
    took.remove(0);
    Ok(took)
}

/// From the post of a batch to its end. The sums are known before, as they are for sealed blocks.
fn once(ends: &Ends, direction: Direction, places: Vec<(usize, usize)>, page: usize) -> Result<Duration, Failure> {
    let place = |(local, remote): (usize, usize)| Page { local: local as u64, remote: remote as u64, len: page as u32 };
    let pages: Vec<Page> = places.into_iter().map(place).collect();
    let (local, source): (_, fn(&Page) -> u64) = match direction {
        Direction::Pull => (&ends.into, |page| page.remote),
        Direction::Push => (&ends.from, |page| page.local),
    };
    let bytes = |at: u64| &ends.bytes[at as usize..at as usize + page];
    let checksums = Checksums::Pages(pages.iter().map(|page| page_sum(bytes(source(page)))).collect());
    let batch = Batch::new(direction, local, ends.remote, pages, token(direction)).with_checksums(checksums);
    let start = Instant::now();
    ends.session.post(batch).wait()?;
    Ok(start.elapsed())
}
