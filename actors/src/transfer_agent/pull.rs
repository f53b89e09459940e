//! The side that wants the blocks: opens a ticket at another worker and brings what it grants.
//!
//! Called by a worker for a request whose first blocks are elsewhere. It returns when nothing is under way any more, with
//! what came: all of it, the beginning of it, or nothing. Never: an error; the caller computes what did not come.
//! Bounds: the ticket's lease, renewed while the holder works; the request's own deadline at its caller.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use starling_cluster::{
    mesh::Mesh,
    stream::{Context, Opened, StreamTx},
};
use starling_ids::{AttemptId, TokenId};
use starling_kv::layout::KvLayout;
use tokio::{
    sync::{Notify, mpsc},
    time::timeout,
};

use super::{
    face::{KvFace, News, Way},
    wire::{KvAsk, KvOpened, Say, Told},
};
use crate::{
    generate::{GenerateFrame, GenerateSpec, KvSource},
    names,
    transfer::{End, HolderTicket, Party, TakerTicket, holder::Asked, holder::Word, taker::Wanted},
    worker::Blocks,
};

/// Longest wait for the holder's yes or no; it answers at once, so longer means that it is frozen.
const OPEN_MAX: Duration = Duration::from_millis(1_500);

/// What to bring.
pub(crate) struct Pull<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) kv: &'a Arc<KvFace>,
    pub(crate) source: &'a KvSource,
    pub(crate) spec: &'a GenerateSpec,
    pub(crate) context: &'a Context,
    /// Leading blocks that are here.
    pub(crate) first: usize,
    /// Leading blocks that are wanted at most.
    pub(crate) blocks: usize,
    /// The request runs at the holder, as this attempt, and is to be handed over.
    pub(crate) live: Option<AttemptId>,
    /// Which answer of the request.
    pub(crate) choice: u32,
    /// Until when to wait for blocks that could be computed instead.
    pub(crate) until: Option<Instant>,
}

impl Pull<'_> {
    /// Its time is over; never, when it has no bound but its lease.
    async fn late(&self) {
        match self.until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    }
}

/// What the holder said beside blocks.
#[derive(Debug)]
pub(crate) enum Heard {
    /// Its engine's news of the answer.
    Frame(GenerateFrame),
    /// A live request is to end there at the next chance.
    Cut,
    /// This answer has ended there by itself, and its client was told.
    Over,
    /// A live request has ended there: all its tokens, and how many of them lie in its blocks.
    Last {
        tokens: Vec<TokenId>,
        computed: usize,
        /// When its last step there ended, by this clock, at the earliest.
        paused: Instant,
    },
}

/// Ends a ticket when dropped.
struct TicketGuard<'a>(&'a Arc<KvFace>, TakerTicket);

impl Drop for TicketGuard<'_> {
    fn drop(&mut self) {
        self.0.end_taken(self.1, End::Aborted);
    }
}

/// Brings blocks into `room`; what came, from block `first` on, and how it ended. What the holder says besides goes to `heard`.
pub(crate) async fn pull(pull: &Pull<'_>, room: Blocks, mut heard: impl FnMut(Heard) + Send) -> (Option<Blocks>, End) {
    let holder = Party { worker: pull.source.worker.clone(), incarnation: pull.source.incarnation };
    let attempt = AttemptId(pull.context.attempt.0.saturating_add(1));
    let wanted = Wanted {
        request: pull.context.request,
        attempt,
        holder: holder.clone(),
        first: u32::try_from(pull.first).unwrap_or(u32::MAX),
        room: room.take(),
        block_bytes: pull.kv.memory.block_bytes,
    };
    let (ticket, mut news) = pull.kv.want(wanted);
    let _guard = TicketGuard(pull.kv, ticket);
    let end = match open(pull, ticket, &holder, attempt).await {
        Ok(open) => bring(pull, &holder, (ticket, open), &mut news, &mut heard).await,
        Err(end) => end,
    };
    pull.kv.end_taken(ticket, end);
    // What is under way has its own deadline.
    loop {
        match news.recv().await {
            Some(News::Settled { end: how, ready }) => return (Some(ready), how),
            Some(News::Renew | News::Ended) => {}
            None => return (None, end),
        }
    }
}

/// An open ticket.
struct Open {
    theirs: HolderTicket,
    attempt: AttemptId,
    landed: Arc<Notify>,
    stream: Opened,
}

impl Open {
    fn say(&self, word: Word) {
        say(&self.stream.tx, Say { ticket: self.theirs, attempt: self.attempt, word });
    }
}

