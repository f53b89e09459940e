//! Shell: the serving side: a worker for each peer's connection, driven by the thread that serves the connection.
//!
//! Called by the serving side's threads. A peer has a worker of its own because UCX keeps what it owes to a dead peer for
//! ever: it would spin and grow. Here all of that, and whatever the peer's last writes still wanted, goes with the
//! connection. Never: touches memory by itself; the peer's operations do, inside UCX.

use std::{os::fd::BorrowedFd, rc::Rc, sync::Arc};

use ucx_sys::{Endpoint, Worker};

use super::{
    super::{
        error::{Refusal, TransferError},
        host::Serving,
        lane::{Job, Lane, Lanes},
        wait::{Bounds, readable},
    },
    Node, failed, local,
    message::{Inbox, send_pages},
    pace::{Pace, Turn},
};

/// Turns with work between two looks at the connection.
const LOOK_EVERY: usize = 16;

impl Lanes for Node {
    fn open(self: Arc<Self>, peer: &[u8]) -> Result<Box<dyn Lane>, TransferError> {
        let (worker, inbox) = (Worker::new(&self.context).map_err(local)?, Rc::<Inbox>::default());
        let taken = Rc::clone(&inbox);
        worker.on_message(move |header, bytes| taken.take(header, bytes)).map_err(local)?;
        let endpoint = match peer.is_empty() {
            true => None,
            // SAFETY: it came from a process that knows the door token, so from one that the authenticated link leads to.
            false => Some(unsafe { worker.connect(peer) }.map_err(local)?),
        };
        let address = worker.address().map_err(local)?;
        Ok(Box::new(Served { endpoint, worker, inbox, address, _node: self }))
    }
}

/// One peer's worker. It goes before the memory that it may touch, which the node keeps.
struct Served {
    /// The way to a peer that wants messages.
    endpoint: Option<Endpoint>,
    worker: Worker,
    inbox: Rc<Inbox>,
    address: Vec<u8>,
    _node: Arc<Node>,
}

impl Served {
    /// One turn; the peer says nothing meanwhile but by its end.
    fn turn(&self, job: &Job<'_>, pace: &mut Pace, steps: &mut usize) -> Result<(), TransferError> {
        match pace.turn(&self.worker, &[job.fd], job.bounds)? {
            Turn::Slept => look(job),
            Turn::Worked | Turn::Idle => step(job, steps),
        }
    }
}

fn step(job: &Job<'_>, steps: &mut usize) -> Result<(), TransferError> {
    *steps += 1;
    if steps.is_multiple_of(LOOK_EVERY) { look(job) } else { Ok(()) }
}

fn look(job: &Job<'_>) -> Result<(), TransferError> {
    job.bounds.halted()?;
    (job.alive)()?;
    if readable(job.fd) { Err(TransferError::PeerGone) } else { Ok(()) }
}

impl Lane for Served {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn until_readable(&self, fd: BorrowedFd<'_>, bounds: &Serving<'_>) -> Result<(), TransferError> {
        let (mut pace, mut worked) = (Pace::new(), 0_usize);
        loop {
            // A look costs a call of the kernel, more than a page in shared memory.
            if worked.is_multiple_of(LOOK_EVERY) {
                bounds.halted()?;
                if readable(fd) {
                    return Ok(());
                }
            }
            match pace.turn(&self.worker, &[fd], bounds)? {
                Turn::Worked => worked += 1,
                Turn::Idle | Turn::Slept => worked = 0,
            }
        }
    }

    fn send(&self, job: &Job<'_>) -> Result<(), TransferError> {
        let endpoint = self.endpoint.as_ref().ok_or(TransferError::Refused(Refusal::NotOffered))?;
        let (mut pace, mut steps) = (Pace::new(), 0);
        send_pages(endpoint, job.region, job.pages, |blocked| {
            if !blocked {
                return step(job, &mut steps);
            }
            endpoint.alive().map_err(failed)?;
            self.turn(job, &mut pace, &mut steps)
        })?;
        // The lane gives its last messages away by its turns, which `until_readable` makes.
        Ok(())
    }

    fn expect(&self, job: &Job<'_>) {
        self.inbox.expect(job.region, job.pages.to_vec(), job.checksums.clone());
    }

    fn take(&self, job: &Job<'_>) -> Result<(), TransferError> {
        let (mut pace, mut steps) = (Pace::new(), 0);
        let outcome = loop {
            match self.inbox.good() {
                Ok((_, true)) => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
            if let Err(error) = self.turn(job, &mut pace, &mut steps) {
                break Err(error);
            }
        };
        self.inbox.close();
        outcome
    }
}
