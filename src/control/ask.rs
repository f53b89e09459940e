//! Asks a node one question over a link, with the key but without joining.
//!
//! Called by the inspection verbs.

use std::{
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

use bytes::Bytes;
use starling_cluster::{
    link::ControlClient,
    security::KeyRing,
    stream::{Fault, FaultKind},
};
use thiserror::Error;

/// Why there is no answer, by who must act.
#[derive(Debug, Error)]
pub enum AskError {
    /// The key file cannot be used.
    #[error("{0}")]
    Key(String),
    /// Nobody answered, or not with this key.
    #[error("{0}")]
    Unreachable(String),
    /// The node answered no.
    #[error("{0}")]
    Refused(Fault),
}

/// Asks the node at `address` (`host:port`) to do `op`; the answer comes within `limit` or not at all.
pub async fn ask(address: &str, key_file: &Path, op: &str, body: Vec<u8>, limit: Duration) -> Result<Bytes, AskError> {
    let keys = KeyRing::load(key_file).map_err(|error| AskError::Key(error.to_string()))?;
    let begun = Instant::now();
    let connecting = tokio::time::timeout(limit, connect(address, &keys));
    let client = connecting.await.map_err(|_| AskError::Unreachable("no connection in time".to_owned()))??;
    let left = limit.saturating_sub(begun.elapsed());
    client.call(op, Bytes::from(body), left).await.map_err(|fault| match fault.kind {
        FaultKind::DeadlineExceeded | FaultKind::Unavailable => AskError::Unreachable(fault.message),
        _ => AskError::Refused(fault),
    })
}

/// A link to the first address of the name that answers.
async fn connect(address: &str, keys: &KeyRing) -> Result<ControlClient, AskError> {
    let found = tokio::net::lookup_host(address).await;
    let found: Vec<SocketAddr> = found.map_err(|error| AskError::Unreachable(error.to_string()))?.collect();
    let mut reason = "the name has no address".to_owned();
    for address in found {
        match ControlClient::connect(address, keys).await {
            Ok(client) => return Ok(client),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(AskError::Unreachable(reason))
}
