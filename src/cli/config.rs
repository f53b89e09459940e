//! `starling config`: the effective configuration and where each value came from.

use clap::Args;
use serde::Serialize;

use super::{Failure, flags::NodeFlags, inspect::print_json, table};
use crate::config::{Config, settings::SETTINGS};

const EXAMPLES: &str = "\
Examples:
  starling config
  starling config --config node.toml --workers 4
  starling config --join --json

A file has one key per flag, with the flag's name:
  http = \"0.0.0.0:8000\"
  workers = 4
  role = [\"router\", \"gateway\"]
The policy is a preset's name, or a table of parts whose costs are added up:
  [policy]
  filters = [{ name = \"topology\", label = \"zone\", prefer = true }]
  scorers = [{ name = \"prefix\" }, { name = \"fill\", weight = 0.5 }]
  picker = { name = \"softmin\", temperature = 0.1 }

Order: default, then file, then environment (STARLING_WORKERS=4), then flag; the
last one wins. An unknown key is refused. Secrets are never settings: `key-file`
names the file, and its content is never printed.

Exit codes: 0 printed, 2 a value is wrong.";

/// Print the settings a node would start with, and where each comes from.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct ShowConfig {
    /// Show the defaults of `starling join` instead of `starling up`
    #[arg(long)]
    join: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: NodeFlags<false>,
}

/// One setting in JSON.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    /// `None` when it is derived at start; `derived` says how.
    value: Option<String>,
    source: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    derived: Option<&'static str>,
    help: &'static str,
}

impl ShowConfig {
    pub(super) fn run(self) -> Result<(), Failure> {
        let layered = Config::layers(self.join, self.flags.file, &self.flags.values)?;
        // Every value must be right by itself; whether they work together depends on the place where a node starts.
        Config::from_layers(self.join, &layered)?;
        let rows = SETTINGS.iter().map(|setting| {
            let said = layered.get(setting.name);
            let derived = if self.join { setting.join } else { setting.up };
            Row {
                name: setting.name,
                value: said.map(|value| value.text.clone()),
                source: said.map_or_else(|| "default".to_owned(), |value| value.source.to_string()),
                derived: said.is_none().then(|| derived.trim_matches(['<', '>'])),
                help: setting.help,
            }
        });
        if self.json {
            return print_json(&rows.collect::<Vec<_>>());
        }
        let mut out = table::table(&["setting", "value", "from"]);
        for row in rows {
            let value = row.value.unwrap_or_else(|| format!("({})", row.derived.unwrap_or("-")));
            out.add_row([row.name.to_owned(), value, row.source]);
        }
        table::print(out);
        Ok(())
    }
}
