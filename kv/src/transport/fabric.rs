//! Shell: the data plane of one process: its host, its listeners and the transports that this machine has.
//!
//! Owned by the transfer agent; calls everything here. If it is dropped, its threads end and its peers see `PeerGone`.

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    sync::Arc,
};

use super::{
    Transport,
    batch::RegionId,
    choice,
    descriptor::{Descriptor, HostId, TransportKind, VERSION},
    error::{Refusal, TransferError},
    grant::{GrantToken, Grants},
    host::Host,
    mem::Mem,
    region::Region,
    serve,
    session::Session,
    shm::Shm,
    sockets,
    tcp::Tcp,
    ucx::{Ucx, UcxConfig},
};

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
    /// Which UCX, if `transports` names it.
    pub ucx: UcxConfig,
}

impl FabricConfig {
    /// All transports, TCP on a port of 127.0.0.1 that the system chooses.
    #[must_use]
    pub fn new(host: HostId, door: GrantToken) -> Self {
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let transports = vec![TransportKind::Mem, TransportKind::Shm, TransportKind::Ucx, TransportKind::Tcp];
        Self { host, door, epoch: 0, listen, advertise: None, transports, ucx: UcxConfig::default() }
    }
}

/// The data plane of one process.
#[derive(Debug)]
pub struct Fabric {
    host: Arc<Host>,
    epoch: u64,
    machine: String,
    transports: Vec<Box<dyn Transport>>,
    ucx: Result<String, String>,
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
        let dialled = wants(TransportKind::Tcp) || wants(TransportKind::Ucx);
        let tcp = config.listen.filter(|_| dialled).map(TcpListener::bind).transpose()?;
        if let Some(listener) = &tcp {
            listener.set_nonblocking(true)?;
        }
        let advertised = tcp.as_ref().and_then(|listener| serve::advertised(listener, config.advertise));
        let (mut lanes, mut ucx) = (None, Err("not asked for".to_owned()));
        if let Some(control) = advertised.filter(|_| wants(TransportKind::Ucx)) {
            ucx = match Ucx::start(&host, &config.ucx, control, &machine) {
                Ok(started) => {
                    lanes = Some(started.lanes());
                    let version = started.version();
                    transports.push(Box::new(started));
                    Ok(version)
                }
                Err(error) => Err(error.to_string()),
            };
        }
        if wants(TransportKind::Tcp) {
            transports.push(Box::new(Tcp { advertised }));
        }
        if tcp.is_some() || local.is_some() {
            serve::start(&host, tcp, local, lanes)?;
        }
        Ok(Self { host, epoch: config.epoch, machine, transports, ucx })
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

    /// The version of the UCX in use, or in one line why there is none.
    pub fn ucx(&self) -> Result<&str, &str> {
        self.ucx.as_deref().map_err(String::as_str)
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

    /// A session over the fastest of the transports that both sides have, measured now. Blocks, at most
    /// [`super::PROBE_LIMIT`] for each transport.
    pub fn choose(&self, peer: &Descriptor) -> Result<Session, TransferError> {
        choice::choose(self, peer)
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.host.stop.now();
    }
}
