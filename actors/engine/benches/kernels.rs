//! Fails when an AVX2 kernel is not much faster than the portable version any more, in this build.
//!
//! `cargo test --workspace --bench kernels` builds it as the tests are built, `cargo bench -p starling-engine` as releases are.
//! Both versions are measured in one process, in turns, so a slow or busy machine slows both; a kernel is given
//! [`TRIES`] chances, and must be [`LEAST`] times as fast in one of them. Only shown, not judged: AVX-512, whose speed nobody has
//! measured, and any version that this CPU cannot run.
#![allow(clippy::print_stdout, reason = "a check prints what it found")]

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use starling_engine::embedded::kernel_gains;

/// The portable version takes at least so many times as long. It takes 28 to 41 times, on a busy machine as on a quiet one, and took 4
/// when a closure in attention was not inlined and so lost the vector instructions of the kernel around it.
const LEAST: f64 = 10.0;
const TRIES: usize = 5;

fn time(work: &mut dyn FnMut()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn main() -> ExitCode {
    for _ in 0..TRIES {
        let gains = kernel_gains(&time);
        for gain in &gains {
            println!("{} {}: {:.1} times as fast as portable", gain.version, gain.kernel, gain.times);
        }
        if gains.iter().all(|gain| gain.version != "avx2" || gain.times >= LEAST) {
            return ExitCode::SUCCESS;
        }
    }
    println!("a kernel is not {LEAST} times as fast as its portable version: was its inner loop inlined?");
    ExitCode::FAILURE
}
