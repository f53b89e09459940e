//! The blocks of a device pool: where block `n` lies in a GPU's memory, and the spans that gather or scatter some of them.
//!
//! Which block holds what is [`starling_kv::pool::BlockPool`]'s, over the same slots. Pure but for the memory it holds.

use starling_kv::pool::BlockSlot;

use crate::{error::CudaError, gpu::Gpu, memory::DeviceMemory, pages::Span};

/// Blocks of one size in one memory. Block `n` lies at `n * block_bytes`, all its layers together, so that moving a block
/// between tiers is one page.
#[derive(Debug, Clone)]
pub struct DevicePool {
    memory: DeviceMemory,
    block_bytes: u64,
}

impl DevicePool {
    /// `blocks` blocks of `block_bytes` each, at least 1; a block's size must be a multiple of 16 bytes.
    pub fn new(gpu: &Gpu, blocks: u32, block_bytes: u64) -> Result<Self, CudaError> {
        if block_bytes == 0 || !block_bytes.is_multiple_of(crate::PAGE_ALIGN) {
            return Err(CudaError::Misaligned { page: 0 });
        }
        let len = block_bytes.checked_mul(u64::from(blocks.max(1))).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or(CudaError::OutOfBounds { page: 0 })?;
        Ok(Self { memory: DeviceMemory::new(gpu, len)?, block_bytes })
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// From these blocks into memory where they lie one after another, in this order.
    #[must_use]
    pub fn gather(&self, blocks: &[BlockSlot]) -> Vec<Span> {
        spans(self.block_bytes, blocks, |block, row| Span { from: block, to: row, len: self.block_bytes })
    }

    /// From memory where they lie one after another, in this order, into these blocks.
    #[must_use]
    pub fn scatter(&self, blocks: &[BlockSlot]) -> Vec<Span> {
        spans(self.block_bytes, blocks, |block, row| Span { from: row, to: block, len: self.block_bytes })
    }
}

fn spans(bytes: u64, blocks: &[BlockSlot], span: impl Fn(u64, u64) -> Span) -> Vec<Span> {
    blocks.iter().zip(0_u64..).map(|(block, row)| span(u64::from(block.0) * bytes, row * bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gather_and_scatter_are_each_others_opposite() {
        let blocks = [BlockSlot(7), BlockSlot(0), BlockSlot(3)];
        let out = spans(64, &blocks, |block, row| Span { from: block, to: row, len: 64 });
        let back = spans(64, &blocks, |block, row| Span { from: row, to: block, len: 64 });
        assert_eq!(out[0], Span { from: 448, to: 0, len: 64 });
        assert_eq!(out[2], Span { from: 192, to: 128, len: 64 });
        assert!(out.iter().zip(&back).all(|(out, back)| (out.from, out.to) == (back.to, back.from)));
    }
}
