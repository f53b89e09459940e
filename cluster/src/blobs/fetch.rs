//! Fetches one blob: whom to ask, in which order, and when to ask again.
//!
//! Called by [`Blobs::get`], which bounds the time. Nodes whose records name the digest come first, in an order of their own
//! for each fetch; then some others, who may have fetched it before. Whoever is busy is asked again later.

use std::{sync::Mutex, time::Duration};

use bytes::Bytes;
use rand::seq::SliceRandom;
use starling_ids::{EndpointName, Incarnation, Metric, NodeId, RequestId};

use super::{BLOB_ENDPOINT, BLOB_MAX, BlobDigest, BlobError, Blobs, lock};
use crate::{
    discovery::{NodeState, NodeView, Snapshot},
    stream::{Context, FaultKind, Opened, StreamError},
};

/// Longest fetch from one node.
const FETCH_TIME_MAX: Duration = Duration::from_secs(15);
/// Nodes asked in one round although their records do not name the blob.
const GUESSES_MAX: usize = 8;
/// Rounds in which nobody holds it, before it is taken for unknown: a record may be on its way.
const ROUNDS_UNKNOWN: u32 = 3;
const AGAIN_FIRST: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(2);

/// Asks round after round; ends with the blob, or when nobody holds it. `last` is what was last said against it.
pub(super) async fn fetch(blobs: &Blobs, digest: BlobDigest, last: &Mutex<String>) -> Result<Bytes, BlobError> {
    let _place = blobs.shelf.inner.fetching.acquire().await;
    let mut unknown = 0;
    for round in 0_u32.. {
        let mut nobody_holds_it = true;
        for (node, incarnation) in holders(blobs, digest) {
            match from(blobs, &node, incarnation, digest).await {
                Ok(bytes) => {
                    metrics::counter!(Metric::BlobsFetched.name(), "outcome" => "fetched").increment(1);
                    // One that finds no room is used all the same.
                    if let Err(error) = blobs.shelf.keep(digest, bytes.clone(), false) {
                        tracing::warn!(%digest, %error, "a fetched blob is not kept");
                    }
                    return Ok(bytes);
                }
                Err(error) => {
                    nobody_holds_it &= matches!(&error, StreamError::Rejected(f) if f.kind == FaultKind::NotFound);
                    tracing::debug!(%node, %digest, %error, "blob not fetched");
                    *lock(last) = format!("{node}: {error}");
                }
            }
        }
        unknown += u32::from(nobody_holds_it);
        if unknown >= ROUNDS_UNKNOWN {
            break;
        }
        tokio::time::sleep(AGAIN_FIRST.saturating_mul(1 << round.min(8)).min(AGAIN_MAX)).await;
    }
    metrics::counter!(Metric::BlobsFetched.name(), "outcome" => "not_found").increment(1);
    Err(BlobError::NotFound(digest))
}

/// Whom to ask in one round.
fn holders(blobs: &Blobs, digest: BlobDigest) -> Vec<(NodeId, Incarnation)> {
    let (snapshot, own) = (blobs.mesh.snapshot(), blobs.mesh.node());
    let others = others(&snapshot, own);
    let names = |view: &&NodeView| {
        let mut instances = view.record.instances.iter();
        instances.any(|instance| instance.card == Some(digest) || instance.bundle == Some(digest))
    };
    let (mut named, mut guesses): (Vec<&NodeView>, Vec<&NodeView>) = others.partition(names);
    named.shuffle(&mut rand::rng());
    guesses.shuffle(&mut rand::rng());
    // A suspect may be slow: after the others.
    named.sort_by_key(|view| view.state);
    guesses.truncate(GUESSES_MAX);
    named.into_iter().chain(guesses).map(|view| (view.record.node.clone(), view.record.incarnation)).collect()
}

fn others<'a>(snapshot: &'a Snapshot, own: &'a NodeId) -> impl Iterator<Item = &'a NodeView> {
    let nodes = snapshot.nodes.iter();
    nodes.filter(move |view| view.record.node != *own && view.state != NodeState::Unreachable)
}

async fn from(
    blobs: &Blobs,
    node: &NodeId,
    incarnation: Incarnation,
    digest: BlobDigest,
) -> Result<Bytes, StreamError> {
    let broken = |reason: &str| StreamError::Broken(reason.to_owned());
    let endpoint = EndpointName::new(BLOB_ENDPOINT).map_err(|error| broken(&error.to_string()))?;
    let context = Context::new(RequestId::default(), FETCH_TIME_MAX);
    let body = Bytes::copy_from_slice(&digest.0);
    let Opened { reply, tx, mut rx } = blobs.mesh.open(node, incarnation, &endpoint, context, body).await?;
    tx.end();
    let length = <[u8; 8]>::try_from(reply.as_ref()).map(u64::from_le_bytes).map_err(|_| broken("no length"))?;
    let length = usize::try_from(length).ok().filter(|length| *length <= BLOB_MAX);
    let length = length.ok_or_else(|| broken("longer than a blob may be"))?;
    let mut bytes = Vec::new();
    while let Some(chunk) = rx.recv().await {
        let chunk = chunk?;
        if bytes.len() + chunk.len() > length {
            return Err(broken("longer than announced"));
        }
        bytes.extend_from_slice(&chunk);
    }
    if BlobDigest::of(&bytes) != digest {
        metrics::counter!(Metric::BlobsFetched.name(), "outcome" => "corrupt").increment(1);
        return Err(broken("its content does not match its digest"));
    }
    Ok(bytes.into())
}
