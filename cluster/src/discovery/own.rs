//! This node's own record: the only one it writes.
//!
//! Called by whoever publishes, from any thread. Bounds: [`RECORD_MAX`]; labels of [`LABEL_MAX`] bytes. Outlives the
//! Directory actor, so a restart of the actor loses nothing.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use starling_ids::EndpointName;
use thiserror::Error;

use super::{
    IllegalStep, Instance, NodeRecord,
    delta::{RecentChanges, RecordDelta},
    patch::{RECORD_MAX, encoded_len},
    record::endpoint_hash,
};

/// Longest key or value of a label in bytes.
pub const LABEL_MAX: usize = 1024;

/// Why a change of this node's record was refused. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PublishError {
    /// The record would be too long to be told.
    #[error("this node's record would take {len} bytes; at most {RECORD_MAX} can be told to others")]
    TooLarge {
        /// Its encoded length in bytes.
        len: usize,
    },
    /// A step that no life has.
    #[error("{endpoint}: {step}")]
    IllegalStep {
        /// Whose.
        endpoint: EndpointName,
        /// Which.
        step: IllegalStep,
    },
    /// A key or value over [`LABEL_MAX`], or an empty key.
    #[error("the label {0:?} has an empty key, or a key or value over {LABEL_MAX} bytes")]
    Label(String),
}

/// The current record. Clones share it.
#[derive(Debug, Clone)]
pub struct OwnRecord {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    record: Arc<NodeRecord>,
    recent: RecentChanges,
}

impl OwnRecord {
    /// Starts with this one; its version is at least 1 from now on.
    #[must_use]
    pub fn new(mut record: NodeRecord) -> Self {
        record.version = record.version.max(1);
        let shared = Shared { record: Arc::new(record), recent: RecentChanges::default() };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// The record as it is now.
    #[must_use]
    pub fn get(&self) -> Arc<NodeRecord> {
        self.lock().record.clone()
    }

    /// The record, and how it differs from its last versions where that is little.
    #[must_use]
    pub fn news(&self) -> (Arc<NodeRecord>, Option<RecordDelta>) {
        let shared = self.lock();
        (shared.record.clone(), shared.recent.delta())
    }

    /// Changes it and raises its version. Who and in which life cannot be changed; instances are kept sorted, one for each
    /// endpoint; an instance takes only steps that a life has.
    pub fn update(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<Arc<NodeRecord>, PublishError> {
        let mut shared = self.lock();
        let before = shared.record.clone();
        let mut record = NodeRecord::clone(&before);
        change(&mut record);
        record.node = before.node.clone();
        record.incarnation = before.incarnation;
        record.version = before.version + 1;
        record.partial = false;
        record.withdrawn = before.withdrawn.clone();
        record.roles.sort_unstable();
        record.instances.sort_by(|one, two| one.endpoint.cmp(&two.endpoint));
        record.instances.dedup_by(|later, first| later.endpoint == first.endpoint);
        settle(&before, &mut record)?;
        let len = encoded_len(&record);
        if len > RECORD_MAX {
            return Err(PublishError::TooLarge { len });
        }
        shared.recent.note(&before, &record);
        shared.record = Arc::new(record);
        Ok(shared.record.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks each instance against what it was, and notes in which version it changed.
fn settle(before: &NodeRecord, record: &mut NodeRecord) -> Result<(), PublishError> {
    check_labels(&record.labels)?;
    for instance in &mut record.instances {
        check_labels(&instance.labels)?;
        let known = before.instance(&instance.endpoint);
        if let Some(known) = known {
            let mut lifecycle = known.lifecycle;
            lifecycle
                .advance(instance.lifecycle)
                .map_err(|step| PublishError::IllegalStep { endpoint: instance.endpoint.clone(), step })?;
            instance.changed = known.changed;
        }
        if known != Some(&*instance) {
            instance.changed = record.version;
        }
    }
    let gone = |known: &&Instance| record.instance(&known.endpoint).is_none();
    let gone: Vec<u64> = before.instances.iter().filter(gone).map(|known| endpoint_hash(&known.endpoint)).collect();
    gone.into_iter().for_each(|endpoint| record.withdrawn.add(endpoint, record.version));
    Ok(())
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), PublishError> {
    let bad = |(key, value): &(&String, &String)| key.is_empty() || key.len() > LABEL_MAX || value.len() > LABEL_MAX;
    match labels.iter().find(bad) {
        Some((key, _)) => Err(PublishError::Label(key.chars().take(80).collect())),
        None => Ok(()),
    }
}
