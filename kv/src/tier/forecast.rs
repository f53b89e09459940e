//! Whether blocks of a lower tier come sooner than the engine would compute them: rates learned from what happened.
//!
//! Called by the tiers at each admission and after each read and step. Never: looks at a clock; times are arguments.

use std::time::Duration;

use crate::index::Tier;

/// A rate that follows what is measured: the newer the heavier.
#[derive(Debug, Clone, Copy)]
struct Rate {
    /// Milliseconds for one unit.
    ms: f64,
    measured: bool,
}

impl Rate {
    const fn guess(ms: f64) -> Self {
        Self { ms, measured: false }
    }

    fn learn(&mut self, ms: f64) {
        if !ms.is_finite() || ms < 0.0 {
            return;
        }
        let share = if self.measured { 0.2 } else { 1.0 };
        self.ms += share * (ms - self.ms);
        self.measured = true;
    }
}

/// Blocks of a chain to fetch, in order, and what else is on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need<'a> {
    /// Where each block lies.
    pub(super) chain: &'a [Tier],
    /// Bytes of one block.
    pub(super) block_bytes: usize,
    /// Tokens of one block.
    pub(super) block_tokens: usize,
    /// Blocks that were asked for before and are still to be read from disk.
    pub(super) queued: usize,
    /// How long the oldest read under way has taken so far.
    pub(super) stuck: Duration,
    /// The present, on the caller's clock.
    pub(super) now: Duration,
}

/// Leading blocks that are worth fetching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worth {
    /// How many, at least 1.
    pub blocks: usize,
    /// Until when to wait for them, on the caller's clock.
    pub deadline: Duration,
}

/// Rates of one engine and its tiers.
#[derive(Debug, Clone)]
pub(super) struct Forecast {
    /// Milliseconds to compute one prompt token.
    compute: Rate,
    /// Milliseconds to copy one MiB from the host's memory.
    host: Rate,
    /// Milliseconds to read one MiB from disk, with others read beside it.
    disk: Rate,
    /// When the disk was last measured, or tried for the sake of measuring.
    disk_tried: Duration,
}

impl Default for Forecast {
    /// Guesses until there is something measured: 4 GB/s, 250 MB/s, 4,000 tokens/s.
    fn default() -> Self {
        Self { compute: Rate::guess(0.25), host: Rate::guess(0.25), disk: Rate::guess(4.0), disk_tried: Duration::ZERO }
    }
}

/// The first answer of a disk, whatever the amount.
const DISK_LATENCY_MS: f64 = 0.5;
/// A disk that was too slow is tried again after this long.
const RETRY_DISK: Duration = Duration::from_secs(30);
/// Shortest and longest wait for blocks.
const WAIT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

impl Forecast {
    /// A step computed `tokens` prompt tokens in `took`.
    pub(super) fn computed(&mut self, tokens: usize, took: Duration) {
        // Few tokens ride along with the decodes and say little.
        if tokens >= 8 {
            self.compute.learn(took.as_secs_f64() * 1e3 / tokens as f64);
        }
    }

    /// `bytes` came from a tier: `took` divided by the number of reads that shared it.
    pub(super) fn read(&mut self, tier: Tier, bytes: usize, took: Duration, now: Duration) {
        let ms = took.as_secs_f64() * 1e3 / mib(bytes).max(1e-6);
        match tier {
            Tier::Device => {}
            Tier::Host => self.host.learn(ms),
            Tier::Disk => {
                self.disk.learn(ms);
                self.disk_tried = now;
            }
        }
    }

    /// Bytes a second from a tier, as measured; 0 when it was not.
    #[must_use]
    pub(super) fn bytes_per_second(&self, tier: Tier) -> f64 {
        let rate = match tier {
            Tier::Device => return 0.0,
            Tier::Host => self.host,
            Tier::Disk => self.disk,
        };
        if rate.measured { f64::from(1 << 20) * 1e3 / rate.ms.max(1e-9) } else { 0.0 }
    }

    /// Milliseconds that one block takes from a tier, measured or guessed.
    #[must_use]
    pub(super) fn block_ms(&self, tier: Tier, block_bytes: usize) -> f64 {
        match tier {
            Tier::Device => 0.0,
            Tier::Host => mib(block_bytes) * self.host.ms,
            Tier::Disk => mib(block_bytes) * self.disk.ms,
        }
    }

