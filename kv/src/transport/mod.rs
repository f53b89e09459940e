//! Moves the bytes of KV blocks between memories: within a process, between processes, between machines.
//!
//! Called by the transfer agent and by tiers; calls the operating system. It knows pages and grants, not blocks, requests
//! or peers' names. Who moves what when is the agent's; which block is free is the pool's.
//!
//! How a transfer goes:
//!
//! 1. Each process starts a [`Fabric`], registers its KV memory as a [`Region`] and sends the [`Descriptor`] to a peer over
//!    the authenticated link.
//! 2. The owner of blocks pins them and issues a [`Grant`]: a token, a direction, byte ranges, the end of a lease. Token and
//!    offsets go to the peer over the link.
//! 3. The peer connects once ([`Fabric::choose`]) and posts a [`Batch`] of [`Page`]s to the [`Session`]. The serving side
//!    compares every offset and length with the grant, whatever the transport, before a byte moves.
//! 4. The [`Transfer`] is awaited, watched page by page, or cancelled. When it resolves, nothing touches its pages any
//!    more on this side; the owner's [`Grants::in_flight`] says so for the other.
//!
//! Threads, not a runtime: each session has one thread that sleeps while idle, and a transfer is a future of its own, so
//! the crate needs no tokio and copies never hold a runtime's worker.
//!
//! What is trusted: the door token and grant tokens are 128 random bits that travel over authenticated links only. The
//! bytes of this plane are not encrypted. A peer that maps a region (`shm`) or holds its UCX key could read more than its
//! grant names if its own code were hostile; `tcp` gives nothing beyond the grant. See each transport.

mod batch;
mod choice;
mod copy;
mod descriptor;
mod error;
mod fabric;
mod grant;
mod host;
mod lane;
mod mem;
mod proto;
mod region;
mod serve;
mod session;
mod shm;
mod sockets;
mod stream;
mod tcp;
#[cfg(test)]
mod tests;
mod transfer;
mod ucx;
mod wait;

use std::fmt;

pub use batch::{Batch, Checksums, Direction, Hold, PAGE_BYTES_MAX, PAGES_MAX, Page, RegionId, fold, page_sum};
pub use choice::{PROBE_LIMIT, Ways};
pub use descriptor::{Descriptor, HostId, Offer, TransportKind, VERSION};
pub use error::{Refusal, TransferError};
pub use fabric::{Fabric, FabricConfig};
pub use grant::{GRANTS_MAX, Grant, GrantToken, Grants};
pub use host::{PROBE, PROBE_BYTES, REGIONS_MAX};
pub use mem::Mem;
pub use region::Region;
pub use serve::CONNECTIONS;
pub use session::{QUEUE, Session};
pub use shm::Shm;
pub use tcp::Tcp;
pub use transfer::{Done, Transfer};
pub use ucx::{Ucx, UcxConfig};

/// One way to move bytes.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Which.
    fn kind(&self) -> TransportKind;

    /// Prepares a region of this host, if this way needs that. A region that this way cannot reach is no error: it is
    /// not offered.
    fn register(&self, id: RegionId, region: &Region) -> Result<(), TransferError>;

    /// How peers reach a region this way; `None` when they cannot.
    fn offer(&self, region: RegionId) -> Option<Offer>;

    /// A session with a peer. It may connect at the first batch only, so an error can also be that batch's.
    fn connect(&self, peer: &Descriptor) -> Result<Session, TransferError>;
}
