//! The other process: this program again, which holds memory and serves it until its standard input ends.
//!
//! Called by the measurements of transports and of faults. If the measurement dies, its end of the pipe closes and the
//! other process ends too.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::process::{Pid, Signal, kill_process};
use starling_kv::transport::{
    Descriptor, Direction, Fabric, FabricConfig, Grant, GrantToken, HostId, Region, RegionId,
};

use crate::{Failure, loads::MEMORY};

/// What to show for a direction.
pub(crate) fn token(direction: Direction) -> GrantToken {
    GrantToken([if direction == Direction::Pull { 1 } else { 2 }; 16])
}

/// Both directions, as a table says them.
pub(crate) const DIRECTIONS: [(Direction, &str); 2] = [(Direction::Pull, "pull"), (Direction::Push, "push")];

/// A data plane of its own name.
pub(crate) fn fabric() -> Result<Fabric, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let id = HostId((u128::from(std::process::id()) << 96) | now);
    Ok(Fabric::start(FabricConfig::new(id, GrantToken([3; 16])))?)
}

/// What all memory holds at first.
pub(crate) fn pattern() -> Vec<u8> {
    let word = |at: usize| (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..MEMORY / 8).flat_map(word).collect()
}

/// Memory that is there, with something in it, known to the data plane.
pub(crate) fn memory(fabric: &Fabric) -> Result<(Region, RegionId), Failure> {
    let region = Region::shared("transfer", MEMORY)?;
    region.populate()?;
    region.write(0, &pattern()).ok_or("the memory is smaller than asked")?;
    let id = fabric.register(&region)?;
    Ok((region, id))
}

/// Grants all of a region for an hour.
pub(crate) fn grant(fabric: &Fabric, region: RegionId) -> Result<(), Failure> {
    for (direction, _) in DIRECTIONS {
        let ranges = std::iter::once(0..MEMORY as u64).collect();
        let expires = Instant::now() + Duration::from_secs(3_600);
        fabric.grants().issue(Grant { token: token(direction), direction, region, ranges, expires })?;
    }
    Ok(())
}

/// The other process's side.
#[allow(clippy::print_stdout, reason = "the way to the measuring process")]
pub(crate) fn serve() -> Result<(), Failure> {
    let fabric = fabric()?;
    let (_region, id) = memory(&fabric)?;
    grant(&fabric, id)?;
    println!("{}", serde_json::to_string(&fabric.describe(id, 0)?)?);
    for line in std::io::stdin().lines() {
        line?;
    }
    Ok(())
}

/// The measuring process's side.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    /// How to reach it.
    pub(crate) descriptor: Descriptor,
}

impl Peer {
    /// Starts it and waits until it serves.
    pub(crate) fn start() -> Result<Self, Failure> {
        let (child, line) = spawn("serve")?;
        Ok(Self { descriptor: serde_json::from_str(&line)?, child })
    }

    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Failure> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Dead already, perhaps: some measurements kill it.
        let _dead = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Starts this program with other words and reads its first line.
pub(crate) fn spawn(word: &str) -> Result<(Child, String), Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.arg(word).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no pipe")?).read_line(&mut line)?;
    if line.is_empty() {
        child.wait()?;
        return Err("the other process ended".into());
    }
    Ok((child, line))
}
