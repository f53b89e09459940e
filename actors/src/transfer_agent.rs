//! Moves KV blocks between this node's workers and those of others: tickets, transfers, leases.
//!
//! Parent: `workers` supervisor. Children: none; the streams of tickets and the transfers belong to the lives of workers.
//! Mailbox: its own sweep, a few times a second. Tickets are taken and blocks granted on the streams' own tasks, under
//! locks that are held for microseconds ([`face`]).
//! Owns: the node's data plane (regions, grants, sessions), what it learned of bandwidth, the sweep of all tickets.
//! Never: touches a block that no ticket covers; what may happen to a ticket is decided in [`crate::transfer`].
//! If it dies: transfers under way break and their requests compute by themselves; tickets end with their streams or by
//! their lease; the next life starts a new data plane, to which peers connect anew.

mod face;
mod flight;
mod give;
mod hold;
mod live;
mod pull;
mod raise;
mod reorder;
#[cfg(test)]
mod tests;
mod wire;

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_cluster::{mesh::Mesh, supervise::Handle};
use starling_engine::backend::KvMemory;
use starling_kv::transport::{
    Descriptor, Fabric, FabricConfig, GrantToken, HostId, Region, RegionId, Session, TransferError, TransportKind, Ways,
};

pub(crate) use face::{KvFace, Place};
pub(crate) use hold::KvDoor;
pub(crate) use pull::{Heard, Pull, pull};

use crate::{
    seat::{Seat, Seated},
    worker::WorkerShared,
};

/// How often leases are looked at.
const SWEEP: Duration = Duration::from_millis(100);

/// Sessions kept; beyond it all are made anew.
const SESSIONS_MAX: usize = 1_024;

/// Bytes per second taken for granted before any transfer was seen: a plain 10 Gbit/s network.
const RATE_PRIOR: f64 = 1e9;

/// What outlives the agent's restarts.
pub(crate) struct AgentShared {
    mesh: Mesh,
    ways: Ways,
    seat: Arc<Seat<AgentFace>>,
    workers: Mutex<Vec<Weak<WorkerShared>>>,
    /// Bits of bytes per second of the last transfers.
    rate: AtomicU64,
    handle: Handle<AgentMsg>,
}

impl std::fmt::Debug for AgentShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AgentShared({})", self.mesh.node())
    }
}

impl AgentShared {
    pub(crate) fn new(mesh: &Mesh, ways: Ways) -> Arc<Self> {
        let (seat, workers, handle) = (Arc::default(), Mutex::default(), Handle::new());
        Arc::new(Self { mesh: mesh.clone(), ways, seat, workers, rate: AtomicU64::new(RATE_PRIOR.to_bits()), handle })
    }

    pub(crate) fn handle(&self) -> &Handle<AgentMsg> {
        &self.handle
    }

    /// The living agent's data plane.
    pub(crate) fn now(&self) -> Option<Arc<AgentFace>> {
        self.seat.now()
    }

    /// Sweeps this worker's tickets from now on.
    pub(crate) fn serve(&self, worker: &Arc<WorkerShared>) {
        lock(&self.workers).push(Arc::downgrade(worker));
    }

    /// A transfer ran at so many bytes per second.
    pub(crate) fn learn(&self, rate: f64) {
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
    }

    /// Bytes per second to expect of a transfer to this node.
    pub(crate) fn rate(&self) -> f64 {
        f64::from_bits(self.rate.load(Ordering::Relaxed))
    }

    /// A session with a peer's memory, kept for the next time.
    pub(crate) async fn session(&self, peer: Descriptor) -> Result<Arc<Session>, TransferError> {
        let face = self.now().ok_or_else(|| TransferError::Local("the transfer agent is starting".to_owned()))?;
        // Connecting may take a moment, and no runtime thread should wait for it.
        let connecting = tokio::task::spawn_blocking(move || face.session(&peer));
        connecting.await.unwrap_or_else(|error| Err(TransferError::Local(error.to_string())))
    }

    /// A session failed: the next ticket connects anew.
    pub(crate) fn forget(&self, host: HostId, region: RegionId) {
        if let Some(face) = self.now() {
            drop(lock(&face.sessions).remove(&(host, region)));
        }
    }
}

/// The data plane of one life of the agent.
#[derive(Debug)]
pub(crate) struct AgentFace {
    pub(crate) fabric: Fabric,
    regions: Mutex<Vec<(Region, RegionId)>>,
    sessions: Mutex<HashMap<(HostId, RegionId), Arc<Session>>>,
}

