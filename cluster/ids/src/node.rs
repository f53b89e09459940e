//! Who: nodes, their incarnations, the workers on them.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::text::{NameError, is_label};

/// The stable name of a node: 1 to 48 bytes of `a-z 0-9 . _ -`, starting with a letter or digit.
///
/// The name outlives the process; [`Incarnation`] tells two processes of one name apart.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeId(Arc<str>);

impl NodeId {
    /// Longest name in bytes. Gossip carries it in every member record.
    pub const LEN_MAX: usize = 48;

    /// Checks and wraps a name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        if is_label(name, Self::LEN_MAX) {
            return Ok(Self(name.into()));
        }
        Err(NameError::new("node name", name, "1 to 48 of a-z 0-9 . _ - starting with a letter or digit"))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for NodeId {
    type Err = NameError;
    fn from_str(s: &str) -> Result<Self, NameError> {
        Self::new(s)
    }
}

impl TryFrom<String> for NodeId {
    type Error = NameError;
    fn try_from(s: String) -> Result<Self, NameError> {
        Self::new(&s)
    }
}

impl From<NodeId> for String {
    fn from(id: NodeId) -> Self {
        id.0.as_ref().into()
    }
}

/// The boot counter of a node: persisted, bumped at every process start, never a wall clock.
///
/// A higher incarnation of the same [`NodeId`] means that all in-memory state of the lower one is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One worker: the node it lives on and its index there. Written `node/0`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// The node.
    pub node: NodeId,
    /// The worker's index on its node, from 0.
    pub index: u16,
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.index)
    }
}

impl fmt::Debug for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_are_checked_where_they_enter() {
        assert!(NodeId::new("gpu-07.rack_2").is_ok());
        for bad in ["", "-a", "A", "a b", "a/b", &"x".repeat(49)] {
            let error = NodeId::new(bad).expect_err(bad);
            assert!(error.to_string().contains("node name"), "{error}");
        }
        assert!(serde_json::from_str::<NodeId>("\"No\"").is_err());
    }
}
