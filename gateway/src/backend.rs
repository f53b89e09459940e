//! The cluster, as the gateway sees it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{future::BoxFuture, stream::BoxStream};
use starling_actors::{
    client::{Baggage, Slip},
    engine::{ModelCard, TokenizerBundle},
    generate::{GenerateError, GenerateFrame, GenerateSpec, ServedModel},
    route::{budget::Standing, wishes::Wishes},
};
use starling_ids::{ModelId, RequestId};

use crate::caller::Who;

/// The frames of one request, in order. Ends after the last answer's finish; a stream that ends before it
/// is a broken one. Dropping it cancels the request wherever it is.
pub type Generation = BoxStream<'static, Result<GenerateFrame, GenerateError>>;

/// One prompt to complete.
#[derive(Debug, Clone)]
pub struct Call {
    /// The client request. Several prompts of one request share it.
    pub request: RequestId,
    /// What is asked for.
    pub spec: GenerateSpec,
    /// Time left for all of it, acceptance and answer.
    pub deadline: Duration,
    /// W3C `traceparent` of the client, checked for its form.
    pub trace_parent: Option<String>,
    /// W3C baggage of the client, within its limits.
    pub baggage: Baggage,
    /// Who asks.
    pub who: Who,
    /// What keeps this client's requests on one worker, for policies that look at it.
    pub session: Option<String>,
    /// What the client asks of the choice of worker.
    pub wishes: Wishes,
    /// Where the decisions are written down, when the client wants to know them.
    pub slip: Option<Slip>,
}

/// Whether new requests should be sent here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// At least one model can be routed.
    Ready,
    /// Not yet, or not any more; the reason is for people.
    NotReady(String),
}

/// What of the cluster is to be seen; the JSON is that of the command line's verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// `starling nodes`.
    Nodes,
    /// `starling instances`.
    Instances,
    /// `starling actors`.
    Actors,
    /// `starling kv`.
    Caches,
    /// `starling plan`.
    Plan,
    /// `starling requests`.
    Requests,
    /// `starling why`.
    Why(RequestId),
}

/// What the gateway needs of the cluster. All calls but [`Backend::generate`], [`Backend::bundle`] and [`Backend::view`] answer from
/// local state at once.
pub trait Backend: Send + Sync + 'static {
    /// Models that can be asked for now, sorted by id, each once.
    fn models(&self) -> Vec<ServedModel>;

    /// Whether some worker names this model, also one that cannot be asked now.
    fn announces(&self, _model: &ModelId) -> bool {
        false
    }

    /// Waits some seconds for a model whose workers serve and cannot be asked this moment. Resolves at once when the model can
    /// be asked for, or when nothing is known that would change that.
    fn reach(&self, _model: &ModelId) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Tokenizer and template of a model. The gateway keeps what it gets, by the card's digest.
    fn bundle(&self, card: &ModelCard) -> BoxFuture<'static, Result<Arc<TokenizerBundle>, GenerateError>>;

    /// Finds a worker. Resolves when one has accepted, before its first token; dropping it cancels.
    fn generate(&self, call: Call) -> BoxFuture<'static, Result<Generation, GenerateError>>;

    /// How the budget of a tenant stands that has one, by what this node knows.
    fn budget(&self, _who: &Who) -> Option<Standing> {
        None
    }

    /// What people see of the cluster, as JSON.
    fn view(&self, _view: View) -> BoxFuture<'static, Result<Bytes, GenerateError>> {
        let nothing = "this node shows nothing of the cluster".to_owned();
        Box::pin(std::future::ready(Err(GenerateError::Unavailable(nothing))))
    }

    /// Whether this node can serve.
    fn readiness(&self) -> Readiness;
}
