//! Records operation logs of a trace and replays them on the prefix index.
//!
//! `index record --trace FILE --workers N --lru BLOCKS --out LOG`, then `index MODE LOG [--threads N] [--rate R]`, or both
//! in one: `index replay --trace FILE --workers N [--lru BLOCKS] [--threads N]`. `compare_index.py` runs it beside a peer's.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its figures")]

use std::{
    fs::File,
    io::{BufReader, BufWriter, Write},
};

use starling_bench::index_bench::{
    command::Command,
    cpu,
    heap::Counting,
    ours::Ours,
    record::{Recording, record},
};

#[global_allocator]
static HEAP: Counting = Counting;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(answer) => println!("{answer}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

fn run(arguments: &[String]) -> Result<String, String> {
    match arguments.first().map(String::as_str) {
        Some("record") => {
            let out = text(arguments, "--out").ok_or("record wants --out LOG")?;
            write_log(arguments, out)
        }
        Some("replay") => replay(arguments),
        Some("hash") => Ok(hash_rate()),
        _ => {
            let command = Command::parse(arguments)?;
            command.run(|| Ours::new(command.log.workers, command.threads))
        }
    }
}

fn text<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    let at = arguments.iter().position(|word| word == name)?;
    arguments.get(at + 1).map(String::as_str)
}

fn number(arguments: &[String], name: &str, default: u32) -> Result<u32, String> {
    text(arguments, name).map_or(Ok(default), |word| word.parse().map_err(|_| format!("{name} wants a number")))
}

fn write_log(arguments: &[String], out: &str) -> Result<String, String> {
    let trace = text(arguments, "--trace").ok_or("record wants --trace FILE")?;
    let how = Recording {
        workers: number(arguments, "--workers", 16)?,
        cache_blocks: number(arguments, "--lru", 16_384)? as usize,
        block_tokens: number(arguments, "--block", 16)?,
    };
    let file = File::open(trace).map_err(|error| format!("{trace}: {error}"))?;
    let log = record(BufReader::new(file), how)?;
    let create = || {
        let mut writer = BufWriter::new(File::create(out)?);
        log.write(&mut writer)?;
        writer.flush()
    };
    create().map_err(|error| format!("{out}: {error}"))?;
    let (found, stored, removed) = log.totals();
    let ops = log.ops.len();
    Ok(format!("{{\"ops\":{ops},\"queried\":{found},\"stored\":{stored},\"removed\":{removed}}}"))
}

/// Records to a temporary file and measures everything on it.
fn replay(arguments: &[String]) -> Result<String, String> {
    let path = std::env::temp_dir().join(format!("index-{}.log", std::process::id()));
    let path = path.to_str().ok_or("the temporary folder has no readable name")?;
    let mut lines = vec![format!("record {}", write_log(arguments, path)?)];
    let threads = number(arguments, "--threads", 1)?.to_string();
    for mode in ["closed", "apply", "paced", "order", "rest", "memory", "check"] {
        let words = [mode, path, "--threads", &threads].map(str::to_owned);
        let command = Command::parse(&words)?;
        lines.push(format!("{mode} {}", command.run(|| Ours::new(command.log.workers, command.threads))?));
    }
    std::fs::remove_file(path).map_err(|error| format!("{path}: {error}"))?;
    Ok(lines.join("\n"))
}

/// Bytes of token ids hashed in a second of CPU time, by block size; whole prompts and one block at a time.
fn hash_rate() -> String {
    use starling_kv::hash::{BlockHasher, HashSeed, block_hashes};
    let tokens: Vec<u32> = (0..1 << 16).collect();
    let mut lines = Vec::new();
    for block in [16usize, 32, 64] {
        let timed = |mut once: Box<dyn FnMut() -> usize + '_>| {
            let began = cpu::used();
            let rounds = 200;
            let blocks: usize = (0..rounds).map(|_| std::hint::black_box(once())).sum();
            let bytes = blocks as f64 * block as f64 * 4.0;
            bytes / (cpu::used() - began).as_secs_f64() / 1e9
        };
        let whole = timed(Box::new(|| block_hashes(HashSeed(7), &tokens, block).len()));
        let grown = timed(Box::new(|| {
            let mut hasher = BlockHasher::new(HashSeed(7), block);
            (block..=tokens.len()).step_by(block).for_each(|end| hasher.extend(&tokens[..end]));
            hasher.hashes().len()
        }));
        lines.push(format!("{{\"block\":{block},\"whole_gb_s\":{whole:.2},\"grown_gb_s\":{grown:.2}}}"));
    }
    lines.join("\n")
}
