//! `starling role`: what a worker is for, changed while it runs.

use clap::Args;
use starling_actors::route::split::Role;

use super::{
    Failure,
    inspect::{Inspect, print_json},
};
use crate::control::op;

const EXAMPLES: &str = "\
Examples:
  starling role host-a/0 prefill    computes prompts for other workers from now on
  starling role host-b/1 decode     answers; others compute its long prompts
  starling role host-a/0 both       does both, as workers do by default

Workers are named NODE/INDEX; `starling instances` shows their nodes and roles.
New requests see the new role within a second. Those that run at a worker whose new role is
prefill go on at another worker that answers, when there is one, from the token they are at.
The role lasts until the worker's process ends; --worker-role sets it at start.

Exit codes: 0 changed, 1 no such worker, 2 wrong command line, 3 no node answered.";

/// Give a worker another role: prefill, decode or both.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct SetRole {
    /// The worker, as NODE/INDEX
    worker: String,
    /// prefill, decode or both
    role: Role,
    #[command(flatten)]
    inspect: Inspect,
}

impl SetRole {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let body = rmp_serde::to_vec(&(&self.worker, self.role)).map_err(Failure::failed)?;
        let before: Role = self.inspect.ask(op::ROLE, body).await?;
        if self.inspect.json {
            return print_json(&before);
        }
        println!("{}: {before} before, {} now", self.worker, self.role);
        Ok(())
    }
}
