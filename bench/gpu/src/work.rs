//! The work that every part does: patterns, scattered pages, medians.

use std::time::{Duration, Instant};

use starling_cuda::{Fence, Span};

use crate::Outcome;

/// Of all that is shuffled or made up.
pub(crate) const SEED: u64 = 7;
/// Times each rate is measured; the median counts.
pub(crate) const ROUNDS: usize = 9;
/// A wait for a GPU that takes longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes as GiB.
pub(crate) fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// SplitMix64: enough for patterns. Source: <https://prng.di.unimi.it/splitmix64.c>.
pub(crate) fn mixed(at: u64) -> u64 {
    let mut z = at.wrapping_add(SEED).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Bytes that differ everywhere.
pub(crate) fn pattern(len: usize, salt: u64) -> Vec<u8> {
    (0..len.div_ceil(8) as u64).flat_map(|at| mixed(at ^ (salt << 40)).to_le_bytes()).take(len).collect()
}

/// `count` pages of `bytes`, each from a place of its own among `places`, to places one after another.
pub(crate) fn scattered(count: u64, bytes: u64, places: u64) -> Vec<Span> {
    let mut order: Vec<u64> = (0..places).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, (mixed(at as u64) % (at as u64 + 1)) as usize);
    }
    let span = |(row, place): (u64, &u64)| Span { from: place * bytes, to: row * bytes, len: bytes };
    (0..count).zip(&order).map(span).collect()
}

/// The same pages the other way.
pub(crate) fn back(spans: &[Span]) -> Vec<Span> {
    spans.iter().map(|span| Span { from: span.to, to: span.from, len: span.len }).collect()
}

/// Waits for a fence.
pub(crate) fn awaited(fence: &Fence) -> Outcome<()> {
    if fence.wait(PATIENCE)? { Ok(()) } else { Err("the GPU did not finish in time".into()) }
}

/// The median time of `run`, after one run that is not counted.
pub(crate) fn median(mut run: impl FnMut() -> Outcome<()>) -> Outcome<Duration> {
    run()?;
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        run()?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(times[ROUNDS / 2])
}

/// One line of the table.
pub(crate) fn rate(what: &str, bytes: u64, took: Duration) -> f64 {
    let rate = bytes as f64 / took.as_secs_f64() / 1e9;
    println!("{what:<64} {:>9.3} ms {rate:>9.1} GB/s", took.as_secs_f64() * 1e3);
    rate
}

/// A check: its line, and an error when it does not hold.
pub(crate) fn check(what: &str, holds: bool) -> Outcome<()> {
    println!("{} {what}", if holds { "ok  " } else { "FAIL" });
    if holds { Ok(()) } else { Err(format!("does not hold: {what}").into()) }
}
