//! The two endpoints of a worker: requests in, events out. Refusals are typed and come before any accept.
//!
//! Called by links and local opens, on the runtime. Registered once per worker for the life of the node; the seat
//! leads to the worker's present life. Bounds: the command channel; the engine's queue says the last word.

use std::{
    sync::{Arc, atomic::Ordering, mpsc::TrySendError},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use starling_cluster::stream::{Context, Fault, FaultKind, Incoming, StreamHandler};
use starling_engine::SubmitError;
use starling_ids::{Metric, TokenId};
use starling_kv::hash::HashSeed;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

use super::{
    WorkerShared,
    forward::{InFlightGuard, RequestStream, Subscription, TypedEnd, Wish, forward, publish},
    ledger::RequestKey,
    port::{AnswerStart, CancelGuard, Command, Delivery, Port, Submission, Subscribed},
    source::{self, Sourced},
    takeover::{self, Arriving},
};
use crate::generate::{Accepted, GenerateSpec, WorkerRequest};

/// Most answers of one request.
const CHOICES_MAX: u32 = 16;

/// Longest wait for the engine thread's verdict; it comes between two steps.
const VERDICT_MAX: Duration = Duration::from_secs(20);

/// When a refused client may try again.
const RETRY_AFTER_MS: u64 = 1_000;

/// Takes requests.
pub(crate) struct GenerateDoor(pub(crate) Arc<WorkerShared>);

impl StreamHandler for GenerateDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let shared = self.0.clone();
        async move {
            let Incoming { context, body, acceptor, .. } = incoming;
            match admit(&shared, &context, &body).await {
                Err(fault) => {
                    let reason = fault.kind.label();
                    metrics::counter!(Metric::WorkerRejected.name(), "reason" => reason).increment(1);
                    acceptor.reject(fault);
                }
                Ok(Admitted { outbox, cancel, in_flight, reply, may_move }) => {
                    // An opener that has gone drops the guards here, which cancels the sequences.
                    let Some((tx, rx)) = acceptor.accept(reply) else { return };
                    let deadline = Instant::now().checked_add(context.time_left);
                    let tasks = cancel.port.tasks.clone();
                    let leave = may_move.then(|| {
                        let name = (context.request, context.attempt);
                        (Wish::of(&shared), cancel.port.lives.enter(name, cancel.key))
                    });
                    let tx = TypedEnd::new(tx);
                    let stream = RequestStream { outbox, tx, rx, cancel, in_flight, deadline, leave };
                    // Refused when the worker died just now: the guards cancel and end the stream with its fault.
                    tasks.spawn(forward(stream));
                }
            }
        }
        .boxed()
    }
}

struct Admitted {
    outbox: mpsc::Receiver<Delivery>,
    cancel: CancelGuard,
    in_flight: InFlightGuard,
    reply: Bytes,
    may_move: bool,
}

async fn admit(shared: &Arc<WorkerShared>, context: &Context, body: &[u8]) -> Result<Admitted, Fault> {
    let request: WorkerRequest = rmp_serde::from_slice(body)
        .map_err(|error| Fault::new(FaultKind::Invalid, format!("the request cannot be read: {error}")))?;
    let port = check(shared, &request)?;
    let in_flight = InFlightGuard::new(shared);
    // Counted first, then looked at again: a drain that begins between the two sees the count or is seen here.
    if shared.draining.load(Ordering::SeqCst) {
        return Err(draining(shared));
    }
    let key = port.key();
    let (sender, outbox) = mpsc::channel(outbox_frames(shared, &request.spec));
    let cancel = CancelGuard { port: port.clone(), key, ended: false };
    let seed = request.spec.hash_seed(shared.model.card().hash_seed);
    let may_move = request.may_move && port.kv.get().is_some();
    let spec = match begin(shared, &port, context, request, (seed, key, &sender))? {
        Begin::Here(spec) => *spec,
        Begin::Apart(task) => {
            // Its number is not known before the engine has it: the router counts it until it should have been reported.
            let reply = accepted(shared, 0)?;
            if !port.tasks.spawn(task) {
                return Err(restarting());
            }
            return Ok(Admitted { outbox, cancel, in_flight, reply, may_move });
        }
    };
    let (verdict, answer) = oneshot::channel();
    let submission = Submission {
        key,
        hash_seed: seed,
        answers: answers(&spec),
        sampling: spec.sampling,
        stop: spec.stop,
        logprobs: spec.logprobs,
        priority: context.priority,
        outbox: sender,
        verdict,
    };
    port.commands.try_send(Command::Submit(Box::new(submission))).map_err(|error| match error {
        TrySendError::Full(_) => overloaded("too many requests arrive at once"),
        TrySendError::Disconnected(_) => restarting(),
    })?;
    match timeout(VERDICT_MAX.min(context.time_left), answer).await {
        Ok(Ok(Ok(number))) => {
            accepted(shared, number).map(|reply| Admitted { outbox, cancel, in_flight, reply, may_move })
        }
        Ok(Ok(Err(error))) => Err(refusal(&error)),
        Ok(Err(_)) => Err(restarting()),
        Err(_) => Err(Fault::new(FaultKind::Unavailable, "the engine gave no verdict in time")),
    }
}

