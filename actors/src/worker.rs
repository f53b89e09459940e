//! Computes: owns one engine, admits requests to it, delivers its tokens, publishes its events and load.
//!
//! Parent: `workers` supervisor. Children: none; the engine thread and the stream tasks belong to its state.
//! Mailbox: news of its own engine thread and a changed lifecycle, a handful in a life; requests never pass it:
//! they go through the bounded command channel of [`port`].
//! Owns: the engine and its KV blocks, the streams of the requests it took, its entry in the directory.
//! Never: blocks on a client, nor keeps a block or a count in anything but a guard of its state.
//! If it dies: its streams end with a typed fault, its KV blocks are lost, indexers see their subscription end
//! and take a new inventory; it is started again with an empty engine.

mod blocks;
mod doors;
mod engine_thread;
mod forward;
mod leaving;
mod ledger;
mod meter;
mod patience;
mod port;
mod publisher;
pub mod rates;
mod source;
mod takeover;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::sync_channel,
    },
};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_cluster::{
    blobs::BlobDigest,
    discovery::{Instance, InstanceKind, Lifecycle},
    mesh::Mesh,
    supervise::{Handle, TaskOwner},
};
use starling_engine::{
    Capabilities, EngineLoad, LoadedModel,
    simulated::faults::{Fault, FaultSwitch},
};
use starling_ids::{Incarnation, WorkerId};
use starling_kv::tier::TierOptions;
use tokio::sync::watch;

use crate::{
    announce::{announce, withdraw},
    cache_report::{self, CacheRow},
    cards, names,
    report::LoadReport,
    route::{
        catalog::SILENT,
        split::{KvLink, Role},
        wishes::ADAPTER,
    },
    seat::{Seat, Seated},
    transfer_agent::{AgentShared, KvDoor},
    tree::{EngineManner, WorkerRole},
};
pub(crate) use blocks::{Blocks, Lent, Returns, Room, RoomAsk, Watch};
pub(crate) use forward::InFlightGuard;
pub(crate) use leaving::{Arrivals, Leaving, LentLive};
pub(crate) use port::{AnswerStart, CancelGuard, Command, Delivery, Port, Submission};

use doors::{EventsDoor, GenerateDoor};
use engine_thread::{EngineArgs, EngineNews, EngineThread};
use port::{COMMANDS_MAX, Cancels, Pulse};

/// Streams of one worker, requests and subscribers together.
const STREAMS_MAX: usize = 16_384;

/// The name of the engine that has faults on command.
pub(crate) const SIMULATED: &str = "simulated";

/// What outlives a worker's restarts: its name, its model, its doors, whether it drains.
pub struct WorkerShared {
    pub(crate) id: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) mesh: Mesh,
    pub(crate) model: Arc<dyn LoadedModel>,
    /// The blob with the model's tokenizer.
    bundle: Option<BlobDigest>,
    /// `embedded`, `simulated`, `vllm` …: for tables.
    pub(crate) engine: String,
    /// The tiers below its device; the disk's folder is its own.
    tiers: TierOptions,
    /// Its blocks are not told to routers, which guess them instead.
    silent: bool,
    /// LoRA adapters that it has.
    adapters: Vec<String>,
    /// What is wrong with its engine on command; only a simulated one has it.
    faults: Option<FaultSwitch>,
    pub(crate) seat: Arc<Seat<Port>>,
    pub(crate) draining: AtomicBool,
    /// Its requests should go on elsewhere.
    pub(crate) leave: watch::Sender<bool>,
    /// Moves its KV blocks.
    pub(crate) agent: Arc<AgentShared>,
    /// What it is for.
    duty: watch::Sender<Role>,
    /// Requests accepted or about to be.
    pub(crate) in_flight: watch::Sender<usize>,
    pub(crate) lifecycle: watch::Sender<Lifecycle>,
    /// Lives of the actor in this process.
    epoch: AtomicU64,
    handle: Handle<WorkerMsg>,
}

impl std::fmt::Debug for WorkerShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WorkerShared({})", self.id)
    }
}

impl WorkerShared {
    pub(crate) fn new(
        mesh: &Mesh,
        index: u16,
        role: &WorkerRole,
        (bundle, agent): (Option<BlobDigest>, &Arc<AgentShared>),
        (mut tiers, manner): (TierOptions, EngineManner),
    ) -> Arc<Self> {
        if let Some(disk) = &mut tiers.disk {
            disk.folder.push(format!("worker-{index}"));
        }
        let EngineManner { kv_silent, fault, adapters } = manner;
        let faults = (role.engine == SIMULATED).then(FaultSwitch::default);
        if let Some(switch) = &faults {
            switch.set(fault);
        }
        let shared = Arc::new(Self {
            id: WorkerId { node: mesh.node().clone(), index },
            incarnation: mesh.incarnation(),
            mesh: mesh.clone(),
            model: role.model.clone(),
            bundle,
            engine: role.engine.clone(),
            tiers,
            silent: kv_silent,
            adapters,
            faults,
            seat: Arc::default(),
            draining: AtomicBool::new(false),
            leave: watch::channel(false).0,
            agent: agent.clone(),
            duty: watch::channel(role.duty).0,
            in_flight: watch::channel(0).0,
            lifecycle: watch::channel(Lifecycle::Joining).0,
            epoch: AtomicU64::new(0),
            handle: Handle::new(),
        });
        mesh.endpoints().serve(names::worker_generate(index), Arc::new(GenerateDoor(shared.clone())));
        mesh.endpoints().serve(names::worker_events(index), Arc::new(EventsDoor(shared.clone())));
        mesh.endpoints().serve(names::worker_kv(index), Arc::new(KvDoor(shared.clone())));
        agent.serve(&shared);
        shared
    }

