//! The side that has the blocks: takes tickets on a worker's KV endpoint, computes when asked to, grants what is ready.
//!
//! Called by links and local opens. One task a ticket, owned by the worker's life. Refusals are typed and come before any
//! accept. Whatever ends the task, its guards give the pins back, revoke the grants and cancel the sequence.

use std::{
    sync::{Arc, atomic::Ordering, mpsc::TrySendError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use starling_cluster::stream::{Context, Fault, FaultKind, Incoming, StreamHandler, StreamRx, StreamTx};
use starling_engine::{StopParams, SubmitError, backend::KvMemory};
use starling_ids::{Metric, TokenId};
use starling_kv::{
    hash::HashSeed,
    pool::BlockSlot,
    transport::{Direction, Grant, GrantToken, RegionId, page_sum},
};
use tokio::sync::{mpsc, oneshot};

use super::{
    AgentFace,
    face::KvFace,
    give, live,
    wire::{KvAsk, KvOpened, Say, Told},
};
use crate::{
    transfer::{End, Granted, HolderTicket, Limits, holder::Refusal, holder::Word},
    worker::{AnswerStart, CancelGuard, Command, Delivery, InFlightGuard, Port, Submission, WorkerShared},
};

/// An engine that has not come round for this long is not vouched for.
pub(super) const STUCK: Duration = Duration::from_secs(10);

/// Takes tickets.
pub(crate) struct KvDoor(pub(crate) Arc<WorkerShared>);

impl StreamHandler for KvDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let shared = self.0.clone();
        async move {
            let Incoming { context, body, acceptor, .. } = incoming;
            match admit(&shared, &body) {
                Err(fault) => {
                    let end = fault.kind.label();
                    metrics::counter!(Metric::TransferEnded.name(), "side" => "refused", "end" => end).increment(1);
                    acceptor.reject(fault);
                }
                Ok((held, ended, reply)) => {
                    // An opener that has gone drops the ticket here.
                    let Some((tx, rx)) = acceptor.accept(reply) else { return };
                    let tasks = held.port.tasks.clone();
                    // Refused when the worker died just now: the guards end the ticket.
                    tasks.spawn(hold(held, ended, (tx, rx), context));
                }
            }
        }
        .boxed()
    }
}

/// A ticket and what its end gives back.
pub(super) struct Held {
    pub(super) port: Arc<Port>,
    pub(super) kv: Arc<KvFace>,
    agent: Arc<AgentFace>,
    region: RegionId,
    pub(super) ask: KvAsk,
    pub(super) tokens: Arc<[TokenId]>,
    pub(super) ticket: TicketGuard,
    /// Counts as a request that this worker works for.
    in_flight: Option<InFlightGuard>,
    pub(super) seed: HashSeed,
    pub(super) block_tokens: usize,
}

/// Ends a ticket when dropped.
pub(super) struct TicketGuard(Arc<KvFace>, pub(super) HolderTicket);

impl Drop for TicketGuard {
    fn drop(&mut self) {
        self.0.end_held(self.1, End::PeerGone);
    }
}

/// Revokes grants when dropped.
pub(super) struct GrantGuard(Arc<AgentFace>, Vec<GrantToken>);

impl GrantGuard {
    pub(super) fn new(held: &Held) -> Self {
        Self(held.agent.clone(), Vec::new())
    }
}

impl Drop for GrantGuard {
    fn drop(&mut self) {
        for token in &self.1 {
            // A transfer that still reads compares checksums before it uses what it read.
            self.0.fabric.grants().revoke(*token);
        }
    }
}

