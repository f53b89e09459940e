//! Fetches tokenizers over the mesh, once each, and keeps them by digest.
//!
//! Called by the client. The bytes are a blob of the mesh; here lies what was decoded. Bounds: [`KEPT_MAX`] bundles.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use starling_engine::{ModelCard, TokenizerBundle};
use tokio::{sync::OnceCell, time::Instant};

use super::REACH_WAIT;
use crate::{generate::GenerateError, route::catalog::CatalogModel, view::View};

/// Bundles kept.
const KEPT_MAX: usize = 64;

/// Longest fetch.
const FETCH_MAX: Duration = Duration::from_secs(30);

type Cell = Arc<OnceCell<Arc<TokenizerBundle>>>;

/// The bundles known here.
#[derive(Debug, Default)]
pub(super) struct Bundles {
    cells: Mutex<HashMap<String, Cell>>,
}

impl Bundles {
    /// The bundle of a card, fetched when it is not here. Concurrent asks wait for one fetch.
    pub(super) async fn get(&self, view: &Arc<View>, card: &ModelCard) -> Result<Arc<TokenizerBundle>, GenerateError> {
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

/// Fetches the blob that the workers of the model name, and checks that it is what the card promises.
async fn fetch(view: &Arc<View>, card: &ModelCard) -> Result<Arc<TokenizerBundle>, GenerateError> {
    let unavailable = |reason: &dyn std::fmt::Display| {
        GenerateError::Unavailable(format!("the tokenizer of `{}` cannot be fetched: {reason}", card.id))
    };
    view.reach(&card.id, Instant::now() + REACH_WAIT).await;
    let catalog = view.catalog();
    let holds = |model: &&CatalogModel| model.card.bundle_digest == card.bundle_digest;
    let blob = catalog.models.values().filter(holds).find_map(|model| model.bundle);
    let blob = blob.ok_or_else(|| unavailable(&"no node serves it"))?;
    let bytes = view.mesh().blobs().get(blob, FETCH_MAX).await.map_err(|error| unavailable(&error))?;
    let bundle: TokenizerBundle = rmp_serde::from_slice(&bytes).map_err(|error| unavailable(&error))?;
    if bundle.digest() != card.bundle_digest {
        return Err(unavailable(&"its content does not match its digest"));
    }
    Ok(Arc::new(bundle))
}
