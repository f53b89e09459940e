//! `starling keys`: the cluster's secret as a file.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Failure, inspect::local_node};
use crate::{config, home::KEY_FILE};
use starling_cluster::security::ClusterKey;

const EXAMPLES: &str = "\
Examples:
  starling keys path                    where the key of this machine's node lies
  starling keys new /etc/starling/key   a key before the first node of a cluster

The key is 32 random bytes. Whoever has it can join, read and send everything;
it is never printed and never logged.

Exit codes: 0 done, 1 failed, 2 wrong command line.";

/// Make a cluster key or say where it lies.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Keys {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Print the path of the key file that the node of this machine uses
    Path {
        /// Data folder of the node
        #[arg(long, value_name = "DIR")]
        data_dir: Option<PathBuf>,
    },
    /// Write a new key to a file that does not exist yet, mode 0600
    New {
        /// The file
        file: PathBuf,
    },
}

impl Keys {
    pub(super) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::New { file } => ClusterKey::generate().store(&file).map_err(Failure::failed),
            What::Path { data_dir } => {
                let file = local_node(data_dir.clone()).map(|node| node.key_file);
                let file = file.or_else(|error| {
                    let path = data_dir.or_else(config::data_home).map(|dir| dir.join(KEY_FILE));
                    path.filter(|path| path.exists()).ok_or(error)
                })?;
                println!("{}", file.display());
                Ok(())
            }
        }
    }
}
