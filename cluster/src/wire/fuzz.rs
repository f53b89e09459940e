//! Tests with fresh seeds: as many as are asked for, or for as long as `STARLING_FUZZ_SECONDS` says.
//!
//! A failing run prints its seed; `STARLING_FUZZ_SEED` runs that one alone.
//! Shell: only in tests, which draw their seeds and look at the clock.

use std::time::{Duration, Instant};

/// Numbers that follow from a seed (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 for 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// One of a few things.
    pub(crate) fn of<'a, T>(&mut self, things: &'a [T]) -> &'a T {
        &things[self.below(things.len())]
    }
}

/// Says the seed when a run ends by a panic.
struct Running(&'static str, u64);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: failed with STARLING_FUZZ_SEED={}", self.0, self.1);
        }
    }
}

/// Runs `test` at least `runs` times and as long as the environment asks for.
#[allow(clippy::disallowed_methods, reason = "tests have no configuration but this")]
pub(crate) fn seeds(what: &'static str, runs: u32, mut test: impl FnMut(&mut Random)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let mut run = |seed: u64| {
        let _running = Running(what, seed);
        test(&mut Random(seed));
    };
    if let Some(seed) = number("STARLING_FUZZ_SEED") {
        return run(seed);
    }
    let (start, limit) = (Instant::now(), Duration::from_secs(number("STARLING_FUZZ_SECONDS").unwrap_or(0)));
    let mut done = 0u64;
    while done < u64::from(runs) || start.elapsed() < limit {
        run(rand::random());
        done += 1;
    }
    if !limit.is_zero() {
        eprintln!("{what}: {done} runs in {:?}", start.elapsed());
    }
}
