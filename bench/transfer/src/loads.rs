//! What is moved: the loads, which pages they touch, and the line in which a measurement is said.
//!
//! Called by every measurement, so that all of them move the same. Never: looks at a clock.

use std::time::Duration;

use serde_json::json;

/// Bytes of the memory on each side: more than the caches of any machine it was run on.
pub(crate) const MEMORY: usize = 256 << 20;

/// One kind of transfer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// As the table's head says it.
    pub(crate) name: &'static str,
    /// Bytes that lie together.
    pub(crate) page: usize,
    /// Pages of one transfer.
    pub(crate) pages: usize,
    /// Transfers measured in one run.
    pub(crate) repeats: usize,
}

/// All of them.
pub(crate) const LOADS: [Load; 4] = [
    Load { name: "pages", page: 16 << 10, pages: 2_000, repeats: 9 },
    Load { name: "64k", page: 64 << 10, pages: 1, repeats: 200 },
    Load { name: "1m", page: 1 << 20, pages: 1, repeats: 50 },
    Load { name: "64m", page: 64 << 20, pages: 1, repeats: 7 },
];

/// Numbers that look random and are the same in every run.
#[derive(Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    /// The same numbers for the same seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    /// Offsets of `load.pages` different pages.
    fn side(&mut self, load: Load) -> Vec<usize> {
        let places = MEMORY / load.page;
        let mut all: Vec<usize> = (0..places).collect();
        for at in 0..load.pages {
            let other = at + self.below(places - at);
            all.swap(at, other);
        }
        all.truncate(load.pages);
        all.into_iter().map(|place| place * load.page).collect()
    }

    /// The pages of one transfer: (offset here, offset there).
    pub(crate) fn pages(&mut self, load: Load) -> Vec<(usize, usize)> {
        let here = self.side(load);
        here.into_iter().zip(self.side(load)).collect()
    }
}

/// One measurement as a line of JSON: the times in milliseconds of all its transfers.
pub(crate) fn line(way: &str, direction: &str, load: Load, took: &[Duration]) -> String {
    let ms: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1e3).collect();
    let bytes = load.page * load.pages;
    json!({"way": way, "direction": direction, "load": load.name, "bytes": bytes, "ms": ms}).to_string()
}
