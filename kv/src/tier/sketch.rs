//! How often each block was asked for lately, roughly: small counters in four rows that halve now and then.
//!
//! Called by the tiers: each request's chain is noted, a shelf that is full compares two blocks.
//! Never: counts lower than the truth since the last halving, up to [`COUNT_MAX`]. Bounds: fixed memory, 1 to 4 MiB.

use starling_ids::BlockHash;

/// Counters stop here.
pub(super) const COUNT_MAX: u8 = 15;

const ROWS: usize = 4;

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Sketch {
    rows: [Box<[u8]>; ROWS],
    mask: usize,
    /// Notes since the last halving.
    noted: usize,
}

impl Sketch {
    /// Counters for a cache of `blocks` blocks.
    #[must_use]
    pub(super) fn new(blocks: usize) -> Self {
        let width = blocks.saturating_mul(4).clamp(1 << 10, 1 << 20).next_power_of_two();
        Self { rows: std::array::from_fn(|_| vec![0; width].into()), mask: width - 1, noted: 0 }
    }

    /// One use more.
    pub(super) fn note(&mut self, hash: BlockHash) {
        for (row, at) in self.rows.iter_mut().zip(places(hash, self.mask)) {
            row[at] = row[at].saturating_add(1).min(COUNT_MAX);
        }
        self.noted += 1;
        // What was in use once must not stay so for ever.
        if self.noted > 8 * (self.mask + 1) {
            self.noted = 0;
            self.rows.iter_mut().flat_map(|row| row.iter_mut()).for_each(|count| *count /= 2);
        }
    }

    /// Uses lately, at least 1: a block that is here at all was used by its writer.
    #[must_use]
    pub(super) fn count(&self, hash: BlockHash) -> u8 {
        let counts = self.rows.iter().zip(places(hash, self.mask)).map(|(row, at)| row[at]);
        counts.min().unwrap_or(0).max(1)
    }
}

/// A place in each row. Hashes are uniform already, so their words serve.
fn places(hash: BlockHash, mask: usize) -> [usize; ROWS] {
    std::array::from_fn(|row| (hash.0 >> (32 * row)) as u32 as usize & mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(n: u64) -> BlockHash {
        BlockHash(u128::from(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) * 0x1_0000_0001_0000_0001)
    }

    #[test]
    fn a_block_in_use_counts_more_than_one_seen_once() {
        let mut sketch = Sketch::new(100);
        for n in 0..500 {
            sketch.note(block(n));
        }
        (0..6).for_each(|_| sketch.note(block(7)));
        assert!(sketch.count(block(7)) >= 6);
        assert_eq!(sketch.count(block(100_000)), 1);
    }

    #[test]
    fn counts_fade() {
        let mut sketch = Sketch::new(1);
        (0..20).for_each(|_| sketch.note(block(7)));
        assert_eq!(sketch.count(block(7)), COUNT_MAX);
        (0..4 * 8 * 1_024 + 4).for_each(|_| sketch.note(block(9)));
        assert_eq!(sketch.count(block(7)), 1);
    }
}