async fn open(pull: &Pull<'_>, ticket: TakerTicket, holder: &Party, attempt: AttemptId) -> Result<Open, End> {
    let kv = pull.kv;
    let asked = Asked {
        taker: kv.party.clone(),
        ticket,
        holder: holder.clone(),
        request: pull.context.request,
        attempt,
        layout: kv.layout,
        block_bytes: kv.memory.block_bytes,
        choice: pull.choice,
        shape: kv.shape,
        numbers: kv.numbers,
    };
    let ask = KvAsk {
        asked,
        spec: pull.spec.clone(),
        compute: pull.source.compute,
        blocks: u32::try_from(pull.blocks).unwrap_or(u32::MAX),
        priority: pull.context.priority,
        live: pull.live,
        first: u32::try_from(pull.first).unwrap_or(u32::MAX),
        whole: pull.source.compute,
    };
    let body = rmp_serde::to_vec(&ask).map_err(|_| End::Broken)?;
    let (node, endpoint) = (&holder.worker.node, names::worker_kv(holder.worker.index));
    let opening = pull.mesh.open(node, holder.incarnation, &endpoint, pull.context.clone(), body.into());
    let opened = tokio::select! {
        biased;
        opened = timeout(OPEN_MAX, opening) => opened,
        () = pull.late() => return Err(End::Late),
    };
    let stream = match opened {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::info!(holder = %holder.worker, %error, "the ticket was refused; computing here");
            return Err(End::Aborted);
        }
        Err(_) => return Err(End::PeerGone),
    };
    let opened: KvOpened = rmp_serde::from_slice(&stream.reply).map_err(|_| End::Broken)?;
    let region = opened.memory.region;
    let order = other_order(kv, &opened)?;
    let session = tokio::select! {
        biased;
        session = kv.agent.session(opened.memory) => session,
        () = pull.late() => return Err(End::Late),
    };
    let session = session.map_err(|error| {
        tracing::warn!(holder = %holder.worker, %error, "no way to its memory; computing here");
        End::Broken
    })?;
    let landed = kv.accepted(ticket, opened.ticket, Way { session, region, order }).map_err(|_| End::Expired)?;
    Ok(Open { theirs: opened.ticket, attempt, landed, stream })
}

/// The holder's layout, when its blocks must be put into the order of those here.
fn other_order(kv: &KvFace, opened: &KvOpened) -> Result<Option<KvLayout>, End> {
    if opened.memory.layout == kv.layout {
        return Ok(None);
    }
    let theirs = opened.shape.filter(|theirs| kv.shape.is_some_and(|ours| ours.differs_in_order_alone(theirs)));
    // It opens a ticket for another layout only when it was told that the numbers are the same.
    theirs.map(Some).ok_or(End::Broken)
}

/// Listens to the holder until all it has to give is here.
async fn bring(
    pull: &Pull<'_>,
    holder: &Party,
    (ticket, mut open): (TakerTicket, Open),
    news: &mut mpsc::Receiver<News>,
    heard: &mut (impl FnMut(Heard) + Send),
) -> End {
    let kv = pull.kv;
    let (mut granted, mut sealed, mut answered) = (0, false, !pull.source.compute);
    // A live request goes on until what it had at first is here.
    let (mut goes_on, mut cut) = (pull.live.is_some(), None);
    let end = loop {
        if sealed && answered && kv.progress(ticket) >= granted {
            if !goes_on {
                break End::Complete;
            }
            (goes_on, sealed, cut) = (false, false, Some(Instant::now()));
            open.say(Word::Cut);
            heard(Heard::Cut);
        }
        tokio::select! {
            biased;
            told = open.stream.rx.recv() => match told.and_then(Result::ok).map(|bytes| rmp_serde::from_slice(&bytes)) {
                Some(Ok(Told::Blocks(grant, blocks))) => {
                    granted += blocks.iter().filter(|block| (pull.first..pull.blocks).contains(&(block.index as usize))).count();
                    if kv.granted((ticket, open.theirs), grant, blocks).is_err() {
                        break End::Expired;
                    }
                    kv.pump(holder);
                }
                Some(Ok(Told::Frame(frame))) => {
                    answered = true;
                    heard(Heard::Frame(frame));
                }
                Some(Ok(Told::Sealed)) => sealed = true,
                Some(Ok(Told::Last { tokens, computed, ran_on_us, left_us })) => {
                    (goes_on, sealed) = (false, true);
                    let paused = paused(cut.zip(ran_on_us), left_us);
                    heard(Heard::Last { tokens, computed: computed as usize, paused });
                }
                Some(Ok(Told::Over)) => {
                    (goes_on, sealed) = (false, true);
                    heard(Heard::Over);
                }
                Some(Ok(Told::Alive)) => {
                    if kv.heard(ticket).is_err() {
                        break End::Expired;
                    }
                }
                // What a newer release says besides is not needed here.
                Some(Err(_)) => {}
                None => break End::PeerGone,
            },
            () = open.landed.notified() => {}
            told = news.recv() => match told {
                // A word that was left out for want of credit is said again.
                Some(News::Renew) => open.say(if cut.is_some() { Word::Cut } else { Word::Renew }),
                // A transfer failed, or the lease is over; the settling follows.
                _ => break End::Broken,
            },
            () = pull.late() => break End::Late,
        }
    };
    open.say(if end == End::Complete { Word::Complete } else { Word::Abort });
    let Opened { tx, .. } = open.stream;
    tx.end();
    end
}

/// When a request stopped at its holder, not later than it did: what the holder says of its own clock, beside when it was
/// told to stop by this one, so that the word's way counts; without that, beside now.
fn paused(cut: Option<(Instant, i64)>, left_us: u64) -> Instant {
    let now = Instant::now();
    let before = |then: Instant, us: u64| then.checked_sub(Duration::from_micros(us)).unwrap_or(then);
    let by_way = cut.map(|(cut, ran_on_us)| match u64::try_from(ran_on_us) {
        Ok(after) => cut + Duration::from_micros(after),
        Err(_) => before(cut, ran_on_us.unsigned_abs()),
    });
    let by_now = before(now, left_us);
    by_way.map_or(by_now, |by_way| by_way.min(by_now))
}

/// A word that finds no credit is left out: the lease says the same later.
fn say(tx: &StreamTx, say: Say) {
    if let Ok(bytes) = rmp_serde::to_vec(&say) {
        tx.try_send(bytes.into()).ok();
    }
}
