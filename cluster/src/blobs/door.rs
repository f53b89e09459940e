//! Hands out blobs that are held here to whoever asks by digest.
//!
//! Called by links and local opens. Bounds: [`SERVED_MAX`] streams at one time, frames of [`CHUNK_BYTES`] under the stream's
//! credits.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};

use super::{BlobDigest, SERVED_MAX, Shelf};
use crate::stream::{Fault, FaultKind, Incoming, StreamHandler};

/// Where blobs are asked for.
pub(crate) const BLOB_ENDPOINT: &str = "starling/blobs/get";
/// Bytes in one frame.
const CHUNK_BYTES: usize = 60 * 1024;

/// The door to a shelf.
pub(crate) struct BlobDoor(pub(crate) Shelf);

/// One of the places to be served; given back when dropped.
struct Place(Shelf);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.inner.serving.fetch_sub(1, Ordering::Relaxed);
    }
}

impl StreamHandler for BlobDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let digest = <[u8; 32]>::try_from(incoming.body.as_ref()).map(BlobDigest);
        let taken = self.0.inner.serving.fetch_add(1, Ordering::Relaxed);
        let place = Place(self.0.clone());
        async move {
            let refusal = match digest {
                Err(_) => Fault::new(FaultKind::Invalid, "a blob is asked for by the 32 bytes of its digest"),
                Ok(_) if taken >= SERVED_MAX => {
                    Fault::new(FaultKind::Overloaded, "too many blobs under way").retry_after_ms(200)
                }
                Ok(digest) => match place.0.held(&digest) {
                    Some(bytes) => return send(incoming, bytes).await,
                    None => Fault::new(FaultKind::NotFound, format!("the blob {digest} is not held here")),
                },
            };
            incoming.acceptor.reject(refusal);
        }
        .boxed()
    }
}

/// Tells the length, then the bytes.
async fn send(incoming: Incoming, bytes: Bytes) {
    let length = Bytes::copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    let Some((tx, rx)) = incoming.acceptor.accept(length) else { return };
    let mut rest = bytes;
    while !rest.is_empty() {
        let chunk = rest.split_to(rest.len().min(CHUNK_BYTES));
        if tx.send(chunk).await.is_err() {
            break;
        }
    }
    tx.end();
    drop(rx);
}
