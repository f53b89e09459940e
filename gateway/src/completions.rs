//! `POST /v1/completions`.

use std::sync::Arc;

use axum::{Extension, body::Body, extract::State, response::Response};
use hyper::Request;
use starling_ids::TokenId;

use crate::{
    admission::Ticket,
    caller::header_priority,
    chat::{Job, answer},
    context::{App, Names},
    error::Fault,
    metrics::Route,
    openai::{
        request::{CompletionRequest, PromptInput},
        response::Shape,
        validate::{self, PromptOrigin},
    },
    prompt::{PromptError, PromptModel},
    reply,
};

const ORIGIN: PromptOrigin = PromptOrigin { param: "prompt" };

/// Completes one or more raw prompts.
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(names): Extension<Names>,
    request: Request<Body>,
) -> Response {
    let mut ticket = app.admission.arrive(Route::Completions);
    match app.in_time(prepare(&app, &mut ticket, request)).await {
        Ok(job) => answer(&app, &names, ticket, job).await,
        Err(fault) => reply::refuse(&fault, ticket),
    }
}

async fn prepare(app: &App, ticket: &mut Ticket, request: Request<Body>) -> Result<Job, Fault> {
    let caller = app.authorize(request.headers())?;
    let urgency = header_priority(request.headers())?;
    let manner = app.manner(request.headers(), &caller)?;
    ticket.admit()?;
    let body = app.body(request).await?;
    let bytes = body.len();
    let parsed = app.models.compute(bytes, move || CompletionRequest::parse(&body)).await??;
    let CompletionRequest { prompts, echo, params } = parsed;
    let who = caller.asks(urgency, params.priority)?;
    let card = app.card_in_reach(&params.model).await?;
    let model = app.models.get(&*app.backend, &card).await?;
    let tokenizing = model.clone();
    let made = app.models.compute(bytes, move || tokenize(&tokenizing, prompts, echo)).await??;
    let (prompts, echo): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let seed = rand::random::<u64>();
    let spec = |(index, prompt)| {
        // Without a seed of the client's, prompts draw apart; with one, each draws as it would alone.
        validate::spec(&params, &card, prompt, ORIGIN, seed.wrapping_add(index as u64 * u64::from(params.choices)))
    };
    let specs = prompts.into_iter().enumerate().map(spec).collect::<Result<_, _>>()?;
    let echo = echo.into_iter().flatten().collect();
    Ok(Job { card, model, params, who, manner, specs, origin: ORIGIN, shape: Shape::Text, echo })
}

type Made = Vec<(Vec<TokenId>, Option<String>)>;

fn tokenize(model: &PromptModel, prompts: Vec<PromptInput>, echo: bool) -> Result<Made, PromptError> {
    let one = |prompt| match prompt {
        PromptInput::Text(text) => Ok((model.completion(&text)?, echo.then_some(text))),
        PromptInput::Tokens(ids) => {
            let text = if echo { Some(model.text(&ids)?) } else { None };
            Ok((ids, text))
        }
    };
    prompts.into_iter().map(one).collect()
}
