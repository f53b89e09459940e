//! A running node's answers to the command line.
//!
//! Called once at start. Bounds: asking all members for their actors runs [`MEMBERS_AT_ONCE`] at a time, each within
//! [`MEMBER_ANSWERS_WITHIN`]; who does not answer is named, not waited for.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture};
use serde::{Serialize, de::DeserializeOwned};
use starling_actors::{
    cache_report::CacheRow,
    names::{OP_CACHES, OP_DRAIN, OP_FAULT, OP_RECEIPTS, OP_ROLE},
    route::{receipt::Receipt, split::Role},
};
use starling_cluster::{
    discovery::InstanceKind,
    mesh::Mesh,
    stream::{Fault, FaultKind},
};
use starling_engine::simulated::faults::Fault as EngineFault;
use starling_ids::NodeId;

use super::{
    op,
    rows::{ActorRow, Caches, ClusterActors, Missing, Why, actor_rows, instance_rows, node_rows},
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
    answer(mesh, op::WHY, |mesh, body| Box::pin(async move { encode(&why(&mesh, body).await) }));
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
async fn all_actors(mesh: &Mesh) -> ClusterActors {
    let members: Vec<NodeId> = mesh.snapshot().nodes.iter().map(|view| view.record.node.clone()).collect();
    let others = members.into_iter().filter(|node| node != mesh.node());
    let asked = others.map(|node| ask_member(mesh.clone(), node));
    let answers: Vec<_> = futures::stream::iter(asked).buffer_unordered(MEMBERS_AT_ONCE).collect().await;
    let mut all = ClusterActors { actors: local_actors(mesh), missing: Vec::new() };
    for answer in answers {
        match answer {
            Ok(rows) => all.actors.extend(rows),
            Err(missing) => all.missing.push(missing),
        }
    }
    all.actors.sort_by(|a, b| (&a.node, &a.path).cmp(&(&b.node, &b.path)));
    all.missing.sort_by(|a, b| a.node.cmp(&b.node));
    all
}

async fn ask_member(mesh: Mesh, node: NodeId) -> Result<Vec<ActorRow>, Missing> {
    let answer = mesh.call(&node, op::ACTORS_LOCAL, Bytes::new(), MEMBER_ANSWERS_WITHIN).await;
    let rows = answer.and_then(|bytes| {
        rmp_serde::from_slice(&bytes).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
    });
    rows.map_err(|fault| Missing { node: node.to_string(), reason: fault.to_string() })
}

/// Asks every node with workers for their caches.
async fn caches(mesh: &Mesh) -> Caches {
    let snapshot = mesh.snapshot();
    let nodes: BTreeSet<NodeId> =
        snapshot.instances(InstanceKind::Worker).map(|(view, _)| view.record.node.clone()).collect();
    let asked = nodes.into_iter().map(|node| ask_caches(mesh.clone(), node));
    let answers: Vec<_> = futures::stream::iter(asked).buffer_unordered(MEMBERS_AT_ONCE).collect().await;
    let mut all = Caches { caches: Vec::new(), missing: Vec::new() };
    for answer in answers {
        match answer {
            Ok(rows) => all.caches.extend(rows),
            Err(missing) => all.missing.push(missing),
        }
    }
    // A worker's own rows keep their order.
    all.caches.sort_by(|a, b| a.worker.cmp(&b.worker));
    all.missing.sort_by(|a, b| a.node.cmp(&b.node));
    all
}

async fn ask_caches(mesh: Mesh, node: NodeId) -> Result<Vec<CacheRow>, Missing> {
    let answer = mesh.call(&node, OP_CACHES, Bytes::new(), MEMBER_ANSWERS_WITHIN).await;
    let rows = answer.and_then(|bytes| {
        rmp_serde::from_slice(&bytes).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
    });
    rows.map_err(|fault| Missing { node: node.to_string(), reason: fault.to_string() })
}

/// Asks every router for its decisions about a request.
async fn why(mesh: &Mesh, request: Bytes) -> Why {
    let snapshot = mesh.snapshot();
    let routers: BTreeSet<NodeId> =
        snapshot.instances(InstanceKind::Router).map(|(view, _)| view.record.node.clone()).collect();
    let asked = routers.into_iter().map(|node| ask_router(mesh.clone(), node, request.clone()));
    let answers: Vec<_> = futures::stream::iter(asked).buffer_unordered(MEMBERS_AT_ONCE).collect().await;
    let mut why = Why { receipts: Vec::new(), missing: Vec::new() };
    for answer in answers {
        match answer {
            Ok(receipts) => why.receipts.extend(receipts),
            Err(missing) => why.missing.push(missing),
        }
    }
    why.receipts.sort_by(|(a, _), (b, _)| a.cmp(b));
    why.missing.sort_by(|a, b| a.node.cmp(&b.node));
    why
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

async fn ask_router(mesh: Mesh, node: NodeId, request: Bytes) -> Result<Vec<(String, Receipt)>, Missing> {
    let answer = mesh.call(&node, OP_RECEIPTS, request, MEMBER_ANSWERS_WITHIN).await;
    let receipts = answer.and_then(|bytes| {
        let read: Result<Vec<Receipt>, _> = rmp_serde::from_slice(&bytes);
        read.map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
    });
    let name = node.to_string();
    let named = |receipts: Vec<Receipt>| receipts.into_iter().map(|receipt| (name.clone(), receipt)).collect();
    receipts.map(named).map_err(|fault| Missing { node: node.to_string(), reason: fault.to_string() })
}
