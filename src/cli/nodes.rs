//! `starling nodes`: who is in the cluster.

use clap::Args;

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{NodeRow, op};

const EXAMPLES: &str = "\
Examples:
  starling nodes
  starling nodes --json | jq -r '.[] | select(.state != \"alive\") | .name'
  starling nodes --node 10.0.0.5:7400 --key-file KEY

States: alive, suspect (failed a probe, may refute), unreachable (a member that
the asked node cannot open a link to, or one that its links know in a later life
than gossip does). A node that is down is not listed.
A name followed by (also ADDRESS): another living process claims it too; give one of
them another --name.
Life: that of its liveliest instance; joining until its record has come.

Exit codes: 0 printed, 2 wrong command line, 3 no node answered.";

/// List the members of the cluster, as one node sees them.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Nodes {
    #[command(flatten)]
    inspect: Inspect,
}

impl Nodes {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let rows: Vec<NodeRow> = self.inspect.ask(op::NODES, Vec::new()).await?;
        if self.inspect.json {
            return print_json(&rows);
        }
        let columns = ["name", "state", "life", "boot", "address", "http", "roles", "instances", "labels", "software"];
        let mut out = table::table(&columns);
        for row in rows {
            let name = row.clash.map_or(row.name.clone(), |rival| format!("{} (also {rival})", row.name));
            out.add_row([
                name,
                row.state,
                row.lifecycle,
                row.incarnation.to_string(),
                row.address,
                table::or_dash(row.http),
                row.roles.join(","),
                row.instances.to_string(),
                table::labels(&row.labels),
                row.software,
            ]);
        }
        table::print(out);
        Ok(())
    }
}
