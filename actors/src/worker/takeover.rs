//! A running request that comes from another worker: its blocks are brought while it goes on there, then it goes on here.
//!
//! Called by the generate door once such a request is accepted. First what is full is pulled; when that is here, the other
//! worker is told to hand the request over, and only what it computed since is pulled then. Until the hand-over a failure
//! costs nothing: the request goes on where it is, and its client is told that it was not taken. After it, what did not come
//! is computed here. Never: tells a client a token of the other worker. Bounds: one task a request, owned by the worker's life.

use std::{
    sync::{Arc, mpsc::TrySendError},
    time::Duration,
};

use futures::future::try_join_all;
use starling_cluster::stream::{Context, Fault, FaultKind};
use starling_ids::{BlockHash, TokenId};
use starling_kv::hash::{HashSeed, block_hashes};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{
    WorkerShared,
    blocks::{Arrived, Room, RoomAsk},
    doors::refusal,
    leaving::{Coming, Luggage, TakenOver},
    ledger::RequestKey,
    port::{AnswerStart, Command, Delivery, Port, Submission},
    source::busy,
};
use crate::{
    generate::{GenerateSpec, KvSource, Moves},
    transfer::End,
    transfer_agent::{Heard, KvFace, Pull, pull},
};

/// Blocks that a request may fill while it is on its way; one that fills more is handed over before.
const EXTRA_BLOCKS: usize = 6;

/// How long it waits for room at most, and how often it asks.
const ROOM_MAX: Duration = Duration::from_secs(5);
const ROOM_EVERY: Duration = Duration::from_millis(20);

/// A request and where it runs now.
pub(crate) struct Arriving {
    pub(crate) shared: Arc<WorkerShared>,
    pub(crate) port: Arc<Port>,
    pub(crate) kv: Arc<KvFace>,
    pub(crate) moves: Moves,
    pub(crate) spec: GenerateSpec,
    pub(crate) context: Context,
    pub(crate) seed: HashSeed,
    pub(crate) key: RequestKey,
    pub(crate) outbox: mpsc::Sender<Delivery>,
}

/// One answer that the other worker handed over.
struct Brought {
    choice: u32,
    tokens: Vec<TokenId>,
    luggage: Luggage,
    paused: std::time::Instant,
    coming: Option<Coming>,
}

/// Takes it over. Its frames go to the outbox like those of any other request.
pub(crate) async fn run(arriving: Arriving) {
    let outbox = arriving.outbox.clone();
    let brought = tokio::select! {
        biased;
        // The client has gone, or stays where it is: the guards give all back.
        () = outbox.closed() => return,
        brought = bring(&arriving) => brought,
    };
    let outcome = match brought {
        Ok(brought) => go_on(arriving, brought).await,
        Err(fault) => Err(fault),
    };
    if let Err(fault) = outcome {
        outbox.try_send(Delivery::Fail(fault)).ok();
    }
}

/// Brings the blocks of its answers until the other worker has ended it there. They leave at one moment.
async fn bring(arriving: &Arriving) -> Result<Vec<Brought>, Fault> {
    let spec = &arriving.spec;
    let wanted: Vec<u32> = (0..spec.choices).filter(|choice| spec.begun(*choice).1).collect();
    if wanted.len() > 1 {
        prefix(arriving).await;
    }
    let answers = try_join_all(wanted.into_iter().map(|choice| bring_one(arriving, choice))).await?;
    let answers: Vec<Brought> = answers.into_iter().flatten().collect();
    if answers.is_empty() {
        return Err(busy("all its answers ended where it was".to_owned()));
    }
    Ok(answers)
}

/// What all its answers begin with is brought once, as far as it comes.
async fn prefix(arriving: &Arriving) -> Option<()> {
    let Arriving { shared, port, kv, moves, spec, context, seed, .. } = arriving;
    let spec = GenerateSpec { choices: 1, so_far: Vec::new(), ..spec.clone() };
    let prompt: Arc<[TokenId]> = spec.prompt.as_slice().into();
    let hashes = block_hashes(*seed, &prompt, shared.model.card().block_tokens as usize);
    let blocks = hashes.len();
    let Room { here, room } = room(port, hashes, &prompt, 0).await?;
    if room.slots().is_empty() {
        return None;
    }
    let source = source_of(moves, blocks);
    let first = here.slots().len();
    // No answer has this number.
    let choice = u32::MAX;
    let job = Pull {
        mesh: &shared.mesh,
        kv,
        source: &source,
        spec: &spec,
        context,
        first,
        blocks,
        live: None,
        choice,
        until: None,
    };
    let (ready, _) = pull(&job, room, |_| {}).await;
    let arrived = Arrived { here: Some(here), first, ready, seed: *seed, tokens: prompt, then: None };
    port.commands.try_send(Command::Arrived(Box::new(arrived))).ok()
}