    /// Who it is.
    #[must_use]
    pub fn id(&self) -> &WorkerId {
        &self.id
    }

    /// Where it is in its life, and news of it.
    #[must_use]
    pub fn lifecycle(&self) -> watch::Receiver<Lifecycle> {
        self.lifecycle.subscribe()
    }

    /// What it is for.
    #[must_use]
    pub fn duty(&self) -> Role {
        *self.duty.borrow()
    }

    /// Gives it another role. Routers hear of it through the directory; requests that run here go on elsewhere when it
    /// answers no more and somebody else does.
    pub fn set_duty(&self, role: Role) {
        if self.duty.send_replace(role) != role {
            tracing::info!(worker = %self.id, %role, "worker has another role");
            let lifecycle = *self.lifecycle.borrow();
            self.publish(lifecycle, None);
            self.wish();
        }
    }

    /// Puts a fault into its engine; the one before, or `None` when its engine is a real one.
    pub(crate) fn set_fault(&self, fault: Fault) -> Option<Fault> {
        let before = self.faults.as_ref().map(|switch| switch.set(fault.clone()));
        if before.is_some() {
            tracing::warn!(worker = %self.id, %fault, "a fault was commanded");
        }
        before
    }

    /// Whether its requests should leave.
    fn wish(&self) {
        self.leave.send_replace(self.draining.load(Ordering::SeqCst) || !self.duty().decodes());
    }

    pub(crate) fn handle(&self) -> &Handle<WorkerMsg> {
        &self.handle
    }

    /// Its caches in numbers, device first; empty while it starts.
    pub(crate) fn caches(&self) -> Vec<CacheRow> {
        let Some(port) = self.seat.now() else { return Vec::new() };
        let (load, tiers) = (port.load.borrow().load, *port.tiers.borrow());
        cache_report::rows(&self.id, &load, tiers.as_ref())
    }

    /// Takes nothing new from now on; what runs goes on elsewhere when it can, else here.
    pub(crate) fn drain(&self) {
        if !self.draining.swap(true, Ordering::SeqCst) {
            self.publish(Lifecycle::Draining, None);
            self.wish();
        }
    }

    /// Requests accepted or about to be.
    pub(crate) fn requests(&self) -> u64 {
        *self.in_flight.borrow() as u64
    }

    /// Waits until nothing runs any more, then says so.
    pub(crate) async fn drained(&self) {
        // The sender of the watch lives in `self`, so waiting cannot fail.
        self.in_flight.subscribe().wait_for(|count| *count == 0).await.ok();
        self.publish(Lifecycle::Drained, None);
    }

    /// Takes its doors and its entry away.
    pub(crate) fn close(&self) {
        self.mesh.endpoints().remove(&names::worker_generate(self.id.index));
        self.mesh.endpoints().remove(&names::worker_events(self.id.index));
        self.mesh.endpoints().remove(&names::worker_kv(self.id.index));
        withdraw(&self.mesh, &names::worker_generate(self.id.index));
        // One that hangs could not be ended.
        if let Some(switch) = &self.faults {
            switch.set(Fault::None);
        }
        self.lifecycle.send_replace(Lifecycle::Gone);
    }

    /// Writes the directory's entry. Without capabilities the entry's own stay.
    fn publish(&self, lifecycle: Lifecycle, capabilities: Option<&Capabilities>) {
        let mut labels = BTreeMap::new();
        labels.insert("engine".to_owned(), self.engine.clone());
        labels.insert("role".to_owned(), self.duty().to_string());
        labels.insert("epoch".to_owned(), self.epoch.load(Ordering::Relaxed).to_string());
        labels.extend(self.adapters.iter().map(|name| (format!("{ADAPTER}{name}"), "yes".to_owned())));
        if self.silent {
            labels.insert(SILENT.to_owned(), "off".to_owned());
        }
        let endpoint = names::worker_generate(self.id.index);
        let instance = Instance {
            model: Some(self.model.card().id.clone()),
            labels,
            card: capabilities.and_then(|capabilities| cards::put(&self.mesh, capabilities)),
            bundle: self.bundle,
            capacity: capabilities.map(|capabilities| capabilities.limits.sequences_max),
            layout: capabilities.map(|capabilities| capabilities.layout_digest),
            ..Instance::new(endpoint, InstanceKind::Worker, lifecycle)
        };
        announce(&self.mesh, instance);
        self.lifecycle.send_replace(lifecycle);
    }
}

