//! Shell: the transport over UCX, through whatever lane it finds between the two (RDMA, shared memory, CUDA, TCP): this side
//! reads or writes the peer's memory with one-sided operations, or, on one machine, pages travel as messages.
//!
//! Called by the fabric; calls `ucx-sys`. As with `shm`, a control connection carries a short message before and after
//! each batch: the owner's gate decides, its grant counts a use, and its death or its freeze is seen at once, which UCX
//! alone would show after seconds or never. The keys travel in the descriptor, over the authenticated link and nowhere
//! else; both sides have a worker for each connection, so what one peer leaves behind ends with it.
//!
//! **What is trusted.** UCX has no authentication: who holds a region's key can reach all of the region, and a process
//! that can talk to a worker can make it write anywhere in its process. Lanes over TCP are therefore off unless
//! [`UcxConfig::lanes`] asks for them: any machine of the network can open them, and UCX (1.13 and 1.22) ends the owner's
//! process when a peer resets one in the middle of a read. The transport `tcp` has neither fault.
//! Never: sends a key to somebody who did not get the descriptor; keeps an endpoint on which something went wrong.

mod message;
mod offer;
mod pace;
mod plan;
mod server;
mod talk;
#[cfg(test)]
mod tests;
mod wire;

use std::{
    fmt,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ucx_sys::{Context, Fault, Library, Memory};

use self::{
    offer::{Reach, Window},
    wire::UcxWire,
};
use super::{
    Transport,
    batch::RegionId,
    descriptor::{Descriptor, Offer, TransportKind},
    error::TransferError,
    host::{Host, PROBE, PROBE_BYTES},
    lane::Lanes,
    region::Region,
    session::Session,
};

/// The lanes unless somebody chose: all but TCP, and but the kernel's copies between processes, which cost more than UCX's
/// own shared memory.
const LANES: &str = "^tcp,cma";

/// Bytes of a piece of UCX's shared memory: a message of [`message::MESSAGE_BYTES`] with UCX's headers. Its own 8 KiB would
/// cut a page of 16 KiB in three.
const PIECE_BYTES: &str = "16640";

/// Operations of one batch under way at most.
const WINDOW: usize = 64;

/// UCX's statuses that say something of this side: no memory, wrong arguments, not implemented, not supported. All others
/// are ways in which a peer that dies shows.
const HERE: [i8; 4] = [-4, -5, -8, -22];

/// Which UCX to use, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UcxConfig {
    /// The file `libucp.so.0` with its parts beside it; `None` for the system's.
    pub library: Option<PathBuf>,
    /// UCX's list of lanes, written as in its variable `UCX_TLS`, which is not read; `None` for all but TCP.
    pub lanes: Option<String>,
    /// Use one-sided operations with a peer on this machine too, as with any other, for whom has a device for that.
    pub one_sided: bool,
}

/// Reaches hosts that run UCX too.
pub struct Ucx {
    node: Arc<Node>,
    control: SocketAddr,
    /// This boot of this machine if its processes are sent messages; else empty.
    machine: String,
}

/// What sessions share.
struct Node {
    known: Mutex<Vec<Known>>,
    context: Arc<Context>,
}

/// Memory that UCX knows; the registration goes before the mapping.
struct Known {
    id: RegionId,
    memory: Arc<Memory>,
    region: Region,
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ucx({}, {})", self.version(), self.control)
    }
}

/// What UCX says no to here, before any peer is involved.
fn local(fault: Fault) -> TransferError {
    TransferError::Local(format!("UCX: {fault}"))
}

/// What an operation's failure is to the batch.
fn failed(fault: Fault) -> TransferError {
    if HERE.contains(&fault.code) { local(fault) } else { TransferError::PeerGone }
}

/// UCX's options, by the names of its variables without `UCX_`. Without the second no lane over shared memory takes an
/// endpoint whose peer may fail.
fn options(config: &UcxConfig) -> [(&'static str, &str); 3] {
    [("TLS", config.lanes.as_deref().unwrap_or(LANES)), ("MM_ERROR_HANDLING", "y"), ("MM_SEG_SIZE", PIECE_BYTES)]
}

impl Ucx {
    /// Loads UCX. `Unsupported` says why there is none; peers find its control connection at `control`; `machine` names
    /// this boot of this machine.
    pub(crate) fn start(
        host: &Arc<Host>,
        config: &UcxConfig,
        control: SocketAddr,
        machine: &str,
    ) -> Result<Self, TransferError> {
        let quiet = std::env::var_os("UCX_LOG_LEVEL").is_none();
        let library = Library::load(config.library.as_deref(), quiet);
        let library = library.map_err(|error| TransferError::Unsupported(error.to_string()))?;
        let context = Context::open(&library, &options(config)).map_err(local)?;
        let machine = if config.one_sided { String::new() } else { machine.to_owned() };
        let ucx = Self { node: Arc::new(Node { known: Mutex::default(), context }), control, machine };
        if let Some(probe) = host.region(PROBE) {
            ucx.register(PROBE, &probe)?;
        }
        Ok(ucx)
    }

    /// The library's version.
    pub(crate) fn version(&self) -> String {
        self.node.context.library().version().to_string()
    }

    /// What peers' connections open their ways with.
    pub(crate) fn lanes(&self) -> Arc<dyn Lanes> {
        Arc::clone(&self.node) as Arc<dyn Lanes>
    }
}

impl Node {
    fn known(&self) -> MutexGuard<'_, Vec<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The registration of a region, if it has one. Without it UCX registers by itself where a lane needs that.
    fn memory(&self, region: &Region) -> Option<Arc<Memory>> {
        self.known().iter().find(|known| known.region.same(region)).map(|known| Arc::clone(&known.memory))
    }

    /// How a peer reaches a region.
    fn window(&self, id: RegionId) -> Option<Window> {
        let known = self.known();
        let Known { memory, region, .. } = known.iter().find(|known| known.id == id)?;
        Some(Window { base: region.base() as u64, key: memory.key().ok()? })
    }
}

impl Transport for Ucx {
    fn kind(&self) -> TransportKind {
        TransportKind::Ucx
    }

    fn register(&self, id: RegionId, region: &Region) -> Result<(), TransferError> {
        // SAFETY: `Known` keeps the mapping until the registration is dropped, and each worker holds the node, which keeps
        // both.
        let memory = unsafe { self.node.context.register(region.base(), region.len()) }.map_err(local)?;
        self.node.known().push(Known { id, memory: Arc::new(memory), region: region.clone() });
        Ok(())
    }

    fn offer(&self, region: RegionId) -> Option<Offer> {
        let (window, probe) = (self.node.window(region)?, self.node.window(PROBE)?);
        let reach = Reach { control: self.control, window, probe };
        Some(Offer { kind: TransportKind::Ucx, address: reach.to_string() })
    }

    fn connect(&self, peer: &Descriptor) -> Result<Session, TransferError> {
        let reach = peer.address(TransportKind::Ucx).and_then(|address| address.parse::<Reach>().ok());
        let reach = reach.ok_or_else(|| TransferError::Unreachable("the peer offers no UCX".to_owned()))?;
        let windows = [(peer.region, peer.len, reach.window), (PROBE, PROBE_BYTES as u64, reach.probe)];
        let (node, control, door) = (Arc::clone(&self.node), reach.control, peer.door);
        let messages = !self.machine.is_empty() && peer.machine == self.machine;
        Session::start_on(TransportKind::Ucx, peer.host, move || UcxWire::new(node, (control, door), windows, messages))
    }
}