fn admit(shared: &Arc<WorkerShared>, body: &[u8]) -> Result<(Held, oneshot::Receiver<End>, Bytes), Fault> {
    let ask: KvAsk = rmp_serde::from_slice(body)
        .map_err(|error| Fault::new(FaultKind::Invalid, format!("the ticket cannot be read: {error}")))?;
    let restarting = || Fault::new(FaultKind::Unavailable, "the worker is starting");
    let port = shared.seat.now().ok_or_else(restarting)?;
    let kv =
        port.kv.get().cloned().ok_or_else(|| Fault::new(FaultKind::Unavailable, "its blocks cannot be reached"))?;
    let agent = shared.agent.now().ok_or_else(restarting)?;
    let card = shared.model.card();
    let begun = ask.live.is_none() && !ask.spec.so_far.is_empty();
    // Only what is computed for the taker must be a single answer.
    if (ask.compute && ask.spec.choices != 1) || begun || ask.spec.model != card.id {
        return Err(Fault::new(FaultKind::Invalid, "tickets are for one new answer of this worker's model"));
    }
    // What leaves is waited for until its taker has it.
    let in_flight = (ask.compute || ask.live.is_some()).then(|| InFlightGuard::new(shared));
    if ask.compute && shared.draining.load(Ordering::SeqCst) {
        return Err(Fault::new(FaultKind::Draining, format!("worker {} takes nothing new", shared.id)));
    }
    let local = |error: &dyn std::fmt::Display| Fault::new(FaultKind::Unavailable, format!("no data plane: {error}"));
    let memory = agent.describe(&kv.memory, kv.layout).map_err(|error| local(&error))?;
    let (ticket, ended) = kv.open(ask.asked.clone()).map_err(|refusal| refused(&refusal))?;
    let guard = TicketGuard(kv.clone(), ticket);
    let region = memory.region;
    let reply = rmp_serde::to_vec(&KvOpened { ticket, memory, shape: kv.shape })
        .map_err(|error| Fault::new(FaultKind::Internal, format!("the reply could not be encoded: {error}")))?;
    let tokens: Arc<[TokenId]> = ask.spec.prompt.as_slice().into();
    let seed = ask.spec.hash_seed(card.hash_seed);
    let block_tokens = card.block_tokens as usize;
    let held = Held { port, kv, agent, region, ask, tokens, ticket: guard, in_flight, seed, block_tokens };
    Ok((held, ended, reply.into()))
}

fn refused(refusal: &Refusal) -> Fault {
    if let Some(metric) = refusal.counts() {
        metrics::counter!(metric.name()).increment(1);
    }
    let kind = match refusal {
        Refusal::Stale { .. } | Refusal::OldAttempt { .. } => FaultKind::StaleIncarnation,
        Refusal::Layout { .. } => FaultKind::Invalid,
        Refusal::Busy { .. } => FaultKind::Overloaded,
    };
    Fault::new(kind, refusal.to_string())
}

/// The sequence that computes the prompt.
pub(super) struct Work {
    outbox: mpsc::Receiver<Delivery>,
    verdict: Option<oneshot::Receiver<Result<u64, SubmitError>>>,
    pub(super) cancel: CancelGuard,
}

impl Work {
    /// Queues the prompt, with one token to answer unless the request is handed over with that.
    pub(super) fn begin(held: &Held) -> Result<Self, TrySendError<()>> {
        let spec = &held.ask.spec;
        let key = held.port.key();
        let (sender, outbox) = mpsc::channel(4);
        let (verdict, answer) = oneshot::channel();
        let submission = Submission {
            key,
            hash_seed: held.seed,
            answers: vec![AnswerStart { choice: 0, tokens: held.tokens.clone(), answered: 0 }],
            sampling: spec.sampling.clone(),
            stop: StopParams { tokens_max: if held.ask.whole { spec.stop.tokens_max } else { 1 }, ..spec.stop.clone() },
            logprobs: spec.logprobs,
            priority: held.ask.priority,
            outbox: sender,
            verdict,
        };
        let cancel = CancelGuard { port: held.port.clone(), key, ended: false };
        let sent = held.port.commands.try_send(Command::Submit(Box::new(submission)));
        sent.map_err(|error| match error {
            TrySendError::Full(_) => TrySendError::Full(()),
            TrySendError::Disconnected(_) => TrySendError::Disconnected(()),
        })?;
        Ok(Self { outbox, verdict: Some(answer), cancel })
    }

    /// The engine's next word; never again once it has ended well.
    pub(super) async fn next(work: &mut Option<Self>) -> Result<Told, End> {
        loop {
            let Some(working) = work else { return std::future::pending().await };
            if let Some(verdict) = &mut working.verdict {
                let taken = verdict.await.is_ok_and(|verdict| verdict.is_ok());
                working.verdict = None;
                if !taken {
                    return Err(End::Broken);
                }
            }
            match working.outbox.recv().await {
                Some(Delivery::Frame(frame)) => return Ok(Told::Frame(frame)),
                Some(Delivery::End | Delivery::Moved) => {
                    working.cancel.ended = true;
                    *work = None;
                }
                Some(Delivery::Fail(_) | Delivery::From(_)) | None => return Err(End::Broken),
            }
        }
    }
}

