//! A worker's caches in numbers, for people: `starling kv`. Pure.
//!
//! Rows cross nodes as MessagePack; fields are only ever appended.

use serde::{Deserialize, Serialize};
use starling_engine::EngineLoad;
use starling_ids::WorkerId;
use starling_kv::tier::{TierLoad, TierStats};

/// One tier of one worker. Counters rise from the start of its engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheRow {
    /// `NODE/INDEX`.
    pub worker: String,
    /// `device`, `host` or `disk`.
    pub tier: String,
    /// Blocks there now.
    pub blocks: u64,
    /// Blocks that fit.
    pub blocks_max: u64,
    /// Bytes of one block; 0 where it is not known.
    pub block_bytes: u64,
    /// On the device: prompt tokens that were looked for. Below: blocks that were not on the device and were looked for.
    pub asked: u64,
    /// Those of them that were used from this tier.
    pub hits: u64,
    /// Blocks written to it.
    pub stored: u64,
    /// Blocks that made room for others.
    pub evicted: u64,
    /// Blocks not taken: asked for too seldom, or too many on their way.
    pub refused: u64,
    /// Blocks that could not be read, were not as written, or could not be written.
    pub faults: u64,
    /// Requests that stopped waiting for it and computed.
    pub late: u64,
    /// Bytes a second to the device; 0 when not measured.
    pub bytes_per_second: f64,
}

impl CacheRow {
    /// Share of what was looked for that was used from here, 0 to 1; `None` before anything was.
    #[must_use]
    pub fn hit_share(&self) -> Option<f64> {
        (self.asked > 0).then(|| self.hits as f64 / self.asked as f64)
    }
}

/// The rows of a worker, device first; a tier that is not there has none.
pub(crate) fn rows(worker: &WorkerId, load: &EngineLoad, stats: Option<&TierStats>) -> Vec<CacheRow> {
    let device = CacheRow {
        worker: worker.to_string(),
        tier: "device".to_owned(),
        blocks: u64::from(load.blocks_pinned) + u64::from(load.blocks_cached),
        blocks_max: u64::from(load.blocks_total),
        block_bytes: stats.map_or(0, |stats| stats.block_bytes),
        asked: load.tokens_cached + load.tokens_prefilled,
        hits: load.tokens_cached,
        stored: 0,
        evicted: 0,
        refused: 0,
        faults: 0,
        late: 0,
        bytes_per_second: 0.0,
    };
    let below = |stats: &TierStats, tier: &str, load: &TierLoad| CacheRow {
        tier: tier.to_owned(),
        blocks: load.blocks,
        blocks_max: load.blocks_max,
        asked: stats.asked,
        hits: load.fetched,
        stored: load.stored,
        evicted: load.evicted,
        refused: load.refused + load.dropped,
        faults: load.unreadable + load.corrupt + load.unwritten,
        late: stats.late,
        bytes_per_second: load.bytes_per_second,
        ..device.clone()
    };
    let lower = stats.map(|stats| [below(stats, "host", &stats.host), below(stats, "disk", &stats.disk)]);
    let there = lower.into_iter().flatten().filter(|row| row.blocks_max > 0).collect::<Vec<_>>();
    std::iter::once(device.clone()).chain(there).collect()
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    #[test]
    fn a_row_for_each_tier_that_is_there() {
        let worker = WorkerId { node: NodeId::new("n").expect("name"), index: 1 };
        let load = EngineLoad {
            blocks_total: 10,
            blocks_cached: 4,
            tokens_cached: 30,
            tokens_prefilled: 10,
            ..EngineLoad::default()
        };
        assert_eq!(rows(&worker, &load, None).len(), 1);
        let disk = TierLoad { blocks: 5, blocks_max: 100, fetched: 6, corrupt: 1, unwritten: 2, ..TierLoad::default() };
        let stats = TierStats { block_bytes: 7, asked: 12, disk, ..TierStats::default() };
        let rows = rows(&worker, &load, Some(&stats));
        let tiers: Vec<&str> = rows.iter().map(|row| row.tier.as_str()).collect();
        assert_eq!(tiers, ["device", "disk"]);
        assert_eq!((rows[0].hit_share(), rows[1].hit_share(), rows[1].faults), (Some(0.75), Some(0.5), 3));
    }
}
