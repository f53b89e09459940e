//! Measured figures against their bars: printed, and kept for `bench/mesh_bars.py` when it asks.

use std::{fs::File, io::Write, time::Duration};

/// Appends a line to a file, whole even when several processes do.
fn append(path: impl AsRef<std::path::Path>, line: &str) {
    let written = File::options().create(true).append(true).open(path).and_then(|mut file| writeln!(file, "{line}"));
    if let Err(error) = written {
        eprintln!("not kept: {line}: {error}");
    }
}

/// Notes a figure and fails when it is above its bar. `name` says what was measured, with its unit. Where figures are
/// gathered, a missed bar is only noted, so that the rest of the test is measured too.
pub(crate) fn bar(name: &str, seen: f64, at_most: f64) {
    eprintln!("figure: {name}: {seen:.2} (bar {at_most})");
    if let Some(path) = std::env::var_os("STARLING_FIGURES") {
        let line = serde_json::json!({"name": name, "seen": seen, "bar": at_most, "ok": seen <= at_most});
        append(path, &line.to_string());
        return;
    }
    assert!(seen <= at_most, "{name}: {seen:.2} is above the bar of {at_most}");
}

/// A time against its bar in seconds.
pub(crate) fn seconds(name: &str, took: Duration, at_most: f64) {
    bar(&format!("{name}, s"), took.as_secs_f64(), at_most);
}

/// How long a fault lasts: `short` in every run, `long` when the bars are measured in full.
pub(crate) fn lasting(short: u64, long: u64) -> Duration {
    let full = std::env::var_os("STARLING_LONG").is_some_and(|value| value == "1");
    Duration::from_secs(if full { long } else { short })
}

/// Says that a test did not run and why, and counts it for the end of the whole run.
pub(crate) fn skipped(reason: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    eprintln!("skipped: {test}: {reason}");
    append(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("skipped.txt"), &format!("{test}: {reason}"));
}
