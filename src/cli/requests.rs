//! `starling requests`: the newest requests and where they went.

use clap::Args;

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{RequestRow, Requests as Newest, op};

const EXAMPLES: &str = "\
Examples:
  starling requests
  starling requests --last 100 --json | jq '.requests[] | select(.outcome.ttft_ms > 500)'
  starling why $(starling requests --last 1 --json | jq -r '.requests[0].request')

The newest decisions of all routers, newest first: where a request went, how many
blocks of its prompt were expected in that worker's cache, the time to the first
token as predicted and as it was. WAITED is the time in the router's queue. A
request that goes on at another worker has a line for each.

Exit codes: 0 printed, 2 wrong command line, 3 no node answered.";

/// Show the newest requests: where they went, what was expected and what came of it.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Requests {
    /// How many
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=200))]
    last: u32,
    #[command(flatten)]
    inspect: Inspect,
}

impl Requests {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let body = rmp_serde::to_vec(&self.last).map_err(Failure::failed)?;
        let newest: Newest = self.inspect.ask(op::REQUESTS, body).await?;
        for missing in &newest.missing {
            eprintln!("no answer from router {}: {}", missing.node, missing.reason);
        }
        if self.inspect.json {
            return print_json(&newest);
        }
        let columns =
            ["request", "ago", "worker", "prompt", "hit blocks", "waited", "ttft expected", "ttft", "tokens", "total"];
        let mut out = table::table(&columns);
        for row in &newest.requests {
            out.add_row(cells(row));
        }
        table::print(out);
        Ok(())
    }
}

fn cells(row: &RequestRow) -> [String; 10] {
    let ms = |value: f64| format!("{value:.0} ms");
    let came = row.outcome;
    [
        row.request.clone(),
        format!("{:.0} s", row.ago_ms / 1e3),
        row.worker.clone(),
        row.prompt_tokens.to_string(),
        row.hit_blocks.to_string(),
        table::or_dash((row.waited_ms > 0.0).then(|| ms(row.waited_ms))),
        ms(row.predicted_ttft_ms),
        table::or_dash(came.map(|came| ms(came.ttft_ms))),
        table::or_dash(came.map(|came| came.answer_tokens)),
        table::or_dash(came.map(|came| ms(came.total_ms))),
    ]
}
