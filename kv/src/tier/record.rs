//! The bytes of the disk tier: one block in its place, one line of the index, and what an index says when it is read again.
//!
//! Called by the disk. Every record carries a checksum; one that does not fit it is passed over. All numbers are
//! little-endian. Never: believes a length before the checksum.

use std::collections::HashMap;

use starling_ids::{BlockHash, TokenId};
use twox_hash::XxHash3_64;

use super::{
    TierBlock, TierShape,
    page::{PAGE, PageBuffer},
    shelf::{Place, Stored},
};
use crate::hash::HashKeyed;

/// Bytes of one line of the index, its first one included.
pub(super) const LINE: usize = 64;
/// Bytes before the tokens of a block in its place.
const HEAD: usize = 64;
const MAGIC: [u8; 8] = *b"starkv-1";
const BLOCK_MAGIC: [u8; 4] = *b"skvb";

/// Bytes of a place: head, tokens and bytes of a block, in whole pages.
pub(super) fn place_bytes(shape: &TierShape) -> usize {
    (HEAD + 4 * shape.block_tokens + shape.block_bytes).next_multiple_of(PAGE)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        value.copy_from_slice(found);
    }
    value
}

fn seal(bytes: &mut [u8]) -> u64 {
    let sum = XxHash3_64::oneshot(&bytes[8..]);
    put(bytes, 0, &sum.to_le_bytes());
    sum
}

/// Writes a block into a place's buffer; its checksum, or `None` when it is not of this shape.
pub(super) fn write_block(block: &TierBlock, shape: &TierShape, buffer: &mut PageBuffer) -> Option<u64> {
    let fits = block.bytes.len() == shape.block_bytes && block.tokens.len() == shape.block_tokens;
    let out = buffer.as_mut_slice();
    if !fits || out.len() < place_bytes(shape) {
        return None;
    }
    put(out, 8, &BLOCK_MAGIC);
    put(out, 12, &u32::from(block.parent.is_some()).to_le_bytes());
    put(out, 16, &block.hash.0.to_le_bytes());
    put(out, 32, &block.parent.map_or(0, |parent| parent.0).to_le_bytes());
    put(out, 48, &(block.tokens.len() as u32).to_le_bytes());
    put(out, 52, &(block.bytes.len() as u32).to_le_bytes());
    put(out, 56, &shape.layout_digest.to_le_bytes());
    for (place, token) in out[HEAD..].chunks_exact_mut(4).zip(&block.tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
    let at = HEAD + 4 * block.tokens.len();
    put(out, at, &block.bytes);
    let end = at + block.bytes.len();
    out[end..].fill(0);
    Some(seal(&mut out[..end]))
}

/// Reads a block back. `None` unless it is, bit by bit, the one of this hash and checksum.
pub(super) fn read_block(mut buffer: PageBuffer, shape: &TierShape, hash: BlockHash, sum: u64) -> Option<TierBlock> {
    let tokens_end = HEAD + 4 * shape.block_tokens;
    let end = tokens_end + shape.block_bytes;
    let bytes = buffer.get(..end)?;
    let right = u64::from_le_bytes(take(bytes, 0)) == sum
        && XxHash3_64::oneshot(&bytes[8..]) == sum
        && take(bytes, 8) == BLOCK_MAGIC
        && u128::from_le_bytes(take(bytes, 16)) == hash.0
        && u32::from_le_bytes(take(bytes, 48)) as usize == shape.block_tokens
        && u32::from_le_bytes(take(bytes, 52)) as usize == shape.block_bytes
        && u64::from_le_bytes(take(bytes, 56)) == shape.layout_digest;
    if !right {
        return None;
    }
    let parent = (take(bytes, 12) == 1u32.to_le_bytes()).then(|| BlockHash(u128::from_le_bytes(take(bytes, 32))));
    let tokens = bytes[HEAD..tokens_end].chunks_exact(4).map(|token| TokenId::from_le_bytes(take(token, 0))).collect();
    buffer.narrow(tokens_end, end);
    Some(TierBlock { hash, parent, tokens, bytes: buffer })
}

/// The first line of an index: what its blocks are.
pub(super) fn first_line(shape: &TierShape) -> [u8; LINE] {
    let mut line = [0; LINE];
    put(&mut line, 8, &MAGIC);
    put(&mut line, 16, &shape.layout_digest.to_le_bytes());
    put(&mut line, 24, &shape.seed.0.to_le_bytes());
    put(&mut line, 40, &(shape.block_tokens as u64).to_le_bytes());
    put(&mut line, 48, &(shape.block_bytes as u64).to_le_bytes());
    seal(&mut line);
    line
}

/// One change of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// A block lies in a place.
    Put(BlockHash, Stored),
    /// A block is gone.
    Remove(BlockHash),
}

