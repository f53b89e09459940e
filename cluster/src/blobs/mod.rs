//! Bytes named by what they are: model cards, tokenizer bundles, and whatever programs hand around.
//!
//! ```text
//! let digest = mesh.blobs().put(bytes)?;                          // held for the life of the node, named in its record
//! let bytes = mesh.blobs().get(digest, Duration::from_secs(10)).await?;       // on any node: from any node that holds it
//! ```
//!
//! A blob is fetched once, checked against its digest, kept, and served on: also by a gateway that has only fetched it.
//! Pure parts: [`BlobDigest`], the store. The rest is a thin shell over streams. Bounds: [`BLOB_MAX`] bytes a blob,
//! [`STORE_MAX`] bytes held, [`SERVED_MAX`] streams out and [`FETCHED_MAX`] in at one time.

mod digest;
mod door;
mod fetch;
mod store;

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
    time::Duration,
};

use bytes::Bytes;
use starling_ids::Metric;
use thiserror::Error;
use tokio::sync::{OnceCell, Semaphore};

pub use self::digest::BlobDigest;
pub(crate) use self::door::{BLOB_ENDPOINT, BlobDoor};
use self::store::Store;
use crate::mesh::Mesh;

/// Longest blob in bytes.
pub const BLOB_MAX: usize = 64 << 20;
/// Bytes held by one node: own blobs, which stay, and fetched ones, of which the longest unused go first.
pub const STORE_MAX: usize = 512 << 20;
/// Streams that carry blobs to others at one time; one more is refused as overloaded.
pub const SERVED_MAX: usize = 16;
/// Blobs fetched at one time; more wait.
pub const FETCHED_MAX: usize = 8;

/// Why there is no blob.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BlobError {
    /// Longer than [`BLOB_MAX`].
    #[error("a blob of {len} bytes is over the limit of {BLOB_MAX}")]
    TooLarge {
        /// Its length.
        len: usize,
    },
    /// This node's own blobs fill the store.
    #[error("the blobs of this node fill its store of {STORE_MAX} bytes")]
    Full,
    /// Every node that was asked says that it does not hold it.
    #[error("no node holds the blob {0}")]
    NotFound(BlobDigest),
    /// Somebody may hold it and could not give it in time.
    #[error("the blob {digest} was not to be had within {limit_ms} ms: {reason}")]
    Unavailable {
        /// Which.
        digest: BlobDigest,
        /// The time allowed, milliseconds.
        limit_ms: u64,
        /// What the last node that was asked said.
        reason: String,
    },
}

type Flight = Arc<OnceCell<Bytes>>;

/// What a node holds. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Shelf {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Mutex<Store>,
    /// Fetches under way: whoever asks for the same waits for the same.
    flights: Mutex<HashMap<BlobDigest, Flight>>,
    fetching: Semaphore,
    serving: AtomicUsize,
}

impl Default for Shelf {
    fn default() -> Self {
        let inner = Inner {
            store: Mutex::new(Store::new(STORE_MAX)),
            flights: Mutex::default(),
            fetching: Semaphore::new(FETCHED_MAX),
            serving: AtomicUsize::new(0),
        };
        Self { inner: Arc::new(inner) }
    }
}

impl Shelf {
    fn held(&self, digest: &BlobDigest) -> Option<Bytes> {
        lock(&self.inner.store).get(digest)
    }

    fn keep(&self, digest: BlobDigest, bytes: Bytes, own: bool) -> Result<(), BlobError> {
        let mut store = lock(&self.inner.store);
        let kept = store.put(digest, bytes, own);
        #[allow(clippy::cast_precision_loss)] // below 2^29
        metrics::gauge!(Metric::BlobBytes.name()).set(store.bytes() as f64);
        kept
    }
}

/// The blobs of a cluster, seen from one node.
#[derive(Debug, Clone)]
pub struct Blobs {
    mesh: Mesh,
    shelf: Shelf,
}

impl Blobs {
    pub(crate) const fn new(mesh: Mesh, shelf: Shelf) -> Self {
        Self { mesh, shelf }
    }

    /// Holds these bytes for the life of the node. To be found by others, name the digest in an instance of this node's
    /// record, as `card` or `bundle`.
    pub fn put(&self, bytes: impl Into<Bytes>) -> Result<BlobDigest, BlobError> {
        let bytes = bytes.into();
        let digest = BlobDigest::of(&bytes);
        self.shelf.keep(digest, bytes, true)?;
        Ok(digest)
    }

    /// The blob if it is held here.
    #[must_use]
    pub fn held(&self, digest: BlobDigest) -> Option<Bytes> {
        self.shelf.held(&digest)
    }

    /// The blob, fetched within `limit` when it is not held here. Asks for one digest share one fetch; dropping the future
    /// of the one that fetches passes the work on to the next.
    pub async fn get(&self, digest: BlobDigest, limit: Duration) -> Result<Bytes, BlobError> {
        if let Some(bytes) = self.held(digest) {
            return Ok(bytes);
        }
        let flight = lock(&self.shelf.inner.flights).entry(digest).or_default().clone();
        let last = Mutex::new("nobody was asked".to_owned());
        let fetched = flight.get_or_try_init(|| fetch::fetch(self, digest, &last));
        let outcome = match tokio::time::timeout(limit, fetched).await {
            Ok(outcome) => outcome.cloned(),
            Err(_) => {
                let (limit_ms, reason) = (u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), lock(&last).clone());
                Err(BlobError::Unavailable { digest, limit_ms, reason })
            }
        };
        self.land(digest, flight);
        outcome
    }

    /// Forgets the flight once nobody else is in it.
    fn land(&self, digest: BlobDigest, flight: Flight) {
        drop(flight);
        let mut flights = lock(&self.shelf.inner.flights);
        if flights.get(&digest).is_some_and(|flight| Arc::strong_count(flight) == 1) {
            flights.remove(&digest);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
