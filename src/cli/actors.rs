//! `starling actors`: what runs inside the members.

use clap::Args;

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{ClusterActors, op};

const EXAMPLES: &str = "\
Examples:
  starling actors
  starling actors --json | jq '[.actors[].restarts] | add'

RESTARTS counts how often the supervisor started the actor again; MAILBOX is
the number of messages that wait. OWNER is the node, or the node and the actor,
that started it from elsewhere and takes it along when it ends. The asked node
asks every member and names those that did not answer in time, on standard
error (`missing` in JSON).

Exit codes: 0 printed, 2 wrong command line, 3 no node answered.";

/// List the actors of every node: kind, state, restarts, mailbox depth.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Actors {
    #[command(flatten)]
    inspect: Inspect,
}

impl Actors {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let all: ClusterActors = self.inspect.ask(op::ACTORS, Vec::new()).await?;
        if self.inspect.json {
            return print_json(&all);
        }
        let mut out = table::table(&["node", "actor", "kind", "state", "restarts", "mailbox", "uptime", "owner"]);
        for row in all.actors {
            out.add_row([
                row.node,
                indented(&row.path),
                row.kind,
                row.state,
                row.restarts.to_string(),
                row.mailbox_depth.to_string(),
                table::duration(row.uptime_secs),
                row.owner.unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        table::print(out);
        for missing in all.missing {
            eprintln!("no answer from {}: {}", missing.node, missing.reason);
        }
        Ok(())
    }
}

/// The last step of a path, moved right by its depth, so that the column reads as a tree.
fn indented(path: &str) -> String {
    let depth = path.matches('/').count();
    let name = path.rsplit('/').next().unwrap_or(path);
    format!("{:width$}{name}", "", width = depth * 2)
}

#[cfg(test)]
mod tests {
    #[test]
    fn paths_read_as_a_tree() {
        assert_eq!(super::indented("node/workers/0"), "    0");
        assert_eq!(super::indented("node"), "node");
    }
}
