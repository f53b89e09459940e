//! `starling join`: one more node of a cluster.

use clap::Args;

use super::{Failure, flags::NodeFlags, up::serve};
use crate::config::Config;

const EXAMPLES: &str = "\
Examples:
  starling join 127.0.0.1:7400
      a worker beside `starling up` on the same machine
  starling join 10.0.0.5:7400 10.0.0.6:7400 --key-file KEY
      on another machine; any one reachable seed will do
  starling join seeds.example.org:7400 --role router,gateway --http 0.0.0.0:8000
  starling join 127.0.0.1:7400 --role gateway
      one more gateway, on a free port

The key: --key-file or STARLING_KEY_FILE, else the key of a `starling up` on
this machine. For another machine copy the file that `starling keys path` names
on the first node, and keep its mode 0600.

Seeds are tried for ever: a node may start before the nodes it joins. A seed is
HOST:PORT (of a name all addresses are used, so one headless service or one DNS
name can stand for all nodes) or file:PATH, a file with one seed a line. What is
wrong with a seed is logged once. When it
serves it prints one line to standard output for scripts:
  ready name=NAME node=HOST:PORT http=HOST:PORT model=MODEL workers=N

Exit codes: 0 ended in order, 1 failed, 2 wrong command line or configuration.";

/// Start a node that joins a cluster by the address of any member.
///
/// By default it runs one worker on a free port. Several nodes on one machine need no flags: each takes its own data
/// folder and its own ports. A node started again in its folder keeps its name.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Join {
    /// Members to join by, each HOST:PORT or file:PATH; added to the setting `seeds`
    #[arg(value_name = "SEED")]
    members: Vec<String>,
    #[command(flatten)]
    flags: NodeFlags<true>,
}

impl Join {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let mut flags = self.flags.values;
        if !self.members.is_empty() {
            let said = flags.iter().position(|(name, _)| *name == "seeds").map(|at| flags.swap_remove(at).1);
            let all = self.members.into_iter().chain(said).collect::<Vec<_>>().join(",");
            flags.push(("seeds", all));
        }
        serve(Config::load(true, self.flags.file, &flags)?).await
    }
}
