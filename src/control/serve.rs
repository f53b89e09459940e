//! A running node's answers to the command line.
//!
//! Called once at start. Bounds: asking members runs [`MEMBERS_AT_ONCE`] at a time, each within
//! [`MEMBER_ANSWERS_WITHIN`]; who does not answer is named, not waited for.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture};
use serde::{Serialize, de::DeserializeOwned};
use starling_actors::{
    cache_report::CacheRow,
    names::{OP_CACHES, OP_DRAIN, OP_FAULT, OP_NEWEST, OP_PLAN, OP_RECEIPTS, OP_ROLE},
    planner::board::PlanRow,
    route::{receipt::Receipt, split::Role},
};
use starling_cluster::{
    discovery::InstanceKind,
    mesh::Mesh,
    stream::{Fault, FaultKind},
};
use starling_engine::simulated::faults::Fault as EngineFault;
use starling_ids::{ModelId, NodeId};

use super::{
    op,
    rows::{
        ActorRow, Caches, ClusterActors, Missing, Plans, RequestRow, Requests, Why, actor_rows, instance_rows,
        node_rows, request_row,
    },
};

const MEMBERS_AT_ONCE: usize = 16;
const MEMBER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);

type Answer = BoxFuture<'static, Result<Bytes, Fault>>;

/// Registers every operation at the mesh.
pub fn serve(mesh: &Mesh) {
    answer(mesh, op::NODES, |mesh, _| {
        Box::pin(async move { encode(&node_rows(&mesh.snapshot(), mesh.node(), mesh.rival())) })
    });
    answer(mesh, op::INSTANCES, |mesh, _| Box::pin(async move { encode(&instance_rows(&mesh.snapshot())) }));
    answer(mesh, op::ACTORS_LOCAL, |mesh, _| Box::pin(async move { encode(&local_actors(&mesh)) }));
    answer(mesh, op::ACTORS, |mesh, _| Box::pin(async move { encode(&all_actors(&mesh).await) }));
    answer(mesh, op::CACHES, |mesh, _| Box::pin(async move { encode(&caches(&mesh).await) }));
    answer(mesh, op::PLAN, |mesh, _| Box::pin(async move { encode(&plans(&mesh).await) }));
    answer(mesh, op::WHY, |mesh, body| Box::pin(async move { encode(&why(&mesh, body).await) }));
    answer(mesh, op::REQUESTS, |mesh, body| {
        Box::pin(async move {
            let count: u32 = rmp_serde::from_slice(&body)
                .map_err(|_| Fault::new(FaultKind::Invalid, "the body must be a number of requests"))?;
            encode(&requests(&mesh, count).await?)
        })
    });
    answer(mesh, op::ROLE, |mesh, body| Box::pin(async move { set_role(&mesh, &body).await }));
    answer(mesh, op::DRAIN, |mesh, body| Box::pin(async move { set_drain(&mesh, &body).await }));
    answer(mesh, op::FAULT, |mesh, body| Box::pin(async move { set_fault(&mesh, &body).await }));
    answer(mesh, op::KEYS, |mesh, body| Box::pin(async move { super::keys::answer(&mesh, &body).await }));
    answer(mesh, op::PANIC, |mesh, body| {
        Box::pin(async move {
            let path: String = rmp_serde::from_slice(&body)
                .map_err(|_| Fault::new(FaultKind::Invalid, "the body must be the path of an actor"))?;
            tracing::warn!(%path, "a panic was asked for");
            encode(&mesh.book().inject_panic(&path).await)
        })
    });
}

/// Registers one operation.
fn answer(mesh: &Mesh, op: &'static str, handler: fn(Mesh, Bytes) -> Answer) {
    let own = mesh.clone();
    mesh.serve_op(op, Arc::new(move |_from: NodeId, body: Bytes| handler(own.clone(), body)));
}

pub(super) fn encode<T: Serialize>(value: &T) -> Result<Bytes, Fault> {
    let bytes = rmp_serde::to_vec_named(value);
    bytes.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
}

fn local_actors(mesh: &Mesh) -> Vec<ActorRow> {
    actor_rows(mesh.node(), &mesh.book().snapshot())
}

/// Asks every other member; sorted by node and path.
pub(super) async fn all_actors(mesh: &Mesh) -> ClusterActors {
    let members = mesh.snapshot().nodes.iter().map(|view| view.record.node.clone()).collect::<BTreeSet<NodeId>>();
    let others = members.into_iter().filter(|node| node != mesh.node()).collect();
    let (answers, missing) = gather::<Vec<ActorRow>>(mesh, others, op::ACTORS_LOCAL, Bytes::new()).await;
    let mut actors = local_actors(mesh);
    actors.extend(answers.into_iter().flat_map(|(_, rows)| rows));
    actors.sort_by(|a, b| (&a.node, &a.path).cmp(&(&b.node, &b.path)));
    ClusterActors { actors, missing }
}

/// Asks every node with workers for their caches; a worker's own rows keep their order.
pub(super) async fn caches(mesh: &Mesh) -> Caches {
    let nodes = with(mesh, InstanceKind::Worker);
    let (answers, missing) = gather::<Vec<CacheRow>>(mesh, nodes, OP_CACHES, Bytes::new()).await;
    let mut caches: Vec<CacheRow> = answers.into_iter().flat_map(|(_, rows)| rows).collect();
    caches.sort_by(|a, b| a.worker.cmp(&b.worker));
    Caches { caches, missing }
}

