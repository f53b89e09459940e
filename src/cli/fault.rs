//! `starling fault`: makes a simulated engine fail, while it runs.

use clap::Args;
use starling_engine::simulated::faults::Fault;

use super::{
    Failure,
    inspect::{Inspect, print_json},
};
use crate::control::op;

const EXAMPLES: &str = "\
Examples:
  starling fault host-a/0 hang            its next step does not come back
  starling fault host-a/0 none            and now it does
  starling fault host-a/1 crash           its next step panics, once; the worker starts again
  starling fault host-b/0 slow=5          its steps take five times as long, up to 1000
  starling fault host-b/0 reject          it refuses new requests as if its queue were full
  starling fault host-b/1 wrong-events    what it tells routers of its cache is wrong
  starling fault host-b/1 say=39,72       every answer is these tokens, here the two letters of Hi

Workers are named NODE/INDEX; only those that were started with --engine simulated fail on command,
at once with --fault. The fault lasts until there is another one, or the worker's process ends.

Exit codes: 0 changed, 1 no such worker or a real engine, 2 wrong command line, 3 no node answered.";

/// Make a simulated engine fail: hang, crash, slow=FACTOR, reject, wrong-events, say=IDS; none ends it.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct SetFault {
    /// The worker, as NODE/INDEX
    worker: String,
    /// none, hang, crash, slow=FACTOR, reject, wrong-events or say=IDS
    fault: Fault,
    #[command(flatten)]
    inspect: Inspect,
}

impl SetFault {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let body = rmp_serde::to_vec(&(&self.worker, &self.fault)).map_err(Failure::failed)?;
        let before: Fault = self.inspect.ask(op::FAULT, body).await?;
        if self.inspect.json {
            return print_json(&before);
        }
        println!("{}: {before} before, {} now", self.worker, self.fault);
        Ok(())
    }
}
