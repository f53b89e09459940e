//! What it costs to move KV blocks between two processes: every transport, and the machine's own limits.
//!
//! `transfer ours [mem|shm|ucx|tcp ...]` | `transfer limits` | `transfer faults [RUNS]` | `transfer idle [SECONDS]`
//!
//! Prints one line of JSON for each measurement; `bench/compare_transfer.py` runs it beside other libraries and makes the
//! table.

mod faults;
mod limits;
mod loads;
mod ours;
mod peer;

/// Anything that went wrong ends the measurement.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |usual| words.get(1).map_or(Ok(usual), |word| word.parse::<usize>());
    match words.first().map(String::as_str) {
        Some("ours") => ours::measure(&words[1..]),
        Some("limits") => limits::measure(),
        Some("faults") => faults::measure(number(10)?),
        Some("idle") => faults::idle(number(10)? as u64),
        Some("serve") => peer::serve(),
        Some("serve-bare") => limits::serve(),
        _ => Err("transfer ours|limits|faults|idle".into()),
    }
}
