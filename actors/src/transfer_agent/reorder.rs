//! Blocks of another order, turned into those of this worker where they lie.
//!
//! Called by [`super::flight`] once their bytes were verified and before they count as come. Never: touches a block that
//! somebody else may read or write; the caller owns those it names. Bounds: room for two blocks.

use starling_engine::backend::{BlockSlot, KvMemory};
use starling_kv::{
    layout::{KvLayout, Piece, convert},
    transport::TransferError,
};

/// See the module.
pub(super) struct Reorder<'a> {
    memory: &'a KvMemory,
    from: KvLayout,
    to: KvLayout,
    read: Vec<u8>,
    write: Vec<u8>,
}

impl<'a> Reorder<'a> {
    /// From one layout to another of as many bytes.
    pub(super) fn new(memory: &'a KvMemory, from: KvLayout, to: KvLayout) -> Self {
        Self { memory, from, to, read: vec![0; from.block_bytes()], write: vec![0; to.block_bytes()] }
    }

    /// Turns one block.
    pub(super) fn turn(&mut self, slot: BlockSlot) -> Result<(), TransferError> {
        let Self { memory, from, to, read, write } = self;
        let local = |what: &str| TransferError::Local(what.to_owned());
        if [read.len() as u64, write.len() as u64] != [memory.block_bytes; 2] {
            return Err(local("a block has not the bytes of its layout"));
        }
        let at = u64::from(slot.0) * memory.block_bytes;
        memory.region.read(at, read).ok_or_else(|| local("a block outside the memory"))?;
        let source = Piece { layout: from, bytes: read.as_slice(), token: 0 };
        let mut target = Piece { layout: to, bytes: write.as_mut_slice(), token: 0 };
        convert(&source, &mut target, from.block_tokens as usize).map_err(|error| local(&error.to_string()))?;
        memory.region.write(at, write).ok_or_else(|| local("a block outside the memory"))
    }
}

#[cfg(test)]
mod tests {
    use starling_kv::{
        layout::{KvDtype, KvOrder},
        transport::Region,
    };

    use super::*;

    #[test]
    fn a_block_is_turned_where_it_lies_and_its_neighbours_stay() {
        let (dtype, order) = (KvDtype::F16, KvOrder::LayerKvTokenHeadDim);
        let from =
            KvLayout { layers: 2, kv_heads: 3, head_dim: 4, dtype, block_tokens: 16, order, tp_rank: 0, tp_size: 1 };
        let to = KvLayout { order: KvOrder::LayerHeadKeysTransposed, ..from };
        let bytes = from.block_bytes();
        let memory = KvMemory { region: Region::private(3 * bytes).expect("memory"), block_bytes: bytes as u64 };
        let before: Vec<u8> = (0..3 * bytes).map(|at| (at * 7 % 251) as u8).collect();
        memory.region.write(0, &before).expect("inside");
        let mut now = vec![0; 3 * bytes];
        Reorder::new(&memory, from, to).turn(BlockSlot(1)).expect("turned");
        memory.region.read(0, &mut now).expect("inside");
        assert_eq!((&now[..bytes], &now[2 * bytes..]), (&before[..bytes], &before[2 * bytes..]));
        assert_ne!(now[bytes..2 * bytes], before[bytes..2 * bytes]);
        Reorder::new(&memory, to, from).turn(BlockSlot(1)).expect("turned back");
        memory.region.read(0, &mut now).expect("inside");
        assert_eq!(now, before);
        assert!(Reorder::new(&memory, from, to).turn(BlockSlot(3)).is_err(), "outside");
        assert!(Reorder::new(&memory, from, KvLayout { block_tokens: 32, ..to }).turn(BlockSlot(0)).is_err());
    }
}
