//! The line between deciding what to compute and computing it.
//!
//! The scheduler plans a [`Batch`]; a backend computes it over its own KV memory and returns one row of
//! logits for each item that asked. Block slots are indices into that memory, handed out by the block pool;
//! the backend never allocates, shares or frees one.

use std::time::Duration;

use starling_ids::TokenId;
pub use starling_kv::pool::BlockSlot;
use starling_kv::transport::Region;

use crate::contract::EngineError;

/// A run of tokens of one sequence: a prefill chunk, or the one token of a decode.
#[derive(Debug, Clone, Copy)]
pub struct BatchItem<'a> {
    /// The tokens to compute, at least one.
    pub tokens: &'a [TokenId],
    /// Position of the first of them in its sequence. Positions before it are in the cache already.
    pub start: usize,
    /// The sequence's blocks in order; covers `start + tokens.len()` positions.
    pub blocks: &'a [BlockSlot],
    /// Return the logits after the last token.
    pub wants_logits: bool,
}

/// What one step computes.
#[derive(Debug, Clone, Default)]
pub struct Batch<'a> {
    /// Items of different sequences; no two write the same block.
    pub items: Vec<BatchItem<'a>>,
}

/// The result for one item that asked for logits.
#[derive(Debug, Clone, Copy)]
pub enum Row<'a> {
    /// One logit per vocabulary entry.
    Dense(&'a [f32]),
    /// A backend that computes nothing says which token is next.
    Token(TokenId),
}

/// What a backend returns for a batch.
#[derive(Debug)]
pub struct Computed<'a> {
    /// One row per item with `wants_logits`, in item order.
    pub rows: Vec<Row<'a>>,
    /// How long the caller must let pass before it delivers; zero for a backend that computes.
    pub takes: Duration,
}

/// Where the blocks of a backend lie: block `slot` begins at `slot * block_bytes`.
#[derive(Debug, Clone)]
pub struct KvMemory {
    /// The memory.
    pub region: Region,
    /// Bytes of one block.
    pub block_bytes: u64,
}

/// Something that computes batches. Bit-equality is part of the promise: an item's logits depend on its
/// sequence's tokens and positions alone, never on batch mix, chunking, thread count or block placement.
pub trait Backend: Send {
    /// Computes keys, values and logits for every item.
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError>;
    /// Bytes of one block; 0 for a backend without memory.
    fn block_bytes(&self) -> usize {
        self.read_block(BlockSlot(0)).len()
    }
    /// The bytes of one block, all layers, in the layout of the model.
    fn read_block(&self, slot: BlockSlot) -> Vec<u8>;
    /// The memory its blocks lie in, for transports that read and write them without the backend; `None` when blocks come
    /// and go by [`Backend::read_block`] and [`Backend::write_block`] alone.
    fn memory(&self) -> Option<KvMemory> {
        None
    }
    /// Overwrites one block. Refused when the length is not the layout's.
    fn write_block(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), EngineError>;
}
