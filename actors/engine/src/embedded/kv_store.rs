//! Keys and values of all blocks of one engine.
//!
//! One block holds 16 tokens of all layers: for each layer and key-value head the keys as `[dim][16]` (16 tokens
//! are one register when scores are computed), then the values as `[16][dim]`; f16, little endian.
//! Called by the forward pass; the memory is a region that transports read and write besides, each its own blocks: the
//! pool's states say whose a block is. So no reference to more than one block's numbers is ever made here.
//! Never: hands out or frees a block; that is the pool's.
//! Bounds: one allocation of `slots` blocks, backed by the system as it is first written.

use starling_kv::{
    layout::{KvDtype, KvLayout, KvOrder},
    transport::Region,
};

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

    /// The same in the words of the data plane.
    pub(super) fn layout(self) -> KvLayout {
        let [layers, kv_heads, head_dim] = [self.layers, self.heads, self.dim].map(|size| size as u32);
        let (dtype, order, block_tokens) = (KvDtype::F16, KvOrder::LayerHeadKeysTransposed, KEYS as u32);
        KvLayout { layers, kv_heads, head_dim, dtype, block_tokens, order, tp_rank: 0, tp_size: 1 }
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
    region: Option<Region>,
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
        let region = Region::shared("starling-kv", bytes).map_err(std::io::Error::other)?;
        Ok(Self { region: Some(region), shape, slots })
    }

    /// No blocks at all, and no memory.
    pub(super) fn empty(shape: KvShape) -> Self {
        Self { region: None, shape, slots: 0 }
    }

    /// Blocks.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// The memory, for transports.
    pub(super) fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// Keys `[dim][16]` and values `[16][dim]` of one head in one layer of block `slot`.
    pub(super) fn head(&self, slot: BlockSlot, layer: usize, head: usize) -> (&[u16], &[u16]) {
        let (at, part) = (self.shape.at(slot, layer, head), self.shape.part());
        let bytes = (4 * part) as u64;
        let Some(first) = self.region.as_ref().and_then(|region| region.at(2 * at as u64, bytes)) else {
            return (&[], &[]);
        };
        // SAFETY: the region is page-aligned and `at` counts u16; `bytes` bytes from there on lie inside, and any bits are
        // a valid u16. The block is read or filled by a sequence of this engine, so no transport writes to it.
        unsafe { std::slice::from_raw_parts(first.cast::<u16>().cast_const(), 2 * part) }.split_at(part)
    }

    /// A way to write tokens from several threads while the borrow of the store is idle.
    pub(super) fn writer(&mut self) -> KvWriter {
        let base = self.region.as_ref().map_or(std::ptr::null_mut(), |region| region.base().cast());
        KvWriter { base, shape: self.shape, slots: self.slots }
    }

    /// The bytes of block `slot`.
    pub(super) fn read(&self, slot: BlockSlot) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.shape.block_bytes()];
        let at = slot.0 as u64 * bytes.len() as u64;
        self.region.as_ref().filter(|_| (slot.0 as usize) < self.slots)?.read(at, &mut bytes)?;
        Some(bytes)
    }

    /// Overwrites block `slot`; `Err` has the length that would be right.
    pub(super) fn write(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), usize> {
        let len = self.shape.block_bytes();
        let region = self.region.as_ref().filter(|_| bytes.len() == len && (slot.0 as usize) < self.slots);
        region.and_then(|region| region.write(slot.0 as u64 * len as u64, bytes)).ok_or(len)
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
