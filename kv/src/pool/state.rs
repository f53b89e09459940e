//! The life of one block: which change may follow which state.
//!
//! Called by the pool for every change; nothing else writes a state.
//! Never: keeps a state of its own.

use serde::{Deserialize, Serialize};

/// Index of a block in a KV memory, below the pool's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockSlot(pub u32);

/// Where a block is in its life: `free → filling → ready → pinned(n) → evicting → free`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// Holds nothing.
    Free,
    /// Owned and written by one sequence; nobody else may read it.
    Filling,
    /// Full, known by its hash, used by nobody: kept for reuse.
    Ready,
    /// Full, known by its hash, read by this many sequences, at least 1. Never written.
    Pinned(u32),
    /// No longer known by its hash; its memory is about to be given away.
    Evicting,
}

/// What happens to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// A sequence takes a free block to write it.
    Take,
    /// It is full and becomes known by its hash.
    Fill,
    /// Its writer gives it back before it is full.
    Abandon,
    /// A reader more.
    Pin,
    /// A reader less.
    Unpin,
    /// Its hash is forgotten.
    Evict,
    /// Its memory is free.
    Clear,
}

impl BlockState {
    /// The state after `change`, or `None` when that must not happen in this state.
    pub(crate) fn after(self, change: Change) -> Option<Self> {
        match (self, change) {
            (Self::Free, Change::Take) => Some(Self::Filling),
            (Self::Filling, Change::Fill) => Some(Self::Ready),
            (Self::Filling, Change::Abandon) | (Self::Evicting, Change::Clear) => Some(Self::Free),
            (Self::Ready, Change::Pin) => Some(Self::Pinned(1)),
            (Self::Ready, Change::Evict) => Some(Self::Evicting),
            (Self::Pinned(readers), Change::Pin) => readers.checked_add(1).map(Self::Pinned),
            (Self::Pinned(0 | 1), Change::Unpin) => Some(Self::Ready),
            (Self::Pinned(readers), Change::Unpin) => Some(Self::Pinned(readers - 1)),
            _ => None,
        }
    }
}

/// How many blocks are in which state. Their sum is the pool's size: that is the conservation law.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Hold nothing.
    pub free: u32,
    /// Being written.
    pub filling: u32,
    /// Kept for reuse.
    pub ready: u32,
    /// Read by at least one sequence.
    pub pinned: u32,
}

impl BlockCounts {
    /// All of them.
    #[must_use]
    pub fn total(self) -> u32 {
        self.free + self.filling + self.ready + self.pinned
    }

    pub(crate) fn of(&mut self, state: BlockState) -> Option<&mut u32> {
        match state {
            BlockState::Free => Some(&mut self.free),
            BlockState::Filling => Some(&mut self.filling),
            BlockState::Ready => Some(&mut self.ready),
            BlockState::Pinned(_) => Some(&mut self.pinned),
            // Lasts only inside one call of the pool.
            BlockState::Evicting => None,
        }
    }
}