/// How a request begins.
enum Begin {
    /// It is computed here from its beginning.
    Here(Box<GenerateSpec>),
    /// Blocks of another worker come first.
    Apart(BoxFuture<'static, ()>),
}

fn begin(
    shared: &Arc<WorkerShared>,
    port: &Arc<Port>,
    context: &Context,
    request: WorkerRequest,
    (seed, key, outbox): (HashSeed, RequestKey, &mpsc::Sender<Delivery>),
) -> Result<Begin, Fault> {
    let WorkerRequest { spec, source, moves, .. } = request;
    let (shared, port, context, outbox) = (shared.clone(), port.clone(), context.clone(), outbox.clone());
    let kv = port.kv.get().cloned();
    if let Some(moves) = moves {
        let kv = kv.ok_or_else(|| Fault::new(FaultKind::Draining, "running requests are not taken over here"))?;
        let arriving = Arriving { shared, port, kv, moves, spec, context, seed, key, outbox };
        return Ok(Begin::Apart(takeover::run(arriving).boxed()));
    }
    let kv_blocks = port.limits.get().map_or(0, |limits| limits.kv_blocks);
    match source.zip(kv.filter(|_| source::fits(&shared, &spec, kv_blocks))) {
        Some((source, kv)) => {
            let sourced = Sourced { shared, port, kv, source, spec, context, seed, key, outbox };
            Ok(Begin::Apart(source::run(sourced).boxed()))
        }
        None => Ok(Begin::Here(Box::new(spec))),
    }
}

fn accepted(shared: &WorkerShared, number: u64) -> Result<Bytes, Fault> {
    let accepted = Accepted { worker: shared.id.clone(), incarnation: shared.incarnation, number };
    let reply = rmp_serde::to_vec(&accepted)
        .map_err(|error| Fault::new(FaultKind::Internal, format!("the reply could not be encoded: {error}")))?;
    Ok(reply.into())
}

/// The answers that are wanted here, each with what it has said before.
fn answers(spec: &GenerateSpec) -> Vec<AnswerStart> {
    let prompt: Arc<[TokenId]> = spec.prompt.as_slice().into();
    let start = |choice| {
        let (said, wanted) = spec.begun(choice);
        let answered = u32::try_from(said.len()).unwrap_or(u32::MAX);
        let tokens = if said.is_empty() { prompt.clone() } else { [&spec.prompt, said].concat().into() };
        wanted.then_some(AnswerStart { choice, tokens, answered })
    };
    (0..spec.choices).filter_map(start).collect()
}

/// Whether this worker, in this life, takes such a request at all.
fn check(shared: &WorkerShared, request: &WorkerRequest) -> Result<Arc<Port>, Fault> {
    if request.worker != shared.id {
        return Err(Fault::new(FaultKind::NotFound, format!("this is worker {}, not {}", shared.id, request.worker)));
    }
    if request.incarnation != shared.incarnation {
        metrics::counter!(Metric::StaleRefused.name(), "at" => "worker").increment(1);
        let (given, own) = (request.incarnation, shared.incarnation);
        return Err(Fault::new(
            FaultKind::StaleIncarnation,
            format!("addressed to incarnation {given}, this is {own}"),
        ));
    }
    let spec = &request.spec;
    if spec.model != shared.model.card().id {
        let served = &shared.model.card().id;
        return Err(Fault::new(FaultKind::NotFound, format!("`{}` is not served here, `{served}` is", spec.model)));
    }
    if let Some(adapter) = spec.adapter.as_ref().filter(|name| !shared.adapters.contains(name)) {
        return Err(Fault::new(FaultKind::NotFound, format!("worker {} has no adapter `{adapter}`", shared.id)));
    }
    if !(1..=CHOICES_MAX).contains(&spec.choices) {
        return Err(invalid(format!("{} choices; 1 to {CHOICES_MAX} are possible", spec.choices), "n"));
    }
    let begun = spec.so_far.len();
    if begun > 0 && (begun != spec.choices as usize || !(0..spec.choices).any(|choice| spec.begun(choice).1)) {
        return Err(invalid(format!("{begun} answers begun of {}, none of them to go on", spec.choices), "so_far"));
    }
    if shared.draining.load(Ordering::SeqCst) {
        return Err(draining(shared));
    }
    let port = shared.seat.now().ok_or_else(restarting)?;
    let limits = port.limits.get().ok_or_else(restarting)?;
    if port.load.borrow().load.waiting >= limits.waiting_max {
        return Err(overloaded("the queue is full"));
    }
    Ok(port)
}

/// Frames a request can produce at most: one a token, and an end for each choice.
fn outbox_frames(shared: &WorkerShared, spec: &GenerateSpec) -> usize {
    let tokens = spec.stop.tokens_max.min(shared.model.card().context_length) as usize;
    // For one that comes from elsewhere, a word on that.
    spec.choices as usize * (tokens + 2) + 3
}

pub(super) fn refusal(error: &SubmitError) -> Fault {
    match error {
        SubmitError::Full { .. } => overloaded(&error.to_string()),
        SubmitError::Empty | SubmitError::TooLong { .. } | SubmitError::PoolTooSmall { .. } => {
            invalid(error.to_string(), "prompt")
        }
        SubmitError::UnknownToken { .. } => invalid(error.to_string(), "prompt"),
        SubmitError::Unsupported { param, .. } => invalid(error.to_string(), param),
        SubmitError::Away(_) => Fault::new(FaultKind::Unavailable, error.to_string()),
    }
}

fn invalid(message: String, param: &str) -> Fault {
    Fault { param: Some(param.to_owned()), ..Fault::new(FaultKind::Invalid, message) }
}

fn overloaded(message: &str) -> Fault {
    Fault::new(FaultKind::Overloaded, message).retry_after_ms(RETRY_AFTER_MS)
}

fn draining(shared: &WorkerShared) -> Fault {
    Fault::new(FaultKind::Draining, format!("worker {} takes nothing new", shared.id))
}

fn restarting() -> Fault {
    Fault::new(FaultKind::Unavailable, "the worker is starting")
}

/// Takes subscribers.
pub(crate) struct EventsDoor(pub(crate) Arc<WorkerShared>);

impl StreamHandler for EventsDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let shared = self.0.clone();
        async move {
            match subscribe(&shared, &incoming.body).await {
                Err(fault) => incoming.acceptor.reject(fault),
                Ok((port, (id, queue))) => {
                    let Some((tx, rx)) = incoming.acceptor.accept(Bytes::new()) else { return };
                    let tasks = port.tasks.clone();
                    // Refused when the worker died just now: the stream breaks and is subscribed to again.
                    tasks.spawn(publish(Subscription { id, queue, tx, rx, port, shared }));
                }
            }
        }
        .boxed()
    }
}

async fn subscribe(shared: &WorkerShared, body: &[u8]) -> Result<(Arc<Port>, Subscribed), Fault> {
    // An older router says nothing, a newer one more than is known here: both have events at least.
    let wants = rmp_serde::from_slice(body).unwrap_or_default();
    let port = shared.seat.now().ok_or_else(restarting)?;
    let (reply, answer) = oneshot::channel();
    port.commands.try_send(Command::Subscribe(wants, reply)).map_err(|_| restarting())?;
    let queue = timeout(VERDICT_MAX, answer).await.map_err(|_| restarting())?.map_err(|_| restarting())?;
    let queue = queue.ok_or_else(|| overloaded("too many subscribers"))?;
    Ok((port, queue))
}
