//! One worker in the index: its life, how much it holds, and in which order that came.
//!
//! Called by the index alone.

use std::collections::VecDeque;

use starling_ids::{BlockHash, Incarnation, WorkerId};

use crate::hash::SetDigest;

/// See the module.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) incarnation: Incarnation,
    /// Blocks it holds.
    pub(super) blocks: usize,
    /// Their digest.
    pub(super) digest: SetDigest,
    /// They, oldest first, and some that are gone again.
    pub(super) order: Order,
}

impl Worker {
    pub(super) fn new(id: WorkerId, incarnation: Incarnation) -> Self {
        Self { id, incarnation, blocks: 0, digest: SetDigest::default(), order: Order::default() }
    }

    /// True when so many of the order's entries are gone that it should be rebuilt.
    pub(super) fn order_is_stale(&self) -> bool {
        self.order.len() > self.blocks + self.blocks / 8 + CHUNK
    }
}

/// Hashes per piece of memory.
const CHUNK: usize = 256;

/// A queue in pieces: it grows and shrinks by pieces, never by doubling.
#[derive(Debug, Default)]
pub(super) struct Order {
    chunks: VecDeque<VecDeque<BlockHash>>,
    len: usize,
}

impl Order {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push(&mut self, hash: BlockHash) {
        match self.chunks.back_mut() {
            Some(chunk) if chunk.len() < chunk.capacity() => chunk.push_back(hash),
            _ => {
                let mut chunk = VecDeque::with_capacity(CHUNK);
                chunk.push_back(hash);
                self.chunks.push_back(chunk);
            }
        }
        self.len += 1;
    }

    pub(super) fn pop(&mut self) -> Option<BlockHash> {
        while let Some(chunk) = self.chunks.front_mut() {
            if let Some(hash) = chunk.pop_front() {
                self.len -= 1;
                return Some(hash);
            }
            self.chunks.pop_front();
        }
        None
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = BlockHash> {
        self.chunks.iter().flatten().copied()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let hashes: usize = self.chunks.iter().map(VecDeque::capacity).sum();
        hashes * 16 + self.chunks.capacity() * std::mem::size_of::<VecDeque<BlockHash>>()
    }
}
