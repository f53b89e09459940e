//! `starling bench`: a whole cluster on a virtual clock, under recorded or made-up traffic.
//!
//! Turns flags into traffic, a setup and a list of runs; prints a table, writes JSON and a picture. The runs are
//! [`starling_replay`]'s. Never: opens a socket, reads the data folder.

use std::{
    io::IsTerminal,
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use serde::Serialize;
use starling_actors::route::policy::PolicyName;
use starling_engine::simulated::Timing;
use starling_replay::{
    plot::svg,
    report::{Quantiles, Slo},
    setup::{Faults, Setup},
    sweep::{Pace, Point, Sweep},
    trace::{Asked, mooncake},
    workload::{Agents, Sessions, agents, sessions},
};

use super::{Failure, table};

const EXAMPLES: &str = "\
Examples:
  starling bench replay conversation_trace.jsonl --workers 8
      Mooncake's trace at six loads, Starling beside four other policies
  starling bench replay TRACE --workers 8,32 --policy starling,dynamo --load 0.8,1.0 --json out.json --svg out.svg
  starling bench replay TRACE --speedup 1,2 --requests 3000
  starling bench replay TRACE --concurrency 256
  starling bench replay --sessions 20000 --rate 50 --turns 4 --workers 32 --gateways 1,8
  starling bench replay --agentic 500 --rate 2 --workers 8
  starling bench replay --sessions 20000 --rate 50 --gateways 8 --kill-owner-at 60 --freeze-gateway-at 90:60

The product's router, index, scheduler and block pool run on a virtual clock in
front of simulated engines; only computation, wires and time are made up. The
same flags give the same figures. `starling` asks one shard for all gateways;
the other policies decide in each gateway, as routers elsewhere do.

Columns: times in milliseconds; `ideal` is the p99 of time to first token if each
request had an idle worker and one endless cache; `good` the share within
--slo-ttft-ms and --slo-itl-ms; `hit` the prompt tokens found in a cache, `next`
the same of requests that go on from another; `cov` the spread of the workers'
busy time; `regret` by how much another worker would have begun sooner, mean;
`alone` decisions that gateways took without a shard.

A load is a share of the capacity: requests a second under the policy dynamo
when all traffic waits from the beginning.

Exit codes: 0 done, 1 a request failed or a file cannot be read or written,
2 wrong command line.";

/// Measure routing without a cluster.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Serve a trace, or made-up sessions or agents, in a simulated cluster
    #[command(after_long_help = EXAMPLES)]
    Replay(Box<Replay>),
}

