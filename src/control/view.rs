//! What the page shows, as JSON: the rows of the inspection verbs.
//!
//! Called by the gateway's backend. Bounds: [`REQUESTS`] decisions; who does not answer is named, not waited for.

use bytes::Bytes;
use serde::Serialize;
use starling_cluster::{
    mesh::Mesh,
    stream::{Fault, FaultKind},
};
use starling_gateway::View;

use super::{
    rows::{instance_rows, node_rows},
    serve::{all_actors, caches, plans, requests, why},
};

/// Decisions shown.
const REQUESTS: u32 = 50;

/// One view of the cluster.
///
/// # Errors
/// What was found cannot be written down.
pub(crate) async fn view(mesh: &Mesh, view: View) -> Result<Bytes, Fault> {
    match view {
        View::Nodes => json(&node_rows(&mesh.snapshot(), mesh.node(), mesh.rival())),
        View::Instances => json(&instance_rows(&mesh.snapshot())),
        View::Actors => json(&all_actors(mesh).await),
        View::Caches => json(&caches(mesh).await),
        View::Plan => json(&plans(mesh).await),
        View::Requests => json(&requests(mesh, REQUESTS).await?),
        View::Why(request) => json(&why(mesh, request.to_string().into()).await),
    }
}

fn json<T: Serialize>(rows: &T) -> Result<Bytes, Fault> {
    let text = serde_json::to_vec(rows);
    text.map(Bytes::from).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
}
