//! Starts the log: lines for people or JSON, on standard error, so that standard output stays for scripts.
//!
//! Called once by a starting node.

use std::io::IsTerminal;

use tracing_subscriber::{EnvFilter, Layer, Registry, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::{LogFormat, variable};

/// The actor library logs each session at `info` and each end of one at `warn`, in its own words and with its own
/// spans around our lines. What of it matters is logged by us. A filter that names these crates has the last word.
const QUIET: &str = "ractor=error,ractor_cluster=error";

/// Installs the log for the process. `level` is a level or a filter, checked by the configuration.
pub fn start(format: LogFormat, level: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(format!("{QUIET},{level}")).map_err(|e| e.to_string())?;
    let colours = std::io::stderr().is_terminal() && variable("NO_COLOR").is_none_or(|v| v.is_empty());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Human => lines.with_ansi(colours).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    tracing_subscriber::registry().with(layer).try_init().map_err(|e| e.to_string())
}
