//! A request whose first blocks come from another worker: pulled, adopted, then computed here from where they end.
//!
//! Called by the generate door once such a request is accepted. The other worker computes the prompt and its first token,
//! or only gives what it has cached. Whatever does not come is computed here: the request never fails because of its
//! source. Never: tells a client a token twice. Bounds: one task a request, owned by the worker's life.

use std::{
    sync::{Arc, mpsc::TrySendError},
    time::Instant,
};

use starling_cluster::stream::{Context, Fault, FaultKind};
use starling_engine::{FinishReason, SubmitError};
use starling_ids::{Metric, TokenId};
use starling_kv::hash::{HashSeed, block_hashes};
use tokio::sync::{mpsc, oneshot};

use super::{
    WorkerShared,
    blocks::{Arrived, Blocks, Room, RoomAsk},
    doors::refusal,
    leaving::{Luggage, TakenOver},
    ledger::RequestKey,
    patience::Known,
    port::{AnswerStart, Command, Delivery, Port, Submission},
};
use crate::{
    generate::{GenerateFrame, GenerateSpec, KvSource},
    transfer::End,
    transfer_agent::{Heard, KvFace, Pull, pull},
};

/// A request and where its first blocks are.
pub(crate) struct Sourced {
    pub(crate) shared: Arc<WorkerShared>,
    pub(crate) port: Arc<Port>,
    pub(crate) kv: Arc<KvFace>,
    pub(crate) source: KvSource,
    pub(crate) spec: GenerateSpec,
    pub(crate) context: Context,
    pub(crate) seed: HashSeed,
    pub(crate) key: RequestKey,
    pub(crate) outbox: mpsc::Sender<Delivery>,
}

/// What the source did for it.
#[derive(Default)]
struct Brought {
    here: Option<Blocks>,
    first: usize,
    ready: Option<Blocks>,
    /// The first token, when the source computed it; `true` when it ended the answer.
    said: Option<(TokenId, bool)>,
    /// All tokens of the sequence that the source began, and how many of them lie in its blocks, the last one filled in part.
    last: Option<(Vec<TokenId>, usize)>,
}

/// Whether a request can be served this way at all; others are computed here from their beginning.
pub(crate) fn fits(shared: &WorkerShared, spec: &GenerateSpec, kv_blocks: u32) -> bool {
    let card = shared.model.card();
    let (tokens, block) = (spec.prompt.len(), card.block_tokens as usize);
    let known = spec.prompt.iter().all(|id| *id < card.vocab_size);
    let holds = tokens < card.context_length as usize && tokens / block.max(1) + 2 < kv_blocks as usize;
    spec.choices == 1 && spec.so_far.is_empty() && known && holds && tokens >= block
}

/// Serves it. Its frames go to the outbox like those of any other request.
pub(crate) async fn run(sourced: Sourced) {
    let outbox = sourced.outbox.clone();
    let prompt: Arc<[TokenId]> = sourced.spec.prompt.as_slice().into();
    let brought = tokio::select! {
        biased;
        // The client left: the guards give all back.
        () = outbox.closed() => return,
        brought = bring(&sourced, &prompt) => brought,
    };
    go_on(sourced, prompt, brought).await;
}

/// Pulls what the source gives.
async fn bring(sourced: &Sourced, prompt: &Arc<[TokenId]>) -> Brought {
    let Sourced { shared, port, kv, source, spec, context, .. } = sourced;
    let mut hashes = block_hashes(sourced.seed, prompt, shared.model.card().block_tokens as usize);
    if !source.compute {
        hashes.truncate(source.blocks as usize);
    }
    // What the source computes ends in a block that is filled in part.
    let extra = usize::from(source.compute);
    let blocks = hashes.len() + extra;
    let (reply, answer) = oneshot::channel();
    let ask = RoomAsk { hashes, tokens: prompt.clone(), extra, reply };
    let asked = port.commands.try_send(Command::Room(Box::new(ask))).is_ok();
    let room = if asked { answer.await.ok().flatten() } else { None };
    let Some(Room { here, room }) = room else {
        count(source, "no_room");
        return Brought::default();
    };
    let first = here.slots().len();
    if room.slots().is_empty() && !source.compute {
        // It is all here by now.
        return Brought { here: Some(here), first, ..Brought::default() };
    }
    let mut until = None;
    if !source.compute {
        let Some(wait) = known(sourced).patience(u32::try_from(room.slots().len()).unwrap_or(u32::MAX)) else {
            count(source, "slower");
            return Brought { here: Some(here), first, ..Brought::default() };
        };
        until = Some(Instant::now() + wait);
    }
    let job = Pull { mesh: &shared.mesh, kv, source, spec, context, first, blocks, live: None, choice: 0, until };
    let (mut said, mut last) = (None, None);
    let (ready, end) = pull(&job, room, |heard| match heard {
        Heard::Frame(frame) if said.is_none() => said = tell(sourced, frame),
        Heard::Frame(_) | Heard::Cut | Heard::Over => {}
        Heard::Last { tokens, computed, .. } => last = Some((tokens, computed)),
    })
    .await;
    count(source, end.label());
    if end != End::Complete {
        tracing::info!(request = %context.request, source = %source.worker, end = end.label(), "computing the rest here");
    }
    Brought { here: Some(here), first, ready, said, last }
}

