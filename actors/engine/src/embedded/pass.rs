//! One chunk of a batch, layer by layer: the phases of the forward pass.
//!
//! A phase forks over the pool where it pays and ends before the next begins. Called by the backend, which holds the
//! memory; calls the kernels and the products. Never: keeps anything between two chunks.

use std::sync::{Mutex, PoisonError};

use super::{
    compute::Turn,
    forward::{Buffers, Column, Model, Worker, step_error},
    kernels::{Columns, ColumnsOut, generic::Attend},
    kv_store::{BLOCK_TOKENS, KvStore},
    matmul::{GATE_UNIT, MatmulScratch, Product, Rows},
    quant::BLOCK,
    repack::{Matrix, PANEL_ROWS},
    weights::Layer,
};
use crate::{backend::Batch, contract::EngineError};

/// Query rows of one attention task.
const ATTEND_ROWS: usize = 24;
/// Below this many columns a loop over columns is not worth waking a thread for.
const COLUMNS_PARALLEL: usize = 8;
/// Values of a row that are normed on the stack together.
const NORM_PIECE: usize = 8 * BLOCK;

/// Consecutive tokens of one sequence that attend together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    first: usize,
    tokens: usize,
    item: usize,
    start: usize,
}

/// What every phase of a chunk needs.
pub(super) struct Pass<'a> {
    pub(super) model: &'a Model,
    pub(super) turn: Turn<'a>,
    pub(super) batch: &'a Batch<'a>,
    pub(super) workers: &'a [Mutex<Worker>],
    pub(super) products: &'a MatmulScratch,
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
    pub(super) fn chunk(
        &self,
        chunk: &[Column],
        buffers: &mut Buffers,
        cache: &mut KvStore,
    ) -> Result<(), EngineError> {
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
    pub(super) fn normalized(&self, x: &[f32], weight: &[f32], out: &mut Columns) -> Result<(), EngineError> {
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

    fn product<'a>(&'a self, matrix: &'a Matrix, columns: &'a Columns) -> Product<'a> {
        Product {
            kernels: &self.model.kernels,
            arena: &self.model.weights.arena,
            matrix,
            columns,
            scratch: self.products,
        }
    }

    /// `x += matrix · columns`.
    fn add_product(&self, matrix: &Matrix, columns: &Columns, x: &mut [f32]) -> Result<(), EngineError> {
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

    pub(super) fn logits(&self, columns: &Columns, logits: &mut [f32]) -> Result<(), EngineError> {
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
