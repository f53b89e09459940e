//! The command line: one file a verb, each turning its arguments into one call and its result into an exit code.
//!
//! Called by `main`. Standard output carries only what scripts read (the `ready` line, tables, JSON, the text of an
//! answer); everything else goes to standard error.
#![expect(clippy::print_stdout, reason = "the command line is the part that prints")]

mod actors;
mod bench;
mod chat;
mod config;
mod debug;
mod drain;
mod fault;
mod flags;
mod inspect;
mod instances;
mod join;
mod keys;
mod kv;
mod nodes;
mod plan;
mod requests;
mod role;
mod sse;
mod table;
mod up;
mod why;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  starling up                            one node: gateway on 127.0.0.1:8000,
                                         router, two workers
  starling join 127.0.0.1:7400           one more worker on the same machine
  starling up --bind 10.0.0.5:7400       a node that other machines can join
  starling join 10.0.0.5:7400 --key-file KEY
                                         a worker on another machine; KEY is a
                                         copy of the first node's key file
  starling nodes                         who is in the cluster
  starling chat -m 'Why is the sky blue?'
  starling bench replay TRACE            the router under recorded traffic, simulated

Exit codes:
  0  done, or ended in order
  1  failed; the reason is on standard error
  2  the command line or the configuration is wrong
  3  no running node answered

Environment:
  STARLING_<FLAG>  every flag of `up` and `join`, for example STARLING_WORKERS=4
  STARLING_CONFIG  a TOML file with the same settings, like --config
  NO_COLOR         no colours in the log
  XDG_DATA_HOME    data lies in its folder starling (~/.local/share/starling)
  Flags win over variables, variables over the file; `starling config` shows
  the result and where each value came from.";

/// Serves large language models from many machines as one system.
///
/// Every node runs this one program. Nodes find each other by gossip, share a secret key, and divide three roles among
/// them: a gateway speaks the OpenAI HTTP API, a router sends each prompt to the worker that already holds its
/// beginning, a worker computes. One node can do all three.
#[derive(Debug, Parser)]
#[command(name = "starling", version, after_long_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Up(up::Up),
    Join(join::Join),
    Nodes(nodes::Nodes),
    Instances(instances::Instances),
    Actors(actors::Actors),
    Role(role::SetRole),
    Fault(fault::SetFault),
    Drain(drain::Drain),
    Requests(requests::Requests),
    Why(why::Why),
    Chat(chat::Chat),
    Bench(bench::Bench),
    Config(config::ShowConfig),
    Keys(keys::Keys),
    Kv(kv::Kv),
    Plan(plan::ShowPlan),
    #[command(hide = true)]
    Debug(debug::Debug),
}

/// Why a verb failed, by exit code.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// 1: the work itself failed.
    #[error("{0}")]
    Failed(String),
    /// 2: the caller must change the command line or the configuration.
    #[error("{0}")]
    Usage(String),
    /// 3: nobody answered.
    #[error("{0}")]
    NoNode(String),
}

impl Failure {
    fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::NoNode(_) => 3,
        }
    }
}

impl From<crate::config::ConfigError> for Failure {
    fn from(error: crate::config::ConfigError) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Reads the command line, runs the verb, reports its failure in one line.
#[must_use]
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("starling: no threads to run on: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(dispatch(cli.verb));
    // A blocked read of standard input must not hold the process up.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("starling: {failure}");
            ExitCode::from(failure.code())
        }
    }
}

async fn dispatch(verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Up(up) => Box::pin(up.run()).await,
        Verb::Join(join) => Box::pin(join.run()).await,
        Verb::Nodes(nodes) => nodes.run().await,
        Verb::Instances(instances) => instances.run().await,
        Verb::Actors(actors) => actors.run().await,
        Verb::Role(role) => role.run().await,
        Verb::Fault(fault) => fault.run().await,
        Verb::Drain(drain) => drain.run().await,
        Verb::Requests(requests) => requests.run().await,
        Verb::Why(why) => why.run().await,
        Verb::Bench(bench) => bench.run(),
        Verb::Chat(chat) => Box::pin(chat.run()).await,
        Verb::Config(config) => config.run(),
        Verb::Keys(keys) => keys.run().await,
        Verb::Kv(kv) => kv.run().await,
        Verb::Plan(plan) => plan.run().await,
        Verb::Debug(debug) => debug.run().await,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_has_a_long_help_with_examples() {
        let mut command = Cli::command();
        for verb in command.get_subcommands_mut().filter(|verb| !verb.is_hide_set()) {
            let help = verb.render_long_help().to_string();
            assert!(help.contains("Example"), "{} has no example", verb.get_name());
        }
    }
}
