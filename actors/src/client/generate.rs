//! One request: hash, route, open, and again elsewhere while nothing has reached the client.
//!
//! Called by [`super::ClusterClient::generate`]. Bounds: [`TRIES_MAX`] workers; the call's own deadline over all.

use std::time::Duration;

use starling_cluster::stream::{Context, Opened, StreamError};
use starling_engine::ModelCard;
use starling_ids::{AttemptId, Metric};
use starling_kv::hash::block_hashes;
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    Call, GenerateStream, Inner,
    outcome::Tries,
    route::{Routed, route},
};
use crate::{
    generate::{GenerateError, GenerateSpec, RouteRequest, WorkerRequest},
    names,
};

/// Workers tried for one request.
const TRIES_MAX: u32 = 3;

/// Longest wait for a worker's yes or no. It answers between two engine steps; longer means that it is frozen.
const ACCEPT_MAX: Duration = Duration::from_secs(10);

pub(super) async fn generate(inner: &Inner, call: Call) -> Result<GenerateStream, GenerateError> {
    let deadline = Instant::now() + call.time_left.min(Duration::from_secs(86_400));
    match timeout_at(deadline, tries(inner, call, deadline)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(GenerateError::Deadline),
    }
}

async fn tries(inner: &Inner, call: Call, deadline: Instant) -> Result<GenerateStream, GenerateError> {
    let card = card(inner, &call.spec)?;
    let mut ask = route_request(&call, &card);
    let mut context = Context::new(call.request, call.time_left);
    context.trace_parent = call.trace_parent;
    context.baggage = call.baggage;
    context.tenant = call.tenant;
    context.priority = call.priority;
    let mut spec = call.spec;
    let mut tries = Tries::default();
    for attempt in 0..TRIES_MAX {
        context.attempt = AttemptId(attempt);
        context.time_left = deadline.saturating_duration_since(Instant::now());
        ask.exclude.clone_from(&tries.exclude);
        ask.failed.clone_from(&tries.failed);
        let Some(routed) = route(inner, &ask, &context, &mut tries).await else { break };
        if attempt > 0 {
            metrics::counter!(Metric::GatewayRetries.name()).increment(1);
        }
        let request = WorkerRequest { spec, worker: routed.worker.clone(), incarnation: routed.incarnation };
        match open(inner, &request, &context).await {
            Ok(opened) => return Ok(GenerateStream::new(opened, routed, request.spec.choices)),
            Err(error) => {
                spec = request.spec;
                let Routed { worker, hold, .. } = routed;
                // The refusing worker's count goes back before the next one is tried.
                drop(hold);
                tracing::debug!(request = %call.request, %worker, %error, "worker did not take the request");
                tries.note(&worker, error)?;
            }
        }
    }
    Err(tries.verdict())
}

/// The card of the model asked for, and whether the request can fit it at all.
fn card(inner: &Inner, spec: &GenerateSpec) -> Result<ModelCard, GenerateError> {
    let catalog = inner.view.catalog();
    let Some(model) = catalog.models.get(&spec.model) else {
        let name = spec.model.clone();
        return Err(if catalog.announced.contains(&name) {
            GenerateError::Unavailable(format!("the workers of `{name}` are starting or leaving"))
        } else {
            GenerateError::UnknownModel(name)
        });
    };
    let context = model.card.context_length as usize;
    let prompt = spec.prompt.len();
    if prompt >= context {
        return Err(GenerateError::ContextLength { prompt, context });
    }
    Ok(model.card.clone())
}

fn route_request(call: &Call, card: &ModelCard) -> RouteRequest {
    let spec = &call.spec;
    let seed = card.hash_seed.scoped(None, spec.cache_salt.as_deref());
    RouteRequest {
        request: call.request,
        model: spec.model.clone(),
        hashes: block_hashes(seed, &spec.prompt, card.block_tokens as usize),
        prompt_tokens: u32::try_from(spec.prompt.len()).unwrap_or(u32::MAX),
        answer_tokens_max: spec.choices.saturating_mul(spec.stop.tokens_max),
        exclude: Vec::new(),
        failed: Vec::new(),
        choices: spec.choices,
    }
}

async fn open(inner: &Inner, request: &WorkerRequest, context: &Context) -> Result<Opened, StreamError> {
    let body = rmp_serde::to_vec(request).map_err(|error| StreamError::Broken(error.to_string()))?;
    let endpoint = names::worker_generate(request.worker.index);
    let mesh = inner.view.mesh();
    let opening = mesh.open(&request.worker.node, request.incarnation, &endpoint, context.clone(), body.into());
    timeout(ACCEPT_MAX, opening).await.map_err(|_| StreamError::Deadline)?
}
