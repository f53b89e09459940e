//! Hands out the tokenizer of the model this node holds, so that a gateway needs no model file.
//!
//! Called by links and local opens. Registered for the life of the node. Bounds: the bundle is encoded once;
//! frames of [`CHUNK_BYTES`] under the stream's credits.

use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use starling_cluster::stream::{Fault, FaultKind, Incoming, StreamHandler};
use starling_engine::LoadedModel;

/// Bytes in one frame.
const CHUNK_BYTES: usize = 60 * 1024;

/// The door of one model's bundle.
pub(crate) struct BundleDoor {
    digest: String,
    bytes: Bytes,
}

impl BundleDoor {
    pub(crate) fn new(model: &dyn LoadedModel) -> Result<Arc<Self>, rmp_serde::encode::Error> {
        let bytes = rmp_serde::to_vec(model.bundle())?.into();
        Ok(Arc::new(Self { digest: model.card().bundle_digest.clone(), bytes }))
    }
}

impl StreamHandler for BundleDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let held = self.digest.as_bytes() == incoming.body.as_ref();
        let bytes = self.bytes.clone();
        async move {
            if !held {
                incoming.acceptor.reject(Fault::new(FaultKind::NotFound, "this node holds another tokenizer"));
                return;
            }
            let Some((tx, rx)) = incoming.acceptor.accept(Bytes::new()) else { return };
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
        .boxed()
    }
}