/// The flags.
#[derive(Debug, Args)]
struct Replay {
    /// Mooncake trace: JSON lines with timestamp, input_length, output_length, hash_ids
    #[arg(value_name = "TRACE", conflicts_with_all = ["sessions", "agentic"])]
    trace: Option<PathBuf>,
    /// Make up so many conversations of several turns instead of a trace
    #[arg(long, value_name = "N", conflicts_with = "agentic")]
    sessions: Option<usize>,
    /// Make up so many agents that branch instead of a trace
    #[arg(long, value_name = "N")]
    agentic: Option<usize>,
    /// Sessions or agents that begin in a second
    #[arg(long, value_name = "R", default_value_t = 10.0)]
    rate: f64,
    /// Turns of a session, mean
    #[arg(long, value_name = "T", default_value_t = 4.0)]
    turns: f64,
    /// Engines; several run one after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "8")]
    workers: Vec<usize>,
    /// Gateways; several run one after the other
    #[arg(long, value_name = "G,..", value_delimiter = ',', default_value = "1")]
    gateways: Vec<usize>,
    /// Policies: starling, dynamo, round-robin, random, p2c, least-loaded, session, prefix-hash
    #[arg(long, value_name = "P,..", value_delimiter = ',', value_parser = PolicyName::from_str,
        default_value = "starling,dynamo,p2c,round-robin,prefix-hash")]
    policy: Vec<PolicyName>,
    /// Arrivals as shares of the capacity [default for a trace: 0.5,0.7,0.8,0.9,1.0,1.2]
    #[arg(long, value_name = "L,..", value_delimiter = ',', conflicts_with_all = ["speedup", "concurrency"])]
    load: Vec<f64>,
    /// Arrivals so many times as fast as the traffic says [default for sessions and agents: 1]
    #[arg(long, value_name = "S,..", value_delimiter = ',', conflicts_with = "concurrency")]
    speedup: Vec<f64>,
    /// Closed loop: so many requests at once, the next comes when one ends
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    concurrency: Vec<usize>,
    /// Only the first so many requests of the trace
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// A good answer begins within so many milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2_000.0)]
    slo_ttft_ms: f64,
    /// A good answer has at most so many milliseconds between tokens, mean
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    slo_itl_ms: f64,
    /// KV blocks of 16 tokens in each engine
    #[arg(long, value_name = "N", default_value_t = 65_536)]
    blocks: u32,
    /// Sequences in a batch
    #[arg(long, value_name = "N", default_value_t = 256)]
    sequences_max: u32,
    /// Tokens in a step
    #[arg(long, value_name = "N", default_value_t = 8_192)]
    batch_tokens_max: u32,
    /// How long steps take: published (the polynomial of Dynamo's mock engine), terms, or a TOML file of rates
    #[arg(long, value_name = "NAME|FILE", default_value = "published")]
    timing: String,
    /// From one node to another, microseconds
    #[arg(long, value_name = "US", default_value_t = 200)]
    link_us: u64,
    /// Within so many milliseconds all gateways hear of a dead router once one has
    #[arg(long, value_name = "MS", default_value_t = 200)]
    gossip_ms: u64,
    /// At this second the router that owns the shard dies (policy starling, at least two gateways)
    #[arg(long, value_name = "SECS")]
    kill_owner_at: Option<f64>,
    /// From this second on a gateway stands still for so many seconds (at least two gateways)
    #[arg(long, value_name = "SECS:FOR", value_parser = freeze)]
    freeze_gateway_at: Option<(f64, f64)>,
    /// Of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw time to first token against load
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// What `--json` holds.
#[derive(Debug, Serialize)]
struct Report {
    traffic: String,
    requests: usize,
    seed: u64,
    slo: Slo,
    points: Vec<Point>,
}

impl Bench {
    pub(super) fn run(self) -> Result<(), Failure> {
        let What::Replay(replay) = self.what;
        replay.run()
    }
}

impl Replay {
    fn run(&self) -> Result<(), Failure> {
        self.check()?;
        let (asked, traffic) = self.traffic()?;
        let slo = Slo { ttft_ms: self.slo_ttft_ms, itl_ms: self.slo_itl_ms };
        let mut points = Vec::new();
        for workers in &self.workers {
            for gateways in &self.gateways {
                let sweep = Sweep::new(&asked, self.setup(*workers, *gateways)?, slo);
                let own = self.serve(&sweep)?;
                print(&own);
                points.extend(own);
            }
        }
        let report = Report { traffic, requests: asked.len(), seed: self.seed, slo, points };
        self.write(&report)?;
        let failed: usize = report.points.iter().map(|point| point.summary.failed).sum();
        if failed > 0 { Err(Failure::Failed(format!("{failed} requests failed"))) } else { Ok(()) }
    }

    fn check(&self) -> Result<(), Failure> {
        let positive = [("--rate", &[self.rate][..]), ("--load", &self.load), ("--speedup", &self.speedup)];
        for (flag, values) in positive {
            if let Some(wrong) = values.iter().find(|value| !(1e-6..=1e6).contains(*value)) {
                return Err(Failure::Usage(format!("{flag} {wrong}: must be a number above 0")));
            }
        }
        if self.turns < 1.0 || !self.turns.is_finite() {
            return Err(Failure::Usage(format!("--turns {}: must be at least 1", self.turns)));
        }
        for (flag, values) in [("--workers", &self.workers), ("--gateways", &self.gateways)] {
            if values.iter().any(|value| !(1..=10_000).contains(value)) {
                return Err(Failure::Usage(format!("{flag}: must be whole numbers from 1 to 10000")));
            }
        }
        let faulty = self.kill_owner_at.is_some() || self.freeze_gateway_at.is_some();
        if faulty && self.gateways.iter().any(|gateways| *gateways < 2) {
            let rule = "--kill-owner-at and --freeze-gateway-at need --gateways 2 or more";
            return Err(Failure::Usage(rule.to_owned()));
        }
        if self.kill_owner_at.is_some_and(|at| !(0.0..=1e9).contains(&at)) {
            return Err(Failure::Usage("--kill-owner-at: must be seconds from 0".to_owned()));
        }
        Ok(())
    }

