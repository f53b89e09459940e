//! The cast's part of a node's actor tree, built in one place.
//!
//! ```text
//! workers            supervisor, in the worker role
//! ├─ workers/transfer  TransferAgent: KV blocks between workers
//! ├─ workers/0       Worker: one engine
//! └─ workers/N
//! router             supervisor, in the router role
//! ├─ router/indexer  Indexer: prefixes and loads of all workers
//! ├─ router/shard    RouterShard: decides, reserves
//! └─ router/budgets  BudgetOwner: leases on the budgets of tenants
//! planner            supervisor, in the router role
//! └─ planner/lead    Planner: roles and numbers of the workers of the models that this node leads
//! ```
//!
//! Called by the program that assembles a node. The gateway adds its own supervisor beside these.

#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_cluster::{
    discovery::{Lifecycle, Snapshot},
    mesh::Mesh,
    stream::{Fault, FaultKind},
    supervise::{Handle, Policy, Restart, SuperviseError, SupervisorHandle, child},
};
use starling_engine::{LoadedModel, simulated::faults::Fault as EngineFault};
use starling_ids::{BlockHash, ModelId, NodeId, RequestId, WorkerId};
use starling_kv::{tier::TierOptions, transport::Ways};
use thiserror::Error;

use crate::{
    budgets::{self, BudgetOwner},
    cache_report::CacheRow,
    cards,
    client::ClusterClient,
    indexer::{Indexer, IndexerArgs, knowledge::Knowledge},
    names,
    planner::{Planner, PlannerOptions, PlannerShared},
    route::{
        policy::{PolicyConfig, PolicyError},
        queue::QueueConfig,
        receipt::Receipt,
        split::Role,
        spread::SpreadRule,
    },
    router_shard::{RouterShard, ShardRules, ShardShared},
    transfer_agent::{AgentShared, TransferAgent},
    view::View,
    worker::{Worker, WorkerShared},
};

/// What a worker node computes with.
#[derive(Clone)]
pub struct WorkerRole {
    /// The loaded model; every worker builds its own engine from it.
    pub model: Arc<dyn LoadedModel>,
    /// `embedded` or `simulated`: a label in tables.
    pub engine: String,
    /// How many workers, at least 1.
    pub count: u16,
    /// What they are for, until told otherwise.
    pub duty: Role,
}

/// What the engines of a node have and do beside the model itself.
#[derive(Debug, Clone, Default)]
pub struct EngineManner {
    /// They tell nothing of their blocks; routers guess them from what they gave where.
    pub kv_silent: bool,
    /// What is wrong with simulated ones from the beginning.
    pub fault: EngineFault,
    /// LoRA adapters that they have.
    pub adapters: Vec<String>,
}

/// Which parts of the cast a node runs.
#[derive(Clone, Default)]
pub struct NodeOptions {
    /// Workers; `None` for a node that does not compute.
    pub worker: Option<WorkerRole>,
    /// A router shard and its indexer.
    pub router: bool,
    /// How its shard chooses.
    pub policy: PolicyConfig,
    /// Tiers below each worker's device. Of the disk: the folder above those of the workers, and the bytes of each.
    pub tiers: TierOptions,
    /// What its engines have and do beside the model itself.
    pub engine: EngineManner,
    /// How blocks move between processes.
    pub ways: Ways,
    /// Who waits, and for how long, while every worker is taken.
    pub queue: QueueConfig,
    /// When a model's decisions are spread over more shards than one.
    pub spread: SpreadRule,
    /// How its planner plans.
    pub planner: PlannerOptions,
    /// The node joins others: its shard takes over from theirs when it knows what they know.
    pub joins: bool,
}

/// Why the cast did not start.
#[derive(Debug, Error)]
pub enum NodeError {
    /// An actor did not start.
    #[error(transparent)]
    Actor(#[from] SuperviseError),
    /// The routing policy cannot be composed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The model's tokenizer cannot be sent.
    #[error("the tokenizer bundle cannot be held for other nodes; the log says why")]
    Bundle,
}

/// The cast on one node. Dropping it stops nothing; [`Node::stop`] does.
pub struct Node {
    mesh: Mesh,
    client: ClusterClient,
    workers: Vec<Arc<WorkerShared>>,
    shard: Option<Arc<ShardShared>>,
    supervisors: Vec<SupervisorHandle>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({}, {} workers)", self.mesh.node(), self.workers.len())
    }
}

