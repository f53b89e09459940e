//! Fetches tokenizers over the mesh, once each, and keeps them by digest.
//!
//! Bounds: [`KEPT_MAX`] bundles of at most [`BYTES_MAX`] encoded.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use starling_cluster::stream::{Context, Opened};
use starling_engine::{ModelCard, TokenizerBundle};
use starling_ids::{Incarnation, NodeId, RequestId};
use tokio::{sync::OnceCell, time::timeout};

use crate::{generate::GenerateError, names, view::View};

/// Bundles kept.
const KEPT_MAX: usize = 64;

/// Largest bundle taken, encoded.
const BYTES_MAX: usize = 64 << 20;

/// Longest fetch from one node.
const FETCH_MAX: Duration = Duration::from_secs(15);

type Cell = Arc<OnceCell<Arc<TokenizerBundle>>>;

/// The bundles known here.
#[derive(Debug, Default)]
pub(super) struct Bundles {
    cells: Mutex<HashMap<String, Cell>>,
}

impl Bundles {
    /// The bundle of a card, fetched when it is not here. Concurrent asks wait for one fetch.
    pub(super) async fn get(&self, view: &View, card: &ModelCard) -> Result<Arc<TokenizerBundle>, GenerateError> {
        let cell = self.cell(&card.bundle_digest);
        cell.get_or_try_init(|| fetch(view, card)).await.cloned()
    }

    fn cell(&self, digest: &str) -> Cell {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        if cells.len() >= KEPT_MAX && !cells.contains_key(digest) {
            // Models come and go by the dozen, not by the thousand; fetching one again is cheap.
            cells.clear();
        }
        cells.entry(digest.to_owned()).or_default().clone()
    }
}

/// Asks the nodes that serve the model, this one first, until one gives what the digest promises.
async fn fetch(view: &View, card: &ModelCard) -> Result<Arc<TokenizerBundle>, GenerateError> {
    let mut reason = "no node serves it".to_owned();
    for (node, incarnation) in holders(view, card) {
        match timeout(FETCH_MAX, fetch_from(view, (&node, incarnation), &card.bundle_digest)).await {
            Ok(Ok(bundle)) => return Ok(Arc::new(bundle)),
            Ok(Err(why)) => reason = format!("{node}: {why}"),
            Err(_) => reason = format!("{node}: no answer in time"),
        }
        tracing::debug!(model = %card.id, reason, "tokenizer not fetched");
    }
    Err(GenerateError::Unavailable(format!("the tokenizer of `{}` cannot be fetched: {reason}", card.id)))
}

fn holders(view: &View, card: &ModelCard) -> Vec<(NodeId, Incarnation)> {
    let own = view.mesh().node();
    let catalog = view.catalog();
    let holds = |other: &&ModelCard| other.bundle_digest == card.bundle_digest;
    let mut nodes: Vec<_> = catalog
        .workers()
        .filter(|(other, _)| holds(other))
        .map(|(_, worker)| (worker.id.node.clone(), worker.incarnation))
        .collect();
    nodes.sort_by_key(|(node, _)| (node != own, node.clone()));
    nodes.dedup();
    nodes
}

async fn fetch_from(
    view: &View,
    (node, incarnation): (&NodeId, Incarnation),
    digest: &str,
) -> Result<TokenizerBundle, String> {
    let context = Context::new(RequestId::default(), FETCH_MAX);
    let body = Bytes::copy_from_slice(digest.as_bytes());
    let opened = view.mesh().open(node, incarnation, &names::node_bundle(), context, body).await;
    let Opened { tx, mut rx, .. } = opened.map_err(|error| error.to_string())?;
    tx.end();
    let mut bytes = Vec::new();
    while let Some(chunk) = rx.recv().await {
        bytes.extend_from_slice(&chunk.map_err(|error| error.to_string())?);
        if bytes.len() > BYTES_MAX {
            return Err(format!("more than {BYTES_MAX} bytes"));
        }
    }
    let bundle: TokenizerBundle = rmp_serde::from_slice(&bytes).map_err(|error| error.to_string())?;
    if bundle.digest() != digest {
        return Err("its content does not match its digest".to_owned());
    }
    Ok(bundle)
}
