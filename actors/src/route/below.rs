//! What a worker has of a prompt on its slower tiers, and what it brings to the device from there, or reads there for a peer.
//!
//! Found by [`super::desk`] in the index's answer, priced by the cost of [`super::policy`] with the rates that the worker
//! reports. The worker decides by the same comparison when the request is there: what is computed sooner is not loaded.
//! Pure. Assumed: a chain lies on the device first, then in the host's memory, then on disk, for its ends are evicted first.

use serde::{Deserialize, Serialize};

/// How fast blocks come from a worker's own slower tiers, as it reports: measured, or a guess before the first one came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TierRates {
    /// Milliseconds to copy one block from the host's memory to the device.
    pub host_ms: f64,
    /// Milliseconds to read one block from disk.
    pub disk_ms: f64,
    /// Milliseconds until the first block of a new request would come from disk: its latency, and what is read before.
    pub disk_wait_ms: f64,
    /// It reads them for other workers too.
    #[serde(default)]
    pub lends: bool,
}

/// Blocks that follow those on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Below {
    /// Leading blocks on the device when these were counted.
    pub device: u32,
    /// Of those that follow: in the host's memory.
    pub host: u32,
    /// Of those that follow: on disk alone.
    pub disk: u32,
}

/// What is brought from the slower tiers because that is sooner than computing it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Blocks.
    pub blocks: u32,
    /// How long that takes, milliseconds; less than computing them.
    pub ms: f64,
}

/// What a worker reads from its slower tiers to give it to another one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reads {
    /// Blocks from the host's memory.
    pub host: u32,
    /// Blocks from disk.
    pub disk: u32,
    /// How long it is until the first of them is there, milliseconds.
    pub wait_ms: f64,
    /// How long they take from then on, milliseconds; those that are there move meanwhile.
    pub ms: f64,
}

impl Below {
    /// Whether there is anything.
    #[must_use]
    pub fn any(&self) -> bool {
        self.host | self.disk > 0
    }

    /// What is left of it once so many leading blocks are on the device, or come there from elsewhere.
    #[must_use]
    pub fn after(self, hits: u32) -> Self {
        let gone = hits.saturating_sub(self.device);
        let disk = self.disk.saturating_sub(gone.saturating_sub(self.host));
        Self { device: self.device.max(hits), host: self.host.saturating_sub(gone), disk }
    }

    /// Leading blocks up to which the device, the host's memory and the disk reach, each with those before it.
    #[must_use]
    pub fn depths(self) -> [u32; 3] {
        let host = self.device.saturating_add(self.host);
        [self.device, host, host.saturating_add(self.disk)]
    }

    /// What is read to give the blocks between these two numbers of leading blocks.
    #[must_use]
    pub fn reads(self, rates: TierRates, from: u32, to: u32) -> Reads {
        let [device, host, disk] = self.depths();
        let between = |first: u32, last: u32| last.min(to).saturating_sub(first.max(from));
        let (host, disk) = (between(device, host), between(host, disk));
        // A rate of what is not read counts for nothing, be it no number.
        let of = |blocks: u32, ms: f64| if blocks > 0 { ms } else { 0.0 };
        let ms = f64::from(host) * of(host, rates.host_ms) + f64::from(disk) * of(disk, rates.disk_ms);
        Reads { host, disk, wait_ms: of(disk, rates.disk_wait_ms), ms }
    }

    /// The larger of two ranks' accounts, as far as they reach.
    #[must_use]
    pub fn larger(self, other: Self) -> Self {
        let reach = |of: &Self| of.device.saturating_add(of.host).saturating_add(of.disk);
        if reach(&other) > reach(&self) { other } else { self }
    }

