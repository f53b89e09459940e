//! `starling keys`: the cluster's secrets as files, and their roll through a running cluster.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use starling_cluster::security::{ClusterKey, KeyRing};

use super::{
    Failure,
    inspect::{Inspect, local_node, print_json},
    table,
};
use crate::{
    config,
    control::{KeysAsk, KeysTold, op},
    home::KEY_FILE,
};

const EXAMPLES: &str = "\
Examples:
  starling keys path                    where the key of this machine's node lies
  starling keys new /etc/starling/key   a key before the first node of a cluster
  starling keys list                    which keys each node accepts and uses

Replacing the key of a running cluster, without stopping anything:
  starling keys add                     1. every node accepts a new key as well
  starling keys use 1a2b3c4d            2. every node seals with it
  starling keys remove 9f8e7d6c         3. no node accepts the old one any more
Each step prints what every node holds before and after; * marks the key in
use. A step that some node has not taken is made again with the same command.
`use` waits for nobody: it is refused while a node does not hold the key, and
`remove` while a node still seals with it or does not answer.

Each node keeps the change in its key file, which it must be able to replace.
A node that was off meanwhile is brought up to date when it joins, as long as
it holds one key that is still accepted. Links made with a removed key take no
new streams at once and end within a minute.

The keys are 32 random bytes each. Whoever has one that is accepted can join,
read and send everything, and take the others: after a theft make a new key,
copy it to every node by hand and start them again. A key is never printed,
never logged and never sent outside TLS; its id, 8 hex digits, is no secret.

Exit codes: 0 done, 1 failed or not taken by every node, 2 wrong command line,
3 no node answered.";

/// The node tries each member three times, and twice over.
const ANSWER_WITHIN: Duration = Duration::from_secs(40);

/// Make a cluster key, say where it lies, and replace it in a running cluster.
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
    /// List the keys that each node accepts; * marks the one it uses
    List {
        #[command(flatten)]
        inspect: Inspect,
    },
    /// Make every node accept one more key, a new one unless a file is given
    Add {
        /// File with the key, as `starling keys new` makes it
        file: Option<PathBuf>,
        #[command(flatten)]
        inspect: Inspect,
    },
    /// Make every node use a key that all of them hold
    Use {
        /// The key's id, 8 hex digits
        id: String,
        #[command(flatten)]
        inspect: Inspect,
    },
    /// Make every node refuse a key that none of them uses
    Remove {
        /// The key's id, 8 hex digits
        id: String,
        #[command(flatten)]
        inspect: Inspect,
    },
}

impl Keys {
    pub(super) async fn run(self) -> Result<(), Failure> {
        match self.what {
            What::New { file } => ClusterKey::generate().store(&file).map_err(Failure::failed),
            What::Path { data_dir } => path(data_dir),
            What::List { inspect } => list(&inspect).await,
            What::Add { file, inspect } => {
                let text = file.map(|file| KeyRing::load(&file).map(|ring| KeyRing::from(ring.primary()).to_text()));
                let text = text.transpose().map_err(|error| Failure::Usage(error.to_string()))?;
                step(&inspect, KeysAsk::Add(text), "added").await
            }
            What::Use { id, inspect } => step(&inspect, KeysAsk::Use(checked(id)?), "in use").await,
            What::Remove { id, inspect } => step(&inspect, KeysAsk::Remove(checked(id)?), "removed").await,
        }
    }
}

fn path(data_dir: Option<PathBuf>) -> Result<(), Failure> {
    let file = local_node(data_dir.clone()).map(|node| node.key_file);
    let file = file.or_else(|error| {
        let path = data_dir.or_else(config::data_home).map(|dir| dir.join(KEY_FILE));
        path.filter(|path| path.exists()).ok_or(error)
    })?;
    println!("{}", file.display());
    Ok(())
}

/// The id, if it looks like one.
fn checked(id: String) -> Result<String, Failure> {
    match id.parse::<starling_cluster::security::KeyId>() {
        Ok(_) => Ok(id),
        Err(error) => Err(Failure::Usage(format!("{id:?}: {error}"))),
    }
}

async fn ask(inspect: &Inspect, ask: &KeysAsk) -> Result<KeysTold, Failure> {
    let body = rmp_serde::to_vec_named(ask).map_err(Failure::failed)?;
    inspect.ask_within(op::KEYS, body, ANSWER_WITHIN).await
}

async fn list(inspect: &Inspect) -> Result<(), Failure> {
    let told = ask(inspect, &KeysAsk::List).await?;
    if inspect.json {
        print_json(&told)?;
        return all_took(&told, "do not say what they hold");
    }
    let mut out = table::table(&["node", "version", "in use", "accepted", "result"]);
    for row in &told.nodes {
        out.add_row([
            row.node.clone(),
            table::or_dash(row.version),
            table::or_dash(row.primary.as_ref()),
            if row.keys.is_empty() { "-".to_owned() } else { row.keys.join(" ") },
            row.result.clone(),
        ]);
    }
    table::print(out);
    all_took(&told, "do not say what they hold")
}

async fn step(inspect: &Inspect, what: KeysAsk, done: &str) -> Result<(), Failure> {
    let told = ask(inspect, &what).await?;
    if inspect.json {
        print_json(&told)?;
        return all_took(&told, "have not taken it");
    }
    let mut out = table::table(&["node", "before", "after", "result"]);
    for row in &told.nodes {
        out.add_row([
            row.node.clone(),
            table::or_dash(row.before.as_ref()),
            table::or_dash(row.after.as_ref()),
            row.result.clone(),
        ]);
    }
    table::print(out);
    println!("key {} {done}", table::or_dash(told.key.as_ref()));
    all_took(&told, "have not taken it")
}

fn all_took(told: &KeysTold, what: &str) -> Result<(), Failure> {
    let failed = told.failed();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failure::Failed(format!("{} of {} nodes {what}: {}", failed.len(), told.nodes.len(), failed.join(", "))))
}