    /// Milliseconds before the first block that is asked for now comes from disk: `queued` others are read before, and the
    /// oldest read has taken `stuck` so far.
    #[must_use]
    pub(super) fn disk_wait_ms(&self, block_bytes: usize, queued: usize, stuck: Duration) -> f64 {
        DISK_LATENCY_MS + stuck.as_secs_f64() * 1e3 + queued as f64 * self.block_ms(Tier::Disk, block_bytes)
    }

    /// Milliseconds to compute one prompt token, as measured; 0 when it was not.
    #[must_use]
    pub(super) fn compute_ms(&self) -> f64 {
        if self.compute.measured { self.compute.ms } else { 0.0 }
    }

    /// How many of the leading blocks to fetch: as many as save most time; `None` when computing is sooner.
    pub(super) fn worth(&mut self, need: Need<'_>) -> Option<Worth> {
        let compute = self.compute.ms * need.block_tokens as f64;
        let latency = self.disk_wait_ms(need.block_bytes, need.queued, need.stuck);
        let (mut cost, mut saved, mut best) = (0.0, 0.0, (0.0, 0));
        let mut disk_used = false;
        for (index, tier) in need.chain.iter().enumerate() {
            cost += self.block_ms(*tier, need.block_bytes);
            if *tier == Tier::Disk && !disk_used {
                (cost, disk_used) = (cost + latency, true);
            }
            saved += compute;
            if saved - cost > best.0 {
                best = (saved - cost, index + 1);
            }
        }
        let mut blocks = best.1;
        // A rate is only ever corrected by trying.
        if blocks < need.chain.len() && need.stuck.is_zero() && need.now.saturating_sub(self.disk_tried) > RETRY_DISK {
            self.disk_tried = need.now;
            blocks = need.chain.len();
        }
        if blocks == 0 {
            return None;
        }
        let wait = Duration::try_from_secs_f64(compute * blocks as f64 / 1e3).unwrap_or(WAIT.1).clamp(WAIT.0, WAIT.1);
        Some(Worth { blocks, deadline: need.now + wait })
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(chain: &[Tier]) -> Need<'_> {
        let (stuck, now) = (Duration::ZERO, Duration::from_secs(1));
        Need { chain, block_bytes: 1 << 20, block_tokens: 16, queued: 0, stuck, now }
    }

    fn learned(compute_ms: u64, disk_ms: u64) -> Forecast {
        let mut forecast = Forecast::default();
        let now = Duration::from_secs(1);
        forecast.computed(16, Duration::from_millis(16 * compute_ms));
        forecast.read(Tier::Host, 1 << 20, Duration::from_millis(1), now);
        forecast.read(Tier::Disk, 1 << 20, Duration::from_millis(disk_ms), now);
        forecast
    }

    #[test]
    fn what_saves_most_is_fetched() {
        let chain = [Tier::Host, Tier::Disk, Tier::Disk];
        assert_eq!(learned(1, 4).worth(need(&chain)).map(|worth| worth.blocks), Some(3));
        assert_eq!(learned(1, 40).worth(need(&chain)).map(|worth| worth.blocks), Some(1), "the disk is too slow");
        assert_eq!(learned(1, 40).worth(need(&chain[1..])), None);
        assert_eq!(learned(1, 4).worth(need(&[])), None);
    }

    #[test]
    fn what_waits_before_it_counts() {
        let chain = [Tier::Disk; 2];
        let mut forecast = learned(1, 4);
        assert!(forecast.worth(need(&chain)).is_some());
        assert_eq!(forecast.worth(Need { queued: 10, ..need(&chain) }), None);
        assert_eq!(forecast.worth(Need { stuck: Duration::from_secs(60), ..need(&chain) }), None);
    }

    #[test]
    fn a_slow_disk_is_tried_again_after_a_while() {
        let mut forecast = learned(1, 400);
        let later = Need { now: Duration::from_secs(60), ..need(&[Tier::Disk]) };
        assert!(forecast.worth(later).is_some());
        assert_eq!(forecast.worth(later), None, "once");
    }

    #[test]
    fn a_wait_is_as_long_as_computing_would_take() {
        let worth = learned(10, 1).worth(need(&[Tier::Disk; 4])).expect("worth it");
        assert_eq!(worth.deadline, Duration::from_millis(1_000 + 640));
        assert_eq!(learned(1, 1).worth(need(&[Tier::Disk])).expect("worth it").deadline, Duration::from_millis(1_100));
    }
}
