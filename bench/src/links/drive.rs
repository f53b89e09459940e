//! Starts the two sides of each measurement, carrier after carrier, round after round, and says who passes.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use super::{
    common::{Failure, Report, runtime},
    handshake::handshakes,
};
use crate::{Setting, argument, median};

/// No random numbers are drawn; phases of paced streams follow from their numbers.
const SEED: u64 = 0;

/// One thing that is measured.
struct Scenario {
    name: &'static str,
    carriers: &'static [&'static str],
    arguments: &'static [&'static str],
    /// Rounds of the mesh and of the bare socket; the others have at most three.
    rounds: usize,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario {
        name: "unpaced",
        carriers: &["bare", "mesh", "tls", "loop", "actors", "velo"],
        arguments: &["--streams", "1000", "--warm", "300", "--measure", "1000"],
        rounds: 7,
    },
    Scenario {
        name: "paced",
        carriers: &["bare", "mesh", "tls", "actors", "velo"],
        arguments: &["--streams", "1000", "--interval", "20000", "--warm", "500", "--measure", "2000"],
        rounds: 7,
    },
    Scenario {
        name: "unary",
        carriers: &["bare", "mesh", "tls", "actors", "velo"],
        arguments: &["--calls", "4000"],
        rounds: 7,
    },
    Scenario {
        name: "10k",
        carriers: &["mesh", "bare"],
        arguments: &[
            "--streams",
            "10000",
            "--interval",
            "100000",
            "--warm",
            "1500",
            "--measure",
            "2000",
            "--stuck",
            "1",
        ],
        rounds: 3,
    },
];

/// Runs what `arguments` ask for (`--all`, or `--only NAME`; `--carriers a,b`; `--rounds N`) and prints one table.
///
/// `velo` is measured when its program is there: in `peers/release` of the target folder, or where
/// `STARLING_BENCH_PEERS` says.
///
/// # Errors
/// Whatever keeps the mesh or the bare socket from being measured; another library that fails is left out.
pub fn drive(arguments: &[String]) -> Result<(), Failure> {
    let only: String = argument(arguments, "--only", String::new())?;
    let chosen: String = argument(arguments, "--carriers", String::new())?;
    let rounds: usize = argument(arguments, "--rounds", 0)?;
    let setting = Setting::here(SEED, 2, "none");
    println!("{}, load {}, commit {}, seed {SEED}", setting.machine, setting.load, setting.commit);
    println!("source on core 0, sink on core 1; carriers in turns; medians");
    let mut rows = Vec::new();
    for scenario in SCENARIOS.iter().filter(|scenario| only.is_empty() || only == scenario.name) {
        let carriers: Vec<&str> = (scenario.carriers.iter().copied())
            .filter(|carrier| chosen.is_empty() || chosen.split(',').any(|name| name == *carrier))
            .filter(|carrier| *carrier != "velo" || program("velo").is_ok_and(|path| path.exists()))
            .collect();
        let seen = rounds_of(scenario, &carriers, if rounds > 0 { rounds } else { scenario.rounds })?;
        show(scenario, &carriers, &seen);
        rows.extend(bars(scenario.name, &seen));
    }
    if only.is_empty() || only == "handshake" {
        let (full, resumed) = runtime()?.block_on(handshakes(50))?;
        println!("\nTLS handshake, dial to first byte back, both sides in one process, median of 50");
        println!("  full     {:6.2} ms, {:6.2} ms CPU", full.wall_ms, full.cpu_ms);
        println!("  resumed  {:6.2} ms, {:6.2} ms CPU", resumed.wall_ms, resumed.cpu_ms);
    }
    println!("\n{:<58} {:>12} {:>12} {:>8} {:>8}  ok", "bar", "mesh", "bare", "seen", "bar");
    for Bar { what, mesh, bare, seen, bar, ok } in &rows {
        println!("{what:<58} {mesh:>12} {bare:>12} {seen:>8} {bar:>8}  {}", if *ok { "yes" } else { "NO" });
    }
    Ok(())
}

type Seen = BTreeMap<&'static str, Vec<Report>>;

