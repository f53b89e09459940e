//! The replay programs' command line: `MODE LOG [--threads N] [--rate R]`, one JSON line as the answer.
//!
//! Called by both replay programs. Standard library alone.

use std::{fs::File, io::BufReader};

use super::{
    drive::{self, Subject, quantile},
    log::Log,
};

/// What to replay and how.
#[derive(Debug, Clone)]
pub struct Command {
    /// `closed`, `apply`, `paced`, `rest`, `order`, `memory` or `check`.
    pub mode: String,
    /// The log.
    pub log: Log,
    /// Threads that apply events.
    pub threads: usize,
    /// Block operations per second, for `paced`.
    pub rate: f64,
}

impl Command {
    /// Reads it from the arguments after the program's name.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub fn parse(arguments: &[String]) -> Result<Self, String> {
        let [mode, path, options @ ..] = arguments else {
            return Err("usage: closed|apply|paced|rest|order|memory|check LOG [--threads N] [--rate R]".to_owned());
        };
        let option = |name: &str, default: f64| match options.iter().position(|word| word == name) {
            None => Ok(default),
            Some(at) => options.get(at + 1).and_then(|word| word.parse().ok()).ok_or(format!("{name} wants a number")),
        };
        let (threads, rate) = (option("--threads", 1.0)? as usize, option("--rate", 1e7)?);
        let file = File::open(path).map_err(|error| format!("{path}: {error}"))?;
        let log = Log::read(&mut BufReader::new(file)).map_err(|error| format!("{path}: {error}"))?;
        Ok(Self { mode: mode.clone(), log, threads: threads.max(1), rate })
    }

    /// Runs it; the answer as JSON.
    ///
    /// # Errors
    /// An unknown mode.
    pub fn run<S: Subject>(&self, make: impl FnOnce() -> S) -> Result<String, String> {
        let log = &self.log;
        let lookups = |sorted: &[u64]| {
            let at = |share| quantile(sorted, share) as f64 / 1e3;
            format!("\"p50_us\":{:.3},\"p99_us\":{:.3},\"p999_us\":{:.3}", at(0.5), at(0.99), at(0.999))
        };
        Ok(match self.mode.as_str() {
            mode @ ("closed" | "apply") => {
                let took = drive::closed(&mut make(), log, mode == "closed");
                let rate = took.blocks as f64 / took.elapsed.as_secs_f64();
                let (elapsed, over) = (took.elapsed.as_secs_f64(), took.handed_over.as_secs_f64());
                let (blocks, cpu) = (took.blocks, took.cpu.as_secs_f64());
                let each = cpu * 1e9 / blocks.max(1) as f64;
                format!(
                    "{{\"block_ops\":{blocks},\"seconds\":{elapsed:.4},\"handed_over\":{over:.4},\"rate\":{rate:.0},\
                     \"cpu_ns_per_block\":{each:.2}}}"
                )
            }
            "paced" => {
                let saw = drive::paced(&mut make(), log, self.rate);
                let (behind, drain) = (saw.behind.as_secs_f64() * 1e3, saw.drain.as_secs_f64() * 1e3);
                format!("{{{},\"behind_ms\":{behind:.3},\"drain_ms\":{drain:.3}}}", lookups(&saw.lookups))
            }
            "rest" => {
                let mut subject = make();
                drive::closed(&mut subject, log, false);
                let (sorted, all) = drive::at_rest(&mut subject, log);
                let rate = sorted.len() as f64 / all.as_secs_f64();
                format!("{{{},\"lookups_per_s\":{rate:.0}}}", lookups(&sorted))
            }
            "order" => format!("{{{}}}", lookups(&drive::in_order(&mut make(), log))),
            "memory" => {
                let memory = drive::memory(make, log);
                format!(
                    "{{\"before\":{:.1},\"pairs_before\":{},\"after\":{:.1},\"pairs_after\":{}}}",
                    memory.before.0, memory.before.1, memory.after.0, memory.after.1
                )
            }
            "check" => {
                let (asked, wrong) = drive::check(&mut make(), log, 2_000);
                format!("{{\"asked\":{asked},\"wrong\":{wrong}}}")
            }
            mode => return Err(format!("no mode {mode}")),
        })
    }
}
