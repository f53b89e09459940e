//! The block pool: which block holds what, who uses it, which one goes when room is needed.
//!
//! Called by an engine's scheduler for its sequences; it decides over indices alone and touches no KV memory.
//! Never: gives one block to two writers, a read block to a writer, or a block whose tokens differ from those
//! asked for. Bounds: as many blocks as it was made with; each operation is O(log blocks) per block it names.
//!
//! Two rules carry the rest. A sequence that reads a block reads all blocks before it, so an unread block has no
//! read child; and eviction takes leaves only, so what is kept always hangs together. Of the leaves the one with the oldest
//! last use goes, where a block that was read again counts as used later than it was: one whole turn of the pool later for
//! its first reader after the one that filled it, one more each time that their number has doubled, three at most. So a
//! flood of prompts that never come back does not push out what does, and what was popular once does not stay for ever.

mod adopt;
mod evict;
mod returns;
mod state;
/// What threads meet at, by one name each: a test puts others in their place.
mod sync {
    pub(super) use std::sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    };
}
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};

use starling_ids::{BlockHash, TokenId};

pub use adopt::{Adopted, Refused};
pub use evict::Evicted;
pub use returns::ReturnBin;
pub use state::{BlockCounts, BlockSlot, BlockState};

use crate::{
    events::KvEvent,
    hash::{HashKeyed, SetDigest},
};
use state::Change;

/// What a full block is: its hash, the block before it, its tokens.
#[derive(Debug, Clone, Copy)]
pub struct BlockKey<'a> {
    /// Its chained hash.
    pub hash: BlockHash,
    /// The block before it in this pool; `None` for a first block.
    pub parent: Option<BlockSlot>,
    /// Exactly one block of tokens.
    pub tokens: &'a [TokenId],
}

/// What became of a block that was filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// It is known by its hash now, and pinned once for the sequence that filled it.
    Stored,
    /// The pool held this content already: use that block, which is pinned once more; the filled one is free again.
    Shared(BlockSlot),
    /// Another content has this hash, or the block is not one block of tokens. It stays the writer's own.
    Private,
}

#[derive(Debug, Clone)]
struct Block {
    state: BlockState,
    hash: Option<BlockHash>,
    parent: Option<BlockSlot>,
    /// Known blocks that follow this one.
    children: u32,
    /// Blocks before it in its chain.
    depth: u32,
    /// Logical time of its last use.
    used: u64,
    /// Sequences that read it after the one that filled it.
    readers: u32,
}

/// A fixed number of blocks and what is in them.
#[derive(Debug, Clone)]
pub struct BlockPool {
    block_tokens: usize,
    blocks: Vec<Block>,
    /// `block_tokens` ids for each block.
    tokens: Vec<TokenId>,
    free: Vec<BlockSlot>,
    known: HashMap<BlockHash, BlockSlot, HashKeyed>,
    /// Ready blocks without known children by their rank, the first to go first.
    leaves: BTreeSet<(u64, BlockSlot)>,
    counts: BlockCounts,
    /// Blocks given back so far; stands for a clock.
    tick: u64,
    digest: SetDigest,
    events: Vec<KvEvent>,
    /// Blocks that made room since they were last taken; `None` when nobody takes them.
    evicted: Option<Vec<Evicted>>,
}

impl BlockPool {
    /// A pool of `blocks` free blocks of `block_tokens` tokens each (at least 1).
    #[must_use]
    pub fn new(blocks: u32, block_tokens: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        let empty =
            Block { state: BlockState::Free, hash: None, parent: None, children: 0, depth: 0, used: 0, readers: 0 };
        Self {
            block_tokens,
            blocks: vec![empty; blocks as usize],
            tokens: vec![0; blocks as usize * block_tokens],
            // The lowest slot is handed out first.
            free: (0..blocks).rev().map(BlockSlot).collect(),
            known: HashMap::default(),
            leaves: BTreeSet::new(),
            counts: BlockCounts { free: blocks, ..BlockCounts::default() },
            tick: 0,
            digest: SetDigest::default(),
            events: Vec::new(),
            evicted: None,
        }
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Blocks by state.
    #[must_use]
    pub fn counts(&self) -> BlockCounts {
        self.counts
    }

    /// Blocks that [`BlockPool::allocate`] can still give: free ones and those kept for reuse.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.counts.free + self.counts.ready
    }