impl Node {
    /// Starts the parts asked for under the mesh's root supervisor. Returns before engines are built;
    /// [`Node::ready`] waits for that.
    pub async fn start(mesh: &Mesh, options: NodeOptions) -> Result<Self, NodeError> {
        let view = View::new(mesh);
        let knowledge = options.router.then(Arc::<Knowledge>::default);
        let client = ClusterClient::new(view.clone(), knowledge.clone());
        let (workers, shard, supervisors) = (Vec::new(), None, Vec::new());
        let mut node = Self { mesh: mesh.clone(), client, workers, shard, supervisors };
        if let Some(role) = options.worker {
            node.start_workers(role, (&options.tiers, options.engine.clone()), options.ways).await?;
        }
        if let Some(knowledge) = knowledge {
            let NodeOptions { policy, queue, spread, joins, planner, .. } = options;
            let rules = ShardRules { policy, queue, spread, joins };
            let shard = node.start_router(&view, &knowledge, rules).await?;
            node.start_planner(&view, &shard, planner).await?;
        }
        Ok(node)
    }

    /// The cluster as a client of this node sees it.
    #[must_use]
    pub fn client(&self) -> &ClusterClient {
        &self.client
    }

    /// The workers of this node.
    #[must_use]
    pub fn workers(&self) -> &[Arc<WorkerShared>] {
        &self.workers
    }

    /// Resolves when every worker of this node serves and stands so in this node's directory. A node without workers
    /// is ready at once.
    pub async fn ready(&self) {
        let mut directory = self.mesh.watch();
        for worker in &self.workers {
            let endpoint = names::worker_generate(worker.id().index);
            let listed = |snapshot: &Arc<Snapshot>| {
                snapshot.node(self.mesh.node()).is_some_and(|view| {
                    let own = view.record.instances.iter().find(|instance| instance.endpoint == endpoint);
                    own.is_some_and(|instance| instance.lifecycle >= Lifecycle::Serving)
                })
            };
            // The directory ends with the node, and with it the wait.
            directory.wait_for(listed).await.ok();
        }
    }

    /// Why a request went where it went, by this node's shard; empty when it did not decide or forgot.
    pub async fn explain(&self, request: RequestId) -> Vec<Receipt> {
        match &self.shard {
            Some(shard) => shard.explain(request).await,
            None => Vec::new(),
        }
    }

    /// Asks every request of this node's shard to go on elsewhere; how many there are.
    #[cfg(test)]
    pub(crate) fn ask_all_to_leave(&self) -> usize {
        self.shard.as_ref().map_or(0, |shard| shard.ask_all_to_leave())
    }

