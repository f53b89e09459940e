//! What every benchmark of this crate needs: what it ran on, and medians.
//!
//! Called by the programs in `src/bin`. Every figure they print comes with the machine, the seed and the commit.

pub mod index_bench;
#[allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a benchmark prints its figures, and its tasks end with their process"
)]
pub mod links;
pub mod selection;
pub mod sim;

use std::{path::PathBuf, process::Command};

use serde::Serialize;
use starling_engine::Activations;

/// Where and of what a figure was taken.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// The CPU's name and the number of its cores.
    pub machine: String,
    /// Processes that wanted a core in the last minute: above the number of cores, figures are too low.
    pub load: String,
    /// The commit, with `+` when the working tree differs from it.
    pub commit: String,
    /// Where made-up prompts come from.
    pub seed: u64,
    /// Threads that compute.
    pub threads: usize,
    /// Inner loops in use.
    pub kernels: String,
}

impl Setting {
    /// Looks around.
    #[must_use]
    pub fn here(seed: u64, threads: usize, kernels: &str) -> Self {
        let cpu = read("/proc/cpuinfo");
        let name = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown CPU");
        let name = name.trim_start_matches(['\t', ':', ' ']);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let load = read("/proc/loadavg").split(' ').next().unwrap_or("").to_owned();
        let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
        let commit = git(&["rev-parse", "--short", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
        Self {
            machine: format!("{name}, {cores} cores"),
            load,
            commit: format!("{commit}{}", if changed { "+" } else { "" }),
            seed,
            threads,
            kernels: kernels.to_owned(),
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
}

/// The middle value; the mean of the two in the middle of an even number; 0 of none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[len / 2],
        len => f64::midpoint(sorted[len / 2 - 1], sorted[len / 2]),
    }
}

/// CPU seconds this process has used, all threads together; 0 where the system does not say.
#[must_use]
pub fn cpu_seconds() -> f64 {
    /// Ticks per second that Linux reports in, fixed by its interface.
    const TICKS: f64 = 100.0;
    let stat = read("/proc/self/stat");
    // Fields are counted after the program's name, which may hold anything.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / TICKS
}

/// A fixed sequence of numbers: made-up prompts are the same in every run.
#[derive(Debug, Clone)]
pub struct Seeded(u64);

impl Seeded {
    /// Starts at `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u32) -> u32 {
        // A linear congruence is random enough for token ids.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(bound.max(1))) as u32
    }
}

/// The value after `name` on the command line, parsed; `fallback` when it is absent.
///
/// # Errors
/// Says which argument is not what it should be.
pub fn argument<T: std::str::FromStr>(arguments: &[String], name: &str, fallback: T) -> Result<T, String> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(fallback) };
    let value = arguments.get(at + 1).ok_or_else(|| format!("{name} needs a value"))?;
    value.parse().map_err(|_| format!("{name} cannot be {value:?}"))
}

/// Where `make model` leaves the default model.
#[must_use]
pub fn model_path() -> PathBuf {
    std::env::home_dir().unwrap_or_default().join(".cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// What `--activations` says.
///
/// # Errors
/// Says what it may be.
pub fn activations(arguments: &[String]) -> Result<Activations, String> {
    match argument(arguments, "--activations", "int16".to_owned())?.as_str() {
        "int8" => Ok(Activations::Int8),
        "int16" => Ok(Activations::Int16),
        other => Err(format!("--activations cannot be {other:?}; int8 or int16")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn arguments_are_parsed_or_named() {
        let line: Vec<String> = ["--threads", "2", "--runs", "x"].map(str::to_owned).to_vec();
        assert_eq!(argument(&line, "--threads", 0usize), Ok(2));
        assert_eq!(argument(&line, "--seed", 7u64), Ok(7));
        assert!(argument(&line, "--runs", 1usize).unwrap_err().contains("--runs"));
    }
}
