//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{Extension, body::Body, extract::State, response::Response};
use hyper::{Request, header::HeaderValue};
use starling_actors::{engine::ModelCard, generate::GenerateSpec};

use crate::{
    admission::Ticket,
    caller::{Who, header_priority},
    context::{App, Names, buffer, unix_s},
    error::Fault,
    manner::{Manner, RECEIPT},
    metrics::Route,
    openai::{
        request::{ChatRequest, Delivery, Params},
        response::{ReplyHead, ReplyWriter, Shape},
        validate::{self, PromptOrigin},
    },
    prompt::PromptModel,
    ratelimit, reply,
    run::{Collected, Run, RunFault, Start},
    sse,
    text::TextRules,
};

const ORIGIN: PromptOrigin = PromptOrigin { param: "messages" };

/// Answers one conversation.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(names): Extension<Names>,
    request: Request<Body>,
) -> Response {
    let mut ticket = app.admission.arrive(Route::Chat);
    match app.in_time(prepare(&app, &mut ticket, request)).await {
        Ok(job) => answer(&app, &names, ticket, job).await,
        Err(fault) => reply::refuse(&fault, ticket),
    }
}

/// All that is known before a worker is asked.
pub(crate) struct Job {
    pub(crate) card: ModelCard,
    pub(crate) model: Arc<PromptModel>,
    pub(crate) params: Params,
    pub(crate) who: Who,
    pub(crate) manner: Manner,
    pub(crate) specs: Vec<GenerateSpec>,
    pub(crate) origin: PromptOrigin,
    pub(crate) shape: Shape,
    /// Prompts to show before the answers, one per prompt, or none.
    pub(crate) echo: Vec<String>,
}

async fn prepare(app: &App, ticket: &mut Ticket, request: Request<Body>) -> Result<Job, Fault> {
    let caller = app.authorize(request.headers())?;
    let urgency = header_priority(request.headers())?;
    let manner = app.manner(request.headers(), &caller)?;
    ticket.admit()?;
    let body = app.body(request).await?;
    let bytes = body.len();
    let ChatRequest { messages, params } = app.models.compute(bytes, move || ChatRequest::parse(&body)).await??;
    let who = caller.asks(urgency, params.priority)?;
    let card = app.card_in_reach(&params.model).await?;
    let model = app.models.get(&*app.backend, &card).await?;
    let tokenizing = model.clone();
    let now = unix_s().cast_signed();
    let prompt = app.models.compute(bytes, move || tokenizing.chat(messages, now)).await??;
    let spec = validate::spec(&params, &card, prompt, ORIGIN, rand::random())?;
    let specs = vec![spec];
    let (origin, shape) = (ORIGIN, Shape::Chat);
    Ok(Job { card, model, params, who, manner, specs, origin, shape, echo: Vec::new() })
}

/// Asks a worker and sends what it says, as a stream or as one document; a tenant with a budget is told how that stands.
pub(crate) async fn answer(app: &App, names: &Names, ticket: Ticket, job: Job) -> Response {
    let who = job.who.clone();
    let mut response = said(app, names, ticket, job).await;
    if let Some(standing) = app.backend.budget(&who) {
        ratelimit::tell(response.headers_mut(), standing);
    }
    response
}

async fn said(app: &App, names: &Names, ticket: Ticket, job: Job) -> Response {
    let rules = TextRules {
        decoding: job.model.decoding().clone(),
        stops: job.params.stops.as_slice().into(),
        tokens_min: job.params.tokens_min,
        skip_special: job.params.skip_special,
        logprobs: job.params.logprobs.is_some(),
    };
    let head = ReplyHead {
        request: names.request,
        created_s: unix_s(),
        model: job.card.id.as_str().to_owned(),
        shape: job.shape,
        logprobs: rules.logprobs,
        decoding: rules.decoding.clone(),
    };
    let start = Start {
        backend: &*app.backend,
        names,
        who: job.who,
        manner: job.manner,
        origin: job.origin,
        rules: Arc::new(rules),
        time: app.config.request_max(),
    };
    let choices = job.params.choices as usize;
    // A prompt's echo stands before each of its answers.
    let echo: Vec<String> = job.echo.into_iter().flat_map(|text| std::iter::repeat_n(text, choices)).collect();
    let run = match Run::start(ticket, start, job.specs).await {
        Ok(run) => run,
        Err(RunFault { fault, ticket }) => return reply::refuse(&fault, ticket),
    };
    match job.params.delivery {
        Delivery::Stream { include_usage } => {
            let writer = ReplyWriter::new(head, run.choices(), include_usage);
            sse::respond(run, writer, sse::SseOptions { include_usage, keep_alive: app.config.keep_alive(), echo })
        }
        Delivery::Unary => unary(run, head, echo).await,
    }
}

async fn unary(run: Run, head: ReplyHead, echo: Vec<String>) -> Response {
    let writer = ReplyWriter::new(head, run.choices(), false);
    match run.collect().await {
        Ok(Collected { mut transcript, usage, receipts, ticket }) => {
            for (answer, prompt) in transcript.answers.iter_mut().zip(echo) {
                answer.text.insert_str(0, &prompt);
            }
            let mut out = buffer();
            writer.unary(&mut out, &transcript, &usage);
            let mut response = reply::document(out.freeze(), ticket);
            // Names of nodes are ASCII, so this cannot fail; a reply without its receipt is still a reply.
            if let Some(value) = receipts.and_then(|line| HeaderValue::try_from(line).ok()) {
                response.headers_mut().insert(RECEIPT, value);
            }
            response
        }
        Err(RunFault { fault, ticket }) => reply::refuse(&fault, ticket),
    }
}
