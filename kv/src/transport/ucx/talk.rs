//! Shell: a session's side of a batch whose pages travel as messages: what is asked and answered on the control connection,
//! and the messages meanwhile.
//!
//! Called by the wire, on its thread. The owner of the region says yes, then pages travel, then the owner says how it ended:
//! as with the transport `tcp`, with messages in place of the stream. On return this side touches its pages no more; after an
//! error the caller drops the link.

use std::os::fd::AsFd;

use super::{
    super::{
        batch::{Batch, Checksums, Direction},
        error::TransferError,
        proto::{Op, Request},
        tcp::{answered, request},
        transfer::Progress,
        wait::{Bounds, hung_up, readable, send},
    },
    failed,
    message::send_pages,
    pace::{Pace, Turn},
    wire::{LOOK_EVERY, Link},
};

/// A batch on its way.
pub(super) struct Talk<'a> {
    pub(super) batch: &'a Batch,
    pub(super) progress: &'a Progress,
    pub(super) link: &'a Link,
}

/// Whether the owner said no before anything began, or something failed on the way.
pub(super) enum Failed {
    /// The link is as it was.
    Before(TransferError),
    /// The link must go.
    OnTheWay(TransferError),
}

impl Talk<'_> {
    /// Moves the batch.
    pub(super) fn run(&self) -> Result<(), Failed> {
        let local: Vec<(u64, u32)> = self.batch.pages.iter().map(|page| (page.local, page.len)).collect();
        let pull = self.batch.direction == Direction::Pull;
        let (op, theirs) = match pull {
            true => (Op::LanePull, Checksums::None),
            false => (Op::LanePush, self.batch.checksums.clone()),
        };
        if pull {
            self.link.inbox.expect(&self.batch.local, local.clone(), self.batch.checksums.clone());
        }
        let outcome = self.ask(op, theirs).map_err(Failed::Before).and_then(|()| {
            let moved = if pull { self.pull() } else { self.push(&local) };
            moved.map_err(Failed::OnTheWay)
        });
        self.link.inbox.close();
        outcome
    }

    fn ask(&self, op: Op, checksums: Checksums) -> Result<(), TransferError> {
        let ask = Request { checksums, ..request(op, self.batch, self.progress.until()) };
        send(self.link.socket.as_fd(), &ask.encode(), self.progress)?;
        answered(&self.link.socket, self.progress).map(drop)
    }

    fn pull(&self) -> Result<(), TransferError> {
        let (mut pace, mut steps, mut known, mut ended) = (Pace::new(), 0, 0, false);
        loop {
            let (good, all) = self.link.inbox.good()?;
            if good > known {
                self.progress.advance(good);
                known = good;
            }
            if all {
                // Only now does the owner's last word count: the lease ran while the bytes were read.
                return if ended { Ok(()) } else { answered(&self.link.socket, self.progress).map(drop) };
            }
            if self.turn(&mut pace, &mut steps, !ended)? && readable(self.link.socket.as_fd()) {
                // The end, whose messages are on their way, or a no.
                answered(&self.link.socket, self.progress)?;
                ended = true;
            }
        }
    }

    fn push(&self, local: &[(u64, u32)]) -> Result<(), TransferError> {
        let (mut pace, mut steps) = (Pace::new(), 0);
        let socket = self.link.socket.as_fd();
        send_pages(&self.link.endpoint, &self.batch.local, local, |blocked| {
            let slept = if blocked { self.turn(&mut pace, &mut steps, true)? } else { self.step(&mut steps)? };
            if slept && readable(socket) {
                // A word before the end is a no.
                return answered(&self.link.socket, self.progress).and(Err(TransferError::PeerGone));
            }
            Ok(())
        })?;
        loop {
            if readable(socket) {
                answered(&self.link.socket, self.progress)?;
                self.progress.advance(self.batch.pages.len());
                return Ok(());
            }
            // What UCX has not sent yet is sent by its turns.
            self.turn(&mut pace, &mut steps, true)?;
        }
    }

    /// One turn of the worker; with `listen` also a word of the owner ends a sleep. True when it is time to look at the
    /// connection.
    fn turn(&self, pace: &mut Pace, steps: &mut usize, listen: bool) -> Result<bool, TransferError> {
        let socket = [self.link.socket.as_fd()];
        let others = if listen { &socket[..] } else { &[] };
        match pace.turn(&self.link.worker, others, self.progress)? {
            Turn::Slept => self.look().map(|()| true),
            Turn::Worked | Turn::Idle => self.step(steps),
        }
    }

    fn step(&self, steps: &mut usize) -> Result<bool, TransferError> {
        *steps += 1;
        if !steps.is_multiple_of(LOOK_EVERY) {
            return Ok(false);
        }
        self.look().map(|()| true)
    }

    fn look(&self) -> Result<(), TransferError> {
        self.progress.halted()?;
        self.link.endpoint.alive().map_err(failed)?;
        if hung_up(self.link.socket.as_fd()) { Err(TransferError::PeerGone) } else { Ok(()) }
    }
}