    fn traffic(&self) -> Result<(Vec<Asked>, String), Failure> {
        let most = self.requests.unwrap_or(usize::MAX);
        match (&self.trace, self.sessions, self.agentic) {
            (Some(path), ..) => {
                let mut asked = mooncake(path).map_err(Failure::failed)?;
                asked.truncate(most.max(1));
                Ok((asked, path.display().to_string()))
            }
            (None, Some(count), _) => {
                let what = Sessions { count: count.max(1), rate: self.rate, turns: self.turns, ..Sessions::default() };
                Ok((sessions(&what, self.seed), format!("{count} sessions, {} a second", self.rate)))
            }
            (None, None, Some(count)) => {
                let what = Agents { count: count.max(1), rate: self.rate, ..Agents::default() };
                Ok((agents(&what, self.seed), format!("{count} agents, {} a second", self.rate)))
            }
            (None, None, None) => {
                Err(Failure::Usage("no traffic: give a TRACE, --sessions N or --agentic N".to_owned()))
            }
        }
    }

    fn setup(&self, workers: usize, gateways: usize) -> Result<Setup, Failure> {
        let seconds = Duration::from_secs_f64;
        Ok(Setup {
            workers,
            gateways,
            blocks: self.blocks,
            sequences: self.sequences_max.max(1),
            step_tokens: self.batch_tokens_max.max(16),
            timing: timing(&self.timing)?,
            wire: Duration::from_micros(self.link_us),
            gossip: Duration::from_millis(self.gossip_ms),
            seed: self.seed,
            faults: Faults {
                kill_owner: self.kill_owner_at.map(seconds),
                freeze_gateway: self.freeze_gateway_at.map(|(at, lasts)| (seconds(at), seconds(lasts))),
            },
            ..Setup::default()
        })
    }

    fn serve(&self, sweep: &Sweep<'_>) -> Result<Vec<Point>, Failure> {
        let (workers, gateways) = (sweep.base.workers, sweep.base.gateways);
        let total = sweep.asked.len();
        let mut capacity = 0.0;
        let paces: Vec<Pace> = if !self.concurrency.is_empty() {
            self.concurrency.iter().map(|most| Pace::Closed((*most).max(1))).collect()
        } else if !self.speedup.is_empty() {
            self.speedup.iter().map(|speedup| Pace::Speedup(*speedup)).collect()
        } else if !self.load.is_empty() {
            self.load.iter().map(|load| Pace::Load(*load)).collect()
        } else if self.trace.is_some() {
            [0.5, 0.7, 0.8, 0.9, 1.0, 1.2].map(Pace::Load).to_vec()
        } else {
            vec![Pace::Speedup(1.0)]
        };
        println!("{workers} workers, {gateways} gateways, {total} requests, seed {}", self.seed);
        if matches!(paces.first(), Some(Pace::Load(_))) {
            capacity = sweep.capacity(shown("capacity", total)).map_err(Failure::failed)?;
            println!("capacity {capacity:.2} requests/s");
        }
        let mut points = Vec::new();
        for pace in paces {
            for policy in &self.policy {
                let name = format!("{pace:?} {}", policy.as_str());
                points.push(sweep.run(*policy, pace, capacity, shown(&name, total)).map_err(Failure::failed)?);
            }
        }
        Ok(points)
    }

    fn write(&self, report: &Report) -> Result<(), Failure> {
        let wrote = |flag: &str, path: &Path, text: String| {
            std::fs::write(path, text).map_err(|error| Failure::Failed(format!("{flag} {}: {error}", path.display())))
        };
        if let Some(path) = &self.json {
            wrote("--json", path, serde_json::to_string_pretty(report).map_err(Failure::failed)?)?;
        }
        if let Some(path) = &self.svg {
            let first = report.points.first().map(|point| (point.workers, point.gateways));
            let own: Vec<Point> =
                report.points.iter().filter(|point| Some((point.workers, point.gateways)) == first).cloned().collect();
            let (workers, gateways) = first.unwrap_or_default();
            wrote("--svg", path, svg(&own, &format!("{}: {workers} workers, {gateways} gateways", report.traffic)))?;
        }
        Ok(())
    }
}

