//! The KV face of one life of a worker: its memory, and the books of its tickets on both sides.
//!
//! Made by the engine thread once the engine is built; used by the streams of tickets, by transfers and by the agent's
//! sweep. Locks are held for microseconds and never while something of a ticket is dropped. If the worker's life is over,
//! its pool, its pins and its tickets are over together.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use starling_cluster::supervise::Tasks;
use starling_engine::backend::KvMemory;
use starling_ids::{AttemptId, Metric};
use starling_kv::{
    layout::KvLayout,
    tier::TierReader,
    transport::{GrantToken, RegionId, Session},
};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};

use super::{AgentShared, flight, raise};
use crate::{
    route::split::KvLink,
    transfer::{
        End, Granted, HolderTicket, Limits, NotOpen, Party, TakerTicket,
        holder::{Asked, Holder, HolderEffect, Refusal, Word},
        taker::{Piece, Taker, TakerEffect, Wanted},
    },
    worker::{Arrivals, Blocks, Returns},
};

/// News that wait for a ticket's task: its end, its settling, and renewals, which are left out when it is behind.
const NEWS_MAX: usize = 8;

/// What a taker's task is told of its ticket.
#[derive(Debug)]
pub(crate) enum News {
    /// Tell the holder that it is still wanted.
    Renew,
    /// It is over; what is under way comes back first.
    Ended,
    /// Nothing is under way any more.
    Settled {
        /// How it ended.
        end: End,
        /// What came, from the first wanted block on.
        ready: Blocks,
    },
}

/// How a ticket's blocks come.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    pub(crate) session: Arc<Session>,
    pub(crate) region: RegionId,
    /// Their layout there, when it has another order.
    pub(crate) order: Option<KvLayout>,
}

/// Where a worker's blocks lie, and how.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Digest of their layout, and of all else that their bytes depend on.
    pub(crate) layout: u64,
    /// The layout, as far as its engine says.
    pub(crate) shape: Option<KvLayout>,
    /// What their numbers depend on; 0 when that cannot be said.
    pub(crate) numbers: u64,
    pub(crate) memory: KvMemory,
    /// Reads what its engine keeps below the device, when there is a tier.
    pub(crate) lower: Option<TierReader>,
}

/// What a transfer needs to know of its ticket.
#[derive(Debug, Clone)]
pub(crate) struct Leg {
    pub(crate) way: Way,
    pub(crate) grants: Vec<GrantToken>,
    pub(crate) landed: Arc<Notify>,
    /// True once nothing is wanted any more.
    pub(crate) over: watch::Sender<bool>,
}

struct HolderSide {
    book: Holder,
    ends: HashMap<HolderTicket, oneshot::Sender<End>>,
}

struct TakerSide {
    book: Taker,
    outlets: HashMap<TakerTicket, mpsc::Sender<News>>,
    legs: HashMap<TakerTicket, Leg>,
}

/// See the module.
pub(crate) struct KvFace {
    pub(crate) party: Party,
    /// As in [`Place`].
    pub(crate) layout: u64,
    pub(crate) shape: Option<KvLayout>,
    pub(crate) numbers: u64,
    pub(crate) memory: KvMemory,
    pub(crate) lower: Option<TierReader>,
    /// Chains that may be read from below for others.
    pub(super) raises: Semaphore,
    pub(crate) returns: Arc<Returns>,
    pub(crate) agent: Arc<AgentShared>,
    /// Running requests that come from other workers.
    pub(crate) arrivals: Arc<Arrivals>,
    tasks: Tasks,
    began: Instant,
    holder: Mutex<HolderSide>,
    taker: Mutex<TakerSide>,
}

impl std::fmt::Debug for KvFace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvFace({:?})", self.party)
    }
}

impl KvFace {
    pub(crate) fn new(
        party: Party,
        place: Place,
        returns: &Arc<Returns>,
        agent: &Arc<AgentShared>,
        tasks: &Tasks,
    ) -> Self {
        let Place { layout, shape, numbers, memory, lower } = place;
        let limits = Limits::default();
        let holder = Holder::new(party.clone(), (layout, memory.block_bytes), limits).shaped(shape, numbers);
        Self {
            holder: Mutex::new(HolderSide { book: holder, ends: HashMap::new() }),
            taker: Mutex::new(TakerSide { book: Taker::new(limits), outlets: HashMap::new(), legs: HashMap::new() }),
            party,
            layout,
            shape,
            numbers,
            memory,
            lower,
            raises: raise::permits(),
            returns: returns.clone(),
            agent: agent.clone(),
            arrivals: Arc::default(),
            tasks: tasks.clone(),
            began: Instant::now(),
        }
    }