impl Line {
    pub(super) fn to_bytes(self) -> [u8; LINE] {
        let mut line = [0; LINE];
        match self {
            Self::Put(hash, stored) => {
                (line[8], line[9]) = (1, u8::from(stored.parent.is_some()));
                put(&mut line, 12, &stored.place.to_le_bytes());
                put(&mut line, 16, &hash.0.to_le_bytes());
                put(&mut line, 32, &stored.parent.map_or(0, |parent| parent.0).to_le_bytes());
                put(&mut line, 48, &stored.tag.to_le_bytes());
            }
            Self::Remove(hash) => {
                line[8] = 2;
                put(&mut line, 16, &hash.0.to_le_bytes());
            }
        }
        seal(&mut line);
        line
    }

    fn from_bytes(line: &[u8]) -> Option<Self> {
        if line.len() != LINE || u64::from_le_bytes(take(line, 0)) != XxHash3_64::oneshot(&line[8..]) {
            return None;
        }
        let hash = BlockHash(u128::from_le_bytes(take(line, 16)));
        match line[8] {
            1 => {
                let parent = (line[9] == 1).then(|| BlockHash(u128::from_le_bytes(take(line, 32))));
                let (place, tag) = (Place::from_le_bytes(take(line, 12)), u64::from_le_bytes(take(line, 48)));
                Some(Self::Put(hash, Stored { place, parent, tag }))
            }
            2 => Some(Self::Remove(hash)),
            _ => None,
        }
    }
}

/// What an index says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Replay {
    /// Its changes in order.
    pub(super) lines: Vec<Line>,
    /// Lines passed over: torn or changed since they were written.
    pub(super) broken: usize,
}

/// Reads an index again. `None` when it is of other blocks, or none at all. A torn last line is passed over.
pub(super) fn replay(bytes: &[u8], shape: &TierShape) -> Option<Replay> {
    let (first, rest) = bytes.split_at_checked(LINE)?;
    if first != first_line(shape) {
        return None;
    }
    let mut replay = Replay::default();
    for line in rest.chunks(LINE) {
        match Line::from_bytes(line) {
            Some(line) => replay.lines.push(line),
            None => replay.broken += 1,
        }
    }
    Some(replay)
}

