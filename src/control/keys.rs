//! `starling keys` as a node answers it: a step of a roll through the whole cluster, or what everybody holds.
//!
//! Called by [`super::serve`]. Answers carry key ids alone; a key itself comes only with [`KeysAsk::Add`], inside TLS.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_cluster::{
    keys::{NodeRing, RollError, Rolled},
    mesh::Mesh,
    security::KeyRing,
    stream::{Fault, FaultKind},
};

/// What is asked.
#[derive(Serialize, Deserialize)]
pub enum KeysAsk {
    /// What does everybody hold?
    List,
    /// Accept one more key: the text of a key file, or a new one.
    Add(Option<String>),
    /// Seal with this key.
    Use(String),
    /// Accept this key no more.
    Remove(String),
}

/// One member's ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRow {
    /// Its name.
    pub node: String,
    /// Version and ids before, the primary marked with `*`; nothing when it did not say.
    pub before: Option<String>,
    /// The same now.
    pub after: Option<String>,
    /// Id of the key it seals with.
    pub primary: Option<String>,
    /// Ids of all keys it accepts, the primary first.
    pub keys: Vec<String>,
    /// Rises with each change.
    pub version: Option<u64>,
    /// `ok`, or what is wrong.
    pub result: String,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeysTold {
    /// Id of the key that the step was about.
    pub key: Option<String>,
    /// Sorted by node.
    pub nodes: Vec<KeyRow>,
}

impl KeysTold {
    /// Nodes that have not taken the step.
    #[must_use]
    pub fn failed(&self) -> Vec<&str> {
        self.nodes.iter().filter(|row| row.result != OK).map(|row| row.node.as_str()).collect()
    }
}

const OK: &str = "ok";

pub(super) async fn answer(mesh: &Mesh, body: &[u8]) -> Result<Bytes, Fault> {
    let invalid = |reason: String| Fault::new(FaultKind::Invalid, reason);
    let ask: KeysAsk = rmp_serde::from_slice(body).map_err(|_| invalid("not a question about keys".to_owned()))?;
    let id = |text: &str| text.parse().map_err(|error| invalid(format!("{text:?}: {error}")));
    let keys = mesh.keys();
    let told = match ask {
        KeysAsk::List => KeysTold { key: None, nodes: keys.list().await.iter().map(row).collect() },
        KeysAsk::Add(None) => told(keys.add(None).await)?,
        KeysAsk::Add(Some(text)) => {
            let ring = KeyRing::from_text(text).map_err(|error| invalid(format!("the file is {error}")))?;
            told(keys.add(Some(ring.primary().clone())).await)?
        }
        KeysAsk::Use(key) => told(keys.promote(id(&key)?).await)?,
        KeysAsk::Remove(key) => told(keys.remove(id(&key)?).await)?,
    };
    super::serve::encode(&told)
}

fn told(rolled: Result<Rolled, RollError>) -> Result<KeysTold, Fault> {
    let rolled = rolled.map_err(|error| {
        let kind = match error {
            RollError::Silent { .. } | RollError::Failed(_) => FaultKind::Unavailable,
            _ => FaultKind::Invalid,
        };
        Fault::new(kind, format!("nothing was changed: {error}"))
    })?;
    Ok(KeysTold { key: Some(rolled.key.to_string()), nodes: rolled.nodes.iter().map(row).collect() })
}

fn row(node: &NodeRing) -> KeyRow {
    KeyRow {
        node: node.node.to_string(),
        before: node.before.as_ref().map(ToString::to_string),
        after: node.after.as_ref().map(ToString::to_string),
        primary: node.after.as_ref().and_then(|ring| ring.primary()).map(|key| key.to_string()),
        keys: node.after.iter().flat_map(|ring| ring.keys.iter().map(ToString::to_string)).collect(),
        version: node.after.as_ref().map(|ring| ring.version),
        result: node.fault.clone().unwrap_or_else(|| OK.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use starling_cluster::{keys::RingView, security::ClusterKey};
    use starling_ids::NodeId;

    use super::*;

    #[test]
    fn a_row_shows_ids_and_who_failed() {
        let ring = KeyRing::from(ClusterKey::from_bytes([0xab; 32]));
        let view = RingView::from(&ring);
        let node = |name: &str, after: Option<RingView>, fault: Option<&str>| {
            let fault = fault.map(str::to_owned);
            row(&NodeRing { node: NodeId::new(name).unwrap(), before: after.clone(), after, fault })
        };
        let told = KeysTold { key: None, nodes: vec![node("a", Some(view), None), node("b", None, Some("no answer"))] };
        let id = ring.primary().id().to_string();
        assert_eq!((told.nodes[0].after.clone(), told.nodes[0].result.as_str()), (Some(format!("v0 {id}*")), "ok"));
        assert_eq!((told.nodes[0].primary.clone(), told.nodes[0].keys.clone()), (Some(id.clone()), vec![id]));
        assert_eq!(told.failed(), ["b"]);
        assert!(!format!("{told:?}").contains("abab"));
    }
}
