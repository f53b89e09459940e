//! What a host tells a peer so that the peer can reach its memory.
//!
//! Called at a link's handshake: it travels over the authenticated link and nowhere else, because its door token opens
//! data connections and its UCX keys open memory. Pure. Bounds: about a kilobyte.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

use super::{batch::RegionId, grant::GrantToken};

/// Version of the data plane's wire; sides of different versions refuse each other.
pub const VERSION: u16 = 2;

/// One data plane in one process, from its start to its end: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostId(pub u128);

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({:032x})", self.0)
    }
}

/// The ways in which bytes can move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// Both sides are one process.
    Mem,
    /// Both sides map one memory.
    Shm,
    /// One-sided operations of UCX.
    Ucx,
    /// Sockets.
    Tcp,
    /// Device memory.
    Cuda,
    /// Something that a later version knows.
    #[serde(other)]
    Unknown,
}

impl TransportKind {
    /// Its name in configuration, labels and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mem => "mem",
            Self::Shm => "shm",
            Self::Ucx => "ucx",
            Self::Tcp => "tcp",
            Self::Cuda => "cuda",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One way to reach a region, and its address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The way.
    pub kind: TransportKind,
    /// What this way calls an address: a socket address for `tcp`, a name for `shm`, empty for `mem`,
    /// and for `ucx` all that its peers need, keys included.
    pub address: String,
}

/// How to reach one region of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// [`VERSION`] of its maker.
    pub version: u16,
    /// Its maker.
    pub host: HostId,
    /// Incarnation of the owner, as the mesh counts it.
    pub epoch: u64,
    /// The machine's boot, so that `shm` is tried only where it can work.
    pub machine: String,
    /// The region.
    pub region: RegionId,
    /// Its bytes.
    pub len: u64,
    /// Digest of the layout of the blocks in it ([`crate::layout::KvLayout::digest`]).
    pub layout: u64,
    /// Opens data connections; gives a right to the probe's bytes only.
    pub door: GrantToken,
    /// The ways, best first.
    pub offers: Vec<Offer>,
}

impl Descriptor {
    /// The address for one way.
    #[must_use]
    pub fn address(&self, kind: TransportKind) -> Option<&str> {
        self.offers.iter().find(|offer| offer.kind == kind).map(|offer| offer.address.as_str())
    }

    /// The socket address for one way, if it has one that can be read.
    pub(crate) fn socket(&self, kind: TransportKind) -> Option<SocketAddr> {
        self.address(kind)?.parse().ok()
    }
}
