//! The side that has the blocks: which are pinned for whom, and until when.
//!
//! Called by the transfer agent with what a taker says and with the time. One book for each life of a worker: its pins are
//! those of that life's pool. Never: forgets a pin; a pin that comes for a ticket that has ended goes back at once.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::{AttemptId, Metric, RequestId};
use starling_kv::{
    layout::{KvLayout, Mismatch, Verdict},
    pool::BlockSlot,
};

use super::{End, HolderTicket, Limits, NotOpen, Party, TakerTicket};

/// What a taker asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Who asks.
    pub taker: Party,
    /// Its name for the ticket.
    pub ticket: TakerTicket,
    /// Who is asked, in the life that is meant.
    pub holder: Party,
    /// For which request.
    pub request: RequestId,
    /// In which attempt of it; a later one takes the place of an earlier one.
    pub attempt: AttemptId,
    /// Digest of the taker's KV layout.
    pub layout: u64,
    /// Bytes of one block of the taker.
    pub block_bytes: u64,
    /// For which answer of it; each has a ticket of its own.
    #[serde(default)]
    pub choice: u32,
    /// The taker's KV layout, as far as its engine says.
    #[serde(default)]
    pub shape: Option<KvLayout>,
    /// What the taker's numbers depend on ([`starling_engine::LoadedModel::numbers`]), from one that can put blocks of the same
    /// numbers into its own order; else 0.
    #[serde(default)]
    pub numbers: u64,
}

/// Why a ticket is not granted; the taker computes by itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Another worker, or another life of it, was meant.
    #[error("this is {}/{:?}, not {}/{:?}", .ours.worker, .ours.incarnation, .meant.worker, .meant.incarnation)]
    Stale {
        /// Who is here.
        ours: Party,
        /// Who was meant.
        meant: Party,
    },
    /// The layouts of the two memories differ.
    #[error("KV layout {ours:016x} with blocks of {our_bytes} bytes here, {theirs:016x} with {their_bytes} there{why}")]
    Layout {
        /// Digest here.
        ours: u64,
        /// Bytes of a block here.
        our_bytes: u64,
        /// Digest there.
        theirs: u64,
        /// Bytes of a block there.
        their_bytes: u64,
        /// What differs, as far as both sides said; begins with a colon unless empty.
        why: String,
    },
    /// A later attempt of the same request is open.
    #[error("attempt {newest} of this request is open")]
    OldAttempt {
        /// The one that is open.
        newest: AttemptId,
    },
    /// Too many are open.
    #[error("{limit} tickets are open already")]
    Busy {
        /// The bound.
        limit: usize,
    },
}

/// What differs between two layouts whose digests do. Blocks move between equal layouts, and between those that differ in their
/// order alone; what could be converted besides is refused all the same, and that is said.
fn difference(ours: Option<&KvLayout>, theirs: Option<&KvLayout>) -> String {
    let (Some(ours), Some(theirs)) = (ours, theirs) else { return String::new() };
    let list = |differ: &[Mismatch]| differ.iter().map(Mismatch::to_string).collect::<Vec<_>>().join("; ");
    match ours.verdict(theirs) {
        Verdict::Equal => ": one shape, filled differently".to_owned(),
        Verdict::Convertible(differ) => format!(": {} (these could be converted)", list(&differ)),
        Verdict::Refused(differ) => format!(": {}", list(&differ)),
    }
}

impl Refusal {
    /// One word, for metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Stale { .. } => "stale",
            Self::Layout { .. } => "layout",
            Self::OldAttempt { .. } => "old_attempt",
            Self::Busy { .. } => "busy",
        }
    }

    /// The counter that a refusal raises besides that of transfers.
    #[must_use]
    pub const fn counts(&self) -> Option<Metric> {
        match self {
            Self::Stale { .. } => Some(Metric::StaleRefused),
            _ => None,
        }
    }
}

/// What a taker says of an open ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    /// It is still there and still wants the blocks.
    Renew,
    /// It has all it wanted.
    Complete,
    /// It does not want them any more.
    Abort,
    /// It has what was granted so far: a live request shall be handed over now.
    Cut,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HolderEffect {
    /// Give these pins back.
    Release {
        /// Whose they were.
        ticket: HolderTicket,
        /// The pins; one entry each.
        slots: Vec<BlockSlot>,
    },
    /// Pin nothing more for it, compute nothing more for it, and tell its taker how it ended.
    Ended {
        /// Which.
        ticket: HolderTicket,
        /// Its name there.
        taker: TakerTicket,
        /// How.
        end: End,
    },
}

#[derive(Debug)]
struct Held {
    asked: Asked,
    pins: Vec<BlockSlot>,
    until: Duration,
}

/// The tickets of one life of one worker.
#[derive(Debug)]
pub struct Holder {
    me: Party,
    layout: (u64, u64),
    shape: Option<KvLayout>,
    numbers: u64,
    limits: Limits,
    next: u64,
    tickets: BTreeMap<HolderTicket, Held>,
}

impl Holder {
    /// No tickets. `layout` is the digest of its KV layout and the bytes of one block.
    #[must_use]
    pub fn new(me: Party, layout: (u64, u64), limits: Limits) -> Self {
        Self { me, layout, shape: None, numbers: 0, limits, next: 0, tickets: BTreeMap::new() }
    }

    /// The same, knowing how its blocks are laid out, to say what differs, and what their numbers depend on.
    #[must_use]
    pub fn shaped(self, shape: Option<KvLayout>, numbers: u64) -> Self {
        Self { shape, numbers, ..self }
    }

