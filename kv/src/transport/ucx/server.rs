//! Shell: the serving side: a worker for each peer's connection, driven by the thread that serves the connection.
//!
//! Called by the serving side's threads. A peer has a worker of its own because UCX keeps what it owes to a dead peer for
//! ever: it would spin and grow. Here all of that, and whatever the peer's last writes still wanted, goes with the
//! connection. Never: touches memory by itself; the peer's operations do, inside UCX.

use std::{os::fd::BorrowedFd, sync::Arc};

use ucx_sys::Worker;

use super::{
    super::{
        error::TransferError,
        host::Serving,
        serve::{Lane, Lanes},
        wait::{Bounds, readable},
    },
    Node, local,
    pace::{Pace, Turn},
};

/// Turns with work between two looks at the connection.
const LOOK_EVERY: usize = 16;

impl Lanes for Node {
    fn open(self: Arc<Self>) -> Result<Box<dyn Lane>, TransferError> {
        let worker = Worker::new(&self.context).map_err(local)?;
        let address = worker.address().map_err(local)?;
        Ok(Box::new(Served { worker, address, _node: self }))
    }
}

/// One peer's worker. It goes before the memory that it may touch, which the node keeps.
struct Served {
    worker: Worker,
    address: Vec<u8>,
    _node: Arc<Node>,
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
}
