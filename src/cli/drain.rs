//! `starling drain`: a worker takes nothing new and what runs there goes on elsewhere.

use std::time::{Duration, Instant};

use clap::Args;

use super::{
    Failure,
    inspect::{Inspect, print_json},
};
use crate::control::op;

const EXAMPLES: &str = "\
Examples:
  starling drain host-a/0           waits until the worker has no request any more
  starling drain host-a/0 --wait 0  returns at once

Workers are named NODE/INDEX; `starling instances` shows their nodes and states.
Requests that run there go on at another worker of the same model from the token they are at;
those that no other worker takes end where they are. Clients notice neither. A drained worker stays
so until its process is started again.

Exit codes: 0 drained, 1 not drained in time or no such worker, 2 wrong command line, 3 no node answered.";

/// Rid a worker of its requests: it takes nothing new, what runs goes on elsewhere.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Drain {
    /// The worker, as NODE/INDEX
    worker: String,
    /// Seconds to wait until it has no request any more
    #[arg(long, default_value_t = 30, value_name = "SECS")]
    wait: u64,
    #[command(flatten)]
    inspect: Inspect,
}

/// How often the worker is asked.
const ASK_EVERY: Duration = Duration::from_millis(100);

impl Drain {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let until = Instant::now() + Duration::from_secs(self.wait.min(86_400));
        let body = rmp_serde::to_vec(&(&self.worker, ())).map_err(Failure::failed)?;
        let left = loop {
            let left: u64 = self.inspect.ask(op::DRAIN, body.clone()).await?;
            if left == 0 || Instant::now() >= until {
                break left;
            }
            tokio::time::sleep(ASK_EVERY).await;
        };
        if self.inspect.json {
            print_json(&left)?;
        } else {
            println!("{} takes nothing new; {left} requests in flight", self.worker);
        }
        let done = left == 0 || self.wait == 0;
        if done { Ok(()) } else { Err(Failure::failed(format!("{left} requests are still in flight"))) }
    }
}
