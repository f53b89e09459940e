//! The words of a worker about itself: its blocks and its load, as routers hear them.
//!
//! These cross nodes as MessagePack. Fields are only ever appended, each with a default.

use serde::{Deserialize, Serialize};
use starling_engine::EngineLoad;
use starling_ids::{BlockHash, Incarnation, WorkerId};
use starling_kv::{events::EventBatch, hash::SetDigest, index::Tier};

use crate::route::{below::TierRates, rates::Rates, split::KvLink};

/// Blocks in one part of an inventory, so that a part stays below 64 KiB.
pub const INVENTORY_PART_BLOCKS: usize = 1_024;

/// Blocks in one part of a bucket, for the same reason.
pub const BUCKET_PART_BLOCKS: usize = 2_048;

/// One frame of a worker's event stream. The stream begins with a whole inventory, or where the last one broke.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum WorkerNews {
    /// Blocks ready for reuse when the subscription began.
    Inventory(InventoryPart),
    /// What changed since, in order and without gaps.
    Events(EventBatch),
    /// How busy it is.
    Load(LoadReport),
    /// What one of its caches holds, in digests; only for a subscriber that wants them.
    Digests(CacheDigests),
    /// What one bucket of a cache holds; the answer to a [`BucketAsk`].
    Bucket(BucketPart),
}

/// The body of a subscription; an empty one is the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscribe {
    /// The subscriber compares digests and asks for buckets.
    pub digests: bool,
    /// How far it has read already, when it has: the events after that, if they are still there, take the place of an inventory.
    #[serde(default)]
    pub from: Option<ReadUpTo>,
}

/// A place in the events of one life of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadUpTo {
    /// The engine's life within that of its node; each numbers its events from 0.
    pub epoch: u64,
    /// Number of the first event that was not read.
    pub seq: u64,
}

/// Digests of what a cache holds after all events before `seq`, from the engine's own book and not from its events: an event
/// that was never sent, or was wrong, shows here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheDigests {
    /// Whose.
    pub worker: WorkerId,
    /// In which life of its node.
    pub incarnation: Incarnation,
    /// Number of the first event that is not in it.
    pub seq: u64,
    /// Which cache.
    pub tier: Tier,
    /// One for each of [`starling_kv::hash::BucketDigests::BUCKETS`].
    pub digests: Vec<SetDigest>,
}

/// What a subscriber sends when digests differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketAsk {
    /// Of which cache.
    pub tier: Tier,
    /// Which buckets, a bit each.
    pub buckets: u64,
}

/// A part of what one bucket holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketPart {
    /// Whose.
    pub worker: WorkerId,
    /// In which life of its node.
    pub incarnation: Incarnation,
    /// Number of the first event that is not in it.
    pub seq: u64,
    /// Of which cache.
    pub tier: Tier,
    /// Which bucket.
    pub bucket: u8,
    /// Whether another part of the same bucket follows.
    pub more: bool,
    /// Blocks, in no order.
    pub blocks: Vec<BlockHash>,
}

/// A part of an inventory. There is at least one, also of no blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryPart {
    /// Whose.
    pub worker: WorkerId,
    /// In which life of its node.
    pub incarnation: Incarnation,
    /// Number of the first event after the inventory.
    pub seq: u64,
    /// Whether another part follows.
    pub more: bool,
    /// (parent, block), parents before children, also across parts; in no order on a lower tier.
    pub blocks: Vec<(Option<BlockHash>, BlockHash)>,
    /// Where they lie: one tier a part.
    #[serde(default)]
    pub tier: Tier,
    /// Which life of the engine it is, to go on reading after a break; 0 of one that does not say.
    #[serde(default)]
    pub epoch: u64,
}

/// A worker's own account of how busy it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Whose.
    pub worker: WorkerId,
    /// In which life of its node.
    pub incarnation: Incarnation,
    /// Takes nothing new.
    pub draining: bool,
    /// The engine's numbers.
    pub load: EngineLoad,
    /// Speeds, learned from its own steps; `None` before there were enough of them.
    pub rates: Option<Rates>,
    /// Milliseconds since its engine last finished a step or found nothing to do.
    pub turn_age_ms: u64,
    /// Requests that its engine has taken in this life of the worker; those of them that have not ended are in `load`.
    #[serde(default)]
    pub admitted: u64,
    /// How fast blocks come to it from others.
    #[serde(default)]
    pub link: KvLink,
    /// How fast blocks come from its own slower tiers; `None` of one that has none.
    #[serde(default)]
    pub tiers: Option<TierRates>,
}

impl LoadReport {
    /// Whether a router should hear of this at once instead of with the next heartbeat.
    #[must_use]
    pub fn differs_much(&self, told: &Self) -> bool {
        let sequences = |report: &Self| u64::from(report.load.running) + u64::from(report.load.waiting);
        let tokens = self.load.prefill_tokens.abs_diff(told.load.prefill_tokens);
        self.draining != told.draining
            || (sequences(self) == 0) != (sequences(told) == 0)
            || sequences(self).abs_diff(sequences(told)) * 4 > sequences(told)
            || tokens * 4 > told.load.prefill_tokens.max(256)
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    fn report(running: u32, prefill_tokens: u64) -> LoadReport {
        LoadReport {
            worker: WorkerId { node: NodeId::new("n").expect("name"), index: 0 },
            incarnation: Incarnation(1),
            draining: false,
            load: EngineLoad { running, prefill_tokens, ..EngineLoad::default() },
            rates: None,
            turn_age_ms: 0,
            admitted: 0,
            link: KvLink::default(),
            tiers: None,
        }
    }

    #[test]
    fn a_small_change_waits_and_a_large_one_does_not() {
        assert!(!report(0, 0).differs_much(&report(0, 0)));
        assert!(report(1, 0).differs_much(&report(0, 0)));
        assert!(report(0, 0).differs_much(&report(1, 0)));
        assert!(!report(9, 0).differs_much(&report(8, 0)));
        assert!(report(12, 0).differs_much(&report(8, 0)));
        assert!(!report(8, 1_030).differs_much(&report(8, 1_000)));
        assert!(report(8, 2_000).differs_much(&report(8, 1_000)));
        assert!(LoadReport { draining: true, ..report(1, 0) }.differs_much(&report(1, 0)));
    }

    #[test]
    fn a_part_of_an_inventory_fits_a_frame() {
        let blocks = (0..INVENTORY_PART_BLOCKS as u128).map(|at| (Some(BlockHash(!at)), BlockHash(at << 64))).collect();
        let worker = WorkerId { node: NodeId::new(&"n".repeat(48)).expect("name"), index: u16::MAX };
        let (incarnation, tier) = (Incarnation(u64::MAX), Tier::Disk);
        let part = InventoryPart { worker, incarnation, seq: u64::MAX, more: true, blocks, tier, epoch: u64::MAX };
        let bytes = rmp_serde::to_vec(&WorkerNews::Inventory(part.clone())).expect("encodes");
        assert!(bytes.len() <= 60 * 1024, "{}", bytes.len());
        let back: WorkerNews = rmp_serde::from_slice(&bytes).expect("decodes");
        assert_eq!(back, WorkerNews::Inventory(part));
    }
}
