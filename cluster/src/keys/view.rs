//! What a node tells of its ring: ids and a version, no secret. Pure.

use std::fmt;

use serde::{Deserialize, Serialize};
use starling_ids::NodeId;

use crate::security::{KeyId, KeyRing};

/// A ring without its secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingView {
    /// Rises with each change.
    pub version: u64,
    /// Its keys, the primary first.
    pub keys: Vec<KeyId>,
}

impl From<&KeyRing> for RingView {
    fn from(ring: &KeyRing) -> Self {
        Self { version: ring.version(), keys: ring.ids() }
    }
}

/// `v3 1a2b3c4d* 9f8e7d6c`: the primary is marked.
impl fmt::Display for RingView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.version)?;
        for (at, key) in self.keys.iter().enumerate() {
            write!(f, " {key}{}", if at == 0 { "*" } else { "" })?;
        }
        Ok(())
    }
}

impl RingView {
    /// What its node seals with.
    #[must_use]
    pub fn primary(&self) -> Option<KeyId> {
        self.keys.first().copied()
    }

    /// Whether its node accepts this key.
    #[must_use]
    pub fn holds(&self, key: KeyId) -> bool {
        self.keys.contains(&key)
    }

    /// The same rule as [`KeyRing::outranks`].
    #[must_use]
    pub fn outranks(&self, other: &Self) -> bool {
        (self.version, &self.keys) > (other.version, &other.keys)
    }
}

/// One member in a roll.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRing {
    /// Who.
    pub node: NodeId,
    /// What it held before; `None`: it did not say.
    pub before: Option<RingView>,
    /// What it holds now; `None`: it did not say.
    pub after: Option<RingView>,
    /// Why it is not as it should be.
    pub fault: Option<String>,
}

impl NodeRing {
    /// A member that gave no answer.
    pub(super) fn silent(node: NodeId, reason: String) -> Self {
        Self { node, before: None, after: None, fault: Some(reason) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security::ClusterKey;

    #[test]
    fn a_view_shows_and_ranks_as_its_ring_does() {
        let (one, two) = (ClusterKey::from_bytes([1; 32]), ClusterKey::from_bytes([2; 32]));
        let ring = KeyRing::from(&one);
        let added = ring.add(two).unwrap();
        let (old, new) = (RingView::from(&ring), RingView::from(&added));
        assert_eq!(new.to_string(), added.to_string());
        assert!(new.outranks(&old) && !old.outranks(&new) && !new.outranks(&new));
        assert_eq!(new.primary(), Some(one.id()));
    }
}
