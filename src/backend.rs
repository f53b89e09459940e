//! The cluster as the gateway sees it, made from the cast's client; and the little that a node without a gateway shows.
//!
//! Called by the HTTP server. Translates words, decides nothing.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use starling_actors::{
    client::{self, ClusterClient},
    engine::{ModelCard, TokenizerBundle},
    generate::{GenerateError, ServedModel},
    route::budget::Standing,
};
use starling_cluster::mesh::Mesh;
use starling_gateway::{Backend, Call, Generation, Readiness, View, Who};
use starling_ids::ModelId;

use crate::control;

/// All of the cluster, for the gateway role.
#[derive(Debug)]
pub(crate) struct ClusterBackend {
    pub(crate) client: ClusterClient,
    pub(crate) mesh: Mesh,
}

impl Backend for ClusterBackend {
    fn models(&self) -> Vec<ServedModel> {
        self.client.models()
    }

    fn announces(&self, model: &ModelId) -> bool {
        self.client.announces(model)
    }

    fn reach(&self, model: &ModelId) -> BoxFuture<'static, ()> {
        let (client, model) = (self.client.clone(), model.clone());
        async move { client.reach(&model).await }.boxed()
    }

    fn bundle(&self, card: &ModelCard) -> BoxFuture<'static, Result<Arc<TokenizerBundle>, GenerateError>> {
        let (client, card) = (self.client.clone(), card.clone());
        async move { client.bundle(&card).await }.boxed()
    }

    fn generate(&self, call: Call) -> BoxFuture<'static, Result<Generation, GenerateError>> {
        let client = self.client.clone();
        let call = client::Call {
            request: call.request,
            spec: call.spec,
            time_left: call.deadline,
            trace_parent: call.trace_parent,
            baggage: call.baggage,
            tenant: call.who.tenant,
            priority: call.who.priority,
            weight: call.who.weight,
            budget: call.who.budget,
            session: call.session,
            wishes: call.wishes,
            slip: call.slip,
        };
        async move { client.generate(call).await.map(StreamExt::boxed) }.boxed()
    }

    fn budget(&self, who: &Who) -> Option<Standing> {
        self.client.budget(&who.tenant, who.budget)
    }

    fn view(&self, view: View) -> BoxFuture<'static, Result<Bytes, GenerateError>> {
        show(self.mesh.clone(), view)
    }

    fn readiness(&self) -> Readiness {
        if self.client.is_ready() {
            return Readiness::Ready;
        }
        Readiness::NotReady("no worker serves a model yet".to_owned())
    }
}

/// What the page shows.
fn show(mesh: Mesh, view: View) -> BoxFuture<'static, Result<Bytes, GenerateError>> {
    async move { control::view(&mesh, view).await.map_err(|fault| GenerateError::Unavailable(fault.to_string())) }
        .boxed()
}

/// A node without the gateway role: health, metrics and the page, no models.
#[derive(Debug)]
pub(crate) struct NodeBackend {
    pub(crate) mesh: Mesh,
    /// Set once the node serves.
    pub(crate) ready: Arc<AtomicBool>,
}

impl NodeBackend {
    fn no_gateway() -> GenerateError {
        GenerateError::Unavailable("this node has no gateway".to_owned())
    }
}

impl Backend for NodeBackend {
    fn models(&self) -> Vec<ServedModel> {
        Vec::new()
    }

    fn bundle(&self, _card: &ModelCard) -> BoxFuture<'static, Result<Arc<TokenizerBundle>, GenerateError>> {
        std::future::ready(Err(Self::no_gateway())).boxed()
    }

    fn generate(&self, _call: Call) -> BoxFuture<'static, Result<Generation, GenerateError>> {
        std::future::ready(Err(Self::no_gateway())).boxed()
    }

    fn view(&self, view: View) -> BoxFuture<'static, Result<Bytes, GenerateError>> {
        show(self.mesh.clone(), view)
    }

    fn readiness(&self) -> Readiness {
        if self.ready.load(Ordering::Acquire) {
            return Readiness::Ready;
        }
        Readiness::NotReady("the node is starting".to_owned())
    }
}
