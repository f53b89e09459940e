//! Who goes when room is needed, and the conservation check.
//!
//! Called by the pool alone. Never: evicts a block that is read or that known blocks follow.

use starling_ids::{BlockHash, TokenId};

use super::{Block, BlockPool, BlockSlot, BlockState, state::BlockCounts, state::Change};
use crate::{events::KvEvent, hash::SetDigest};

/// Turns of the whole pool by which readers can delay a block's end.
const TURNS_MAX: u32 = 3;

/// A block that made room for another one. Its bytes are in its slot until the new owner writes there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evicted {
    /// Where it was.
    pub slot: BlockSlot,
    /// Its hash.
    pub hash: BlockHash,
    /// The block before it, `None` for a first block.
    pub parent: Option<BlockHash>,
    /// Its tokens.
    pub tokens: Box<[TokenId]>,
}

impl BlockPool {
    /// From now on blocks that make room are noted, for [`BlockPool::take_evicted`].
    pub fn note_evicted(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// Blocks that made room since the last call. The caller reads their bytes before anything writes to the pool's memory.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        self.evicted.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Frees the leaf of least worth for another block.
    pub(super) fn make_room(&mut self) -> Option<BlockSlot> {
        let (_, slot) = self.leaves.first().copied()?;
        if self.evicted.is_some()
            && let Some(hash) = self.hash_of(slot)
            && let Some((parent, tokens)) = self.content(slot)
        {
            let evicted = Evicted { slot, hash, parent, tokens: tokens.into() };
            self.evicted.get_or_insert_default().push(evicted);
        }
        self.evict(slot);
        Some(slot)
    }

    /// Forgets every block that nobody reads. With none left, the event says so in one word.
    pub fn clear(&mut self) {
        let before = self.known.len();
        let events = self.events.len();
        while self.evict_oldest().is_some() {}
        if before > 0 && self.known.is_empty() {
            // Nothing that was said before matters any more to a reader that empties its table.
            self.events.truncate(events);
            self.events.push(KvEvent::Cleared);
        }
    }

    /// Forgets one block, unless it is read or known blocks follow it. True when it is gone.
    pub fn forget(&mut self, slot: BlockSlot) -> bool {
        let leaf = self.blocks.get(slot.0 as usize).is_some_and(|b| b.state == BlockState::Ready && b.children == 0);
        if leaf {
            self.evict(slot);
        }
        leaf
    }

    /// Frees the leaf of least worth.
    pub(super) fn evict_oldest(&mut self) -> Option<BlockSlot> {
        let (_, slot) = self.leaves.first().copied()?;
        self.evict(slot);
        Some(slot)
    }

    /// Ready → evicting → free.
    pub(super) fn evict(&mut self, slot: BlockSlot) {
        self.unlist(slot);
        self.change(slot, Change::Evict);
        let block = &mut self.blocks[slot.0 as usize];
        let (hash, parent) = (block.hash.take(), block.parent.take());
        if let Some(hash) = hash {
            self.known.remove(&hash);
            self.digest.toggle(hash);
            self.note_removed(hash);
        }
        if let Some(parent) = parent {
            self.blocks[parent.0 as usize].children -= 1;
            self.list(parent);
        }
        self.change(slot, Change::Clear);
        self.free.push(slot);
    }

    /// When a block would have been used last if each doubling of its readers were a turn of the pool.
    fn rank(&self, block: &Block) -> u64 {
        let turns = block.readers.saturating_add(1).ilog2().min(TURNS_MAX);
        block.used + u64::from(turns) * self.blocks.len() as u64
    }

    /// Lists the block as a leaf if it is one.
    pub(super) fn list(&mut self, slot: BlockSlot) {
        let Some(block) = self.blocks.get(slot.0 as usize) else { return };
        if block.state == BlockState::Ready && block.children == 0 {
            self.leaves.insert((self.rank(block), slot));
        }
    }

    /// Takes the block off the list, before its state, its children, its readers or its time change.
    pub(super) fn unlist(&mut self, slot: BlockSlot) {
        if let Some(block) = self.blocks.get(slot.0 as usize) {
            self.leaves.remove(&(self.rank(block), slot));
        }
    }

    fn note_removed(&mut self, hash: BlockHash) {
        match self.events.last_mut() {
            Some(KvEvent::Removed { blocks }) => blocks.push(hash),
            _ => self.events.push(KvEvent::Removed { blocks: vec![hash] }),
        }
    }

    /// Recounts everything and compares: states with counts, free list, known blocks, children, leaves, digest.
    /// O(blocks); for tests and debug assertions.
    pub fn check(&self) -> Result<(), String> {
        let mut counts = BlockCounts::default();
        let mut children = vec![0u32; self.blocks.len()];
        let mut digest = SetDigest::default();
        for block in &self.blocks {
            *counts.of(block.state).ok_or("a block is left in state evicting")? += 1;
            if let Some(parent) = block.parent {
                children[parent.0 as usize] += 1;
            }
            if let Some(hash) = block.hash {
                digest.toggle(hash);
            }
        }
        let equal = |what: &str, is: usize, should: usize| {
            if is == should { Ok(()) } else { Err(format!("{what}: {is}, should be {should}")) }
        };
        if counts != self.counts || digest != self.digest {
            return Err(format!("counted {counts:?} {digest:?}, kept {:?} {:?}", self.counts, self.digest));
        }
        equal("free list", self.free.len(), counts.free as usize)?;
        equal("known blocks", self.known.len(), (counts.ready + counts.pinned) as usize)?;
        let mut leaves = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            equal("children", block.children as usize, children[index] as usize)?;
            let known = matches!(block.state, BlockState::Ready | BlockState::Pinned(_));
            equal("hash of a known block", usize::from(block.hash.is_some()), usize::from(known))?;
            let leaf = block.state == BlockState::Ready && block.children == 0;
            leaves += usize::from(leaf);
            let listed = self.leaves.contains(&(self.rank(block), BlockSlot(index as u32)));
            equal("a leaf under its rank", usize::from(listed), usize::from(leaf))?;
            let parent_unread = block.parent.is_some_and(|p| self.state(p) == BlockState::Ready);
            if parent_unread && matches!(block.state, BlockState::Pinned(_)) {
                return Err(format!("block {index} is read, the block before it is not"));
            }
        }
        equal("leaves", self.leaves.len(), leaves)
    }
}