    /// Requests that this node's workers work for.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.workers.iter().map(|worker| *worker.in_flight.borrow()).sum()
    }

    /// Reservations that this node's shard holds.
    #[must_use]
    pub fn reservations(&self) -> usize {
        self.shard.as_ref().map_or(0, |shard| shard.reservations())
    }

    /// Requests that wait at this node's shard for a worker with room.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shard.as_ref().map_or(0, |shard| shard.waiting())
    }

    /// (worker, block) pairs in this node's prefix index.
    #[must_use]
    pub fn indexed_blocks(&self) -> usize {
        self.shard.as_ref().map_or(0, |shard| shard.knowledge.memberships())
    }

    /// Leading blocks of a chain that a worker holds, by this node's prefix index.
    #[must_use]
    pub fn hit_blocks(&self, worker: &WorkerId, chain: &[BlockHash]) -> usize {
        self.shard.as_ref().map_or(0, |shard| shard.knowledge.depth(worker, chain))
    }

    /// Workers that this node's indexer hears.
    #[must_use]
    pub fn heard(&self) -> usize {
        self.shard.as_ref().map_or(0, |shard| shard.knowledge.heard())
    }

    /// Over how many shards the decisions about a model are spread, as this node sees it.
    #[must_use]
    pub fn parts_of(&self, model: &ModelId) -> u32 {
        self.client.parts_of(model)
    }

    /// Takes nothing new and lets what runs finish. True when all of it did before `limit` was over.
    pub async fn drain(&self, limit: Duration) -> bool {
        for worker in &self.workers {
            worker.drain();
        }
        if let Some(shard) = &self.shard {
            // Other shards take over; this one still answers who asks meanwhile.
            shard.drain();
        }
        let all = futures::future::join_all(self.workers.iter().map(|worker| worker.drained()));
        tokio::time::timeout(limit, all).await.is_ok()
    }

    /// Stops the cast, last started first. Streams that still run end with a typed fault.
    pub async fn stop(self) {
        if let Some(shard) = &self.shard {
            shard.close();
        }
        for worker in &self.workers {
            worker.close();
        }
        for supervisor in self.supervisors.iter().rev() {
            if let Err(error) = supervisor.stop_all().await {
                tracing::warn!(supervisor = supervisor.path(), %error, "did not stop in order");
            }
        }
    }

    async fn start_workers(
        &mut self,
        role: WorkerRole,
        (tiers, manner): (&TierOptions, EngineManner),
        ways: Ways,
    ) -> Result<(), NodeError> {
        let supervisor = self.mesh.supervisor().child_supervisor("workers", Policy::default()).await?;
        self.supervisors.push(supervisor.clone());
        let bundle = cards::put(&self.mesh, role.model.bundle()).ok_or(NodeError::Bundle)?;
        let agent = AgentShared::new(&self.mesh, ways);
        let (handle, shared) = (agent.handle().clone(), agent.clone());
        let make = move || (TransferAgent, shared.clone());
        supervisor.add(child("transfer", "transfer-agent", Restart::Permanent, &handle, make)).await?;
        for index in 0..role.count {
            let shared =
                WorkerShared::new(&self.mesh, index, &role, (Some(bundle), &agent), (tiers.clone(), manner.clone()));
            self.workers.push(shared.clone());
            let handle = shared.handle().clone();
            let make = move || (Worker, shared.clone());
            supervisor.add(child(index.to_string(), "worker", Restart::Permanent, &handle, make)).await?;
        }
        serve_caches(&self.mesh, self.workers.clone());
        serve_roles(&self.mesh, &self.workers);
        serve_drains(&self.mesh, &self.workers);
        serve_faults(&self.mesh, &self.workers);
        Ok(())
    }

    async fn start_router(
        &mut self,
        view: &Arc<View>,
        knowledge: &Arc<Knowledge>,
        rules: ShardRules,
    ) -> Result<Arc<ShardShared>, NodeError> {
        let supervisor = self.mesh.supervisor().child_supervisor("router", Policy::default()).await?;
        self.supervisors.push(supervisor.clone());
        let args = IndexerArgs { view: view.clone(), knowledge: knowledge.clone() };
        let make = move || (Indexer, args.clone());
        supervisor.add(child("indexer", "indexer", Restart::Permanent, &Handle::new(), make)).await?;
        let shared = ShardShared::new(view, knowledge, rules)?;
        serve_receipts(&self.mesh, &shared);
        serve_newest(&self.mesh, &shared);
        self.shard = Some(shared.clone());
        let handle = shared.handle().clone();
        let own = shared.clone();
        let make = move || (RouterShard, own.clone());
        supervisor.add(child("shard", "router-shard", Restart::Permanent, &handle, make)).await?;
        let handle = Handle::new();
        budgets::serve(&self.mesh, &handle);
        supervisor.add(child("budgets", "budget-owner", Restart::Permanent, &handle, || (BudgetOwner, ()))).await?;
        Ok(shared)
    }

    async fn start_planner(
        &mut self,
        view: &Arc<View>,
        shard: &Arc<ShardShared>,
        options: PlannerOptions,
    ) -> Result<(), NodeError> {
        // Also without a planner of its own it tells those of others what its router sees.
        let shared = PlannerShared::new(view, shard, options);
        if !shared.is_on() {
            return Ok(());
        }
        let supervisor = self.mesh.supervisor().child_supervisor("planner", Policy::default()).await?;
        self.supervisors.push(supervisor.clone());
        let handle = shared.handle().clone();
        let make = move || (Planner, shared.clone());
        supervisor.add(child("lead", "planner", Restart::Permanent, &handle, make)).await?;
        Ok(())
    }
}

/// Answers what the caches of this node's workers hold.
fn serve_caches(mesh: &Mesh, workers: Vec<Arc<WorkerShared>>) {
    let answer = move |_from: NodeId, _body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let rows: Vec<CacheRow> = workers.iter().flat_map(|worker| worker.caches()).collect();
        let bytes = rmp_serde::to_vec(&rows);
        let answer = bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()));
        Box::pin(std::future::ready(answer))
    };
    mesh.serve_op(names::OP_CACHES, Arc::new(answer));
}

