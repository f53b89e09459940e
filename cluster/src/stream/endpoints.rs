//! What a node answers to: endpoint names and their handlers.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::{EndpointName, NodeId};

use super::{Context, Fault, FaultKind, StreamRx, StreamTx};
use crate::near;

/// Answers streams of one endpoint. Called on the runtime; must not block.
pub trait StreamHandler: Send + Sync + 'static {
    /// Takes one stream. Dropping `incoming` unanswered rejects it as [`super::FaultKind::Internal`].
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()>;
}

/// A stream that wants in.
#[derive(Debug)]
pub struct Incoming {
    /// Who opened it; the node itself for local streams.
    pub peer: NodeId,
    /// Request, deadline, tenant, priority.
    pub context: Context,
    /// The first body.
    pub body: Bytes,
    /// Says yes or no.
    pub acceptor: Acceptor,
}

type Answer = Box<dyn FnOnce(Result<Bytes, Fault>) -> Option<(StreamTx, StreamRx)> + Send>;

/// The one answer to an [`Incoming`]. Built by the link (remote) or the local opener.
pub struct Acceptor {
    answer: Option<Answer>,
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

impl Acceptor {
    /// `answer` gets the verdict once; it returns both halves when the verdict was yes and the opener still waits.
    pub(crate) fn new(
        answer: impl FnOnce(Result<Bytes, Fault>) -> Option<(StreamTx, StreamRx)> + Send + 'static,
    ) -> Self {
        Self { answer: Some(Box::new(answer)) }
    }

    /// Accepts with a reply body. `None` when the opener is gone already.
    pub fn accept(mut self, reply: Bytes) -> Option<(StreamTx, StreamRx)> {
        self.answer.take().and_then(|answer| answer(Ok(reply)))
    }

    /// Rejects with a reason.
    pub fn reject(mut self, fault: Fault) {
        if let Some(answer) = self.answer.take() {
            answer(Err(fault));
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            answer(Err(Fault::new(FaultKind::Internal, "the handler dropped the stream without an answer")));
        }
    }
}

/// The endpoints of this node, shared by links and local opens. Cheap to clone.
#[derive(Clone, Default)]
pub struct Endpoints {
    table: Arc<std::sync::RwLock<HashMap<EndpointName, Arc<dyn StreamHandler>>>>,
}

impl std::fmt::Debug for Endpoints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Endpoints")
    }
}

impl Endpoints {
    /// Registers or replaces a handler.
    pub fn serve(&self, name: EndpointName, handler: Arc<dyn StreamHandler>) {
        self.write().insert(name, handler);
    }

    /// Registers a handler under a name that is free; false when it is not.
    pub(crate) fn claim(&self, name: EndpointName, handler: Arc<dyn StreamHandler>) -> bool {
        match self.write().entry(name) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(handler);
                true
            }
        }
    }

    /// Takes a handler away; later opens are rejected as not found.
    pub fn remove(&self, name: &EndpointName) {
        self.write().remove(name);
    }

    /// The handler of a name.
    #[must_use]
    pub fn get(&self, name: &EndpointName) -> Option<Arc<dyn StreamHandler>> {
        self.table.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(name).cloned()
    }

    /// The answer to an open of an endpoint that nobody serves: names that it may have meant, of the same namespace.
    #[must_use]
    pub fn not_found(&self, name: &EndpointName) -> Fault {
        let table = self.table.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let namespace = |name: &EndpointName| name.as_str().split('/').next().map(str::to_owned);
        let wanted = namespace(name);
        let names = table.keys().filter(|known| namespace(known) == wanted).map(EndpointName::as_str);
        let hint =
            if wanted.as_deref() == Some("starling") { String::new() } else { near::hint(name.as_str(), names, "") };
        Fault::new(FaultKind::NotFound, format!("no endpoint {name} on this node{hint}"))
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<EndpointName, Arc<dyn StreamHandler>>> {
        self.table.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
