//! What the inspection verbs share: finding a node and asking it one question.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use serde::de::DeserializeOwned;

use super::Failure;
use crate::{config::variable, control, home};

/// How long a node gets to answer. Longer than the time it gives the other members.
const ANSWER_WITHIN: Duration = Duration::from_secs(8);

/// Which node to ask, and how to print.
#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// Ask the node at this cluster address instead of the one that runs here
    #[arg(long, value_name = "ADDR")]
    node: Option<String>,
    /// Cluster key, for --node [default: the local node's key; variable STARLING_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Data folder of the node to ask [default: searched below XDG_DATA_HOME/starling; variable STARLING_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

impl Inspect {
    /// The folder given by flag or variable.
    fn folder(&self) -> Option<PathBuf> {
        self.data_dir.clone().or_else(|| variable("STARLING_DATA_DIR").filter(|v| !v.is_empty()).map(PathBuf::from))
    }

    /// Address and key file of the node to ask. Says on standard error which one when there are several.
    fn target(&self) -> Result<(String, PathBuf), Failure> {
        let given = self
            .key_file
            .clone()
            .or_else(|| variable("STARLING_KEY_FILE").filter(|v| !v.is_empty()).map(PathBuf::from));
        if let (Some(node), Some(key)) = (&self.node, &given) {
            return Ok((node.clone(), key.clone()));
        }
        let local = local_node(self.folder());
        match (&self.node, local) {
            (None, Ok(file)) => Ok((file.address.to_string(), given.unwrap_or(file.key_file))),
            (Some(node), Ok(file)) => Ok((node.clone(), file.key_file)),
            (None, Err(error)) => Err(error),
            (Some(_), Err(_)) => {
                Err(Failure::Usage("--node needs --key-file FILE: no node runs here to take it from".into()))
            }
        }
    }

    /// Asks one operation and reads the answer.
    pub(super) async fn ask<T: DeserializeOwned>(&self, op: &str, body: Vec<u8>) -> Result<T, Failure> {
        self.ask_within(op, body, ANSWER_WITHIN).await
    }

    /// The same for an operation that takes longer.
    pub(super) async fn ask_within<T: DeserializeOwned>(
        &self,
        op: &str,
        body: Vec<u8>,
        limit: Duration,
    ) -> Result<T, Failure> {
        let (address, key) = self.target()?;
        let answer = control::ask(&address, &key, op, body, limit).await;
        let bytes = answer.map_err(|error| match error {
            control::AskError::Refused(fault) => Failure::Failed(format!("{address}: {fault}")),
            control::AskError::Key(reason) => Failure::Usage(reason),
            control::AskError::Unreachable(reason) => Failure::NoNode(format!("no answer from {address}: {reason}")),
        })?;
        rmp_serde::from_slice(&bytes)
            .map_err(|e| Failure::Failed(format!("{address} answered what this version cannot read: {e}")))
    }
}

/// The node that runs here: the one of the folder, else the first below the default folder.
pub(super) fn local_node(folder: Option<PathBuf>) -> Result<home::NodeFile, Failure> {
    let mut found = home::running(folder.as_deref()).map_err(|error| Failure::NoNode(error.to_string()))?;
    let (dir, file) = found.remove(0);
    if !found.is_empty() {
        let others: Vec<String> =
            found.iter().map(|(dir, other)| format!("{} ({})", other.name, dir.display())).collect();
        eprintln!("asking {} ({}); also running here: {}", file.name, dir.display(), others.join(", "));
    }
    Ok(file)
}

/// JSON for scripts: pretty, with a stable order of keys.
pub(super) fn print_json<T: serde::Serialize>(value: &T) -> Result<(), Failure> {
    println!("{}", serde_json::to_string_pretty(value).map_err(Failure::failed)?);
    Ok(())
}
