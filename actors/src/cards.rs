//! The cards of workers: what each can do, as blobs that everybody fetches by digest.
//!
//! Called by workers, which put them, and by [`crate::view::View`], which reads the directory through them. Bounds:
//! [`KEPT_MAX`] decoded cards; fetches as the blobs bound them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use starling_cluster::{
    blobs::{BlobDigest, Blobs},
    mesh::Mesh,
};

use crate::route::catalog::Card;

/// Decoded cards kept; beyond it all are read anew from the blobs, which keep the bytes.
const KEPT_MAX: usize = 4_096;

/// Holds a value as a blob for other nodes; `None` when that fails, which is logged.
pub(crate) fn put<T: serde::Serialize>(mesh: &Mesh, value: &T) -> Option<BlobDigest> {
    let held = rmp_serde::to_vec(value).map_err(|error| error.to_string());
    match held.and_then(|bytes| mesh.blobs().put(bytes).map_err(|error| error.to_string())) {
        Ok(digest) => Some(digest),
        Err(error) => {
            tracing::error!(error, "a card or a tokenizer cannot be held for other nodes");
            None
        }
    }
}

/// Cards read so far, and those being fetched.
#[derive(Debug, Default)]
pub(crate) struct Cards {
    read: Mutex<BTreeMap<BlobDigest, Card>>,
}

impl Cards {
    /// What is known of a card now; what this node holds as a blob is known.
    pub(crate) fn get(&self, blobs: &Blobs, digest: BlobDigest) -> Card {
        if let Some(card) = self.lock().get(&digest) {
            return card.clone();
        }
        blobs.held(digest).map_or(Card::Missing, |bytes| self.note(digest, &bytes))
    }

    /// Reads the bytes of a card.
    pub(crate) fn note(&self, digest: BlobDigest, bytes: &[u8]) -> Card {
        let card = rmp_serde::from_slice(bytes).map_or(Card::Unreadable, |card| Card::Known(Arc::new(card)));
        let mut read = self.lock();
        if read.len() >= KEPT_MAX {
            read.clear();
        }
        read.insert(digest, card.clone());
        card
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<BlobDigest, Card>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
