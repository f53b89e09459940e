//! The forward pass of a Llama model over a paged cache.
//!
//! A batch is flattened into columns, one per token, and computed in chunks of at most [`CHUNK_TOKENS`], layer by
//! layer. Each output depends on its own column and its sequence's cache alone, in an order fixed by position,
//! so logits are equal to the bit for any chunking, batch mix, thread count and block placement.
//! Called by the engine through [`Backend`]; calls the kernels on the pool. Never: allocates or frees a block.
//! Bounds: scratch memory for one chunk; logits for the items that ask. If a task panics: the step fails.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{
    compute::{Pool, Turn},
    config::LlamaConfig,
    kernels::{
        Columns, ColumnsOut, Kernels,
        generic::{Attend, AttendScratch},
    },
    kv_store::{BLOCK_TOKENS, KvShape, KvStore},
    matmul::{GATE_UNIT, MatmulScratch, Product, Rows},
    quant::BLOCK,
    repack::PANEL_ROWS,
    weights::{Layer, Weights},
};
use crate::{
    backend::{Backend, Batch, BatchItem, BlockSlot, Computed, Row},
    contract::EngineError,
};

/// Tokens computed together: enough that unpacking weights costs little, few enough to stay in the cache.
const CHUNK_TOKENS: usize = 256;
/// Query rows of one attention task.
const ATTEND_ROWS: usize = 24;
/// Below this many columns a loop over columns is not worth waking a thread for.
const COLUMNS_PARALLEL: usize = 8;

/// A loaded model: what all engines of a process share.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) config: LlamaConfig,
    pub(super) weights: Weights,
    pub(super) kernels: Kernels,
    pub(super) pool: Pool,
}

/// One token of a batch.
#[derive(Debug, Clone, Copy)]
struct Column {
    item: usize,
    token: u32,
    position: usize,
    wants_logits: bool,
}

/// Consecutive tokens of one sequence that attend together.
#[derive(Debug, Clone, Copy)]
struct Tile {
    first: usize,
    tokens: usize,
    item: usize,
    start: usize,
}

/// Memory of one thread.
#[derive(Debug, Default)]
struct Worker {
    attend: AttendScratch,
    out: Vec<f32>,
}

/// Memory of one chunk.
#[derive(Debug, Default)]
struct Buffers {
    /// Residual stream, `[column][hidden]`.
    x: Vec<f32>,
    /// Queries, keys, values, `[column][q + 2 kv]`.
    qkv: Vec<f32>,
    /// Attention's output, `[column][q]`.
    attended: Vec<f32>,
    /// Cosine and sine of each rotary pair, `[column][head_dim]`.
    angles: Vec<f32>,
    /// Input of the products from `hidden` or `q` wide rows.
    narrow: Columns,
    /// Input of the product from `ffn` wide rows.
    wide: Columns,
    tiles: Vec<Tile>,
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

/// What every phase of a chunk needs.
struct Pass<'a> {
    model: &'a Model,
    turn: Turn<'a>,
    batch: &'a Batch<'a>,
    workers: &'a [Mutex<Worker>],
    products: &'a MatmulScratch,
}