fn rounds_of(scenario: &Scenario, carriers: &[&'static str], rounds: usize) -> Result<Seen, Failure> {
    let mut seen = Seen::new();
    for round in 0..rounds {
        for carrier in carriers.iter().copied() {
            let compared = matches!(carrier, "mesh" | "bare");
            if !compared && round >= 3 {
                continue;
            }
            match measure(carrier, scenario.arguments) {
                Ok(report) => seen.entry(carrier).or_default().push(report),
                Err(error) if compared => return Err(error),
                Err(error) => eprintln!("{} {carrier}: {error}", scenario.name),
            }
        }
    }
    Ok(seen)
}

/// Names the program of `bench/peers` when it is not in the target folder of this one.
const PEERS: &str = "STARLING_BENCH_PEERS";

/// The program that plays a carrier.
fn program(carrier: &str) -> Result<PathBuf, Failure> {
    let own = std::env::current_exe()?;
    if carrier != "velo" {
        return Ok(own);
    }
    if let Some(named) = std::env::var_os(PEERS) {
        return Ok(named.into());
    }
    let target = own.parent().and_then(|release| release.parent()).ok_or("no target folder")?;
    Ok(target.join("peers/release/starling-bench-peers"))
}

/// Ends a side when it is dropped.
struct Side(Child);

impl Drop for Side {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

fn start(
    carrier: &str,
    role: &str,
    arguments: &[&str],
) -> Result<(Side, BufReader<std::process::ChildStdout>), Failure> {
    let mut command = Command::new(program(carrier)?);
    command.args(["side", role, "--carrier", carrier]).args(arguments).stdout(Stdio::piped()).stdin(Stdio::null());
    let mut child = command.spawn()?;
    let stdout = child.stdout.take().ok_or("no output")?;
    Ok((Side(child), BufReader::new(stdout)))
}

fn measure(carrier: &str, arguments: &[&str]) -> Result<Report, Failure> {
    let (source, mut says) = start(carrier, "source", &[])?;
    let mut address = String::new();
    says.read_line(&mut address)?;
    let pid = source.0.id().to_string();
    let to_source = ["--address", address.trim(), "--pid", pid.as_str()];
    let (_sink, mut says) = start(carrier, "sink", &[&to_source, arguments].concat())?;
    let mut report = String::new();
    says.read_line(&mut report)?;
    serde_json::from_str(&report).map_err(|error| format!("{carrier}: no report ({error})").into())
}

fn middle(seen: &Seen, carrier: &str, figure: impl Fn(&Report) -> f64) -> f64 {
    median(&seen.get(carrier).into_iter().flatten().map(figure).collect::<Vec<_>>())
}

fn show(scenario: &Scenario, carriers: &[&str], seen: &Seen) {
    println!("\n{}: {}", scenario.name, scenario.arguments.join(" "));
    println!(
        "  {:<7} {:>12} {:>10} {:>14} {:>10} {:>10} {:>10} {:>9} {:>8} {:>8}",
        "carrier", "tokens/s", "calls/s", "CPU ns (src)", "p50 us", "p99 us", "RSS MB", "empty MB", "kept", "gap ms"
    );
    for carrier in carriers {
        let of = |figure: fn(&Report) -> f64| middle(seen, carrier, figure);
        println!(
            "  {:<7} {:>12.0} {:>10.0} {:>7.0} ({:>4.0}) {:>10.1} {:>10.1} {:>10.1} {:>9.1} {:>8.3} {:>8.1}",
            carrier,
            of(|report| report.tokens_per_s),
            of(|report| report.calls_per_s),
            of(|report| report.cpu_ns),
            of(|report| report.source_cpu_ns),
            of(|report| report.p50_us),
            of(|report| report.p99_us),
            of(|report| report.resident) / 1e6,
            of(|report| report.resident_before) / 1e6,
            of(|report| report.kept),
            of(|report| report.longest_gap_ms),
        );
    }
}

/// One line of the last table.
struct Bar {
    what: String,
    mesh: String,
    bare: String,
    seen: String,
    bar: String,
    ok: bool,
}

/// The median over rounds of mesh divided by bare: both were measured next to each other.
fn ratio(seen: &Seen, figure: impl Fn(&Report) -> f64) -> f64 {
    let (mesh, bare) = (seen.get("mesh"), seen.get("bare"));
    let pairs = mesh.into_iter().flatten().zip(bare.into_iter().flatten());
    median(&pairs.map(|(mesh, bare)| figure(mesh) / figure(bare)).collect::<Vec<_>>())
}

fn bars(scenario: &str, seen: &Seen) -> Vec<Bar> {
    let against = |what: &str, figure: fn(&Report) -> f64, least: Option<f64>, most: Option<f64>| {
        let seen_ratio = ratio(seen, figure);
        Bar {
            what: what.to_owned(),
            mesh: format!("{:.1}", middle(seen, "mesh", figure)),
            bare: format!("{:.1}", middle(seen, "bare", figure)),
            seen: format!("{seen_ratio:.2}"),
            bar: least.map_or_else(|| format!("<= {:.1}", most.unwrap_or(0.0)), |least| format!(">= {least:.1}")),
            ok: seen_ratio > 0.0
                && least.is_none_or(|least| seen_ratio >= least)
                && most.is_none_or(|most| seen_ratio <= most),
        }
    };
    let alone = |what: &str, seen: f64, bar: &str, ok: bool| Bar {
        what: what.to_owned(),
        mesh: format!("{seen:.2}"),
        bare: String::new(),
        seen: String::new(),
        bar: bar.to_owned(),
        ok,
    };
    match scenario {
        "unpaced" => vec![
            against("1,000 streams unpaced, tokens/s", |report| report.tokens_per_s, Some(0.8), None),
            against("1,000 streams unpaced, CPU ns per token", |report| report.cpu_ns, None, Some(1.3)),
        ],
        "paced" => vec![
            against("1,000 streams x 50 tokens/s, p50 us", |report| report.p50_us, None, Some(1.5)),
            against("1,000 streams x 50 tokens/s, p99 us", |report| report.p99_us, None, Some(2.0)),
            against("1,000 streams x 50 tokens/s, CPU ns per token", |report| report.cpu_ns, None, Some(1.3)),
        ],
        "unary" => vec![against("unary call of 64 bytes, p50 us", |report| report.p50_us, None, Some(1.3))],
        _ => {
            let of = |figure: fn(&Report) -> f64| middle(seen, "mesh", figure);
            let (resident, kept) = (of(|report| report.resident) / 1e6, of(|report| report.kept));
            let gap = of(|report| report.longest_gap_ms);
            vec![
                alone("10,000 streams open, MB of both ends", resident, "<= 200", resident > 0.0 && resident <= 200.0),
                alone("10,000 streams, one reader stuck: the others keep", kept, ">= 0.95", kept >= 0.95),
                alone("10,000 streams at 10/s: longest silence, ms", gap, "<= 1000", gap > 0.0 && gap <= 1000.0),
            ]
        }
    }
}
