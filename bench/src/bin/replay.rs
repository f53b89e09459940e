//! Serves a trace in a simulated cluster under several policies and loads.
//!
//! `replay TRACE [--workers 8,32] [--gateways 1] [--policy starling,dynamo,..] [--load 0.5,0.8,..] [--requests N] [--json FILE]`
//! A load is a share of the capacity: what the cluster ends in a second under `dynamo` when it is never idle.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its figures")]

use std::{error::Error, path::PathBuf, time::Duration};

use starling_actors::route::policy::{PolicyConfig, PolicyName};
use starling_bench::{
    argument,
    replay::{
        cluster::{Cluster, Setup},
        report::{Slo, Summary, summary},
        trace::{self, Asked},
    },
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let trace = trace::mooncake(&PathBuf::from(arguments.first().ok_or("the trace's file is missing")?))?;
    let requests: usize = argument(&arguments, "--requests", trace.len())?;
    let trace = &trace[..requests.min(trace.len())];
    let policies = list(&arguments, "--policy", "starling,dynamo,p2c,round-robin,prefix-hash")?;
    let policies: Vec<PolicyName> = policies.iter().map(|name| name.parse()).collect::<Result<_, _>>()?;
    let workers: Vec<usize> = numbers(&arguments, "--workers", "8")?;
    let loads: Vec<f64> = numbers(&arguments, "--load", "0.5,0.7,0.8,0.9,1.0,1.2")?;
    let gateways: usize = argument(&arguments, "--gateways", 1)?;
    let seed: u64 = argument(&arguments, "--seed", 1)?;
    for workers in workers {
        let base = Setup { workers, gateways, seed, ..Setup::default() };
        let capacity = capacity(&base, trace)?;
        println!(
            "{workers} workers, {gateways} gateways, {requests} requests, seed {seed}: capacity {capacity:.2} requests/s"
        );
        println!(
            "{:>5} {:>12} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7} {:>7} {:>8}",
            "load", "policy", "ttft p50", "p90", "p99", "itl p50", "itl p99", "hit", "good", "cov", "util", "µs/dec"
        );
        for load in &loads {
            let rate = trace.len() as f64 / trace.last().map_or(1.0, |last| last.at.as_secs_f64());
            let paced = paced(trace, rate / (load * capacity));
            for policy in &policies {
                let setup = Setup {
                    policy: PolicyConfig::named(*policy),
                    decide_apart: *policy != PolicyName::Starling,
                    ..base.clone()
                };
                let figures = serve(&setup, &paced)?;
                row(*load, policy.as_str(), &figures);
            }
        }
    }
    Ok(())
}

fn serve(setup: &Setup, asked: &[Asked]) -> Result<Summary, Box<dyn Error>> {
    let run =
        Cluster::new(setup, asked)?.run(|ended, now| eprint!("\r{ended} ended at {:.0} s   ", now.as_secs_f64()))?;
    eprint!("\r                              \r");
    Ok(summary(&run, Slo { ttft: Duration::from_secs(2), itl: Duration::from_millis(50) }))
}

/// Requests ended in a second when the cluster is never idle.
fn capacity(base: &Setup, trace: &[Asked]) -> Result<f64, Box<dyn Error>> {
    let part = &trace[..trace.len().min(3_000)];
    let setup = Setup {
        policy: PolicyConfig::named(PolicyName::Dynamo),
        decide_apart: true,
        concurrency: Some(base.workers * 64),
        ..base.clone()
    };
    Ok(serve(&setup, part)?.per_second)
}

fn paced(trace: &[Asked], stretch: f64) -> Vec<Asked> {
    // The trace's clock is coarse: many requests bear the same time. They are spread over the gap to the next one.
    let mut paced = trace.to_vec();
    let mut from = 0;
    while from < paced.len() {
        let at = trace[from].at;
        let to = (from..trace.len()).find(|next| trace[*next].at > at).unwrap_or(trace.len());
        let gap = trace.get(to).map_or(Duration::ZERO, |next| next.at - at);
        for (place, asked) in paced[from..to].iter_mut().enumerate() {
            asked.at = (at + gap.mul_f64(place as f64 / (to - from) as f64)).mul_f64(stretch);
        }
        from = to;
    }
    paced
}

fn row(load: f64, policy: &str, s: &Summary) {
    println!(
        "{load:>5.2} {policy:>12} {:>9.0} {:>9.0} {:>9.0} {:>8.1} {:>8.1} {:>7.3} {:>7.3} {:>7.3} {:>7.3} {:>8.1}{}",
        s.ttft[0],
        s.ttft[1],
        s.ttft[2],
        s.itl[0],
        s.itl[2],
        s.hit_rate,
        s.goodput,
        s.load_cov,
        s.utilisation,
        s.decision_us,
        if s.failed > 0 { format!("  {} FAILED", s.failed) } else { String::new() },
    );
}

fn list(arguments: &[String], name: &str, fallback: &str) -> Result<Vec<String>, String> {
    let text: String = argument(arguments, name, fallback.to_owned())?;
    Ok(text.split(',').map(str::to_owned).collect())
}

fn numbers<T: std::str::FromStr>(arguments: &[String], name: &str, fallback: &str) -> Result<Vec<T>, String> {
    let texts = list(arguments, name, fallback)?;
    texts.iter().map(|text| text.parse().map_err(|_| format!("{name} cannot be {text:?}"))).collect()
}
