//! `starling up`: a whole node in one process.

use clap::Args;

use super::{Failure, flags::NodeFlags};
use crate::{
    config::Config,
    node::{End, Node, StartError},
    shutdown::Ending,
};

const EXAMPLES: &str = "\
Examples:
  starling up
  starling up --http 0.0.0.0:8000 --bind 10.0.0.5:7400
      clients and other machines can reach it
  starling up --model ~/models/Llama-3.2-1B.gguf --workers 1 --kv-mib 2048
  starling up --kv-host 1GiB --kv-disk /var/cache/starling --kv-disk-size 50GiB
      prompts' caches outlive the process
  starling up --engine vllm --engine-url http://127.0.0.1:8001 --model DIR
      --engine-events tcp://127.0.0.1:5557 --engine-replay tcp://127.0.0.1:5558
      in front of a vLLM that runs already; DIR for its tokenizer
  starling up --engine simulated --http 127.0.0.1:0
      no model is needed; any free port

When it serves it prints one line to standard output for scripts:
  ready name=NAME node=HOST:PORT http=HOST:PORT model=MODEL workers=N

Ctrl-C or SIGTERM once: no new requests are taken, those in flight finish
(at most --drain-secs), then the node leaves the cluster. Twice: at once.

Exit codes: 0 ended in order, 1 failed, 2 wrong command line or configuration.";

/// Start a node that does everything: gateway, router and workers.
///
/// The first node of a cluster. It makes the cluster key on its first start (`cluster.key` in the data folder, mode
/// 0600), loads the model, and serves the OpenAI API on 127.0.0.1:8000. Other nodes join it with `starling join`.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Up {
    #[command(flatten)]
    flags: NodeFlags<false>,
}

impl Up {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let config = Config::load(false, self.flags.file, &self.flags.values)?;
        serve(config).await
    }
}

/// A node whose boot counter was lost is started again above the life that the cluster remembers; once is enough.
const STARTS_MAX: usize = 3;

/// Runs a node from start to end; the same for `up` and `join`.
pub(super) async fn serve(config: Config) -> Result<(), Failure> {
    crate::logging::start(config.log, &config.log_level).map_err(Failure::failed)?;
    let mut ending = Ending::listen().map_err(Failure::failed)?;
    for _ in 1..STARTS_MAX {
        match run_once(config.clone(), &mut ending).await? {
            End::Outlived => tracing::warn!("the boot counter was lost and is raised now; the node is started again"),
            end => return told(end),
        }
    }
    told(run_once(config, &mut ending).await?)
}

async fn run_once(config: Config, ending: &mut Ending) -> Result<End, Failure> {
    let banner = !config.join;
    let node = tokio::select! {
        node = Box::pin(Node::start(config)) => node,
        () = ending.signal() => return Err(Failure::failed("ended by a signal before it was ready")),
    };
    let node = match node {
        Err(StartError::Outlived(_)) => return Ok(End::Outlived),
        node => node.map_err(Failure::failed)?,
    };
    let facts = node.facts();
    if banner {
        println!("{}", facts.banner());
    }
    println!("{}", facts.ready_line());
    Ok(Box::pin(node.run_until(ending)).await)
}

fn told(end: End) -> Result<(), Failure> {
    match end {
        End::InOrder => Ok(()),
        End::AtOnce => Err(Failure::failed("ended at once by a second signal")),
        End::Broken | End::Outlived => Err(Failure::failed("the node could not go on; the log says why")),
    }
}
