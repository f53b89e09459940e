//! Checks KV blocks in GPU memory and measures how fast they move: `cargo run --release -p starling-gpu-check`.
//!
//! Prints one line a check and a table of rates beside plain copies of the driver in the same run; ends with 0 when all
//! checks hold, and when there is no GPU, which it says. Under 4 minutes. Seed, sizes and rounds are fixed and printed.

#![allow(clippy::print_stdout, reason = "a program whose output is its result")]

mod checks;
mod peer;
mod rates;
mod staged;
mod work;

use std::process::ExitCode;

use starling_cuda::{CudaError, Gpu};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => everything(),
        ["compile"] => starling_cuda::compile().map(|ptx| print!("{ptx}")).map_err(Into::into),
        ["peer", ticket, pages] => peer::child(ticket, pages),
        _ => Err("usage: starling-gpu-check [compile]".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn everything() -> Outcome<()> {
    let gpu = match Gpu::open(0) {
        Err(CudaError::Missing(why)) => {
            println!("no GPU: {why}; nothing was checked");
            return Ok(());
        }
        opened => opened?,
    };
    let (free, total) = gpu.memory()?;
    println!("{}, {:.1} of {:.1} GiB free; seed {}", gpu.name(), work::gib(free), work::gib(total), work::SEED);
    checks::all(&gpu)?;
    rates::all(&gpu)?;
    staged::all(&gpu)?;
    peer::parent(&gpu)?;
    println!("all checks hold");
    Ok(())
}