/// Asks every router what its planner says.
pub(super) async fn plans(mesh: &Mesh) -> Plans {
    let nodes = with(mesh, InstanceKind::Router);
    let (answers, missing) = gather::<Vec<PlanRow>>(mesh, nodes, OP_PLAN, Bytes::new()).await;
    let mut plans: Vec<PlanRow> = answers.into_iter().flat_map(|(_, rows)| rows).collect();
    plans.sort_by(|a, b| (&a.model, &a.leader).cmp(&(&b.model, &b.leader)));
    Plans { plans, missing }
}

/// Asks every router for its decisions about a request.
pub(super) async fn why(mesh: &Mesh, request: Bytes) -> Why {
    let nodes = with(mesh, InstanceKind::Router);
    let (answers, missing) = gather::<Vec<Receipt>>(mesh, nodes, OP_RECEIPTS, request).await;
    let named = |(router, receipts): (NodeId, Vec<Receipt>)| {
        receipts.into_iter().map(|receipt| (router.to_string(), receipt)).collect::<Vec<_>>()
    };
    Why { receipts: answers.into_iter().flat_map(named).collect(), missing }
}

/// Asks every router for its newest decisions, and merges them.
pub(super) async fn requests(mesh: &Mesh, count: u32) -> Result<Requests, Fault> {
    let nodes = with(mesh, InstanceKind::Router);
    let (answers, missing) = gather::<Vec<Newest>>(mesh, nodes, OP_NEWEST, encode(&count)?).await;
    let named = |(router, newest): (NodeId, Vec<Newest>)| {
        newest.into_iter().map(|(model, ago, receipt)| request_row(&router, &model, ago, &receipt)).collect::<Vec<_>>()
    };
    let mut requests: Vec<RequestRow> = answers.into_iter().flat_map(named).collect();
    requests.sort_by(|a, b| a.ago_ms.total_cmp(&b.ago_ms));
    requests.truncate(usize::try_from(count).unwrap_or(usize::MAX));
    Ok(Requests { requests, missing })
}

/// A decision with its model, and how long ago it was taken.
type Newest = (ModelId, Duration, Receipt);

/// The nodes that offer such an instance.
fn with(mesh: &Mesh, kind: InstanceKind) -> BTreeSet<NodeId> {
    mesh.snapshot().instances(kind).map(|(view, _)| view.record.node.clone()).collect()
}

/// Asks nodes the same question; what they say, and who says nothing, sorted by node.
async fn gather<T: DeserializeOwned>(
    mesh: &Mesh,
    nodes: BTreeSet<NodeId>,
    op: &str,
    body: Bytes,
) -> (Vec<(NodeId, T)>, Vec<Missing>) {
    let ask = |node: NodeId| {
        let (mesh, op, body) = (mesh.clone(), op.to_owned(), body.clone());
        async move {
            let answer = mesh.call(&node, &op, body, MEMBER_ANSWERS_WITHIN).await.and_then(|bytes| {
                rmp_serde::from_slice(&bytes).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
            });
            match answer {
                Ok(told) => Ok((node, told)),
                Err(fault) => Err(Missing { node: node.to_string(), reason: fault.to_string() }),
            }
        }
    };
    let answers: Vec<_> =
        futures::stream::iter(nodes.into_iter().map(ask)).buffer_unordered(MEMBERS_AT_ONCE).collect().await;
    let (mut told, mut missing) = (Vec::new(), Vec::new());
    for answer in answers {
        match answer {
            Ok(one) => told.push(one),
            Err(one) => missing.push(one),
        }
    }
    told.sort_by(|(a, _), (b, _)| a.cmp(b));
    missing.sort_by(|a, b| a.node.cmp(&b.node));
    (told, missing)
}

/// Hands a change of role to the worker's node.
async fn set_role(mesh: &Mesh, body: &[u8]) -> Result<Bytes, Fault> {
    let before: Role = tell_worker::<Role, _>(mesh, OP_ROLE, body).await?;
    encode(&before)
}

/// Hands a drain to the worker's node.
async fn set_drain(mesh: &Mesh, body: &[u8]) -> Result<Bytes, Fault> {
    let in_flight: u64 = tell_worker::<(), _>(mesh, OP_DRAIN, body).await?;
    encode(&in_flight)
}

/// Hands a fault on command to the worker's node.
async fn set_fault(mesh: &Mesh, body: &[u8]) -> Result<Bytes, Fault> {
    let before: EngineFault = tell_worker::<EngineFault, _>(mesh, OP_FAULT, body).await?;
    encode(&before)
}

/// Hands `(worker as NODE/INDEX, something)` to that worker's node as `(index, something)`; its answer.
async fn tell_worker<T, A>(mesh: &Mesh, op: &str, body: &[u8]) -> Result<A, Fault>
where
    T: Serialize + DeserializeOwned,
    A: DeserializeOwned,
{
    let invalid = |reason: String| Fault::new(FaultKind::Invalid, reason);
    let (worker, what): (String, T) = rmp_serde::from_slice(body).map_err(|error| invalid(error.to_string()))?;
    let parts = worker.rsplit_once('/').and_then(|(node, index)| Some((NodeId::new(node).ok()?, index.parse().ok()?)));
    let form = || invalid(format!("`{worker}` is no worker; write NODE/INDEX, for example host-a/0"));
    let (node, index): (NodeId, u16) = parts.ok_or_else(form)?;
    let asked =
        rmp_serde::to_vec(&(index, what)).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))?;
    let answer = mesh.call(&node, op, asked.into(), MEMBER_ANSWERS_WITHIN).await?;
    rmp_serde::from_slice(&answer).map_err(|error| invalid(error.to_string()))
}
