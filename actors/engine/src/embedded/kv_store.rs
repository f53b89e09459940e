//! Keys and values of all blocks of one engine.
//!
//! One block holds 16 tokens of all layers: for each layer and key-value head the keys as `[dim][16]` (16 tokens
//! are one register when scores are computed), then the values as `[16][dim]`; f16, little endian.
//! Called by the forward pass; calls the memory map. Never: hands out or frees a block; that is the pool's.
//! Bounds: one allocation of `slots` blocks, backed by the system as it is first written.

use memmap2::MmapMut;

use super::{config::LlamaConfig, kernels::generic::KEYS};
use crate::backend::BlockSlot;

/// Tokens of a block.
pub(super) const BLOCK_TOKENS: usize = KEYS;

/// Where things are in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvShape {
    layers: usize,
    heads: usize,
    dim: usize,
}

impl KvShape {
    /// The shape of a model's blocks.
    pub(super) fn of(config: &LlamaConfig) -> Self {
        Self { layers: config.layers, heads: config.kv_heads, dim: config.head_dim }
    }

    /// Elements of the keys, or the values, of one head in one layer of one block.
    fn part(self) -> usize {
        KEYS * self.dim
    }

    /// Elements of one block.
    fn elements(self) -> usize {
        self.layers * self.heads * 2 * self.part()
    }

    /// Bytes of one block.
    pub(super) fn block_bytes(self) -> usize {
        self.elements() * 2
    }

    /// First element of the keys of a head in block `slot`; the values follow them.
    fn at(self, slot: BlockSlot, layer: usize, head: usize) -> usize {
        slot.0 as usize * self.elements() + (layer * self.heads + head) * 2 * self.part()
    }
}

/// The memory of one engine.
#[derive(Debug)]
pub(super) struct KvStore {
    map: Option<MmapMut>,
    shape: KvShape,
    slots: usize,
}

/// Writes tokens from several threads, each its own tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvWriter {
    base: *mut u16,
    shape: KvShape,
    slots: usize,
}

// SAFETY: it is an address; `put` states what its callers keep apart.
unsafe impl Send for KvWriter {}
// SAFETY: as above.
unsafe impl Sync for KvWriter {}

impl KvStore {
    /// Reserves `slots` blocks.
    pub(super) fn new(shape: KvShape, slots: usize) -> Result<Self, std::io::Error> {
        let bytes = shape.block_bytes().saturating_mul(slots);
        let map = MmapMut::map_anon(bytes.max(1))?;
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for keys and values");
        }
        Ok(Self { map: Some(map), shape, slots })
    }

    /// No blocks at all, and no memory.
    pub(super) fn empty(shape: KvShape) -> Self {
        Self { map: None, shape, slots: 0 }
    }

    /// Blocks.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    fn elements(&self) -> &[u16] {
        let Some(map) = &self.map else { return &[] };
        let len = self.slots * self.shape.elements();
        // SAFETY: the map is page-aligned, at least `2 * len` bytes long, and any bits are a valid u16.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), len) }
    }

    /// Keys `[dim][16]` and values `[16][dim]` of one head in one layer of block `slot`.
    pub(super) fn head(&self, slot: BlockSlot, layer: usize, head: usize) -> (&[u16], &[u16]) {
        let (at, part) = (self.shape.at(slot, layer, head), self.shape.part());
        self.elements()[at..at + 2 * part].split_at(part)
    }

    /// A way to write tokens from several threads while the borrow of the store is idle.
    pub(super) fn writer(&mut self) -> KvWriter {
        let base = self.map.as_mut().map_or(std::ptr::null_mut(), |map| map.as_mut_ptr().cast());
        KvWriter { base, shape: self.shape, slots: self.slots }
    }

    /// The bytes of block `slot`.
    pub(super) fn read(&self, slot: BlockSlot) -> Option<&[u8]> {
        let len = self.shape.block_bytes();
        let at = slot.0 as usize * len;
        self.map.as_ref().filter(|_| (slot.0 as usize) < self.slots)?.get(at..at + len)
    }

    /// Overwrites block `slot`; `Err` has the length that would be right.
    pub(super) fn write(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), usize> {
        let len = self.shape.block_bytes();
        let Some(map) = self.map.as_mut().filter(|_| bytes.len() == len && (slot.0 as usize) < self.slots) else {
            return Err(len);
        };
        map[slot.0 as usize * len..][..len].copy_from_slice(bytes);
        Ok(())
    }
}

impl KvWriter {
    /// Stores key and value rows (`heads * dim` each) of token `offset` (0 to 15) of block `slot` in one layer.
    ///
    /// # Safety
    /// The store is alive, and no other thread reads or writes this token.
    pub(super) unsafe fn put(&self, slot: BlockSlot, layer: usize, offset: usize, rows: (&[f32], &[f32])) {
        let (dim, part) = (self.shape.dim, self.shape.part());
        let width = self.shape.heads * dim;
        assert!(
            (slot.0 as usize) < self.slots && layer < self.shape.layers && offset < KEYS,
            "a token outside the cache"
        );
        assert!(rows.0.len() == width && rows.1.len() == width, "a key or value row of another width");
        for head in 0..self.shape.heads {
            let at = self.shape.at(slot, layer, head);
            for d in 0..dim {
                let key = half::f16::from_f32(rows.0[head * dim + d]).to_bits();
                let value = half::f16::from_f32(rows.1[head * dim + d]).to_bits();
                // SAFETY: in bounds by the assertions; the caller keeps threads apart.
                unsafe {
                    *self.base.add(at + d * KEYS + offset) = key;
                    *self.base.add(at + part + offset * dim + d) = value;
                }
            }
        }
    }
}
