//! `starling kv`: the caches of every worker, tier by tier.

use clap::Args;
use starling_actors::cache_report::CacheRow;

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{Caches, op};

const EXAMPLES: &str = "\
Examples:
  starling kv
  starling kv --json | jq '.caches[] | select(.tier == \"disk\") | .faults'

A worker computes on blocks of its device pool. What leaves it goes to the tiers
below, when there are any (--kv-host, --kv-disk), and comes back when that is
sooner than computing it. HIT of the device is the share of prompt tokens that
were not computed, whatever tier they came from; HIT of a tier below is its share
of the blocks that were not on the device. LOST counts blocks that made room or
were not taken, FAULTS those that could not be read, were not as written, or
could not be written; LATE requests that stopped waiting and computed.

Exit codes: 0 printed, 2 wrong command line, 3 no node answered.";

/// Show the KV caches of every worker: pools, tiers, hit rates, bandwidths.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Kv {
    #[command(flatten)]
    inspect: Inspect,
}

impl Kv {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let all: Caches = self.inspect.ask(op::CACHES, Vec::new()).await?;
        for missing in &all.missing {
            eprintln!("no answer from {}: {}", missing.node, missing.reason);
        }
        if self.inspect.json {
            return print_json(&all);
        }
        let columns =
            ["worker", "tier", "blocks", "of", "size", "hit", "stored", "lost", "faults", "late", "to device"];
        let mut out = table::table(&columns);
        for row in &all.caches {
            out.add_row(cells(row));
        }
        table::print(out);
        Ok(())
    }
}

fn cells(row: &CacheRow) -> [String; 11] {
    let below = row.tier != "device";
    let only_below = |value: u64| table::or_dash(below.then_some(value));
    [
        row.worker.clone(),
        row.tier.clone(),
        row.blocks.to_string(),
        row.blocks_max.to_string(),
        table::or_dash((row.block_bytes > 0).then(|| size(row.blocks as f64 * row.block_bytes as f64))),
        table::or_dash(row.hit_share().map(|share| format!("{:.1} %", share * 100.0))),
        only_below(row.stored),
        only_below(row.evicted + row.refused),
        only_below(row.faults),
        only_below(row.late),
        table::or_dash((row.bytes_per_second > 0.0).then(|| format!("{}/s", size(row.bytes_per_second)))),
    ]
}

/// Bytes in a unit that leaves one to four digits: `368 KiB`, `1.2 GiB`.
fn size(mut bytes: f64) -> String {
    for unit in ["B", "KiB", "MiB"] {
        if bytes < 1_024.0 {
            return format!("{bytes:.0} {unit}");
        }
        bytes /= 1_024.0;
    }
    format!("{bytes:.1} GiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        assert_eq!([size(0.0), size(2_048.0), size(5.0e9)], ["0 B", "2 KiB", "4.7 GiB"]);
    }
}
