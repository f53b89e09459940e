//! Blocks that transfers read or write: lent to others under pins, or reserved for what comes from them.
//!
//! Called by the engine between steps. Never: lends a block that is not ready, nor takes more than half of the pool for
//! all transfers together, so that sequences of this engine can always go on once a lease is over.

use starling_ids::{BlockHash, TokenId};
use starling_kv::{
    hash::{HashSeed, block_hashes},
    pool::{BlockKey, BlockSlot, Filled},
};

use super::Scheduler;

/// What became of blocks that came from elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Adoption {
    /// Blocks that are ready for reuse now, from the first one on.
    pub taken: usize,
    /// Room that was given back unused.
    pub spare: usize,
}

impl Scheduler {
    /// Pins the ready blocks of a chain after its first `from`, which the same borrower has pinned already.
    ///
    /// `hashes` are those of the full blocks of `tokens`; both are compared.
    pub fn lend(&mut self, hashes: &[BlockHash], tokens: &[TokenId], from: usize) -> Vec<BlockSlot> {
        let mut slots = self.pool.match_prefix(hashes, tokens).split_off_at(from);
        slots.truncate(self.guest_room());
        slots.iter().for_each(|slot| self.pool.pin(*slot));
        self.guests += slots.len();
        slots
    }

    /// Gives pins back.
    pub fn give_back(&mut self, slots: &[BlockSlot]) {
        self.pool.release_all(slots);
        self.guests = self.guests.saturating_sub(slots.len());
    }

    /// Room for blocks that come from elsewhere: all of it, or none.
    pub fn reserve(&mut self, blocks: usize) -> Option<Vec<BlockSlot>> {
        if blocks > self.guest_room() {
            return None;
        }
        let mut slots = Vec::with_capacity(blocks);
        while slots.len() < blocks {
            match self.pool.allocate() {
                Some(slot) => slots.push(slot),
                None => {
                    self.pool.release_all(&slots);
                    return None;
                }
            }
        }
        self.guests += blocks;
        Some(slots)
    }

    /// Makes blocks known whose bytes have come: those of `tokens` from block `first` on. Blocks before them must be here.
    pub fn adopt(&mut self, seed: HashSeed, tokens: &[TokenId], first: usize, slots: &[BlockSlot]) -> Adoption {
        let size = self.pool.block_tokens();
        let hashes = block_hashes(seed, tokens, size);
        let mut held = self.pool.match_prefix(hashes.get(..first).unwrap_or_default(), tokens);
        self.guests = self.guests.saturating_sub(slots.len());
        if held.len() < first || hashes.len() < first + slots.len() {
            self.pool.release_all(slots);
            return Adoption { taken: 0, spare: slots.len() };
        }
        held.iter().for_each(|slot| self.pool.pin(*slot));
        let mut taken = 0;
        for (index, slot) in (first..).zip(slots) {
            let tokens = &tokens[index * size..(index + 1) * size];
            match self.pool.fill(*slot, BlockKey { hash: hashes[index], parent: held.last().copied(), tokens }) {
                Filled::Stored => held.push(*slot),
                Filled::Shared(here) => held.push(here),
                Filled::Private => break,
            }
            taken += 1;
        }
        // Another content has this hash: what follows would hang on nothing.
        self.pool.release_all(&slots[taken..]);
        self.pool.release_all(&held);
        Adoption { taken, spare: slots.len() - taken }
    }

    /// Pins and room that transfers hold now.
    #[must_use]
    pub fn guests(&self) -> usize {
        self.guests
    }

    fn guest_room(&self) -> usize {
        (self.limits.kv_blocks as usize / 2).saturating_sub(self.guests)
    }
}

trait SplitOffAt {
    fn split_off_at(self, at: usize) -> Self;
}

impl SplitOffAt for Vec<BlockSlot> {
    /// What lies behind `at`; nothing when it is shorter.
    fn split_off_at(mut self, at: usize) -> Self {
        if at >= self.len() { Vec::new() } else { self.split_off(at) }
    }
}