    /// Digest of the set of known blocks; an index of this pool has the same.
    #[must_use]
    pub fn digest(&self) -> SetDigest {
        self.digest
    }

    /// The state of a block; `Free` for a slot outside the pool.
    #[must_use]
    pub fn state(&self, slot: BlockSlot) -> BlockState {
        self.blocks.get(slot.0 as usize).map_or(BlockState::Free, |block| block.state)
    }

    /// The known block with this content, compared by lineage and tokens and not by hash alone.
    #[must_use]
    pub fn find(&self, key: BlockKey<'_>) -> Option<BlockSlot> {
        self.known.get(&key.hash).copied().filter(|slot| self.holds(*slot, key))
    }

    /// The leading blocks of `tokens` that are known, at most `hashes.len()` of them. Nothing is pinned.
    ///
    /// `hashes` are the hashes of the full blocks of `tokens` in order.
    #[must_use]
    pub fn match_prefix(&self, hashes: &[BlockHash], tokens: &[TokenId]) -> Vec<BlockSlot> {
        let mut found = Vec::new();
        let mut parent = None;
        for (hash, tokens) in hashes.iter().zip(tokens.chunks_exact(self.block_tokens)) {
            let Some(slot) = self.find(BlockKey { hash: *hash, parent, tokens }) else { break };
            found.push(slot);
            parent = Some(slot);
        }
        found
    }

    /// The block known by this hash, ready or pinned.
    #[must_use]
    pub fn known(&self, hash: BlockHash) -> Option<BlockSlot> {
        self.known.get(&hash).copied()
    }

    /// The hash before this block (`None` for a first block) and its tokens; `None` for a block that is not known.
    #[must_use]
    pub fn content(&self, slot: BlockSlot) -> Option<(Option<BlockHash>, &[TokenId])> {
        let block = self.blocks.get(slot.0 as usize)?;
        block.hash?;
        Some((block.parent.and_then(|parent| self.hash_of(parent)), self.tokens_of(slot)))
    }

    /// A reader more for a known block. The caller pins a chain from its first block on.
    pub fn pin(&mut self, slot: BlockSlot) {
        self.hold(slot);
        if let Some(block) = self.blocks.get_mut(slot.0 as usize) {
            block.readers = block.readers.saturating_add(1);
        }
    }

    /// A pin that says nothing of the block's worth.
    fn hold(&mut self, slot: BlockSlot) {
        self.unlist(slot);
        self.change(slot, Change::Pin);
    }

    /// A block to write, evicting the leaf of least worth when none is free; `None` when all are in use.
    pub fn allocate(&mut self) -> Option<BlockSlot> {
        if self.free.is_empty() {
            self.make_room()?;
        }
        let slot = self.free.pop()?;
        self.change(slot, Change::Take);
        Some(slot)
    }

    /// Makes a block known that its writer has filled; see [`Filled`]. Its parent must be known and pinned by the writer.
    pub fn fill(&mut self, slot: BlockSlot, key: BlockKey<'_>) -> Filled {
        let parent_known = key.parent.is_none_or(|parent| self.hash_of(parent).is_some());
        if key.tokens.len() != self.block_tokens || !parent_known || self.state(slot) != BlockState::Filling {
            return Filled::Private;
        }
        if let Some(existing) = self.known.get(&key.hash).copied() {
            if !self.holds(existing, key) {
                return Filled::Private;
            }
            self.pin(existing);
            self.release(slot);
            return Filled::Shared(existing);
        }
        self.register(slot, key);
        self.change(slot, Change::Pin);
        Filled::Stored
    }

    /// Gives one use of a block back: a half-filled one becomes free, a pinned one loses a reader.
    pub fn release(&mut self, slot: BlockSlot) {
        self.tick += 1;
        self.give_back(slot);
    }

