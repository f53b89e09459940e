//! The side that wants the blocks: which room is reserved, what is under way, what has come.
//!
//! Called by the transfer agent with what a holder says, what the transports did, and the time. One book for each life of
//! a worker: its room is that of that life's pool. Never: takes a block whose bytes were not verified, or gives room back
//! that a transport may still write to. A ticket that ends while pieces are under way waits for them, takes nothing more,
//! and settles when the last one is back.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use starling_ids::{AttemptId, RequestId};
use starling_kv::pool::BlockSlot;

use super::{End, Granted, HolderTicket, Limits, NotOpen, Party, TakerTicket, fair::Fair};

/// What is wanted of whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// For which request.
    pub request: RequestId,
    /// In which attempt.
    pub attempt: AttemptId,
    /// Of whom.
    pub holder: Party,
    /// The first block of the chain that is not here.
    pub first: u32,
    /// Room for that block and those after it, in order.
    pub room: Vec<BlockSlot>,
    /// Bytes of one block.
    pub block_bytes: u64,
}

/// One block to pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// What was granted.
    pub granted: Granted,
    /// Where it goes.
    pub to: BlockSlot,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TakerEffect {
    /// Tell the holder that the ticket is still wanted.
    Renew {
        /// Which.
        ticket: TakerTicket,
    },
    /// Nothing more is wanted of the holder: tell it, and stop what is under way.
    Ended {
        /// Which.
        ticket: TakerTicket,
        /// How.
        end: End,
    },
    /// Nothing is under way any more: the blocks that came, from the first one on without a gap, and the room to give back.
    Settled {
        /// Which.
        ticket: TakerTicket,
        /// How it ended.
        end: End,
        /// (place in the chain, where it lies), in order.
        ready: Vec<(u32, BlockSlot)>,
        /// Room that holds nothing.
        spare: Vec<BlockSlot>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nothing was granted for it yet.
    Empty,
    /// Granted, waits for its turn.
    Queued,
    /// A transport writes to it.
    Flying,
    /// Its bytes are those that were granted.
    Verified,
}

#[derive(Debug)]
struct Taking {
    wanted: Wanted,
    theirs: Option<HolderTicket>,
    places: Vec<Place>,
    flying: usize,
    until: Duration,
    renewed: Duration,
    over: Option<End>,
}

#[derive(Debug)]
struct Peer {
    fair: Fair<TakerTicket, Piece>,
    flights: usize,
}

/// The tickets of one life of one worker.
#[derive(Debug)]
pub struct Taker {
    limits: Limits,
    next: u64,
    tickets: BTreeMap<TakerTicket, Taking>,
    peers: HashMap<Party, Peer>,
}

impl Taker {
    /// No tickets.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, next: 0, tickets: BTreeMap::new(), peers: HashMap::new() }
    }

    /// Opens a ticket. The room is the ticket's until it settles.
    pub fn want(&mut self, now: Duration, wanted: Wanted) -> TakerTicket {
        self.next += 1;
        let ticket = TakerTicket(self.next);
        let places = vec![Place::Empty; wanted.room.len()];
        let (until, renewed) = (now + self.limits.lease, now);
        self.tickets.insert(ticket, Taking { wanted, theirs: None, places, flying: 0, until, renewed, over: None });
        ticket
    }

    /// The holder opened its side.
    ///
    /// # Errors
    /// [`NotOpen`] when the ticket has ended meanwhile.
    pub fn accepted(&mut self, now: Duration, ticket: TakerTicket, theirs: HolderTicket) -> Result<(), NotOpen> {
        let until = now + self.limits.lease;
        let taking = self.open(ticket)?;
        (taking.theirs, taking.until) = (Some(theirs), until);
        Ok(())
    }

    /// The holder is still there.
    ///
    /// # Errors
    /// [`NotOpen`] when the ticket has ended, also by its lease just now: the next tick says so.
    pub fn heard(&mut self, now: Duration, ticket: TakerTicket) -> Result<(), NotOpen> {
        let lease = self.limits.lease;
        let taking = self.open(ticket)?;
        if taking.until <= now {
            return Err(NotOpen);
        }
        taking.until = now + lease;
        Ok(())
    }

    /// The holder has pinned blocks. Those that nobody wants, or that were granted before, are left out.
    ///
    /// # Errors
    /// As [`Taker::heard`].
    pub fn granted(
        &mut self,
        now: Duration,
        (ticket, theirs): (TakerTicket, HolderTicket),
        blocks: &[Granted],
    ) -> Result<(), NotOpen> {
        self.heard(now, ticket)?;
        let quantum = self.limits.quantum;
        let Some(taking) = self.tickets.get_mut(&ticket).filter(|taking| taking.theirs == Some(theirs)) else {
            return Err(NotOpen);
        };
        let holder = taking.wanted.holder.clone();
        let peer = self.peers.entry(holder).or_insert_with(|| Peer { fair: Fair::new(quantum), flights: 0 });
        for granted in blocks {
            let Some(at) = granted.index.checked_sub(taking.wanted.first).map(|at| at as usize) else { continue };
            let Some(place) = taking.places.get_mut(at).filter(|place| **place == Place::Empty) else { continue };
            *place = Place::Queued;
            let piece = Piece { granted: *granted, to: taking.wanted.room[at] };
            peer.fair.push(ticket, piece, taking.wanted.block_bytes);
        }
        Ok(())
    }

    /// The next transfer from a holder: pieces of one ticket. `None` when nothing waits, or as many as may are under way.
    pub fn next(&mut self, holder: &Party) -> Option<(TakerTicket, HolderTicket, Vec<Piece>)> {
        let peer = self.peers.get_mut(holder).filter(|peer| peer.flights < self.limits.flights_per_peer)?;
        loop {
            let (ticket, pieces) = peer.fair.turn()?;
            let Some(taking) = self.tickets.get_mut(&ticket).filter(|taking| taking.over.is_none()) else { continue };
            let Some(theirs) = taking.theirs else { continue };
            for piece in &pieces {
                taking.places[(piece.granted.index - taking.wanted.first) as usize] = Place::Flying;
            }
            taking.flying += 1;
            peer.flights += 1;
            return Some((ticket, theirs, pieces));
        }
    }

    /// A transfer is back, whatever became of it: nothing writes to its room any more. `Err` says why its bytes are void.
    pub fn landed(
        &mut self,
        now: Duration,
        ticket: TakerTicket,
        (pieces, result): (&[Piece], Result<(), End>),
    ) -> Vec<TakerEffect> {
        let Some(taking) = self.tickets.get_mut(&ticket) else { return Vec::new() };
        taking.flying = taking.flying.saturating_sub(1);
        if let Some(peer) = self.peers.get_mut(&taking.wanted.holder) {
            peer.flights = peer.flights.saturating_sub(1);
        }
        let in_time = taking.over.is_none() && taking.until > now;
        let verified = result.is_ok() && in_time;
        for piece in pieces {
            let at = (piece.granted.index - taking.wanted.first) as usize;
            taking.places[at] = if verified { Place::Verified } else { Place::Empty };
        }
        match (taking.over, result) {
            (Some(_), _) => self.settle(ticket),
            (None, Err(end)) => self.end(ticket, end),
            (None, Ok(())) if !in_time => self.end(ticket, End::Expired),
            (None, Ok(())) => Vec::new(),
        }
    }

    /// Blocks that have come, from the first wanted one on without a gap, and whether that is all there is room for.
    #[must_use]
    pub fn progress(&self, ticket: TakerTicket) -> Option<(usize, bool)> {
        let taking = self.tickets.get(&ticket)?;
        let come = taking.places.iter().take_while(|place| **place == Place::Verified).count();
        Some((come, come == taking.places.len()))
    }

    /// Ends a ticket. It settles at once, or when the last transfer is back.
    pub fn end(&mut self, ticket: TakerTicket, end: End) -> Vec<TakerEffect> {
        let Ok(taking) = self.open(ticket) else { return Vec::new() };
        taking.over = Some(end);
        let holder = taking.wanted.holder.clone();
        if let Some(peer) = self.peers.get_mut(&holder) {
            peer.fair.remove(ticket);
        }
        let mut effects = vec![TakerEffect::Ended { ticket, end }];
        effects.extend(self.settle(ticket));
        effects
    }

    /// A life of a worker is over: nothing more comes from there.
    pub fn gone(&mut self, holder: &Party) -> Vec<TakerEffect> {
        let theirs = self.tickets.iter().filter(|(_, taking)| taking.wanted.holder == *holder).map(|(id, _)| *id);
        let theirs: Vec<TakerTicket> = theirs.collect();
        theirs.into_iter().flat_map(|ticket| self.end(ticket, End::PeerGone)).collect()
    }

    /// Time passes: leases run out, others are renewed in time.
    pub fn tick(&mut self, now: Duration) -> Vec<TakerEffect> {
        let mut effects = Vec::new();
        let open = self.tickets.iter().filter(|(_, taking)| taking.over.is_none()).map(|(id, _)| *id);
        let open: Vec<TakerTicket> = open.collect();
        for ticket in open {
            let Some(taking) = self.tickets.get_mut(&ticket) else { continue };
            if taking.until <= now {
                effects.extend(self.end(ticket, End::Expired));
            } else if taking.theirs.is_some() && taking.renewed + self.limits.lease / 4 <= now {
                taking.renewed = now;
                effects.push(TakerEffect::Renew { ticket });
            }
        }
        effects
    }

    /// Holders of which something waits for its turn.
    #[must_use]
    pub fn waiting(&self) -> Vec<Party> {
        self.peers.iter().filter(|(_, peer)| !peer.fair.is_empty()).map(|(holder, _)| holder.clone()).collect()
    }

    /// Tickets that have not settled.
    #[must_use]
    pub fn open_tickets(&self) -> usize {
        self.tickets.len()
    }

    /// Room held now, blocks.
    #[must_use]
    pub fn room(&self) -> usize {
        self.tickets.values().map(|taking| taking.wanted.room.len()).sum()
    }

    fn open(&mut self, ticket: TakerTicket) -> Result<&mut Taking, NotOpen> {
        self.tickets.get_mut(&ticket).filter(|taking| taking.over.is_none()).ok_or(NotOpen)
    }

    /// Gives a ticket's room back, once nothing is under way.
    fn settle(&mut self, ticket: TakerTicket) -> Vec<TakerEffect> {
        let done = self.tickets.get(&ticket).is_some_and(|taking| taking.over.is_some() && taking.flying == 0);
        let Some(Taking { wanted, places, over: Some(end), .. }) = done.then(|| self.tickets.remove(&ticket)).flatten()
        else {
            return Vec::new();
        };
        let idle = self.peers.get(&wanted.holder).is_some_and(|peer| peer.flights == 0 && peer.fair.is_empty());
        if idle {
            self.peers.remove(&wanted.holder);
        }
        let come = places.iter().take_while(|place| **place == Place::Verified).count();
        let (ready, spare) = wanted.room.split_at(come);
        let ready = (wanted.first..).zip(ready.iter().copied()).collect();
        vec![TakerEffect::Settled { ticket, end, ready, spare: spare.to_vec() }]
    }
}
