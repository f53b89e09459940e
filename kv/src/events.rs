//! What a worker says about its blocks.

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, Incarnation, WorkerId};

/// One change of a worker's set of ready blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// Blocks became ready for reuse: a chain, each the child of the one before it.
    Stored {
        /// The block before the first one, `None` when that is a first block.
        parent: Option<BlockHash>,
        /// The chain.
        blocks: Vec<BlockHash>,
    },
    /// Blocks are gone. Order does not matter; children of a removed block may stay for a while.
    Removed {
        /// Which.
        blocks: Vec<BlockHash>,
    },
    /// All blocks are gone.
    Cleared,
}

/// Events of one worker, numbered. `seq` is the number of the first event; the next batch starts at `seq + events.len()`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventBatch {
    /// Whose.
    pub worker: WorkerId,
    /// In which life; batches of an earlier one are refused.
    pub incarnation: Incarnation,
    /// Number of the first event.
    pub seq: u64,
    /// The events.
    pub events: Vec<KvEvent>,
}
