//! How long a shard takes to choose among 32, 1,024 and 10,000 workers; one line of JSON a figure.
//!
//! `selection [--workers 32,1024,10000] [--samples 3000] [--policy starling]`. `bench/compare_selection.py` runs it beside a peer's.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its figures")]

use starling_actors::route::policy::PolicyName;
use starling_bench::selection::measure;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run(arguments: &[String]) -> Result<(), String> {
    let text = |name: &str, default: &str| {
        let at = arguments.iter().position(|word| word == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default, String::as_str).to_owned()
    };
    let samples = text("--samples", "3000").parse().map_err(|_| "--samples wants a number".to_owned())?;
    let policy: PolicyName = text("--policy", "starling").parse().map_err(|error| format!("{error}"))?;
    for workers in text("--workers", "32,1024,10000").split(',') {
        let workers: usize = workers.parse().map_err(|_| "--workers wants numbers".to_owned())?;
        for row in measure(policy, workers.max(1), samples)? {
            println!("{}", serde_json::to_string(&row).map_err(|error| error.to_string())?);
        }
    }
    Ok(())
}
