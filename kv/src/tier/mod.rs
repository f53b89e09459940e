//! Tiers below the device: blocks that leave the engine's pool go to the host's memory and to disk, and come back when
//! that is predicted to be sooner than computing them.
//!
//! Called by an engine between its steps through [`Tiers`]; nothing in it waits except [`Tiers::arrived`] with a time given
//! and [`Tiers::close`]. [`book`] decides, with [`shelf`] (which block lies where), [`sketch`] (what is asked for often) and
//! [`forecast`] (what pays); [`store`] and [`disk`] act.
//! Never: gives out a block that is not, bit by bit, the one that was stored; a fault of any kind is a miss and a counter.
//! Bounds: the bytes paid for on each tier, and [`LEAVING_BYTES`] on their way to disk.
//!
//! Tiers are inclusive: a block that comes back stays below, so that it need not be written again when it leaves.

mod book;
mod disk;
mod forecast;
mod page;
mod reader;
mod record;
mod shelf;
mod sketch;
mod store;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, TokenId};

pub use book::LEAVING_BYTES;
pub use disk::{BlockFile, DiskError};
pub use forecast::Worth;
pub use page::{PAGE, PageBuffer};
pub use reader::{Reading, TierReader};
pub use store::Tiers;

use crate::{hash::HashSeed, index::Tier};

/// What the blocks of a store are; two stores of different shapes share nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierShape {
    /// Bytes of keys and values of one block.
    pub block_bytes: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Digest of their layout.
    pub layout_digest: u64,
    /// Seed of the model's hashes.
    pub seed: HashSeed,
}

/// Which tiers an engine has.
#[derive(Debug, Clone, Default)]
pub struct TierOptions {
    /// Bytes of the host's memory; 0 for none.
    pub host_bytes: u64,
    /// A disk tier.
    pub disk: Option<DiskOptions>,
}

impl TierOptions {
    /// No tier at all.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.host_bytes == 0 && self.disk.is_none()
    }
}

/// A disk tier.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// A folder of its own, which is made when it is not there.
    pub folder: PathBuf,
    /// Bytes of blocks in it.
    pub bytes: u64,
    /// Stands in for the file of blocks, in tests.
    pub file: Option<Arc<dyn BlockFile>>,
}

/// A block below the device.
#[derive(Debug, PartialEq, Eq)]
pub struct TierBlock {
    /// Its hash.
    pub hash: BlockHash,
    /// The block before it, `None` for a first block.
    pub parent: Option<BlockHash>,
    /// Its tokens, compared before use.
    pub tokens: Box<[TokenId]>,
    /// Keys and values.
    pub bytes: PageBuffer,
}

/// What lies on one tier: (block before it, block), in no order.
pub type TierInventory = (Tier, Vec<(Option<BlockHash>, BlockHash)>);

/// Names one request for blocks; the caller never uses one twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A block that was asked for, or the news that it will not come.
#[derive(Debug)]
pub struct Arrival {
    /// Who asked.
    pub ticket: Ticket,
    /// Its number in the chain that was asked for.
    pub index: usize,
    /// Where it was.
    pub tier: Tier,
    /// `None` when it is gone or could not be read whole.
    pub block: Option<Arc<TierBlock>>,
}

/// One tier in numbers; counters rise from the start of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TierLoad {
    /// Blocks there now.
    pub blocks: u64,
    /// Blocks that fit.
    pub blocks_max: u64,
    /// Blocks written to it.
    pub stored: u64,
    /// Blocks that went back to the device, or to another worker.
    pub fetched: u64,
    /// Blocks that made room for others.
    pub evicted: u64,
    /// Blocks not taken, because what would have had to go is asked for more often.
    pub refused: u64,
    /// Blocks not taken, because too many were on their way or the last write had failed.
    pub dropped: u64,
    /// Blocks that could not be read.
    pub unreadable: u64,
    /// Blocks whose bytes were not those that had been written.
    pub corrupt: u64,
    /// Blocks, or lines of the index, that could not be written.
    pub unwritten: u64,
    /// Bytes a second to the device as measured lately; 0 when none came yet.
    pub bytes_per_second: f64,
    /// Milliseconds that one block is expected to take to the device: as measured, or a guess before the first one came.
    pub block_ms: f64,
}

/// The tiers of an engine in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TierStats {
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Blocks of prompts that were not on the device and were looked for below.
    pub asked: u64,
    /// Those of them that lay below.
    pub found: u64,
    /// Those of them that were fetched in time.
    pub fetched: u64,
    /// Of those found, left where they were because they are computed sooner.
    pub slower: u64,
    /// Of those found, left because the disk does not answer.
    pub stalled: u64,
    /// Requests that stopped waiting and computed.
    pub late: u64,
    /// Blocks being read for requests.
    pub reading: u64,
    /// Blocks on their way to disk.
    pub leaving: u64,
    /// Milliseconds that the engine takes to compute one prompt token, as measured; 0 when it was not.
    pub compute_ms: f64,
    /// Milliseconds until the first block of a new request would come from disk.
    pub disk_wait_ms: f64,
    /// The host's memory.
    pub host: TierLoad,
    /// The disk.
    pub disk: TierLoad,
}