/// What a worker is told.
#[derive(Debug)]
pub(crate) enum WorkerMsg {
    /// Its engine thread has news.
    Engine(EngineNews),
}

impl ractor::Message for WorkerMsg {}

/// The actor.
pub(crate) struct Worker;

/// What one life owns. The order matters: the face goes first, then the engine with all its outboxes, then the
/// streams, which have seen the outboxes close or are ended by their guards.
pub(crate) struct WorkerState {
    _seated: Seated<Port>,
    _engine: EngineThread,
    _tasks: TaskOwner,
    _entry: WarmingEntry,
}

/// Takes a dead worker out of routing at once: its entry says warming until its engine is built again.
struct WarmingEntry(Arc<WorkerShared>);

impl Drop for WarmingEntry {
    fn drop(&mut self) {
        if *self.0.lifecycle.borrow() == Lifecycle::Serving {
            self.0.publish(Lifecycle::Warming, None);
        }
    }
}

impl Actor for Worker {
    type Msg = WorkerMsg;
    type State = WorkerState;
    type Arguments = Arc<WorkerShared>;

    async fn pre_start(
        &self,
        myself: ActorRef<WorkerMsg>,
        shared: Arc<WorkerShared>,
    ) -> Result<WorkerState, ActorProcessingErr> {
        shared.epoch.fetch_add(1, Ordering::Relaxed);
        if !shared.draining.load(Ordering::SeqCst) {
            shared.publish(Lifecycle::Warming, None);
        }
        let tasks = TaskOwner::new(STREAMS_MAX);
        let (commands, inbox) = sync_channel(COMMANDS_MAX);
        let (returns, kv) = (Returns::new(commands.clone()), Arc::new(OnceLock::new()));
        let (load_sender, load) = watch::channel(first_report(&shared));
        let (tiers_told, tiers_seen) = watch::channel(None);
        let port = Arc::new(Port {
            commands: commands.clone(),
            cancels: Arc::new(Cancels::default()),
            load,
            tiers: tiers_seen,
            pulse: Arc::new(Pulse::new()),
            limits: Arc::new(OnceLock::new()),
            kv: kv.clone(),
            tasks: tasks.tasks(),
            next_key: AtomicU64::new(0),
            lives: Arc::default(),
        });
        let args = EngineArgs {
            worker: shared.id.clone(),
            incarnation: shared.incarnation,
            model: shared.model.clone(),
            commands: inbox,
            cancels: port.cancels.clone(),
            load: load_sender,
            pulse: port.pulse.clone(),
            limits: port.limits.clone(),
            tiers: shared.tiers.clone(),
            tiers_told,
            epoch: shared.epoch.load(Ordering::Relaxed),
            silent: shared.silent,
            faults: shared.faults.clone(),
            returns,
            kv,
            agent: shared.agent.clone(),
            tasks: tasks.tasks(),
            // An actor that has ended needs no news.
            tell: Box::new(move |news| drop(myself.send_message(WorkerMsg::Engine(news)))),
        };
        let engine = EngineThread::start(args, commands)?;
        let entry = WarmingEntry(shared.clone());
        Ok(WorkerState { _seated: shared.seat.sit(port), _engine: engine, _tasks: tasks, _entry: entry })
    }

    async fn handle(
        &self,
        _myself: ActorRef<WorkerMsg>,
        message: WorkerMsg,
        state: &mut WorkerState,
    ) -> Result<(), ActorProcessingErr> {
        let shared = &state._entry.0;
        match message {
            WorkerMsg::Engine(EngineNews::Ready(capabilities)) => {
                if !shared.draining.load(Ordering::SeqCst) {
                    shared.publish(Lifecycle::Serving, Some(&capabilities));
                }
                tracing::info!(worker = %shared.id, model = %capabilities.card.id, "worker serves");
                Ok(())
            }
            WorkerMsg::Engine(EngineNews::Away(reason)) => {
                // Out of routing until it is back; what it had taken has ended with a fault.
                if *shared.lifecycle.borrow() == Lifecycle::Serving {
                    shared.publish(Lifecycle::Warming, None);
                }
                tracing::info!(worker = %shared.id, reason, "worker waits for its engine");
                Ok(())
            }
            WorkerMsg::Engine(EngineNews::Ended(reason)) => Err(format!("the engine ended: {reason}").into()),
        }
    }
}

fn first_report(shared: &WorkerShared) -> LoadReport {
    LoadReport {
        worker: shared.id.clone(),
        incarnation: shared.incarnation,
        draining: false,
        load: EngineLoad::default(),
        rates: None,
        turn_age_ms: 0,
        admitted: 0,
        link: KvLink::default(),
        tiers: None,
    }
}
