//! Shell: the data plane of one process: its host, its listeners and the transports that this machine has.
//!
//! Owned by the transfer agent; calls everything here. If it is dropped, its threads end and its peers see `PeerGone`.

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use super::{
    Transport,
    batch::{Batch, Direction, Page, RegionId},
    descriptor::{Descriptor, HostId, TransportKind, VERSION},
    error::{Refusal, TransferError},
    grant::{GrantToken, Grants},
    host::{Host, PROBE, PROBE_BYTES},
    mem::Mem,
    region::Region,
    serve,
    session::Session,
    shm::Shm,
    sockets,
    tcp::Tcp,
};

/// The longest that a probe of one transport takes.
pub const PROBE_LIMIT: Duration = Duration::from_millis(500);

/// What a data plane needs to know.
#[derive(Debug, Clone)]
pub struct FabricConfig {
    /// 128 random bits, new for each start.
    pub host: HostId,
    /// 128 random bits that open data connections.
    pub door: GrantToken,
    /// The owner's incarnation in the mesh.
    pub epoch: u64,
    /// Where to listen for data connections; `None` for no TCP (and no UCX, which is set up over it).
    pub listen: Option<SocketAddr>,
    /// The address that peers dial, when it is not the one listened on.
    pub advertise: Option<IpAddr>,
    /// The transports to use, as far as this machine has them.
    pub transports: Vec<TransportKind>,
}

impl FabricConfig {
    /// All transports, TCP on a port of 127.0.0.1 that the system chooses.
    #[must_use]
    pub fn new(host: HostId, door: GrantToken) -> Self {
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let transports = vec![TransportKind::Mem, TransportKind::Shm, TransportKind::Ucx, TransportKind::Tcp];
        Self { host, door, epoch: 0, listen, advertise: None, transports }
    }
}

/// The data plane of one process.
#[derive(Debug)]
pub struct Fabric {
    host: Arc<Host>,
    epoch: u64,
    machine: String,
    transports: Vec<Box<dyn Transport>>,
}

/// Names this boot of this machine; empty when it cannot be told.
fn machine() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl Fabric {
    /// Starts it. `Local` when it cannot listen.
    pub fn start(config: FabricConfig) -> Result<Self, TransferError> {
        let host = Host::start(config.host, config.door)?;
        let machine = machine();
        let wants = |kind| config.transports.contains(&kind);
        let mut transports: Vec<Box<dyn Transport>> = Vec::new();
        if wants(TransportKind::Mem) {
            transports.push(Box::new(Mem));
        }
        let local =
            wants(TransportKind::Shm).then(|| sockets::listen_local(&sockets::local_name(host.id))).transpose()?;
        if wants(TransportKind::Shm) {
            transports.push(Box::new(Shm::new(host.id, &machine)));
        }
        let tcp = config.listen.filter(|_| wants(TransportKind::Tcp)).map(TcpListener::bind).transpose()?;
        if let Some(listener) = &tcp {
            listener.set_nonblocking(true)?;
        }
        if wants(TransportKind::Tcp) {
            let advertised = tcp.as_ref().and_then(|listener| serve::advertised(listener, config.advertise));
            transports.push(Box::new(Tcp { advertised }));
        }
        if tcp.is_some() || local.is_some() {
            serve::start(&host, tcp, local, Arc::new(serve::NoExtra))?;
        }
        Ok(Self { host, epoch: config.epoch, machine, transports })
    }

    /// Who this is.
    #[must_use]
    pub fn host(&self) -> HostId {
        self.host.id
    }

    /// What peers may touch.
    #[must_use]
    pub fn grants(&self) -> &Arc<Grants> {
        &self.host.grants
    }

    /// The transports of this machine, best first.
    #[must_use]
    pub fn kinds(&self) -> Vec<TransportKind> {
        self.transports.iter().map(|transport| transport.kind()).collect()
    }

    /// Makes a region known to peers. Without a grant they can do nothing with it.
    pub fn register(&self, region: &Region) -> Result<RegionId, TransferError> {
        let id = self.host.register(region)?;
        self.transports.iter().try_for_each(|transport| transport.register(id, region))?;
        Ok(id)
    }

    /// What a peer needs to reach a region; `layout` is the digest of the layout of its blocks.
    pub fn describe(&self, region: RegionId, layout: u64) -> Result<Descriptor, TransferError> {
        let memory = self.host.region(region).ok_or(Refusal::NoRegion)?;
        Ok(Descriptor {
            version: VERSION,
            host: self.host.id,
            epoch: self.epoch,
            machine: self.machine.clone(),
            region,
            len: memory.len() as u64,
            layout,
            door: self.host.door,
            offers: self.transports.iter().filter_map(|transport| transport.offer(region)).collect(),
        })
    }

    /// A session over one transport. `Unsupported` when this machine has it not, `Unreachable` when the peer has it not.
    pub fn connect(&self, peer: &Descriptor, kind: TransportKind) -> Result<Session, TransferError> {
        if peer.version != VERSION {
            return Err(Refusal::Version.into());
        }
        let transport = self.transports.iter().find(|transport| transport.kind() == kind);
        transport.ok_or_else(|| TransferError::Unsupported(format!("no transport {kind} here")))?.connect(peer)
    }

    /// A session over the best transport that both sides have and that moves the probe's megabyte. Blocks, at most
    /// [`PROBE_LIMIT`] for each transport.
    pub fn choose(&self, peer: &Descriptor) -> Result<Session, TransferError> {
        let mut last = TransferError::Unreachable("no transport in common".to_owned());
        for kind in [TransportKind::Mem, TransportKind::Shm, TransportKind::Ucx, TransportKind::Tcp] {
            let possible = peer.address(kind).is_some() && self.kinds().contains(&kind);
            if !possible || (kind == TransportKind::Mem && Host::find(peer.host).is_none()) {
                continue;
            }
            match self.connect(peer, kind).and_then(|session| probe(&session, peer).map(|()| session)) {
                Ok(session) => return Ok(session),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Reads the peer's probe region once: the connection is made, and the first bandwidth is known.
fn probe(session: &Session, peer: &Descriptor) -> Result<(), TransferError> {
    let local = Region::private(PROBE_BYTES)?;
    let pages = vec![Page { local: 0, remote: 0, len: PROBE_BYTES as u32 }];
    session.post(Batch::new(Direction::Pull, &local, PROBE, pages, peer.door).within(PROBE_LIMIT)).wait().map(drop)
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.host.stop.now();
    }
}
