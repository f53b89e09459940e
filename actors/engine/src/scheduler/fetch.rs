//! Blocks that come from a lower tier instead of being computed: who waits for which, and what it does when they come.
//!
//! Called by admission (to ask), by the engine between steps (to tell what came) and by preemption and cancellation (to
//! give up). A sequence that fetches holds the blocks it fetches into, filling, and claims their hashes, so that a twin
//! waits for them; it is in no batch. Never: makes a block known before all blocks before it are, waits without a deadline.
//! Bounds: it counts as one of `sequences_max`, and may be preempted like one that runs.

use std::time::Duration;

use starling_ids::{BlockHash, TokenId};
use starling_kv::{
    pool::BlockSlot,
    tier::{Ticket, Worth},
};

use super::{Plan, Scheduler, admit::matchable_blocks, sequence::Rank};

/// What lies below the device, as far as admission must know.
pub trait Below {
    /// How many of a chain's leading blocks come sooner than they are computed, and until when to wait for them.
    fn worth(&mut self, chain: &[BlockHash]) -> Option<Worth>;
}

/// Nothing lies below.
impl Below for () {
    fn worth(&mut self, _chain: &[BlockHash]) -> Option<Worth> {
        None
    }
}

/// Blocks to ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    /// Under this name.
    pub ticket: Ticket,
    /// In order.
    pub chain: Vec<BlockHash>,
}

/// What a sequence waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fetching {
    ticket: Ticket,
    /// Number of the first block in the sequence.
    first: usize,
    blocks: usize,
    deadline: Duration,
}

/// A block that a sequence waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awaited<'a> {
    /// Where its bytes go.
    pub slot: BlockSlot,
    /// The block before it.
    pub parent: Option<BlockHash>,
    /// The tokens it must have.
    pub tokens: &'a [TokenId],
}

impl Scheduler {
    /// Asks for what follows the cached blocks of a sequence that was just admitted. True when it waits for them now.
    pub(super) fn fetch(&mut self, rank: Rank, plan: &mut Plan, below: &mut dyn Below) -> bool {
        let Some(sequence) = self.sequences.get(&rank.id) else { return false };
        let first = sequence.published;
        let last = matchable_blocks(sequence, self).min(sequence.hashes().len());
        let chain = sequence.hashes().get(first..last).unwrap_or_default();
        if sequence.private || sequence.fetch_failed || chain.is_empty() {
            return false;
        }
        let Some(worth) = below.worth(chain) else { return false };
        let mut chain: Vec<BlockHash> = chain.iter().copied().take(worth.blocks).collect();
        let mut slots = Vec::with_capacity(chain.len());
        while slots.len() < chain.len() {
            let Some(slot) = self.pool.allocate() else { break };
            slots.push(slot);
        }
        chain.truncate(slots.len());
        let Some(sequence) = self.sequences.get_mut(&rank.id).filter(|_| !slots.is_empty()) else { return false };
        sequence.blocks.extend(slots);
        sequence.expect_cached(first + chain.len());
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.running.remove(&rank);
        self.fetching.insert(rank, Fetching { ticket, first, blocks: chain.len(), deadline: worth.deadline });
        plan.fetches.push(Fetch { ticket, chain });
        true
    }

    /// The block number `index` of what was asked for under a ticket; `None` when nobody waits for it any more.
    #[must_use]
    pub fn awaited(&self, ticket: Ticket, index: usize) -> Option<Awaited<'_>> {
        let (rank, fetching) = self.fetching.iter().find(|(_, fetching)| fetching.ticket == ticket)?;
        let sequence = self.sequences.get(&rank.id).filter(|_| index < fetching.blocks)?;
        let at = fetching.first + index;
        let parent = at.checked_sub(1).and_then(|before| sequence.hashes().get(before)).copied();
        Some(Awaited { slot: *sequence.blocks.get(at)?, parent, tokens: sequence.block(at) })
    }

    /// The leading `arrived` blocks of a ticket are written to their slots; no other one will be. The sequence goes on from
    /// there in the next step.
    pub fn fetched(&mut self, ticket: Ticket, arrived: usize) {
        let found = self.fetching.iter().find(|(_, fetching)| fetching.ticket == ticket);
        let Some((rank, fetching)) = found.map(|(rank, fetching)| (*rank, *fetching)) else { return };
        self.fetching.remove(&rank);
        let Some(mut sequence) = self.sequences.remove(&rank.id) else { return };
        let arrived = arrived.min(fetching.blocks);
        sequence.fetch_failed |= arrived < fetching.blocks;
        sequence.computed += arrived * self.pool.block_tokens();
        sequence.expect_cached(fetching.first + arrived);
        // Part of the cache hit that is reported, unless a report was made before.
        if sequence.unreported {
            let before = sequence.matched.unwrap_or(0);
            let after = before.max(fetching.first + arrived);
            sequence.matched = Some(after);
            self.totals.cached += ((after - before) * self.pool.block_tokens()) as u64;
        }
        self.publish(&mut sequence);
        self.sequences.insert(rank.id, sequence);
        self.running.insert(rank);
    }

    /// Tickets whose deadline has passed.
    #[must_use]
    pub fn overdue(&self, now: Duration) -> Vec<Ticket> {
        let overdue = self.fetching.values().filter(|fetching| fetching.deadline <= now);
        overdue.map(|fetching| fetching.ticket).collect()
    }

    /// Sequences that wait for blocks of a lower tier.
    #[must_use]
    pub fn fetching(&self) -> usize {
        self.fetching.len()
    }

    /// Tickets that were given up since the last call.
    pub fn take_abandoned(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.abandoned)
    }

    /// A sequence waits no more: it was cancelled, or has lost its blocks.
    pub(super) fn abandon(&mut self, rank: Rank) {
        self.abandoned.extend(self.fetching.remove(&rank).map(|fetching| fetching.ticket));
    }
}
