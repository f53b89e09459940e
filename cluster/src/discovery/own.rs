//! This node's own record: the only one it writes.
//!
//! Called by whoever publishes, from any thread. Bounds: [`RECORD_MAX`]. Outlives the Directory actor, so a restart
//! of the actor loses nothing.

use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use super::{NodeRecord, core::RECORD_MAX, core::encoded_len};

/// The record would be too long to be pulled; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("this node's record would take {len} bytes; at most {RECORD_MAX} can be told to others")]
pub struct RecordTooLarge {
    /// Its encoded length in bytes.
    pub len: usize,
}

/// The current record. Clones share it.
#[derive(Debug, Clone)]
pub struct OwnRecord {
    record: Arc<Mutex<Arc<NodeRecord>>>,
}

impl OwnRecord {
    /// Starts with this one; its version is at least 1 from now on.
    #[must_use]
    pub fn new(mut record: NodeRecord) -> Self {
        record.version = record.version.max(1);
        Self { record: Arc::new(Mutex::new(Arc::new(record))) }
    }

    /// The record as it is now.
    #[must_use]
    pub fn get(&self) -> Arc<NodeRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes it and raises its version. Who and in which life cannot be changed; instances are kept sorted.
    pub fn update(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<Arc<NodeRecord>, RecordTooLarge> {
        let mut current = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = NodeRecord::clone(&current);
        change(&mut record);
        record.node = current.node.clone();
        record.incarnation = current.incarnation;
        record.version = current.version + 1;
        record.instances.sort_by(|one, two| one.endpoint.cmp(&two.endpoint));
        record.roles.sort_unstable();
        let len = encoded_len(&record);
        if len > RECORD_MAX {
            return Err(RecordTooLarge { len });
        }
        *current = Arc::new(record);
        Ok(current.clone())
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::{Incarnation, NodeId};

    use super::*;

    #[test]
    fn each_change_raises_the_version_and_a_refused_one_changes_nothing() {
        let own = OwnRecord::new(NodeRecord {
            node: NodeId::new("a").expect("name"),
            incarnation: Incarnation(3),
            version: 0,
            address: "127.0.0.1:1".parse().expect("address"),
            http: None,
            roles: Vec::new(),
            software: String::new(),
            instances: Vec::new(),
        });
        let changed = own.update(|record| {
            record.roles = vec!["worker".into(), "gateway".into()];
            record.version = 77;
            record.incarnation = Incarnation(9);
        });
        let changed = changed.expect("fits");
        assert_eq!((changed.version, changed.incarnation), (2, Incarnation(3)));
        assert_eq!(changed.roles, ["gateway", "worker"]);
        assert!(own.update(|record| record.software = "x".repeat(RECORD_MAX)).is_err());
        assert_eq!(own.get(), changed);
    }
}