    /// How fast blocks come to it from others.
    pub(crate) fn link(&self) -> KvLink {
        KvLink { block_bytes: self.memory.block_bytes, bytes_per_ms: self.agent.rate() / 1e3 }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn holding(&self) -> MutexGuard<'_, HolderSide> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taking(&self) -> MutexGuard<'_, TakerSide> {
        self.taker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tickets open on both sides: as holder, as taker.
    #[cfg(test)]
    pub(crate) fn open_tickets(&self) -> (usize, usize) {
        (self.holding().book.open_tickets(), self.taking().book.open_tickets())
    }

    /// Opens a ticket as holder. What is received says that it ended, and how.
    pub(crate) fn open(&self, asked: Asked) -> Result<(HolderTicket, oneshot::Receiver<End>), Refusal> {
        let now = self.now();
        let mut side = self.holding();
        let (ticket, effects) = side.book.open(now, asked)?;
        let (sender, ended) = oneshot::channel();
        side.ends.insert(ticket, sender);
        metrics::gauge!(Metric::TransferTickets.name(), "side" => "holder").increment(1.0);
        self.held(&mut side, effects);
        Ok((ticket, ended))
    }

    /// Blocks are pinned for a ticket; they go back with it.
    pub(crate) fn pinned(&self, ticket: HolderTicket, pins: Blocks) {
        let mut side = self.holding();
        let effects = side.book.pinned(ticket, &pins.take());
        self.held(&mut side, effects);
    }

    /// The taker says something of a ticket.
    pub(crate) fn said(&self, ticket: HolderTicket, attempt: AttemptId, word: Word) -> Result<(), NotOpen> {
        let now = self.now();
        let mut side = self.holding();
        let effects = side.book.said(now, (ticket, attempt), word)?;
        self.held(&mut side, effects);
        Ok(())
    }

    /// Ends a ticket as holder; nothing happens when it has ended.
    pub(crate) fn end_held(&self, ticket: HolderTicket, end: End) {
        let mut side = self.holding();
        let effects = side.book.end(ticket, end);
        self.held(&mut side, effects);
    }

    /// Opens a ticket as taker.
    pub(crate) fn want(&self, wanted: Wanted) -> (TakerTicket, mpsc::Receiver<News>) {
        let now = self.now();
        let (sender, news) = mpsc::channel(NEWS_MAX);
        let mut side = self.taking();
        let ticket = side.book.want(now, wanted);
        side.outlets.insert(ticket, sender);
        metrics::gauge!(Metric::TransferTickets.name(), "side" => "taker").increment(1.0);
        (ticket, news)
    }

    /// The holder opened its side; its blocks come this way. The notice is given with each transfer that lands.
    pub(crate) fn accepted(&self, ticket: TakerTicket, theirs: HolderTicket, way: Way) -> Result<Arc<Notify>, NotOpen> {
        let now = self.now();
        let mut side = self.taking();
        side.book.accepted(now, ticket, theirs)?;
        let leg = Leg { way, grants: Vec::new(), landed: Arc::default(), over: watch::Sender::new(false) };
        let landed = leg.landed.clone();
        side.legs.insert(ticket, leg);
        Ok(landed)
    }

    /// The holder shows that it works.
    pub(crate) fn heard(&self, ticket: TakerTicket) -> Result<(), NotOpen> {
        let now = self.now();
        self.taking().book.heard(now, ticket)
    }

    /// The holder grants blocks; transfers begin as far as they may.
    pub(crate) fn granted(
        self: &Arc<Self>,
        (ticket, theirs): (TakerTicket, HolderTicket),
        grant: GrantToken,
        mut blocks: Vec<Granted>,
    ) -> Result<(), NotOpen> {
        let now = self.now();
        {
            let mut side = self.taking();
            let leg = side.legs.get_mut(&ticket).ok_or(NotOpen)?;
            let wave = u32::try_from(leg.grants.len()).unwrap_or(u32::MAX);
            leg.grants.push(grant);
            blocks.iter_mut().for_each(|block| block.wave = wave);
            side.book.granted(now, (ticket, theirs), &blocks)?;
        }
        Ok(())
    }

    /// Starts the transfers from a holder whose turn it is.
    pub(crate) fn pump(self: &Arc<Self>, holder: &Party) {
        while let Some((ticket, pieces, leg)) = self.next(holder) {
            let flight = flight::Flight::new(self, holder, ticket, pieces);
            // A set that is full or closed drops the flight, which lands as broken.
            self.tasks.spawn(flight::fly(flight, leg));
        }
    }

    fn next(&self, holder: &Party) -> Option<(TakerTicket, Vec<Piece>, Leg)> {
        let mut side = self.taking();
        let (ticket, _, pieces) = side.book.next(holder)?;
        let leg = side.legs.get(&ticket).cloned();
        // A ticket has a way from its acceptance until it settles, and it is granted blocks only then.
        leg.map(|leg| (ticket, pieces, leg))
    }

    /// A transfer is back, and nothing touches its room any more.
    pub(crate) fn landed(&self, ticket: TakerTicket, pieces: &[Piece], result: Result<(), End>) {
        let now = self.now();
        let mut side = self.taking();
        let effects = side.book.landed(now, ticket, (pieces, result));
        if let Some(leg) = side.legs.get(&ticket) {
            leg.landed.notify_one();
        }
        self.took(side, effects);
    }

    /// Blocks that have come, from the first wanted one on.
    pub(crate) fn progress(&self, ticket: TakerTicket) -> usize {
        self.taking().book.progress(ticket).map_or(0, |(come, _)| come)
    }

    /// Ends a ticket as taker; nothing happens when it has ended.
    pub(crate) fn end_taken(&self, ticket: TakerTicket, end: End) {
        let mut side = self.taking();
        let effects = side.book.end(ticket, end);
        self.took(side, effects);
    }

    /// Time passes.
    pub(crate) fn sweep(self: &Arc<Self>) {
        let now = self.now();
        {
            let mut side = self.holding();
            let effects = side.book.tick(now);
            self.held(&mut side, effects);
        }
        let mut side = self.taking();
        let effects = side.book.tick(now);
        let waiting = side.book.waiting();
        self.took(side, effects);
        waiting.iter().for_each(|holder| self.pump(holder));
    }

    fn held(&self, side: &mut HolderSide, effects: Vec<HolderEffect>) {
        for effect in effects {
            match effect {
                HolderEffect::Release { slots, .. } => self.returns.push(&slots),
                HolderEffect::Ended { ticket, end, .. } => {
                    metrics::gauge!(Metric::TransferTickets.name(), "side" => "holder").decrement(1.0);
                    count("holder", end);
                    if let Some(sender) = side.ends.remove(&ticket) {
                        // A task that has gone needs no news.
                        sender.send(end).ok();
                    }
                }
            }
        }
    }

    fn took(&self, mut side: MutexGuard<'_, TakerSide>, effects: Vec<TakerEffect>) {
        let mut undelivered = Vec::new();
        for effect in effects {
            match effect {
                TakerEffect::Renew { ticket } => {
                    // Places are kept for the end and the settling.
                    let outlet = side.outlets.get(&ticket).filter(|outlet| outlet.capacity() > 2);
                    undelivered.extend(outlet.and_then(|outlet| outlet.try_send(News::Renew).err()));
                }
                TakerEffect::Ended { ticket, .. } => {
                    if let Some(leg) = side.legs.get(&ticket) {
                        leg.over.send_replace(true);
                    }
                    let outlet = side.outlets.get(&ticket);
                    undelivered.extend(outlet.and_then(|outlet| outlet.try_send(News::Ended).err()));
                }
                TakerEffect::Settled { ticket, end, ready, spare } => {
                    metrics::gauge!(Metric::TransferTickets.name(), "side" => "taker").decrement(1.0);
                    count("taker", end);
                    self.returns.push(&spare);
                    side.legs.remove(&ticket);
                    let slots = ready.into_iter().map(|(_, slot)| slot).collect();
                    let news = News::Settled { end, ready: Blocks::new(slots, &self.returns) };
                    match side.outlets.remove(&ticket) {
                        Some(outlet) => undelivered.extend(outlet.try_send(news).err()),
                        None => drop(news),
                    }
                }
            }
        }
        drop(side);
        // Nobody waits any more: what came goes back with the news.
        drop(undelivered);
    }
}

fn count(side: &'static str, end: End) {
    metrics::counter!(Metric::TransferEnded.name(), "side" => side, "end" => end.label()).increment(1);
}