/// Gives workers other roles, also when other nodes ask for it.
fn serve_roles(mesh: &Mesh, workers: &[Arc<WorkerShared>]) {
    let workers = workers.to_vec();
    let answer = move |_from: NodeId, body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let workers = workers.clone();
        Box::pin(async move {
            let asked: Result<(u16, Role), _> = rmp_serde::from_slice(&body);
            let (index, role) = asked.map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))?;
            let worker = workers.iter().find(|worker| worker.id().index == index);
            let worker = worker.ok_or_else(|| Fault::new(FaultKind::NotFound, format!("no worker {index} here")))?;
            let before = worker.duty();
            worker.set_duty(role);
            let bytes = rmp_serde::to_vec(&before);
            bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
        })
    };
    mesh.serve_op(names::OP_ROLE, Arc::new(answer));
}

/// Drains single workers, also when other nodes ask for it.
fn serve_drains(mesh: &Mesh, workers: &[Arc<WorkerShared>]) {
    let workers = workers.to_vec();
    let answer = move |_from: NodeId, body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let workers = workers.clone();
        Box::pin(async move {
            let asked: Result<(u16, ()), _> = rmp_serde::from_slice(&body);
            let (index, ()) = asked.map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))?;
            let worker = workers.iter().find(|worker| worker.id().index == index);
            let worker = worker.ok_or_else(|| Fault::new(FaultKind::NotFound, format!("no worker {index} here")))?;
            worker.drain();
            let bytes = rmp_serde::to_vec(&worker.requests());
            bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
        })
    };
    mesh.serve_op(names::OP_DRAIN, Arc::new(answer));
}

/// Puts faults into simulated engines, also when other nodes ask for it.
fn serve_faults(mesh: &Mesh, workers: &[Arc<WorkerShared>]) {
    let workers = workers.to_vec();
    let answer = move |_from: NodeId, body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let invalid = |text: String| Fault::new(FaultKind::Invalid, text);
        let set = || {
            let asked: Result<(u16, EngineFault), _> = rmp_serde::from_slice(&body);
            let (index, fault) = asked.map_err(|error| invalid(error.to_string()))?;
            let named = fault.to_string();
            let fault = fault.checked().ok_or_else(|| invalid(format!("{named} is no fault")))?;
            let worker = workers.iter().find(|worker| worker.id().index == index);
            let worker = worker.ok_or_else(|| Fault::new(FaultKind::NotFound, format!("no worker {index} here")))?;
            let real = || invalid(format!("{} has a real engine; only simulated ones fail on command", worker.id()));
            let before = worker.set_fault(fault).ok_or_else(real)?;
            let bytes = rmp_serde::to_vec(&before);
            bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
        };
        Box::pin(std::future::ready(set()))
    };
    mesh.serve_op(names::OP_FAULT, Arc::new(answer));
}

/// Answers why requests went where they went, also to other nodes.
fn serve_receipts(mesh: &Mesh, shard: &Arc<ShardShared>) {
    let shard = shard.clone();
    let answer = move |_from: NodeId, body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let shard = shard.clone();
        Box::pin(async move {
            let text = std::str::from_utf8(&body).ok();
            let request = text.and_then(|text| text.parse().ok());
            let invalid = || Fault::new(FaultKind::Invalid, "the body must be a request id: 32 hex digits");
            let receipts = shard.explain(request.ok_or_else(invalid)?).await;
            let bytes = rmp_serde::to_vec(&receipts);
            bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
        })
    };
    mesh.serve_op(names::OP_RECEIPTS, Arc::new(answer));
}

/// Tells the newest decisions, also to other nodes.
fn serve_newest(mesh: &Mesh, shard: &Arc<ShardShared>) {
    let shard = shard.clone();
    let answer = move |_from: NodeId, body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let shard = shard.clone();
        Box::pin(async move {
            let count: Result<u32, _> = rmp_serde::from_slice(&body);
            let count = count.map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))?;
            let bytes = rmp_serde::to_vec(&shard.newest(usize::try_from(count).unwrap_or(usize::MAX)).await);
            bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
        })
    };
    mesh.serve_op(names::OP_NEWEST, Arc::new(answer));
}