/// What this worker knows of its link and of its own speed.
fn known(sourced: &Sourced) -> Known {
    let Sourced { shared, port, kv, .. } = sourced;
    Known {
        link: kv.link(),
        rates: port.load.borrow().rates,
        block_tokens: shared.model.card().block_tokens,
        step_tokens: port.limits.get().map_or(1, |limits| limits.batch_tokens_max),
        reading_ms: sourced.source.reading_ms,
    }
}

/// Tells the client the first token; the token and whether the answer is over with it.
fn tell(sourced: &Sourced, mut frame: GenerateFrame) -> Option<(TokenId, bool)> {
    let token = frame.tokens.first()?.id;
    let card = sourced.shared.model.card();
    let full = sourced.spec.stop.tokens_max <= 1 || sourced.spec.prompt.len() + 1 >= card.context_length as usize;
    // A source of an older release is asked for one token, so its end by length is this answer's only if there is room for no other.
    if frame.finish == Some(FinishReason::Length) && !full {
        frame.finish = None;
    }
    let over = frame.finish.is_some();
    // A client that has gone is seen by whoever waits for it.
    sourced.outbox.try_send(Delivery::Frame(frame)).ok();
    Some((token, over))
}

/// Hands what came to the engine, and the rest of the request with it.
async fn go_on(sourced: Sourced, prompt: Arc<[TokenId]>, brought: Brought) {
    let Sourced { port, spec, context, seed, key, outbox, .. } = sourced;
    let Brought { here, first, ready, said, last } = brought;
    let over = said.is_some_and(|(_, over)| over);
    let tokens: Arc<[TokenId]> = match said {
        Some((token, _)) => prompt.iter().copied().chain([token]).collect(),
        None => prompt.clone(),
    };
    let (verdict, answer) = oneshot::channel();
    let submission = Submission {
        key,
        hash_seed: seed,
        answers: vec![AnswerStart { choice: 0, tokens, answered: u32::from(said.is_some()) }],
        sampling: spec.sampling,
        stop: spec.stop,
        logprobs: spec.logprobs,
        priority: context.priority,
        outbox: outbox.clone(),
        verdict,
    };
    let last = last.filter(|(tokens, _)| !over && said.is_some() && **tokens == *submission.answers[0].tokens);
    let command = match (last, here) {
        // It goes on from the last token that the source computed.
        (Some((_, computed)), Some(here)) => Command::TakeOver(Box::new(TakenOver {
            submission,
            luggage: vec![Luggage { here, ready, computed }],
            paused: None,
            coming: Vec::new(),
        })),
        (_, here) => {
            let then = (!over).then(|| Box::new(submission));
            Command::Arrived(Box::new(Arrived { here, first, ready, seed, tokens: prompt, then }))
        }
    };
    let sent = port.commands.try_send(command);
    let last = match sent {
        Err(TrySendError::Full(_)) => Delivery::Fail(busy("too many requests arrive at once".to_owned())),
        Err(TrySendError::Disconnected(_)) => Delivery::Fail(busy("the worker is starting".to_owned())),
        Ok(()) if over => Delivery::End,
        Ok(()) => match answer.await {
            Ok(Ok(_)) => return,
            // Another worker takes it; the client has been told of no refusal.
            Ok(Err(error @ SubmitError::Full { .. })) => Delivery::Fail(busy(error.to_string())),
            Ok(Err(error)) => Delivery::Fail(refusal(&error)),
            Err(_) => Delivery::Fail(busy("the worker is starting".to_owned())),
        },
    };
    outbox.try_send(last).ok();
}

pub(super) fn busy(reason: String) -> Fault {
    Fault::new(FaultKind::Unavailable, reason)
}

fn count(source: &KvSource, outcome: &'static str) {
    let kind = if source.compute { "split" } else { "pull" };
    metrics::counter!(Metric::WorkerSourced.name(), "kind" => kind, "outcome" => outcome).increment(1);
}
