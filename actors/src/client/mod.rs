//! How a gateway, or a program, asks the cluster for tokens: find a worker, open a stream, read frames.
//!
//! Called by the gateway's handlers, any number at a time. The same code serves workers of this process and of
//! others. Never: holds text, HTTP or a KV block. What a request holds (its reservation, its worker stream, its
//! count) lies in its [`GenerateStream`] and goes with it.

mod budget;
mod bundle;
mod failures;
mod generate;
mod journey;
mod moving;
mod outcome;
mod own_load;
mod question;
mod route;
mod slip;
mod stream;

use std::{sync::Arc, time::Duration};

pub use starling_cluster::stream::Baggage;
use starling_engine::{ModelCard, TokenizerBundle};
use starling_ids::{ModelId, RequestId};
use tokio::time::Instant;

use crate::{
    generate::{GenerateError, GenerateSpec, ServedModel},
    indexer::knowledge::Knowledge,
    route::{budget::Standing, wishes::Wishes},
    view::View,
};
use budget::Budgets;
use bundle::Bundles;
use failures::Failures;
use own_load::OwnLoad;
pub use slip::Slip;
pub use stream::GenerateStream;

/// How long a shard in whose queue a request waits may say nothing.
pub(crate) const SIGN_MAX: Duration = Duration::from_secs(5);

/// How long a request waits for a model whose workers serve and cannot be reached this moment. Links are dialled again within
/// this time, and gossip declares the dead.
pub const REACH_WAIT: Duration = Duration::from_secs(5);

/// One prompt to complete.
#[derive(Debug, Clone)]
pub struct Call {
    /// The client request; several prompts of one request share it.
    pub request: RequestId,
    /// What is asked for.
    pub spec: GenerateSpec,
    /// Time left for all of it, acceptance and answer.
    pub time_left: Duration,
    /// W3C `traceparent`, when the client sent one.
    pub trace_parent: Option<String>,
    /// What the client wants everybody below to know.
    pub baggage: Baggage,
    /// Whose request.
    pub tenant: String,
    /// Lower runs first.
    pub priority: i32,
    /// Its tenant's part beside other tenants, 1 to 1,000; 0 is read as 1.
    pub weight: u32,
    /// Tokens per minute that its tenant may spend in the whole cluster; 0 without a bound.
    pub budget: u64,
    /// What keeps requests together on one worker, for policies that look at it.
    pub session: Option<String>,
    /// What the client asks of the choice of worker itself.
    pub wishes: Wishes,
    /// Where the decisions are written down, for one who wants to know them.
    pub slip: Option<Slip>,
}

/// The cluster as a client sees it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ClusterClient {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    view: Arc<View>,
    /// What this node's indexer knows, when it has one; helps decide while no shard answers.
    knowledge: Option<Arc<Knowledge>>,
    bundles: Bundles,
    own: OwnLoad,
    failures: Failures,
    budgets: Arc<Budgets>,
}

impl ClusterClient {
    /// A client of this node's cluster.
    #[must_use]
    pub fn new(view: Arc<View>, knowledge: Option<Arc<Knowledge>>) -> Self {
        let inner = Inner {
            view,
            knowledge,
            bundles: Bundles::default(),
            own: OwnLoad::default(),
            failures: Failures::default(),
            budgets: Arc::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Models that can be asked for now, sorted by name: those and only those that [`ClusterClient::generate`] can route.
    #[must_use]
    pub fn models(&self) -> Vec<ServedModel> {
        let catalog = self.inner.view.catalog();
        let served = |model: &crate::route::catalog::CatalogModel| ServedModel {
            card: model.card.clone(),
            workers: model.workers.len(),
        };
        catalog.models.values().map(served).collect()
    }

    /// Whether some worker names this model, also one that cannot be asked now.
    #[must_use]
    pub fn announces(&self, model: &ModelId) -> bool {
        self.inner.view.catalog().announced.contains(model)
    }

    /// How a tenant's budget of so many tokens per minute stands, by what this client knows; `None` without a budget.
    #[must_use]
    pub fn budget(&self, tenant: &str, per_minute: u64) -> Option<Standing> {
        budget::standing(&self.inner.budgets, tenant, per_minute)
    }

    /// Over how many shards the decisions about a model are spread.
    #[must_use]
    pub fn parts_of(&self, model: &ModelId) -> u32 {
        self.inner.view.catalog().parts_of(model)
    }

    /// Waits for a model that cannot be asked for now but in a moment, at most [`REACH_WAIT`]. Resolves at once when it can be, or
    /// when nobody serves it.
    pub async fn reach(&self, model: &ModelId) {
        self.inner.view.reach(model, Instant::now() + REACH_WAIT).await;
    }

    /// Whether at least one model can be asked for.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.inner.view.catalog().models.is_empty()
    }

    /// Tokenizer and template of a model, from any node that holds it. Kept by digest; concurrent asks share one fetch.
    pub async fn bundle(&self, card: &ModelCard) -> Result<Arc<TokenizerBundle>, GenerateError> {
        self.inner.bundles.get(&self.inner.view, card).await
    }

    /// Finds a worker that accepts the request; resolves before its first token. Dropping the future, or later the
    /// stream, cancels the request wherever it is.
    pub async fn generate(&self, call: Call) -> Result<GenerateStream, GenerateError> {
        generate::generate(&self.inner, call).await
    }
}
