//! Shell: how a thread drives its worker: it spins for a moment after each event, then sleeps until the next.
//!
//! Called by the serving side's threads and by sessions. A peer answers within a microsecond while both spin, and an idle worker
//! costs nothing.

use std::{os::fd::BorrowedFd, thread, time::Instant};

use rustix::event::PollFlags;
use ucx_sys::Worker;

use super::{
    super::{
        error::TransferError,
        wait::{Bounds, SPIN, wait_any},
    },
    local,
};

/// What one turn was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The worker did something.
    Worked,
    /// There was nothing to do, this time.
    Idle,
    /// The thread slept, and something woke it.
    Slept,
}

/// One thread's memory of when there was work last.
#[derive(Debug)]
pub(super) struct Pace {
    busy: Instant,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { busy: Instant::now() }
    }

    /// Lets the worker do what there is. Sleeps when there has been nothing for a while, until the worker or one of `others`
    /// wakes it or the bounds end it.
    pub(super) fn turn(
        &mut self,
        worker: &Worker,
        others: &[BorrowedFd<'_>],
        bounds: &impl Bounds,
    ) -> Result<Turn, TransferError> {
        if worker.progress() {
            self.busy = Instant::now();
            return Ok(Turn::Worked);
        }
        if self.busy.elapsed() < SPIN {
            // Where the peer shares this core, it is the one that must run.
            thread::yield_now();
            return Ok(Turn::Idle);
        }
        if !worker.arm().map_err(local)? {
            return Ok(Turn::Idle);
        }
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(worker.event()).chain(others.iter().copied()).collect();
        wait_any(&fds, PollFlags::IN, bounds)?;
        self.busy = Instant::now();
        Ok(Turn::Slept)
    }
}
