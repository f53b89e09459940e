//! What a planner asks of other nodes, and what it answers.
//!
//! Bounds: [`ANSWER_MAX`] for each answer, [`ASKED_AT_ONCE`] routers at a time.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture};
use serde::Serialize;
use starling_cluster::{
    discovery::{InstanceKind, Snapshot},
    mesh::Mesh,
    stream::{Fault, FaultKind},
};
use starling_ids::{ModelId, NodeId, WorkerId};

use super::PlannerShared;
use crate::{
    names,
    plan::{Raw, SeenAll, WorkerSeen},
    route::{
        catalog::{Catalog, CatalogWorker},
        split::Role,
    },
};

/// Longest wait for one answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

const ASKED_AT_ONCE: usize = 16;

/// What every router has seen; `None` of one that did not answer.
pub(super) type SeenBy = BTreeMap<NodeId, Option<SeenAll>>;

/// Answers what this node's router has seen, and what its planner said.
pub(super) fn serve(shared: &Arc<PlannerShared>) {
    let mesh = shared.view.mesh().clone();
    let own = shared.clone();
    let seen = move |_from: NodeId, _body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        let restarting = || Fault::new(FaultKind::Unavailable, "the router shard is starting");
        let answer = own.shard.seen().ok_or_else(restarting).and_then(|seen| encode(&seen));
        Box::pin(std::future::ready(answer))
    };
    mesh.serve_op(names::OP_SEEN, Arc::new(seen));
    let own = shared.clone();
    let rows = move |_from: NodeId, _body: Bytes| -> BoxFuture<'static, Result<Bytes, Fault>> {
        Box::pin(std::future::ready(encode(&own.rows())))
    };
    mesh.serve_op(names::OP_PLAN, Arc::new(rows));
}

fn encode<T: Serialize>(value: &T) -> Result<Bytes, Fault> {
    let bytes = rmp_serde::to_vec_named(value);
    bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
}

/// Asks every router what it has seen.
pub(super) async fn seen(mesh: &Mesh, routers: &[NodeId]) -> SeenBy {
    let ask = |router: NodeId| async move {
        let answer = mesh.call(&router, names::OP_SEEN, Bytes::new(), ANSWER_MAX).await;
        let told = answer.map_err(|fault| fault.to_string());
        let told = told.and_then(|bytes| rmp_serde::from_slice(&bytes).map_err(|error| error.to_string()));
        let told = told.inspect_err(|error| tracing::debug!(%router, error, "a router does not tell what it has seen"));
        (router, told.ok())
    };
    futures::stream::iter(routers.iter().cloned().map(ask)).buffer_unordered(ASKED_AT_ONCE).collect().await
}

/// What is known of a model now; `None` of one that nobody serves.
pub(super) fn raw(shared: &PlannerShared, catalog: &Catalog, model: &ModelId, seen: &SeenBy) -> Option<Raw> {
    let served = catalog.models.get(model)?;
    let routers = seen.iter().map(|(router, told)| (router.clone(), told.as_ref().map(|told| told.of(model))));
    let lives = || served.workers.iter().map(|worker| (&worker.id, worker.incarnation));
    let told = shared.shard.knowledge.survey(lives(), &[]);
    let snapshot = shared.view.mesh().snapshot();
    let worker = |(worker, told): (&CatalogWorker, _)| worker_seen(&snapshot, worker, told);
    let workers = served.workers.iter().zip(told).map(worker).collect();
    Some(Raw { routers: routers.collect(), workers, block_tokens: served.card.block_tokens })
}

fn worker_seen(
    snapshot: &Snapshot,
    worker: &CatalogWorker,
    told: Option<crate::indexer::knowledge::WorkerStatus>,
) -> WorkerSeen {
    let sound = told.as_ref().is_some_and(|told| told.sound && told.report.is_some()) && !worker.suspect;
    let report = told.and_then(|told| told.report).map(|(_, report)| report);
    let load = report.as_ref().map(|report| report.load).unwrap_or_default();
    WorkerSeen {
        id: worker.id.clone(),
        incarnation: worker.incarnation,
        role: worker.role,
        sound,
        removable: stands_alone(snapshot, &worker.id),
        rates: report.and_then(|report| report.rates),
        sequences_max: worker.limits.sequences_max,
        step_tokens: worker.limits.batch_tokens_max,
        blocks: worker.limits.kv_blocks,
        blocks_pinned: load.blocks_pinned,
        running: load.running,
        waiting: load.waiting,
        queued_tokens: load.prefill_tokens,
        prefilled: load.tokens_prefilled,
        generated: load.tokens_generated,
    }
}

/// Whether a worker's node does nothing else.
fn stands_alone(snapshot: &Snapshot, worker: &WorkerId) -> bool {
    snapshot.node(&worker.node).is_some_and(|view| {
        let workers = view.record.instances.iter().filter(|instance| instance.kind == InstanceKind::Worker);
        view.record.roles == ["worker"] && workers.count() == 1
    })
}

/// Gives a worker a role.
pub(super) async fn set_role(mesh: &Mesh, worker: &WorkerId, role: Role) -> Result<(), String> {
    let _before: Role = tell(mesh, names::OP_ROLE, worker, role).await?;
    Ok(())
}

/// Drains a worker; the requests that it has still.
pub(super) async fn drain(mesh: &Mesh, worker: &WorkerId) -> Result<u64, String> {
    tell(mesh, names::OP_DRAIN, worker, ()).await
}

/// Whether a worker that is being drained has nothing to do any more, or is gone.
pub(super) async fn is_empty(mesh: &Mesh, worker: &WorkerId) -> bool {
    mesh.snapshot().node(&worker.node).is_none() || drain(mesh, worker).await == Ok(0)
}

async fn tell<T: Serialize, A: serde::de::DeserializeOwned>(
    mesh: &Mesh,
    op: &str,
    worker: &WorkerId,
    what: T,
) -> Result<A, String> {
    let body = rmp_serde::to_vec(&(worker.index, what)).map_err(|error| error.to_string())?;
    let answer = mesh.call(&worker.node, op, body.into(), ANSWER_MAX).await.map_err(|fault| fault.to_string())?;
    rmp_serde::from_slice(&answer).map_err(|error| error.to_string())
}
