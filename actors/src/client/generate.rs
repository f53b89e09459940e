//! One request from its call to its stream: what is asked of the router and of the worker.
//!
//! Called by [`super::ClusterClient::generate`]. The way from there is [`super::journey`].

use std::{sync::Arc, time::Duration};

use starling_cluster::stream::Context;
use starling_engine::ModelCard;
use tokio::time::{Instant, timeout_at};

use super::{Call, GenerateStream, Inner, REACH_WAIT, budget::pay, journey::Journey, question::Hashing};
use crate::generate::{GenerateError, GenerateSpec};

pub(super) async fn generate(inner: &Arc<Inner>, call: Call) -> Result<GenerateStream, GenerateError> {
    let deadline = Instant::now() + call.time_left.min(Duration::from_secs(86_400));
    inner.view.reach(&call.spec.model, deadline.min(Instant::now() + REACH_WAIT)).await;
    let card = card(inner, &call.spec)?;
    let paid = timeout_at(deadline, pay(inner, &call)).await;
    let charge = paid.map_err(|_| GenerateError::Deadline)??;
    let hashing = Hashing::of(&call.spec, &card);
    let ask = hashing.question(&call);
    let mut context = Context::new(call.request, call.time_left);
    context.trace_parent = call.trace_parent;
    context.baggage = call.baggage;
    context.tenant = call.tenant;
    context.priority = call.priority;
    let mut journey = Journey::new(inner.clone(), (ask, hashing), call.spec, context, deadline);
    journey.charge = charge;
    journey.slip = call.slip;
    let (opened, routed) = journey.begin().await?;
    Ok(GenerateStream::new(opened, routed, journey))
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
    if let Some(adapter) = spec.adapter.as_ref().filter(|adapter| !model.adapters().contains(adapter.as_str())) {
        let known = model.adapters().into_iter().map(str::to_owned).collect();
        return Err(GenerateError::UnknownAdapter { model: spec.model.clone(), adapter: adapter.clone(), known });
    }
    let context = model.card.context_length as usize;
    let prompt = spec.prompt.len();
    if prompt >= context {
        return Err(GenerateError::ContextLength { prompt, context });
    }
    Ok(model.card.clone())
}