fn step_error(error: impl std::fmt::Display) -> EngineError {
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
            buffers: Buffers::default(),
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
        self.cache.read(slot).map(<[u8]>::to_vec).unwrap_or_default()
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

/// Cuts a chunk into runs of one sequence, at most `most` tokens each.
fn tiles(chunk: &[Column], most: usize, out: &mut Vec<Tile>) {
    out.clear();
    for (index, column) in chunk.iter().enumerate() {
        match out.last_mut() {
            Some(tile) if tile.item == column.item && tile.tokens < most => tile.tokens += 1,
            _ => out.push(Tile { first: index, tokens: 1, item: column.item, start: column.position }),
        }
    }
}

impl Pass<'_> {
    /// Computes one chunk: keys and values into the cache, the residual stream into `buffers.x`.
    fn chunk(&self, chunk: &[Column], buffers: &mut Buffers, cache: &mut KvStore) -> Result<(), EngineError> {
        let config = &self.model.config;
        let count = chunk.len();
        buffers.x.resize(count * config.hidden, 0.0);
        buffers.qkv.resize(count * (config.q_width() + 2 * config.kv_width()), 0.0);
        buffers.attended.resize(count * config.q_width(), 0.0);
        buffers.angles.clear();
        for column in chunk {
            for angle in &config.rotary {
                let (sine, cosine) = (column.position as f64 * angle).sin_cos();
                buffers.angles.extend([cosine as f32, sine as f32]);
            }
        }
        tiles(chunk, (ATTEND_ROWS / config.group()).max(1), &mut buffers.tiles);
        self.embed(chunk, &mut buffers.x)?;
        let logits_here = chunk.iter().any(|column| column.wants_logits);
        for (index, layer) in self.model.weights.layers.iter().enumerate() {
            self.attention_inputs(index, layer, chunk, (&mut *buffers, &mut *cache))?;
            if index + 1 == config.layers && !logits_here {
                // The last layer's output is for logits alone, and nobody wants them.
                return Ok(());
            }
            self.attention(index, buffers, cache)?;
            self.quantized(&buffers.attended, config.q_width(), &mut buffers.narrow)?;
            self.add_product(&layer.attention_out, &buffers.narrow, &mut buffers.x)?;
            self.normalized(&buffers.x, &layer.ffn_norm, &mut buffers.narrow)?;
            self.gated(layer, &buffers.narrow, &mut buffers.wide)?;
            self.add_product(&layer.down, &buffers.wide, &mut buffers.x)?;
        }
        Ok(())
    }

    /// Runs `f` for each column, on several threads when there are enough of them.
    fn each_column(&self, count: usize, f: &(dyn Fn(usize) + Sync)) -> Result<(), EngineError> {
        if count < COLUMNS_PARALLEL || self.turn.width() == 1 {
            (0..count).for_each(f);
            return Ok(());
        }
        let share = count.div_ceil(self.turn.width() * 4);
        let run = |_: usize, task: usize| (task * share..((task + 1) * share).min(count)).for_each(f);
        self.turn.run(count.div_ceil(share), &run).map_err(step_error)
    }

    fn embed(&self, chunk: &[Column], x: &mut [f32]) -> Result<(), EngineError> {
        let (weights, hidden) = (&self.model.weights, self.model.config.hidden);
        let rows = Rows::new(x, hidden);
        self.each_column(chunk.len(), &|column| {
            // SAFETY: each column is written by one task.
            let out = unsafe { rows.part(column, 0, hidden) };
            weights.arena.row(&weights.embedding, chunk[column].token as usize, out);
        })
    }

    /// Quantizes each row of `rows`, `width` wide, into a column.
    fn quantized(&self, rows: &[f32], width: usize, out: &mut Columns) -> Result<(), EngineError> {
        out.resize(rows.len() / width, width / BLOCK);
        let columns = ColumnsOut::new(out);
        self.each_column(out.count, &|column| {
            // SAFETY: each column is written by one task, and `out` is borrowed until they are done.
            unsafe { self.model.kernels.quantize(&rows[column * width..][..width], &columns, 0, column) }
        })
    }

    /// Norms each row of `x` and quantizes it into a column.
    fn normalized(&self, x: &[f32], weight: &[f32], out: &mut Columns) -> Result<(), EngineError> {
        let (kernels, hidden) = (&self.model.kernels, self.model.config.hidden);
        out.resize(x.len() / hidden, hidden / BLOCK);
        let columns = ColumnsOut::new(out);
        // Rows are normed in pieces that live on the stack; the sum needs the whole row first.
        self.each_column(out.count, &|column| {
            let scale = kernels.norm_scale(&x[column * hidden..][..hidden], self.model.config.epsilon);
            let pieces = x[column * hidden..][..hidden].chunks(NORM_PIECE).zip(weight.chunks(NORM_PIECE));
            for (index, (x, weight)) in pieces.enumerate() {
                let mut piece = [0.0f32; NORM_PIECE];
                let piece = &mut piece[..x.len()];
                kernels.scaled(x, weight, scale, piece);
                // SAFETY: each column is written by one task, and `out` is borrowed until they are done.
                unsafe { kernels.quantize(piece, &columns, index * (NORM_PIECE / BLOCK), column) };
            }
        })
    }

    /// Queries, keys and values of a chunk, rotated; keys and values into the cache.
    fn attention_inputs(
        &self,
        index: usize,
        layer: &Layer,
        chunk: &[Column],
        (buffers, cache): (&mut Buffers, &mut KvStore),
    ) -> Result<(), EngineError> {
        let config = &self.model.config;
        self.normalized(&buffers.x, &layer.attention_norm, &mut buffers.narrow)?;
        let (q, kv, dim) = (config.q_width(), config.kv_width(), config.head_dim);
        let width = q + 2 * kv;
        let rows = Rows::new(&mut buffers.qkv, width);
        self.product(&layer.qkv, &buffers.narrow).run(&self.turn, 1, &|panel, first, acc| {
            for (column, acc) in acc.chunks_exact(PANEL_ROWS).enumerate() {
                // SAFETY: each panel and tile of columns is one task's.
                unsafe { rows.part(first + column, panel * PANEL_ROWS, PANEL_ROWS) }.copy_from_slice(acc);
            }
        })?;
        let writer = cache.writer();
        self.each_column(chunk.len(), &|column| {
            let place = chunk[column];
            // SAFETY: each column is one task's.
            let row = unsafe { rows.part(column, 0, width) };
            let (rotated, value) = row.split_at_mut(q + kv);
            self.model.kernels.rotate(rotated, &buffers.angles[column * dim..][..dim], dim);
            let slot = self.batch.items[place.item].blocks[place.position / BLOCK_TOKENS];
            // SAFETY: each token is one task's, and no two items of a batch write the same block.
            unsafe { writer.put(slot, index, place.position % BLOCK_TOKENS, (&rotated[q..], value)) };
        })
    }

    fn attention(&self, index: usize, buffers: &mut Buffers, cache: &KvStore) -> Result<(), EngineError> {
        let config = &self.model.config;
        let (kv_heads, group, dim) = (config.kv_heads, config.group(), config.head_dim);
        let stride = config.q_width() + 2 * config.kv_width();
        let width = group * dim;
        let rows = Rows::new(&mut buffers.attended, config.q_width());
        let (qkv, tiles) = (&buffers.qkv, &buffers.tiles);
        let task = |worker: usize, task: usize| {
            // Late tiles see the most keys: they start first.
            let (tile, head) = (tiles[tiles.len() - 1 - task / kv_heads], task % kv_heads);
            let blocks = self.batch.items[tile.item].blocks;
            let block = |i: usize| cache.head(blocks[i], index, head);
            let mut worker = self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
            let Worker { attend, out } = &mut *worker;
            out.resize(tile.tokens * width, 0.0);
            let queries = &qkv[tile.first * stride + head * width..];
            let input = Attend { queries, stride, tokens: tile.tokens, start: tile.start, group, dim, block: &block };
            self.model.kernels.attend(&input, attend, out);
            for (token, out) in out.chunks_exact(width).enumerate() {
                // SAFETY: each tile and head is one task's.
                unsafe { rows.part(tile.first + token, head * width, width) }.copy_from_slice(out);
            }
        };
        self.turn.run(tiles.len() * kv_heads, &task).map_err(step_error)
    }

    fn product<'a>(&'a self, matrix: &'a super::repack::Matrix, columns: &'a Columns) -> Product<'a> {
        Product {
            kernels: &self.model.kernels,
            arena: &self.model.weights.arena,
            matrix,
            columns,
            scratch: self.products,
        }
    }

    /// `x += matrix · columns`.
    fn add_product(&self, matrix: &super::repack::Matrix, columns: &Columns, x: &mut [f32]) -> Result<(), EngineError> {
        let rows = Rows::new(x, matrix.rows);
        self.product(matrix, columns).run(&self.turn, 1, &|panel, first, acc| {
            for (column, acc) in acc.chunks_exact(PANEL_ROWS).enumerate() {
                // SAFETY: each panel and tile of columns is one task's.
                let out = unsafe { rows.part(first + column, panel * PANEL_ROWS, PANEL_ROWS) };
                out.iter_mut().zip(acc).for_each(|(out, acc)| *out += *acc);
            }
        })
    }

    /// `silu(gate · columns) × (up · columns)`, quantized.
    fn gated(&self, layer: &Layer, columns: &Columns, out: &mut Columns) -> Result<(), EngineError> {
        let kernels = &self.model.kernels;
        out.resize(columns.count, self.model.config.ffn / BLOCK);
        let outputs = ColumnsOut::new(out);
        self.product(&layer.gate_up, columns).run(&self.turn, GATE_UNIT, &|panel, first, acc| {
            let count = acc.len() / (GATE_UNIT * PANEL_ROWS);
            for column in 0..count {
                let part = |i: usize| &acc[(i * count + column) * PANEL_ROWS..][..PANEL_ROWS];
                let (mut gate, mut up) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
                for i in 0..2 {
                    gate[i * PANEL_ROWS..][..PANEL_ROWS].copy_from_slice(part(i));
                    up[i * PANEL_ROWS..][..PANEL_ROWS].copy_from_slice(part(2 + i));
                }
                kernels.silu_mul(&mut gate, &up);
                // SAFETY: each group of panels, which is one block, and tile of columns is one task's.
                unsafe { kernels.quantize(&gate, &outputs, panel / GATE_UNIT, first + column) };
            }
        })
    }

    fn logits(&self, columns: &Columns, logits: &mut [f32]) -> Result<(), EngineError> {
        let output = self.model.weights.output();
        let vocab = output.rows;
        let rows = Rows::new(logits, vocab);
        self.product(output, columns).run(&self.turn, 1, &|panel, first, acc| {
            // The last panel may reach past the vocabulary.
            let len = PANEL_ROWS.min(vocab - panel * PANEL_ROWS);
            for (column, acc) in acc.chunks_exact(PANEL_ROWS).enumerate() {
                // SAFETY: each panel and tile of columns is one task's.
                unsafe { rows.part(first + column, panel * PANEL_ROWS, len) }.copy_from_slice(&acc[..len]);
            }
        })
    }
}

/// Values of a row that are normed on the stack together.
const NORM_PIECE: usize = 8 * BLOCK;
