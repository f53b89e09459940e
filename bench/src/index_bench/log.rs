//! The operation log: what an index is asked and told, recorded once and replayed by every index alike.
//!
//! A block is a number here; equal numbers are equal blocks after equal prefixes. Each index makes its own hashes of
//! them. Called by the recorder and by both replay programs, so this file uses the standard library alone.

use std::{
    io::{self, Read, Write},
    ops::Range,
};

/// First bytes of a log file.
const MAGIC: u64 = 0x3130_474f_4c58_4449;

/// One operation. Ranges are into [`Log::blocks`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Which workers hold how much of this chain?
    Find {
        /// The chain.
        chain: Range<usize>,
    },
    /// A worker stored a chain.
    Store {
        /// Which worker.
        worker: u32,
        /// The block before the chain, `None` at the beginning of a prompt.
        parent: Option<u32>,
        /// The chain.
        chain: Range<usize>,
    },
    /// A worker removed blocks.
    Remove {
        /// Which worker.
        worker: u32,
        /// They, in the order of removal.
        blocks: Range<usize>,
    },
}

impl Op {
    /// Blocks it is about: what a rate of block operations counts.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Find { chain } | Self::Store { chain, .. } => chain.len(),
            Self::Remove { blocks, .. } => blocks.len(),
        }
    }

    /// True when it is about no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// Workers are numbered from 0 up to this.
    pub workers: u32,
    /// In their order.
    pub ops: Vec<Op>,
    /// What the ranges point into.
    pub blocks: Vec<u32>,
}

impl Log {
    /// Appends blocks and gives their range.
    pub fn push_blocks(&mut self, blocks: impl IntoIterator<Item = u32>) -> Range<usize> {
        let begin = self.blocks.len();
        self.blocks.extend(blocks);
        begin..self.blocks.len()
    }

    /// (blocks queried, stored, removed).
    #[must_use]
    pub fn totals(&self) -> (usize, usize, usize) {
        let mut totals = (0, 0, 0);
        for op in &self.ops {
            match op {
                Op::Find { .. } => totals.0 += op.len(),
                Op::Store { .. } => totals.1 += op.len(),
                Op::Remove { .. } => totals.2 += op.len(),
            }
        }
        totals
    }

    /// Writes it down.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut word = |value: u64| to.write_all(&value.to_le_bytes());
        for value in [MAGIC, u64::from(self.workers), self.ops.len() as u64, self.blocks.len() as u64] {
            word(value)?;
        }
        for op in &self.ops {
            let (kind, worker, parent, range) = match op {
                Op::Find { chain } => (0, 0, None, chain),
                Op::Store { worker, parent, chain } => (1, *worker, *parent, chain),
                Op::Remove { worker, blocks } => (2, *worker, None, blocks),
            };
            word(kind)?;
            word(u64::from(worker))?;
            word(parent.map_or(u64::MAX, u64::from))?;
            word(range.start as u64)?;
            word(range.end as u64)?;
        }
        self.blocks.iter().try_for_each(|block| to.write_all(&block.to_le_bytes()))
    }

    /// Reads what [`Self::write`] wrote.
    ///
    /// # Errors
    /// What the reader says, or that this is not a log.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "not an operation log");
        let mut word = || {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        let small = |value: u64| u32::try_from(value).map_err(|_| wrong());
        if word()? != MAGIC {
            return Err(wrong());
        }
        let (workers, ops, blocks) = (small(word()?)?, word()? as usize, word()? as usize);
        let mut log = Self { workers, ops: Vec::with_capacity(ops), blocks: Vec::with_capacity(blocks) };
        for _ in 0..ops {
            let (kind, worker, parent) = (word()?, small(word()?)?, word()?);
            let range = word()? as usize..word()? as usize;
            log.ops.push(match kind {
                0 => Op::Find { chain: range },
                1 => Op::Store { worker, parent: u32::try_from(parent).ok(), chain: range },
                2 => Op::Remove { worker, blocks: range },
                _ => return Err(wrong()),
            });
        }
        let mut bytes = vec![0; blocks * 4];
        from.read_exact(&mut bytes)?;
        log.blocks.extend(bytes.chunks_exact(4).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]])));
        Ok(log)
    }
}

/// A number that looks random, of another one: for hashes made of block numbers.
#[must_use]
pub fn mix(seed: u64, value: u32) -> u64 {
    let mut x = seed.wrapping_add(u64::from(value).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