    /// Whether the taker has but to put the numbers of these blocks into another order.
    fn reorders(&self, asked: &Asked) -> bool {
        let same_numbers = self.numbers != 0 && self.numbers == asked.numbers && self.layout.1 == asked.block_bytes;
        let shapes = self.shape.as_ref().zip(asked.shape.as_ref());
        same_numbers && shapes.is_some_and(|(ours, theirs)| theirs.differs_in_order_alone(ours))
    }

    /// Opens a ticket, or says why not. An earlier attempt of the same request ends.
    ///
    /// # Errors
    /// Every [`Refusal`]; nothing changed then.
    pub fn open(&mut self, now: Duration, asked: Asked) -> Result<(HolderTicket, Vec<HolderEffect>), Refusal> {
        if asked.holder != self.me {
            return Err(Refusal::Stale { ours: self.me.clone(), meant: asked.holder });
        }
        let ((ours, our_bytes), theirs, their_bytes) = (self.layout, asked.layout, asked.block_bytes);
        if (ours, our_bytes) != (theirs, their_bytes) && !self.reorders(&asked) {
            let why = difference(self.shape.as_ref(), asked.shape.as_ref());
            return Err(Refusal::Layout { ours, our_bytes, theirs, their_bytes, why });
        }
        let name = |asked: &Asked| (asked.taker.clone(), asked.request, asked.choice);
        let same = |held: &Held| name(&held.asked) == name(&asked);
        let before = self.tickets.iter().find(|(_, held)| same(held)).map(|(id, held)| (*id, held.asked.attempt));
        if let Some((_, newest)) = before.filter(|(_, newest)| *newest >= asked.attempt) {
            return Err(Refusal::OldAttempt { newest });
        }
        let of_taker = self.tickets.values().filter(|held| held.asked.taker == asked.taker).count();
        let bounds = [(self.tickets.len(), self.limits.tickets), (of_taker, self.limits.tickets_per_peer)];
        if let Some((_, limit)) = bounds.into_iter().find(|(open, limit)| before.is_none() && open >= limit) {
            return Err(Refusal::Busy { limit });
        }
        let effects = before.map(|(id, _)| self.end(id, End::Superseded)).unwrap_or_default();
        self.next += 1;
        let ticket = HolderTicket(self.next);
        self.tickets.insert(ticket, Held { asked, pins: Vec::new(), until: now + self.limits.lease });
        Ok((ticket, effects))
    }

    /// The engine has pinned blocks for a ticket.
    pub fn pinned(&mut self, ticket: HolderTicket, slots: &[BlockSlot]) -> Vec<HolderEffect> {
        match self.tickets.get_mut(&ticket) {
            Some(held) => {
                held.pins.extend_from_slice(slots);
                Vec::new()
            }
            None => vec![HolderEffect::Release { ticket, slots: slots.to_vec() }],
        }
    }

    /// A taker says something of a ticket.
    ///
    /// # Errors
    /// [`NotOpen`] when there is no such ticket of that attempt; nothing changed then.
    pub fn said(
        &mut self,
        now: Duration,
        (ticket, attempt): (HolderTicket, AttemptId),
        word: Word,
    ) -> Result<Vec<HolderEffect>, NotOpen> {
        let lease = self.limits.lease;
        let held = self.tickets.get_mut(&ticket).filter(|held| held.asked.attempt == attempt).ok_or(NotOpen)?;
        if held.until <= now {
            return Ok(self.end(ticket, End::Expired));
        }
        match word {
            Word::Renew | Word::Cut => {
                held.until = now + lease;
                Ok(Vec::new())
            }
            Word::Complete => Ok(self.end(ticket, End::Complete)),
            Word::Abort => Ok(self.end(ticket, End::Aborted)),
        }
    }

    /// The stream of a ticket broke, or its work here ended without a result.
    pub fn end(&mut self, ticket: HolderTicket, end: End) -> Vec<HolderEffect> {
        let Some(held) = self.tickets.remove(&ticket) else { return Vec::new() };
        let mut effects = vec![HolderEffect::Ended { ticket, taker: held.asked.ticket, end }];
        if !held.pins.is_empty() {
            effects.push(HolderEffect::Release { ticket, slots: held.pins });
        }
        effects
    }

    /// A life of a worker is over, with all its tickets.
    pub fn gone(&mut self, taker: &Party) -> Vec<HolderEffect> {
        let theirs = self.tickets.iter().filter(|(_, held)| held.asked.taker == *taker).map(|(id, _)| *id);
        let theirs: Vec<HolderTicket> = theirs.collect();
        theirs.into_iter().flat_map(|ticket| self.end(ticket, End::PeerGone)).collect()
    }

    /// Time passes: leases run out.
    pub fn tick(&mut self, now: Duration) -> Vec<HolderEffect> {
        let over = self.tickets.iter().filter(|(_, held)| held.until <= now).map(|(id, _)| *id);
        let over: Vec<HolderTicket> = over.collect();
        over.into_iter().flat_map(|ticket| self.end(ticket, End::Expired)).collect()
    }

    /// Tickets open now.
    #[must_use]
    pub fn open_tickets(&self) -> usize {
        self.tickets.len()
    }

    /// Pins held now.
    #[must_use]
    pub fn pins(&self) -> usize {
        self.tickets.values().map(|held| held.pins.len()).sum()
    }
}
