//! `starling instances`: what the members offer.

use clap::Args;

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{InstanceRow, op};

const EXAMPLES: &str = "\
Examples:
  starling instances
  starling instances --json | jq '[.[] | select(.lifecycle == \"serving\")] | length'

An instance takes requests when its life is `serving` and its node is alive, as a
last resort also when its node is suspect.
Lives: joining, warming, serving, draining, drained, gone.

Exit codes: 0 printed, 2 wrong command line, 3 no node answered.";

/// List the instances of the cluster: workers, routers, gateways and registered services.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Instances {
    #[command(flatten)]
    inspect: Inspect,
}

impl Instances {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let rows: Vec<InstanceRow> = self.inspect.ask(op::INSTANCES, Vec::new()).await?;
        if self.inspect.json {
            return print_json(&rows);
        }
        let columns = ["endpoint", "node", "kind", "life", "node state", "routable", "capacity", "model", "labels"];
        let mut out = table::table(&columns);
        for row in rows {
            out.add_row([
                row.endpoint,
                row.node,
                row.kind,
                row.lifecycle,
                row.node_state,
                row.routable,
                table::or_dash(row.capacity),
                table::or_dash(row.model),
                table::labels(&row.labels),
            ]);
        }
        table::print(out);
        Ok(())
    }
}
