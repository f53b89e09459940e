//! Reads blocks of the tiers for somebody beside the engine, on any thread: another worker that takes them.
//!
//! Called by whoever lends blocks. Calls the book under its lock, for microseconds; the disk is read by the tiers' own threads.
//! Never: takes an arrival of the engine's, keeps more than [`AHEAD`] blocks that nobody has asked for yet, waits beyond the time it
//! was given. If the tiers end, or a block is gone, unreadable or not the one that was stored, nothing more comes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

use starling_ids::BlockHash;

use super::{
    Arrival, Ticket, TierBlock,
    store::{GUESTS, Shared},
};
use crate::index::Tier;

/// Blocks that are read ahead of the one that is waited for.
const AHEAD: usize = 8;

/// The tiers of an engine, for other threads than the engine's.
#[derive(Debug, Clone)]
pub struct TierReader {
    shared: Arc<Shared>,
}

impl TierReader {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Begins to read the leading blocks of a chain that lie on the tiers, for at most `limit`. Whether that is worth it was decided
    /// by whoever asks; what lies on a disk that does not answer is left out. `None` when nothing is left.
    #[must_use]
    pub fn read(&self, chain: &[BlockHash], limit: Duration) -> Option<Reading> {
        let now = self.shared.began.elapsed();
        let (sender, arrivals) = channel();
        let mut state = self.shared.lock();
        let blocks = state.book.lendable(chain, now);
        if blocks == 0 || state.stop {
            return None;
        }
        state.book.note(&chain[..blocks]);
        state.guest_numbers += 1;
        let ticket = Ticket(GUESTS | state.guest_numbers);
        state.guests.insert(ticket, sender);
        drop(state);
        Some(Reading {
            shared: Arc::clone(&self.shared),
            ticket,
            chain: chain[..blocks].into(),
            arrivals,
            came: BTreeMap::new(),
            asked: 0,
            given: Vec::new(),
            until: now + limit,
        })
    }
}

/// Blocks on their way, in the order of their chain. Dropping it ends the reading.
#[derive(Debug)]
pub struct Reading {
    shared: Arc<Shared>,
    ticket: Ticket,
    chain: Box<[BlockHash]>,
    arrivals: Receiver<Arrival>,
    /// Came before those before them did.
    came: BTreeMap<usize, Arrival>,
    asked: usize,
    /// Where the blocks were that were given out.
    given: Vec<Tier>,
    until: Duration,
}

impl Reading {
    /// Blocks that are expected.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.chain.len()
    }

    /// The next block and where it was; waits for it. `None` when no more come.
    pub fn next_block(&mut self) -> Option<(Tier, Arc<TierBlock>)> {
        let at = self.given.len();
        self.ask(at + AHEAD);
        while !self.came.contains_key(&at) && at < self.chain.len() {
            let left = self.until.saturating_sub(self.shared.began.elapsed());
            let arrival = self.arrivals.recv_timeout(left).ok()?;
            self.came.insert(arrival.index, arrival);
        }
        let Arrival { tier, block, .. } = self.came.remove(&at)?;
        let block = block?;
        self.given.push(tier);
        Some((tier, block))
    }

    /// Whether the next block is here already.
    pub fn is_here(&mut self) -> bool {
        self.came.extend(self.arrivals.try_iter().map(|arrival| (arrival.index, arrival)));
        self.came.contains_key(&self.given.len())
    }

    /// Asks for all blocks before `end` that were not asked for.
    fn ask(&mut self, end: usize) {
        let end = end.min(self.chain.len());
        if self.asked >= end {
            return;
        }
        let here = self.shared.lock().book.fetch(self.ticket, self.asked, &self.chain[self.asked..end]);
        self.asked = end;
        self.came.extend(here.into_iter().map(|arrival| (arrival.index, arrival)));
        self.shared.to_read.notify_all();
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.guests.remove(&self.ticket);
        state.book.forget(self.ticket);
        self.given.iter().for_each(|tier| state.book.fetched(*tier));
    }
}