/// What lies where after these changes, the longest unused first: of a place the last block, of a block the last place.
pub(super) fn settle(lines: &[Line]) -> Vec<(BlockHash, Stored)> {
    let mut kept: HashMap<BlockHash, (usize, Stored), HashKeyed> = HashMap::default();
    let mut owners: HashMap<Place, BlockHash> = HashMap::new();
    for (number, line) in lines.iter().enumerate() {
        match line {
            Line::Put(hash, stored) => {
                if let Some(before) = owners.insert(stored.place, *hash).filter(|before| before != hash) {
                    kept.remove(&before);
                }
                if let Some((_, moved)) = kept.insert(*hash, (number, *stored))
                    && moved.place != stored.place
                {
                    owners.remove(&moved.place);
                }
            }
            Line::Remove(hash) => {
                if let Some((_, gone)) = kept.remove(hash) {
                    owners.remove(&gone.place);
                }
            }
        }
    }
    let mut kept: Vec<_> = kept.into_iter().map(|(hash, (number, stored))| (number, hash, stored)).collect();
    kept.sort_unstable_by_key(|(number, ..)| *number);
    kept.into_iter().map(|(_, hash, stored)| (hash, stored)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hash::HashSeed;

    const SHAPE: TierShape = TierShape { block_bytes: 100, block_tokens: 3, layout_digest: 7, seed: HashSeed(9) };

    fn block() -> TierBlock {
        let bytes: Vec<u8> = (0..100).collect();
        let (hash, parent) = (BlockHash(5), Some(BlockHash(4)));
        TierBlock { hash, parent, tokens: vec![1, 2, 3].into(), bytes: bytes.into() }
    }

    fn written() -> (PageBuffer, u64) {
        let mut buffer = PageBuffer::new(place_bytes(&SHAPE));
        let sum = write_block(&block(), &SHAPE, &mut buffer).expect("of this shape");
        (buffer, sum)
    }

    #[test]
    fn a_block_comes_back_whole() {
        let (buffer, sum) = written();
        assert_eq!(buffer.len(), PAGE);
        assert_eq!(sum, 3_715_720_889_340_810_495, "a change makes old disks unreadable: raise the version");
        assert_eq!(read_block(buffer, &SHAPE, BlockHash(5), sum), Some(block()));
        let other = TierBlock { tokens: vec![1].into(), ..block() };
        assert_eq!(write_block(&other, &SHAPE, &mut PageBuffer::new(PAGE)), None);
    }

    #[test]
    fn another_block_in_its_place_is_no_block() {
        let (buffer, sum) = written();
        assert_eq!(read_block(buffer, &SHAPE, BlockHash(6), sum), None);
        let (buffer, sum) = written();
        assert_eq!(read_block(buffer, &SHAPE, BlockHash(5), sum ^ 1), None);
        assert_eq!(read_block(PageBuffer::new(10), &SHAPE, BlockHash(5), sum), None);
    }

    #[test]
    fn an_index_of_other_blocks_is_not_read() {
        let first = first_line(&SHAPE);
        assert_eq!(replay(&first, &SHAPE), Some(Replay::default()));
        assert_eq!(replay(&first, &TierShape { layout_digest: 8, ..SHAPE }), None);
        assert_eq!(replay(&first[..63], &SHAPE), None);
    }

    #[test]
    fn the_last_word_about_a_place_and_a_block_counts() {
        let (put, gone) = (
            |hash, place| Line::Put(BlockHash(hash), Stored { place, parent: None, tag: 0 }),
            |hash| Line::Remove(BlockHash(hash)),
        );
        let settled = |lines: &[Line]| -> Vec<(u128, Place)> {
            settle(lines).into_iter().map(|(hash, stored)| (hash.0, stored.place)).collect()
        };
        assert_eq!(settled(&[put(1, 2), put(2, 0), put(3, 2), put(2, 1)]), [(3, 2), (2, 1)]);
        assert_eq!(settled(&[put(1, 0), gone(1), put(2, 0), gone(1), gone(7)]), [(2, 0)]);
        assert_eq!(settled(&[put(1, 0), put(1, 1), put(2, 0), put(3, 1)]), [(2, 0), (3, 1)]);
    }

    fn line() -> impl Strategy<Value = Line> {
        let put = (any::<u128>(), any::<Option<u128>>(), any::<u32>(), any::<u64>()).prop_map(
            |(hash, parent, place, tag)| {
                Line::Put(BlockHash(hash), Stored { place, parent: parent.map(BlockHash), tag })
            },
        );
        prop_oneof![put, any::<u128>().prop_map(|hash| Line::Remove(BlockHash(hash)))]
    }

    proptest! {
        /// Cut anywhere: every whole line is there, the torn one is not.
        #[test]
        fn a_torn_index_loses_its_last_line(lines in prop::collection::vec(line(), 0..8), cut in 0usize..LINE * 9) {
            let mut bytes = first_line(&SHAPE).to_vec();
            lines.iter().for_each(|line| bytes.extend(line.to_bytes()));
            bytes.truncate(cut.max(LINE));
            let whole = bytes.len() / LINE - 1;
            let read = replay(&bytes, &SHAPE).expect("of this shape");
            prop_assert_eq!(&read.lines, &lines[..whole]);
            prop_assert_eq!(read.broken, usize::from(!bytes.len().is_multiple_of(LINE)));
        }

        /// A flipped bit anywhere in a block is seen.
        #[test]
        fn a_flipped_bit_is_seen(at in 0usize..176, bit in 0u8..8) {
            let (mut buffer, sum) = written();
            buffer.as_mut_slice()[at] ^= 1 << bit;
            prop_assert_eq!(read_block(buffer, &SHAPE, BlockHash(5), sum), None);
        }

        #[test]
        fn any_bytes_are_read_without_a_fault(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let whole = [first_line(&SHAPE).as_slice(), &bytes].concat();
            prop_assert!(replay(&whole, &SHAPE).is_some());
            prop_assert!(replay(&bytes, &SHAPE).is_none());
        }
    }
}