    /// Gives a sequence's blocks back, in the order of the sequence. All carry the same time of last use.
    pub fn release_all(&mut self, slots: &[BlockSlot]) {
        self.tick += slots.len().max(1) as u64;
        for slot in slots.iter().rev() {
            self.give_back(*slot);
        }
    }

    /// Like [`BlockPool::release_all`], and forgets those that nobody else reads: their content is not to be trusted.
    pub fn discard_all(&mut self, slots: &[BlockSlot]) {
        self.tick += slots.len().max(1) as u64;
        for slot in slots.iter().rev() {
            self.give_back(*slot);
            self.forget(*slot);
        }
    }

    /// Every known block, parents before children: (hash before it, its hash).
    #[must_use]
    pub fn inventory(&self) -> Vec<(Option<BlockHash>, BlockHash)> {
        let mut blocks: Vec<&Block> = self.blocks.iter().filter(|block| block.hash.is_some()).collect();
        blocks.sort_by_key(|block| (block.depth, block.hash));
        let entry = |block: &Block| Some((block.parent.and_then(|parent| self.hash_of(parent)), block.hash?));
        blocks.into_iter().filter_map(entry).collect()
    }

    /// What became known and what was forgotten since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    fn give_back(&mut self, slot: BlockSlot) {
        if self.state(slot) == BlockState::Filling {
            self.change(slot, Change::Abandon);
            self.free.push(slot);
            return;
        }
        self.change(slot, Change::Unpin);
        if let Some(block) = self.blocks.get_mut(slot.0 as usize) {
            block.used = self.tick;
        }
        self.list(slot);
    }

    /// Filling → ready under its hash. The caller pins or lists it.
    fn register(&mut self, slot: BlockSlot, key: BlockKey<'_>) {
        self.change(slot, Change::Fill);
        let depth = key.parent.map_or(0, |parent| {
            self.unlist(parent);
            let parent = &mut self.blocks[parent.0 as usize];
            parent.children += 1;
            parent.depth + 1
        });
        let block = &mut self.blocks[slot.0 as usize];
        (block.hash, block.parent, block.depth, block.readers) = (Some(key.hash), key.parent, depth, 0);
        let at = slot.0 as usize * self.block_tokens;
        self.tokens[at..at + self.block_tokens].copy_from_slice(key.tokens);
        self.known.insert(key.hash, slot);
        self.digest.toggle(key.hash);
        self.note_stored(key.parent.and_then(|parent| self.hash_of(parent)), key.hash);
    }

    fn note_stored(&mut self, parent: Option<BlockHash>, hash: BlockHash) {
        match self.events.last_mut() {
            Some(KvEvent::Stored { blocks, .. }) if parent.is_some() && blocks.last().copied() == parent => {
                blocks.push(hash);
            }
            _ => self.events.push(KvEvent::Stored { parent, blocks: vec![hash] }),
        }
    }

    fn holds(&self, slot: BlockSlot, key: BlockKey<'_>) -> bool {
        self.blocks[slot.0 as usize].parent == key.parent && self.tokens_of(slot) == key.tokens
    }

    fn hash_of(&self, slot: BlockSlot) -> Option<BlockHash> {
        self.blocks.get(slot.0 as usize).and_then(|block| block.hash)
    }

    fn tokens_of(&self, slot: BlockSlot) -> &[TokenId] {
        let at = slot.0 as usize * self.block_tokens;
        &self.tokens[at..at + self.block_tokens]
    }

    /// The one place where a state is written. A change that must not happen leaves the block as it is: a block
    /// lost to the pool is better than one with two owners.
    fn change(&mut self, slot: BlockSlot, change: Change) {
        let Some(block) = self.blocks.get_mut(slot.0 as usize) else { return };
        let Some(next) = block.state.after(change) else {
            debug_assert!(false, "{change:?} of block {} in state {:?}", slot.0, block.state);
            return;
        };
        let before = std::mem::replace(&mut block.state, next);
        if let Some(count) = self.counts.of(before) {
            *count -= 1;
        }
        if let Some(count) = self.counts.of(next) {
            *count += 1;
        }
    }
}
