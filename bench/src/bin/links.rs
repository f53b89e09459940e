//! What links cost: tokens/s, latency, CPU and memory against a bare socket and other libraries.
//!
//! `links --all` | `links [--only unpaced|paced|unary|10k|handshake] [--carriers mesh,bare,tls,loop,actors,velo]
//!     [--rounds N]`
//! Carriers: `mesh` (this project, TLS 1.3), `bare` (plain TCP, frames by hand, a task for each stream as well), `tls`
//! (the same under the mesh's TLS), `loop` (plain TCP without tasks and queues), `actors` (ractor_cluster alone) and
//! `velo`, when `bench/peers` has been built with `CARGO_TARGET_DIR=target/peers`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use starling_bench::links::{Failure, drive, side};

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "side") { side(&arguments) } else { drive(&arguments) }
}
