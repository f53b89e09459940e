//! The words of the index's answers: tiers, ranks, overlaps, matches.
//!
//! Called by whoever asks or feeds the index.

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, WorkerId};

/// Where a worker keeps a block. An earlier one is faster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// In the memory that the engine computes in.
    #[default]
    Device,
    /// In the host's memory.
    Host,
    /// On a disk.
    Disk,
}

impl Tier {
    /// All of them, fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];
}

/// Which cache of a worker an event is about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cache {
    /// Data-parallel rank: each has a cache of its own.
    pub rank: u16,
    /// Tier of it.
    pub tier: Tier,
}

/// Names one rank of one life of one worker for as long as the index knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    /// Shard and lane in it.
    pub(super) lane: u32,
    /// Which use of that lane.
    pub(super) generation: u32,
}

impl Holder {
    /// A small number that no other holder has at the same time: an index for what is kept by holder. The next holder of
    /// the number is another value.
    #[must_use]
    pub fn lane(self) -> usize {
        self.lane as usize
    }
}

/// How much of a chain's beginning one holder has, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// Who.
    pub holder: Holder,
    /// Leading blocks on its device.
    pub device: u32,
    /// Leading blocks on any tier, at least 1.
    pub reach: u32,
    /// Of `reach`: blocks that are not on the device but in the host's memory.
    pub host: u32,
    /// Of `reach`: blocks that are on disk alone.
    pub disk: u32,
}

/// One rank of a worker that holds the beginning of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Which worker.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Which of its ranks.
    pub rank: u16,
    /// Leading blocks it holds on its device without a hole.
    pub depth: usize,
    /// Leading blocks it holds on any tier without a hole, at least 1.
    pub reach: usize,
    /// Of `reach`: blocks to load from the host's memory.
    pub host: usize,
    /// Of `reach`: blocks to load from disk.
    pub disk: usize,
}