fn source_of(moves: &Moves, blocks: usize) -> KvSource {
    let (worker, incarnation) = (moves.worker.clone(), moves.incarnation);
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    KvSource { worker, incarnation, compute: false, blocks, host: 0, disk: 0, reading_ms: 0 }
}

/// Brings one answer. `None` when it ended where it was.
async fn bring_one(arriving: &Arriving, choice: u32) -> Result<Option<Brought>, Fault> {
    let Arriving { shared, port, kv, moves, spec, context, .. } = arriving;
    let known: Arc<[TokenId]> = [&spec.prompt, spec.begun(choice).0].concat().into();
    let hashes = block_hashes(arriving.seed, &known, shared.model.card().block_tokens as usize);
    let blocks = hashes.len() + EXTRA_BLOCKS;
    let Room { here, room } =
        room(port, hashes, &known, EXTRA_BLOCKS).await.ok_or_else(|| busy("no room for its blocks".to_owned()))?;
    let source = source_of(moves, blocks);
    let first = here.slots().len();
    let live = Some(moves.attempt);
    let job = Pull { mesh: &shared.mesh, kv, source: &source, spec, context, first, blocks, live, choice, until: None };
    let (mut last, mut coming, mut over) = (None, None::<Coming>, false);
    let (ready, end) = pull(&job, room, |heard| match heard {
        Heard::Cut => coming = Some(Coming::new(&kv.arrivals)),
        Heard::Last { tokens, computed, paused } => {
            coming.get_or_insert_with(|| Coming::new(&kv.arrivals)).left();
            tracing::debug!(request = %context.request, paused = ?paused.elapsed(), "it has left its worker");
            last = Some((tokens, computed, paused));
        }
        Heard::Over => over = true,
        Heard::Frame(_) => {}
    })
    .await;
    if over {
        return Ok(None);
    }
    let Some((tokens, computed, paused)) = last else {
        return Err(busy(format!("it was not handed over: {}", end.label())));
    };
    if end != End::Complete {
        tracing::info!(request = %context.request, from = %moves.worker, end = end.label(), "computing the rest here");
    }
    if !tokens.starts_with(&known) {
        return Err(Fault::new(FaultKind::Internal, "another request was handed over"));
    }
    tracing::debug!(request = %context.request, paused = ?paused.elapsed(), "its last blocks are here");
    Ok(Some(Brought { choice, tokens, luggage: Luggage { here, ready, computed }, paused, coming }))
}

/// Room for its blocks. When many come at once, those before it give room back as they go on here.
async fn room(port: &Port, hashes: Vec<BlockHash>, tokens: &Arc<[TokenId]>, extra: usize) -> Option<Room> {
    let until = Instant::now() + ROOM_MAX;
    loop {
        let (reply, answer) = oneshot::channel();
        let ask = RoomAsk { hashes: hashes.clone(), tokens: tokens.clone(), extra, reply };
        port.commands.try_send(Command::Room(Box::new(ask))).ok()?;
        let room = answer.await.ok()?;
        if room.is_some() || Instant::now() >= until {
            return room;
        }
        tokio::time::sleep(ROOM_EVERY).await;
    }
}

/// Hands it to the engine.
async fn go_on(arriving: Arriving, brought: Vec<Brought>) -> Result<(), Fault> {
    let Arriving { port, spec, context, seed, key, outbox, .. } = arriving;
    let paused = brought.iter().map(|answer| answer.paused).min();
    let (mut answers, mut luggage, mut coming) = (Vec::new(), Vec::new(), Vec::new());
    for answer in brought {
        let answered = u32::try_from(answer.tokens.len().saturating_sub(spec.prompt.len())).unwrap_or(u32::MAX);
        answers.push(AnswerStart { choice: answer.choice, tokens: answer.tokens.into(), answered });
        luggage.push(answer.luggage);
        coming.extend(answer.coming);
    }
    let said = answers.iter().fold(0u32, |said, answer| said.saturating_add(answer.answered));
    // It holds every frame of a request, and this one.
    outbox.try_send(Delivery::From(said)).ok();
    let (verdict, answer) = oneshot::channel();
    let submission = Submission {
        key,
        hash_seed: seed,
        answers,
        sampling: spec.sampling,
        stop: spec.stop,
        logprobs: spec.logprobs,
        priority: context.priority,
        outbox,
        verdict,
    };
    let taken = Box::new(TakenOver { submission, luggage, paused, coming });
    let starting = || busy("the worker is starting".to_owned());
    port.commands.try_send(Command::TakeOver(taken)).map_err(|error| match error {
        TrySendError::Full(_) => busy("too many requests arrive at once".to_owned()),
        TrySendError::Disconnected(_) => starting(),
    })?;
    match answer.await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(match refusal(&error) {
            // Another worker takes it; the client has been told of no refusal.
            fault if fault.kind == FaultKind::Overloaded => busy(error.to_string()),
            fault => fault,
        }),
        Err(_) => Err(starting()),
    }
}