/// Serves a ticket until it ends.
async fn hold(held: Held, ended: oneshot::Receiver<End>, (tx, mut rx): (StreamTx, StreamRx), context: Context) {
    let end = tokio::select! {
        biased;
        end = ended => end.unwrap_or(End::PeerGone),
        end = async {
            match held.ask.live {
                None if !(held.ask.compute && held.ask.whole) => give::serve(&held, &tx, &mut rx).await,
                live => live::serve(&held, live, &tx, &mut rx).await,
            }
        } => end,
        () = tokio::time::sleep(context.time_left) => End::Aborted,
    };
    let Held { kv, ticket, in_flight, .. } = held;
    kv.end_held(ticket.1, end);
    drop(in_flight);
    match end {
        End::Complete => tx.end(),
        other => tx.fail(Fault::new(FaultKind::Unavailable, format!("the ticket ended: {}", other.label()))),
    }
    drop(rx);
}

/// Tells the taker, in order.
pub(super) async fn say(tx: &StreamTx, told: Vec<Told>) -> Result<(), End> {
    for told in told {
        let bytes = rmp_serde::to_vec(&told).map_err(|_| End::Broken)?;
        tx.send(bytes.into()).await.map_err(|_| End::PeerGone)?;
    }
    Ok(())
}

/// Takes a word of the taker. Without an end the ticket goes on; an unreadable word or one of another attempt is a renewal
/// that renews nothing.
pub(super) fn hear(held: &Held, bytes: &[u8], grants: &GrantGuard) -> Result<Word, End> {
    let Ok(say) = rmp_serde::from_slice::<Say>(bytes) else { return Ok(Word::Renew) };
    if held.kv.said(say.ticket, say.attempt, say.word).is_err() {
        // Another attempt's word changes nothing; one about this ticket says that it is over.
        let ours = say.ticket == held.ticket.1 && say.attempt == held.ask.asked.attempt;
        return if ours { Err(End::Expired) } else { Ok(Word::Renew) };
    }
    match say.word {
        Word::Renew | Word::Cut => {
            let now = Instant::now();
            for token in &grants.1 {
                held.agent.fabric.grants().renew(*token, now + Limits::default().lease, now);
            }
            Ok(say.word)
        }
        Word::Complete => Err(End::Complete),
        Word::Abort => Err(End::Aborted),
    }
}

/// Lets the taker read pinned blocks.
pub(super) async fn grant(held: &Held, first: usize, slots: Vec<BlockSlot>, grants: &mut GrantGuard) -> Option<Told> {
    let memory = held.kv.memory.clone();
    let granted = tokio::task::spawn_blocking(move || sums(&memory, first, &slots)).await.ok()??;
    issue(held, granted, grants)
}

/// The same with blocks whose sums are known.
pub(super) fn issue(held: &Held, granted: Vec<Granted>, grants: &mut GrantGuard) -> Option<Told> {
    let bytes = held.kv.memory.block_bytes;
    let place = |block: &Granted| u64::from(block.slot.0) * bytes..(u64::from(block.slot.0) + 1) * bytes;
    let ranges = granted.iter().map(place).collect();
    let token = GrantToken(rand::random());
    let expires = Instant::now() + Limits::default().lease;
    let grant = Grant { token, direction: Direction::Pull, region: held.region, ranges, expires };
    held.agent.fabric.grants().issue(grant).ok()?;
    grants.1.push(token);
    Some(Told::Blocks(token, granted))
}

/// Sums of pinned blocks, which nobody writes.
fn sums(memory: &KvMemory, first: usize, slots: &[BlockSlot]) -> Option<Vec<Granted>> {
    let mut bytes = vec![0; usize::try_from(memory.block_bytes).ok()?];
    let mut granted = Vec::with_capacity(slots.len());
    for (index, slot) in (first..).zip(slots) {
        memory.region.read(u64::from(slot.0) * memory.block_bytes, &mut bytes)?;
        granted.push(Granted { index: u32::try_from(index).ok()?, slot: *slot, checksum: page_sum(&bytes), wave: 0 });
    }
    Some(granted)
}
