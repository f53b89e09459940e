//! What the Directory actor asks other nodes, and its answer to the same question from them.
//!
//! Run as tasks of the Directory actor; each ends with a message to it. Bounds: [`WAIT`] for every answer.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ractor::ActorRef;
use rand::RngExt;
use starling_ids::NodeId;

use super::{
    NodeRecord,
    actor::{DirectoryMsg, OP_RECORD, OP_SYNC},
    core::Digest,
};
use crate::{
    session::Caller,
    stream::{Fault, FaultKind},
    supervise::Handle,
};

/// Longest wait for an answer.
const WAIT: Duration = Duration::from_secs(2);
const SYNC_EVERY: Duration = Duration::from_secs(2);

/// Wakes the actor every two seconds, give or take a quarter, so that nodes started together do not ask together.
pub(super) async fn tick(directory: ActorRef<DirectoryMsg>) {
    loop {
        let pause = SYNC_EVERY.mul_f64(rand::rng().random_range(0.75..1.25));
        tokio::time::sleep(pause).await;
        if directory.cast(DirectoryMsg::Sync).is_err() {
            return;
        }
    }
}

/// Asks `node` for its own record.
pub(super) async fn pull(caller: Caller, node: NodeId, answer_to: ActorRef<DirectoryMsg>) {
    let outcome = caller(node.clone(), OP_RECORD, Bytes::new(), WAIT).await;
    let outcome = outcome.and_then(|record| decode(&record));
    send(&answer_to, DirectoryMsg::Pulled(node, outcome));
}

/// Tells `peer` what is known here and takes what it knows better.
pub(super) async fn compare(caller: Caller, peer: NodeId, digest: Digest, answer_to: ActorRef<DirectoryMsg>) {
    let answer = async { decode::<Vec<NodeRecord>>(&caller(peer.clone(), OP_SYNC, encode(&digest)?, WAIT).await?) };
    match answer.await {
        Ok(records) => send(&answer_to, DirectoryMsg::Synced(records)),
        Err(fault) => tracing::debug!(%peer, %fault, "digests were not compared"),
    }
}

/// Answers [`OP_SYNC`].
pub(super) async fn answer_sync(asked: Handle<DirectoryMsg>, body: Bytes) -> Result<Bytes, Fault> {
    let digest: Digest = decode(&body)?;
    let (reply, answer) = tokio::sync::oneshot::channel();
    asked.cast(DirectoryMsg::Newer(digest, reply))?;
    let unavailable = || Fault::new(FaultKind::Unavailable, "the directory gives no answer");
    let newer: Result<Vec<Arc<NodeRecord>>, _> = tokio::time::timeout(WAIT, answer).await.map_err(|_| unavailable())?;
    encode(&newer.map_err(|_| unavailable())?)
}

pub(super) fn send(to: &ActorRef<DirectoryMsg>, message: DirectoryMsg) {
    if to.cast(message).is_err() {
        tracing::debug!("the directory is gone");
    }
}

pub(super) fn encode<T: serde::Serialize>(value: &T) -> Result<Bytes, Fault> {
    let bytes = rmp_serde::to_vec(value).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))?;
    Ok(bytes.into())
}

fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    rmp_serde::from_slice(bytes).map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))
}
