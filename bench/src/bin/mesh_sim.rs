//! Runs the product's membership and directory on a virtual clock, and holds them to their bars.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![allow(clippy::print_stderr, reason = "and its progress")]

use std::{
    error::Error,
    process::ExitCode,
    time::{Duration, Instant},
};

use starling_bench::{
    argument,
    sim::{BARS, HEAD, Options, Outcome, Row, SCENARIOS, Scenario, Summary, fuzz, seconds, table},
};

const HELP: &str = "\
mesh_sim: clusters of 3 to 10,000 nodes on a virtual clock

  mesh_sim --list                                  the scenarios
  mesh_sim --scenario NAME [options]               one scenario; each seed's figures, then a table
    --nodes N          nodes (default: the scenario's)
    --loss P           share of the datagrams lost, 0 to 1 (0)
    --seed S           the first seed (1)
    --seeds K          that many seeds (1)
    --minutes M        length of the scenario `steady` (60)
    --trace            who took whom for dead without reason
    --machines         a node that dies takes its machine along: connections to it are not refused but unanswered
  mesh_sim --all [--long] [--only NAME]            the table of bars; --long adds what takes many minutes
  mesh_sim --fuzz SECONDS [--seed-from N]          random faults for so long; prints the seed of each run that fails
  mesh_sim --fuzz-seed N                           one such run, told in words

The same seed gives the same run. The exit status is 1 when a bar or an invariant does not hold.
";

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let ok = if given("--list") {
        for scenario in SCENARIOS {
            println!("{:10} {} ({} nodes)", scenario.name, scenario.about, scenario.nodes);
        }
        true
    } else if given("--scenario") {
        one(&arguments)?
    } else if given("--all") {
        all(given("--long"), &argument(&arguments, "--only", String::new())?)
    } else if given("--fuzz-seed") {
        tell(argument(&arguments, "--fuzz-seed", 1)?)
    } else if given("--fuzz") {
        search(argument(&arguments, "--fuzz", 60)?, argument(&arguments, "--seed-from", 1)?)
    } else {
        print!("{HELP}");
        given("--help")
    };
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One scenario, as the command line says.
fn one(arguments: &[String]) -> Result<bool, Box<dyn Error>> {
    let name: String = argument(arguments, "--scenario", String::new())?;
    let scenario = Scenario::named(&name).ok_or_else(|| format!("no scenario {name:?}; --list shows them"))?;
    let fallback = Options::default();
    let options = Options {
        nodes: argument(arguments, "--nodes", scenario.nodes)?,
        loss: argument(arguments, "--loss", 0.0)?,
        minutes: argument(arguments, "--minutes", fallback.minutes)?,
        machines_die: arguments.iter().any(|argument| argument == "--machines"),
        progress: true,
        trace: arguments.iter().any(|argument| argument == "--trace"),
        ..fallback
    };
    let first = argument(arguments, "--seed", 1)?;
    let seeds = first..first + argument(arguments, "--seeds", 1u64)?;
    Ok(report(&run(scenario, options, seeds)))
}

/// The table of bars, each line as soon as it is known.
fn all(long: bool, only: &str) -> bool {
    let mut ok = true;
    print!("{HEAD}");
    for row in BARS.iter().filter(|row| (long || !row.long) && (only.is_empty() || row.scenario == only)) {
        let Some(scenario) = Scenario::named(row.scenario) else { continue };
        let &Row { nodes, loss, machines_die, .. } = row;
        let options = Options { nodes, loss, machines_die, progress: row.long, ..Options::default() };
        let summaries = run(scenario, options, 1..row.seeds + 1);
        print!("{}", table(&summaries));
        ok &= summaries.iter().all(|summary| summary.ok);
    }
    ok
}

fn report(summaries: &[Summary]) -> bool {
    print!("{HEAD}{}", table(summaries));
    summaries.iter().all(|summary| summary.ok)
}

/// Runs a scenario with each seed; what each came to goes to stderr.
fn run(scenario: &Scenario, options: Options, seeds: std::ops::Range<u64>) -> Vec<Summary> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    let Options { nodes, loss, machines_die, .. } = options;
    for seed in seeds {
        let begun = Instant::now();
        let outcome = (scenario.run)(&Options { seed, ..options });
        let took = begun.elapsed().as_secs_f64();
        let machines = if machines_die { " --machines" } else { "" };
        eprintln!(
            "mesh_sim --scenario {} --nodes {nodes} --loss {loss} --seed {seed}{machines}: {:.0} s of virtual time, {} events in {took:.1} s{}",
            scenario.name,
            seconds(outcome.time),
            outcome.events,
            if outcome.ok() { "" } else { ": NOT OK" }
        );
        for figure in outcome.figures.iter().filter(|figure| !figure.ok()) {
            eprintln!(
                "    {}: {:.2} {}, the bar is {:.2}",
                figure.name,
                figure.value,
                figure.unit,
                figure.bar.unwrap_or(0.0)
            );
        }
        if options.trace {
            outcome.log.iter().for_each(|line| eprintln!("    {line}"));
        }
        for broken in &outcome.broken {
            eprintln!("    {broken}");
        }
        outcomes.push(outcome);
    }
    let lost = if loss > 0.0 { format!(", {:.0} % lost", loss * 100.0) } else { String::new() };
    let machines = if machines_die { ", machines die" } else { "" };
    Summary::all(&format!("{}, {nodes} nodes{lost}{machines}", scenario.name), &outcomes)
}

/// Random runs until the time is over.
fn search(time_s: u64, first: u64) -> bool {
    let (begun, mut seed, mut failed) = (Instant::now(), first, 0);
    while begun.elapsed() < Duration::from_secs(time_s) {
        let outcome = fuzz(seed, |_| ());
        if !outcome.ok() {
            failed += 1;
            println!("mesh_sim --fuzz-seed {seed}: {}", outcome.broken.join("; "));
        }
        seed += 1;
    }
    println!("{} random runs from seed {first} on, {failed} of them broke an invariant", seed - first);
    failed == 0
}

fn tell(seed: u64) -> bool {
    let outcome = fuzz(seed, |deed| println!("{deed}"));
    outcome.broken.iter().for_each(|broken| println!("{broken}"));
    outcome.ok()
}
