//! What the serving side wants of a transport that works inside this process, for a peer: UCX.
//!
//! Called by the serving side; implemented by the transport. Never: touches a page before the gate said yes.

use std::{os::fd::BorrowedFd, sync::Arc};

use super::{batch::Checksums, error::TransferError, host::Serving, region::Region, stream::PageList};

/// What makes one-sided operations and messages possible on a connection.
pub(crate) trait Lanes: Send + Sync + 'static {
    /// An end for one peer, to be driven by the thread that asked for it; `peer` is the peer's address, empty for one that
    /// wants no messages.
    fn open(self: Arc<Self>, peer: &[u8]) -> Result<Box<dyn Lane>, TransferError>;
}

/// Pages that travel as messages.
pub(crate) struct Job<'a> {
    pub(crate) region: &'a Region,
    pub(crate) pages: PageList<'a>,
    /// What they must hash to, where they arrive.
    pub(crate) checksums: &'a Checksums,
    /// The connection: whatever comes on it meanwhile is the peer's end.
    pub(crate) fd: BorrowedFd<'a>,
    pub(crate) bounds: &'a Serving<'a>,
    /// Whether the lease still runs.
    pub(crate) alive: &'a dyn Fn() -> Result<(), TransferError>,
}

/// One peer's way into this process. When it is dropped, nothing that the peer asked for happens any more.
pub(crate) trait Lane {
    /// Where the peer's operations are to go.
    fn address(&self) -> &[u8];

    /// Lets the peer's operations happen until a message has come on the connection.
    fn until_readable(&self, fd: BorrowedFd<'_>, bounds: &Serving<'_>) -> Result<(), TransferError>;

    /// Sends pages. On return their memory is not read any more.
    fn send(&self, job: &Job<'_>) -> Result<(), TransferError>;

    /// Takes these pages from now on.
    fn expect(&self, job: &Job<'_>);

    /// Waits until all that is expected is in place and good. On return nothing is written any more.
    fn take(&self, job: &Job<'_>) -> Result<(), TransferError>;
}