    /// Which of it is worth bringing, at most `blocks_max`, where computing a block takes `block_ms`. Each tier counts on its
    /// own: what is slower than computing is left where it is.
    #[must_use]
    pub fn load(self, rates: TierRates, block_ms: f64, blocks_max: u32) -> Load {
        let host = self.host.min(blocks_max);
        let disk = self.disk.min(blocks_max - host);
        let mut load = Load::default();
        let mut bring = |blocks: u32, ms: f64| {
            // A rate that is no number compares as not worth it.
            if blocks > 0 && ms >= 0.0 && ms < f64::from(blocks) * block_ms {
                load = Load { blocks: load.blocks + blocks, ms: load.ms + ms };
            }
        };
        bring(host, f64::from(host) * rates.host_ms);
        bring(disk, rates.disk_wait_ms + f64::from(disk) * rates.disk_ms);
        load
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATES: TierRates = TierRates { host_ms: 0.1, disk_ms: 1.0, disk_wait_ms: 5.0, lends: true };

    #[test]
    fn what_is_computed_sooner_is_not_loaded() {
        let both = Below { device: 4, host: 10, disk: 20 };
        assert_eq!(both.load(RATES, 2.0, 99), Load { blocks: 30, ms: 1.0 + 25.0 });
        assert_eq!(both.load(RATES, 1.1, 99), Load { blocks: 10, ms: 1.0 }, "25 ms of reading beside 22 of computing");
        assert_eq!(both.load(RATES, 0.05, 99), Load::default());
        assert_eq!(both.load(TierRates { disk_wait_ms: 60_000.0, ..RATES }, 2.0, 99).blocks, 10, "the disk hangs");
        assert_eq!(both.load(TierRates { host_ms: f64::NAN, ..RATES }, 2.0, 99).blocks, 20);
        assert_eq!(both.load(RATES, 2.0, 12), Load { blocks: 10, ms: 1.0 }, "two blocks are not worth a read");
    }

    #[test]
    fn what_is_given_is_read_where_it_lies_and_what_the_other_has_is_not_read() {
        let both = Below { device: 4, host: 10, disk: 20 };
        assert_eq!(both.depths(), [4, 14, 34]);
        assert_eq!(both.reads(RATES, 0, 4), Reads::default());
        assert_eq!(both.reads(RATES, 0, 14), Reads { host: 10, disk: 0, wait_ms: 0.0, ms: 1.0 });
        assert_eq!(both.reads(RATES, 9, 34), Reads { host: 5, disk: 20, wait_ms: 5.0, ms: 0.5 + 20.0 });
        assert_eq!(both.reads(RATES, 20, 30), Reads { host: 0, disk: 10, wait_ms: 5.0, ms: 10.0 });
        assert_eq!(both.reads(RATES, 30, 9), Reads::default());
    }

    #[test]
    fn what_is_on_the_device_by_then_is_not_loaded() {
        let both = Below { device: 4, host: 10, disk: 20 };
        assert_eq!(both.after(3), both);
        assert_eq!(both.after(9), Below { device: 9, host: 5, disk: 20 });
        assert_eq!(both.after(16), Below { device: 16, host: 0, disk: 18 });
        assert!(!both.after(34).any() && !both.after(u32::MAX).any());
        assert_eq!(both.larger(Below { device: 33, ..Below::default() }), both);
        assert_eq!(Below::default().larger(both), both);
    }

    proptest! {
        /// Loading never costs more than computing the same; more blocks never save less; nor does a faster tier.
        #[test]
        fn a_load_only_ever_saves(
            (device, host, disk, more) in (0u32..40, 0u32..200, 0u32..200, 0u32..50),
            (host_ms, disk_ms, wait, block_ms) in (0.0f64..5.0, 0.0f64..20.0, 0.0f64..2_000.0, 0.0f64..10.0),
            most in 0u32..500,
        ) {
            let rates = TierRates { host_ms, disk_ms, disk_wait_ms: wait, lends: true };
            let saved = |below: Below, rates, most| {
                let load = below.load(rates, block_ms, most);
                assert!(load.blocks <= most && load.blocks <= below.host + below.disk);
                f64::from(load.blocks) * block_ms - load.ms
            };
            let below = Below { device, host, disk };
            let now = saved(below, rates, most);
            prop_assert!(now >= 0.0);
            let (on_disk, in_memory) = (Below { disk: disk + more, ..below }, Below { host: host + more, ..below });
            prop_assert!(saved(on_disk, rates, most) >= now - 1e-9);
            prop_assert!(saved(in_memory, rates, u32::MAX) >= saved(below, rates, u32::MAX) - 1e-9);
            let faster =
                TierRates { host_ms: host_ms / 2.0, disk_ms: disk_ms / 2.0, disk_wait_ms: wait / 2.0, lends: true };
            prop_assert!(saved(below, faster, most) >= now - 1e-9);
            let later = below.after(device + more);
            prop_assert!(later.device + later.host + later.disk == (device + host + disk).max(device + more));
            // Read in two parts it is the same blocks, and the same again once a part of it is on the device.
            let (end, cut) = (below.depths()[2], (device + more).min(below.depths()[2]));
            let (whole, parts) = (below.reads(rates, 0, end), [below.reads(rates, 0, cut), below.reads(rates, cut, end)]);
            prop_assert_eq!(whole.host + whole.disk, host + disk);
            prop_assert_eq!(parts[0].host + parts[1].host, host);
            prop_assert_eq!(parts[0].disk + parts[1].disk, disk);
            prop_assert_eq!(later.reads(rates, cut, end), parts[1]);
        }
    }
}
