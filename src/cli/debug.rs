//! `starling debug`: faults on request, to watch the supervision work.

use clap::{Args, Subcommand};

use super::{Failure, inspect::Inspect};
use crate::control::op;

/// Cause faults on purpose.
#[derive(Debug, Args)]
pub(super) struct Debug {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Make an actor of the asked node panic while it handles its next message; `starling actors --json` prints paths
    Panic {
        /// The actor's path
        path: String,
        #[command(flatten)]
        inspect: Inspect,
    },
}

impl Debug {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let What::Panic { path, inspect } = self.what;
        let body = rmp_serde::to_vec_named(&path).map_err(Failure::failed)?;
        let found: bool = inspect.ask(op::PANIC, body).await?;
        if found { Ok(()) } else { Err(Failure::Failed(format!("no actor {path:?} on that node"))) }
    }
}
