//! The forward pass of a Llama model over a paged cache.
//!
//! A batch is flattened into columns, one per token, and computed in chunks of at most [`CHUNK_TOKENS`], layer by
//! layer. Each output depends on its own column and its sequence's cache alone, in an order fixed by position,
//! so logits are equal to the bit for any chunking, batch mix, thread count and block placement.
//! Called by the engine through [`Backend`]; calls the kernels on the pool. Never: allocates or frees a block.
//! Bounds: scratch memory for one chunk; logits for the items that ask. If a task panics: the step fails.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use super::{
    compute::Pool,
    config::LlamaConfig,
    kernels::{Columns, Kernels, generic::AttendScratch},
    kv_store::{BLOCK_TOKENS, KvShape, KvStore},
    matmul::MatmulScratch,
    pass::{Pass, Tile},
    weights::Weights,
};
use crate::{
    backend::{Backend, Batch, BatchItem, BlockSlot, Computed, KvMemory, Row},
    contract::EngineError,
    loader::Activations,
};

/// Tokens computed together: enough that unpacking weights costs little, few enough to stay in the cache.
const CHUNK_TOKENS: usize = 256;

/// A loaded model: what all engines of a process share.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) config: LlamaConfig,
    pub(super) weights: Weights,
    pub(super) kernels: Kernels,
    pub(super) pool: Pool,
    /// How exactly the inputs of products are rounded.
    pub(super) activations: Activations,
}

/// One token of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) item: usize,
    pub(super) token: u32,
    pub(super) position: usize,
    pub(super) wants_logits: bool,
}

/// Memory of one thread.
#[derive(Debug, Default)]
pub(super) struct Worker {
    pub(super) attend: AttendScratch,
    pub(super) out: Vec<f32>,
}

/// Memory of one chunk.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Residual stream, `[column][hidden]`.
    pub(super) x: Vec<f32>,
    /// Queries, keys, values, `[column][q + 2 kv]`.
    pub(super) qkv: Vec<f32>,
    /// Attention's output, `[column][q]`.
    pub(super) attended: Vec<f32>,
    /// Cosine and sine of each rotary pair, `[column][head_dim]`.
    pub(super) angles: Vec<f32>,
    /// Input of the products from `hidden` or `q` wide rows.
    pub(super) narrow: Columns,
    /// Input of the product from `ffn` wide rows.
    pub(super) wide: Columns,
    pub(super) tiles: Vec<Tile>,
}

impl Buffers {
    fn new(activations: Activations) -> Self {
        let (narrow, wide) = (Columns::new(activations), Columns::new(activations));
        let floats = Vec::new;
        Self { x: floats(), qkv: floats(), attended: floats(), angles: floats(), narrow, wide, tiles: Vec::new() }
    }
}

/// Computes batches on this machine's CPU.
#[derive(Debug)]
pub struct CpuBackend {
    model: Arc<Model>,
    cache: KvStore,
    buffers: Buffers,
    workers: Vec<Mutex<Worker>>,
    products: MatmulScratch,
    /// Rows of the residual stream whose logits are wanted.
    finals: Vec<f32>,
    logits: Vec<f32>,
}

pub(super) fn step_error(error: impl std::fmt::Display) -> EngineError {
    EngineError::Step(error.to_string())
}

impl CpuBackend {
    /// A backend with `slots` blocks of cache.
    pub(super) fn new(model: Arc<Model>, slots: usize) -> Result<Self, std::io::Error> {
        let cache = KvStore::new(KvShape::of(&model.config), slots)?;
        Ok(Self::over(model, cache))
    }

    /// A backend that can hold no sequence, for when there is no memory: every step fails.
    pub(super) fn without_cache(model: Arc<Model>) -> Self {
        let cache = KvStore::empty(KvShape::of(&model.config));
        Self::over(model, cache)
    }

    fn over(model: Arc<Model>, cache: KvStore) -> Self {
        let width = model.pool.width();
        Self {
            cache,
            buffers: Buffers::new(model.activations),
            workers: (0..width).map(|_| Mutex::default()).collect(),
            products: MatmulScratch::new(width),
            finals: Vec::new(),
            logits: Vec::new(),
            model,
        }
    }

    /// Refuses what would reach outside the vocabulary or the cache.
    fn check(&self, item: &BatchItem<'_>) -> Result<(), EngineError> {
        let end = item.start + item.tokens.len();
        if item.tokens.is_empty() || end > item.blocks.len() * BLOCK_TOKENS {
            let (tokens, blocks) = (item.tokens.len(), item.blocks.len());
            return Err(step_error(format!("{tokens} tokens from position {} do not fit {blocks} blocks", item.start)));
        }
        if let Some(token) = item.tokens.iter().find(|token| **token as usize >= self.model.config.vocab) {
            return Err(step_error(format!("token {token} is not in the vocabulary")));
        }
        if let Some(slot) = item.blocks.iter().find(|slot| slot.0 as usize >= self.cache.slots()) {
            return Err(step_error(format!("block {} is not in the cache of {}", slot.0, self.cache.slots())));
        }
        Ok(())
    }
}

impl Backend for CpuBackend {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        batch.items.iter().try_for_each(|item| self.check(item))?;
        let columns: Vec<Column> = batch.items.iter().enumerate().flat_map(|(i, item)| columns_of(i, item)).collect();
        let model = &*self.model;
        let (hidden, vocab) = (model.config.hidden, model.config.vocab);
        let pass = Pass { model, turn: model.pool.turn(), batch, workers: &self.workers, products: &self.products };
        self.finals.clear();
        for chunk in columns.chunks(CHUNK_TOKENS) {
            pass.chunk(chunk, &mut self.buffers, &mut self.cache)?;
            for (column, x) in chunk.iter().zip(self.buffers.x.chunks_exact(hidden)) {
                if column.wants_logits {
                    self.finals.extend_from_slice(x);
                }
            }
        }
        let wanted = self.finals.len() / hidden;
        self.logits.resize(wanted * vocab, 0.0);
        if wanted > 0 {
            pass.normalized(&self.finals, &model.weights.output_norm, &mut self.buffers.narrow)?;
            pass.logits(&self.buffers.narrow, &mut self.logits)?;
        }
        let rows = self.logits.chunks_exact(vocab).map(Row::Dense).collect();
        Ok(Computed { rows, takes: Duration::ZERO })
    }

    fn read_block(&self, slot: BlockSlot) -> Vec<u8> {
        self.cache.read(slot).unwrap_or_default()
    }

    fn memory(&self) -> Option<KvMemory> {
        let block_bytes = KvShape::of(&self.model.config).block_bytes() as u64;
        self.cache.region().map(|region| KvMemory { region: region.clone(), block_bytes })
    }

    fn write_block(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), EngineError> {
        self.cache.write(slot, bytes).map_err(|needed| {
            EngineError::Block(format!(
                "slot {} of {}: {} bytes, {needed} needed",
                slot.0,
                self.cache.slots(),
                bytes.len()
            ))
        })
    }
}

fn columns_of<'a>(index: usize, item: &'a BatchItem<'a>) -> impl Iterator<Item = Column> + 'a {
    let last = item.tokens.len() - 1;
    item.tokens.iter().enumerate().map(move |(i, token)| Column {
        item: index,
        token: *token,
        position: item.start + i,
        wants_logits: item.wants_logits && i == last,
    })
}