impl AgentFace {
    /// How peers reach a worker's memory.
    pub(crate) fn describe(&self, memory: &KvMemory, layout: u64) -> Result<Descriptor, TransferError> {
        let mut regions = lock(&self.regions);
        let known = regions.iter().find(|(region, _)| region.same(&memory.region)).map(|(_, id)| *id);
        let id = match known {
            Some(id) => id,
            None => {
                let id = self.fabric.register(&memory.region)?;
                regions.push((memory.region.clone(), id));
                id
            }
        };
        self.fabric.describe(id, layout)
    }

    fn session(&self, peer: &Descriptor) -> Result<Arc<Session>, TransferError> {
        let key = (peer.host, peer.region);
        if let Some(session) = lock(&self.sessions).get(&key) {
            return Ok(session.clone());
        }
        let session = Arc::new(self.fabric.choose(peer)?);
        tracing::info!(transport = %session.kind(), "a way to another worker's memory");
        let mut sessions = lock(&self.sessions);
        if sessions.len() >= SESSIONS_MAX {
            // Peers come and go by the dozen; the sessions in use are held by their tickets.
            sessions.clear();
        }
        sessions.insert(key, session.clone());
        Ok(session)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the agent is told.
#[derive(Debug)]
pub(crate) enum AgentMsg {
    /// Time passed.
    Sweep,
}

impl ractor::Message for AgentMsg {}

/// The actor.
pub(crate) struct TransferAgent;

/// What one life owns.
pub(crate) struct AgentState {
    _seated: Seated<AgentFace>,
    face: Arc<AgentFace>,
    shared: Arc<AgentShared>,
}

impl Actor for TransferAgent {
    type Msg = AgentMsg;
    type State = AgentState;
    type Arguments = Arc<AgentShared>;

    async fn pre_start(
        &self,
        myself: ActorRef<AgentMsg>,
        shared: Arc<AgentShared>,
    ) -> Result<AgentState, ActorProcessingErr> {
        let fabric = start_fabric(&shared.mesh, &shared.ways).map_err(|error| format!("no data plane: {error}"))?;
        let face = Arc::new(AgentFace { fabric, regions: Mutex::default(), sessions: Mutex::default() });
        let seated = shared.seat.sit(face.clone());
        // Ends with the actor.
        drop(myself.send_interval(SWEEP, || AgentMsg::Sweep));
        Ok(AgentState { _seated: seated, face, shared })
    }

    async fn handle(
        &self,
        _myself: ActorRef<AgentMsg>,
        message: AgentMsg,
        state: &mut AgentState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            AgentMsg::Sweep => {
                let mut workers = lock(&state.shared.workers);
                workers.retain(|worker| worker.strong_count() > 0);
                let living: Vec<_> = workers.iter().filter_map(Weak::upgrade).collect();
                drop(workers);
                let ports = living.iter().filter_map(|worker| worker.seat.now());
                for kv in ports.filter_map(|port| port.kv.get().cloned()) {
                    kv.sweep();
                }
                state.face.fabric.grants().sweep(Instant::now());
            }
        }
        Ok(())
    }
}

/// The data plane on the address of the mesh, or on all addresses where that one is not this machine's own.
fn start_fabric(mesh: &Mesh, ways: &Ways) -> Result<Fabric, TransferError> {
    let config = FabricConfig {
        epoch: mesh.incarnation().0,
        advertise: Some(mesh.address().ip()),
        transports: ways.kinds(mesh.address().ip().is_loopback()),
        ucx: ways.ucx.clone(),
        ..FabricConfig::new(HostId(rand::random()), GrantToken(rand::random()))
    };
    let listen = SocketAddr::new(mesh.address().ip(), 0);
    let asked = config.transports.contains(&TransportKind::Ucx);
    let fabric = Fabric::start(FabricConfig { listen: Some(listen), ..config.clone() }).or_else(|_| {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Fabric::start(FabricConfig { listen: Some(any), ..config })
    })?;
    match fabric.ucx() {
        Ok(version) => tracing::info!(version, "KV blocks can move through UCX"),
        Err(reason) if asked && ways.only.is_some() => {
            tracing::warn!(reason, "no UCX here, and nothing else is allowed")
        }
        Err(reason) if asked => tracing::info!(reason, "no UCX here; KV blocks move without it"),
        Err(_) => {}
    }
    Ok(fabric)
}
