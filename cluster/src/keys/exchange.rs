//! One node asks another about its ring, and both end with the newer one.
//!
//! Called by the roller and the keeper. The ring travels only inside TLS, between ends that have proved a key that the
//! other one accepts. Bounds: a body is a few hundred bytes; longer ones are refused by the ring's parser.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_ids::NodeId;
use tokio::task::spawn_blocking;

use super::view::RingView;
use crate::{
    link::{ClientError, ControlClient},
    security::{KeyRing, Keys, SecretText, TlsError},
    session::{Caller, Ops},
    stream::{Fault, FaultKind},
};

/// The operation.
pub(super) const OP_EXCHANGE: &str = "keys/exchange";
/// Longest wait for one answer.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// What the asker says.
#[derive(Serialize, Deserialize)]
struct Question {
    /// What it holds.
    have: RingView,
    /// The ring itself, when the asker wants it to be taken.
    ring: Option<SecretText>,
}

/// What the other one says.
#[derive(Serialize, Deserialize)]
struct Answer {
    before: RingView,
    after: RingView,
    /// Its ring, when that outranks what the asker has.
    ring: Option<SecretText>,
    /// Why its file does not hold what is in force.
    not_kept: Option<String>,
}

/// What an exchange told of the other side.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) before: RingView,
    pub(super) after: RingView,
    pub(super) not_kept: Option<String>,
}

/// Answers exchanges on this node.
pub(super) fn serve(ops: &Ops, keys: &Keys) {
    let keys = keys.clone();
    ops.serve(
        OP_EXCHANGE,
        Arc::new(move |from, body| {
            let keys = keys.clone();
            Box::pin(async move { answer(&keys, &from, &body).await })
        }),
    );
}

async fn answer(keys: &Keys, from: &NodeId, body: &[u8]) -> Result<Bytes, Fault> {
    let unreadable = || Fault::new(FaultKind::Invalid, "not a question about keys");
    let question: Question = rmp_serde::from_slice(body).map_err(|_| unreadable())?;
    let before = RingView::from(&*keys.ring());
    let mut not_kept = None;
    if let Some(text) = &question.ring {
        let offered = KeyRing::parse(text.as_str()).map_err(|_| unreadable())?;
        tracing::debug!(%from, %offered, held = %before, "a ring is offered");
        not_kept = adopt(keys, offered).await?;
    }
    let ring = keys.ring();
    let after = RingView::from(&*ring);
    let newer = after.outranks(&question.have).then(|| ring.text());
    encode(&Answer { before, after, ring: newer, not_kept })
}

/// Takes a ring if it outranks the one held. Why it was not kept, if it was taken and not kept.
async fn adopt(keys: &Keys, offered: KeyRing) -> Result<Option<String>, Fault> {
    let keys = keys.clone();
    let adopted = spawn_blocking(move || keys.adopt(offered)).await;
    let adopted = adopted.map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))?;
    Ok(adopted.err().map(|error| error.to_string()))
}

fn encode<T: Serialize>(value: &T) -> Result<Bytes, Fault> {
    let encoded = rmp_serde::to_vec_named(value).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))?;
    Ok(encoded.into())
}

/// The question of a node with these keys; `offer` to have its ring taken.
fn question(keys: &Keys, offer: bool) -> Result<Bytes, Fault> {
    let ring = keys.ring();
    encode(&Question { have: RingView::from(&*ring), ring: offer.then(|| ring.text()) })
}

/// Takes a newer ring out of an answer.
async fn learn(keys: &Keys, answer: &[u8]) -> Result<Told, Fault> {
    let unreadable = || Fault::new(FaultKind::Invalid, "the answer about keys does not decode");
    let Answer { before, after, ring, not_kept } = rmp_serde::from_slice(answer).map_err(|_| unreadable())?;
    if let Some(text) = ring {
        let offered = KeyRing::parse(text.as_str()).map_err(|_| unreadable())?;
        // What could not be kept is in the log.
        adopt(keys, offered).await?;
    }
    Ok(Told { before, after, not_kept })
}

/// With a member, over an actor session.
pub(super) async fn with_member(keys: &Keys, caller: &Caller, node: &NodeId, offer: bool) -> Result<Told, Fault> {
    let answer = caller(node.clone(), OP_EXCHANGE, question(keys, offer)?, ANSWER_WITHIN).await?;
    learn(keys, &answer).await
}

/// With whoever listens at an address: before membership, and when gossip cannot be read. Offers the own ring if it is
/// the newer one.
pub(super) async fn with_address(keys: &Keys, address: SocketAddr) -> Result<Told, AddressError> {
    let client = ControlClient::connect(address, keys).await?;
    let ask = async |offer| {
        let answer = client.call(OP_EXCHANGE, question(keys, offer)?, ANSWER_WITHIN).await?;
        learn(keys, &answer).await
    };
    let told = ask(false).await?;
    if RingView::from(&*keys.ring()).outranks(&told.after) { Ok(ask(true).await?) } else { Ok(told) }
}

/// Why there was no exchange with an address.
#[derive(Debug, thiserror::Error)]
pub(super) enum AddressError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl AddressError {
    /// The other side has said that it accepts none of our keys.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Client(ClientError::Tls(TlsError::NoSharedKey(_))))
    }
}