/// Shows on a terminal, twice a second, how far a run is.
fn shown(name: &str, total: usize) -> impl FnMut(usize, Duration) + use<> {
    let (name, terminal, mut last) = (name.to_owned(), std::io::stderr().is_terminal(), Instant::now());
    move |ended, now| {
        if terminal && last.elapsed() >= Duration::from_millis(500) {
            last = Instant::now();
            eprint!("\r\x1b[K{name}: {ended} of {total} ended after {:.0} s\r", now.as_secs_f64());
        }
    }
}

fn timing(text: &str) -> Result<Timing, Failure> {
    let timing = match text {
        "published" => Timing::published(),
        "terms" => Timing::default(),
        path => {
            let text = std::fs::read_to_string(path).map_err(|error| {
                Failure::Usage(format!("--timing {path}: neither published, terms nor a file: {error}"))
            })?;
            toml::from_str(&text).map_err(|error| Failure::Usage(format!("--timing {path}: {error}")))?
        }
    };
    timing.validated().map_err(|error| Failure::Usage(format!("--timing {text}: {error}")))
}

fn freeze(text: &str) -> Result<(f64, f64), String> {
    let number = |part: &str| part.parse::<f64>().ok().filter(|number| (0.0..=1e9).contains(number));
    let parts = text.split_once(':').and_then(|(at, lasts)| Some((number(at)?, number(lasts)?)));
    parts.ok_or_else(|| "must be SECS:FOR, for example 90:60".to_owned())
}

fn print(points: &[Point]) {
    let head = [
        "load", "policy", "rate", "ttft p50", "p90", "p99", "ideal", "itl p50", "p90", "p99", "e2e p50", "p90", "p99",
        "good", "hit", "next", "cov", "regret", "alone", "failed",
    ];
    let mut out = table::table(&head);
    let three = |q: &Quantiles, digits: usize| [q.p50, q.p90, q.p99].map(|ms| format!("{ms:.digits$}"));
    for Point { load, policy, rate, summary, .. } in points {
        let mut row = vec![table::or_dash(load.map(|load| format!("{load:.2}"))), policy.clone(), format!("{rate:.1}")];
        row.extend(three(&summary.ttft, 0));
        row.push(format!("{:.0}", summary.ttft_ideal.p99));
        row.extend(three(&summary.itl, 1));
        row.extend(three(&summary.e2e, 0));
        let shares = [summary.goodput, summary.hit_rate, summary.follow_up_share, summary.load_cov];
        row.extend(shares.map(|share| format!("{share:.3}")));
        row.push(format!("{:.1}", summary.regret.mean));
        row.extend([summary.fallbacks, summary.failed].map(|count| count.to_string()));
        out.add_row(row);
    }
    table::print(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freeze_is_two_numbers() {
        assert_eq!(freeze("90:60"), Ok((90.0, 60.0)));
        assert!(freeze("90").is_err() && freeze("-1:2").is_err() && freeze("a:b").is_err());
    }

    #[test]
    fn timings_are_names_or_files_that_make_sense() {
        assert_eq!(timing("published").unwrap(), Timing::published());
        let error = timing("/nowhere/rates.toml").unwrap_err().to_string();
        assert!(error.contains("--timing /nowhere/rates.toml"), "{error}");
        let file = std::env::temp_dir().join(format!("starling-rates-{}.toml", std::process::id()));
        std::fs::write(&file, "speedup = 2.0\n[curve.terms]\nstep_ms = 5.0\n").unwrap();
        let path = file.display().to_string();
        assert_eq!(timing(&path).unwrap().speedup, 2.0);
        std::fs::write(&file, "speedup = -2.0\n").unwrap();
        assert!(timing(&path).unwrap_err().to_string().contains("speedup"));
        std::fs::remove_file(&file).unwrap();
    }
}
