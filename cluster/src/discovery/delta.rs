//! Small changes of a record, small enough to travel with the rumour of its new version.
//!
//! Called by whoever publishes, and by the core when gossip brings one. Pure. Bounds: [`DELTA_MAX`] encoded bytes. A change
//! of lifecycle or of a label is small; everything else is pulled.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{Instance, Lifecycle, NodeRecord, patch::encoded_len, record::endpoint_hash};

/// Longest encoded [`RecordDelta`] in bytes: ten of them fit a gossip packet.
pub const DELTA_MAX: usize = 120;
/// Versions back that one delta may begin at.
const BACK_MAX: usize = 16;

/// One small change. An instance is named by [`endpoint_hash`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SmallChange {
    /// An instance is elsewhere in its life.
    #[serde(rename = "c")]
    Lifecycle(u64, Lifecycle),
    /// An instance has a label, new or with another value.
    #[serde(rename = "l")]
    Label(u64, String, String),
}

/// All that changed from some version to that of the rumour it travels with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordDelta {
    /// It can be applied to this version and to every later one.
    pub since: u64,
    /// What has changed; the last of several values of one thing.
    pub changes: Vec<SmallChange>,
}

impl RecordDelta {
    /// The record in its new version; `None` when the delta does not build on what is held.
    #[must_use]
    pub fn apply(&self, held: &NodeRecord, version: u64) -> Option<NodeRecord> {
        if held.version < self.since || held.version >= version || held.version == 0 {
            return None;
        }
        let mut record = held.clone();
        for change in &self.changes {
            let (SmallChange::Lifecycle(hash, _) | SmallChange::Label(hash, ..)) = change;
            let found = record.instances.iter_mut().find(|instance| endpoint_hash(&instance.endpoint) == *hash)?;
            match change {
                SmallChange::Lifecycle(_, lifecycle) => found.lifecycle = *lifecycle,
                SmallChange::Label(_, key, value) if !held.partial => {
                    found.labels.insert(key.clone(), value.clone());
                }
                // The labels come with the rest of the record.
                SmallChange::Label(..) => {}
            }
            found.changed = version;
        }
        record.version = version;
        Some(record)
    }
}

/// The last changes of this node's record, as long as they were small.
#[derive(Debug, Default)]
pub(super) struct RecentChanges {
    /// The version before each change, and what it was.
    changes: VecDeque<(u64, Vec<SmallChange>)>,
}

impl RecentChanges {
    /// Notes what turned one version into the next.
    pub(super) fn note(&mut self, before: &NodeRecord, after: &NodeRecord) {
        match small(before, after) {
            Some(changes) => {
                self.changes.push_back((before.version, changes));
                if self.changes.len() > BACK_MAX {
                    self.changes.pop_front();
                }
            }
            None => self.changes.clear(),
        }
    }

    /// What changed lately, from as far back as fits.
    pub(super) fn delta(&self) -> Option<RecordDelta> {
        let mut best = None;
        let mut latest: BTreeMap<(u64, Option<&str>), &SmallChange> = BTreeMap::new();
        for (since, changes) in self.changes.iter().rev() {
            for change in changes.iter().rev() {
                let key = match change {
                    SmallChange::Lifecycle(hash, _) => (*hash, None),
                    SmallChange::Label(hash, key, _) => (*hash, Some(key.as_str())),
                };
                latest.entry(key).or_insert(change);
            }
            let delta =
                RecordDelta { since: *since, changes: latest.values().map(|change| (*change).clone()).collect() };
            if encoded_len(&delta) > DELTA_MAX {
                break;
            }
            best = Some(delta);
        }
        best
    }
}

/// What changed, when it was nothing but lifecycles and labels that came or changed.
fn small(before: &NodeRecord, after: &NodeRecord) -> Option<Vec<SmallChange>> {
    let same_frame = before.http == after.http
        && before.roles == after.roles
        && before.software == after.software
        && before.labels == after.labels
        && before.withdrawn == after.withdrawn
        && before.address == after.address
        && before.instances.len() == after.instances.len();
    if !same_frame {
        return None;
    }
    let mut changes = Vec::new();
    for (old, new) in before.instances.iter().zip(&after.instances) {
        let hash = endpoint_hash(&new.endpoint);
        if new.lifecycle != old.lifecycle {
            changes.push(SmallChange::Lifecycle(hash, new.lifecycle));
        }
        let told = |(key, value): (&String, &String)| SmallChange::Label(hash, key.clone(), value.clone());
        changes.extend(new.labels.iter().filter(|(key, value)| old.labels.get(*key) != Some(value)).map(told));
        let (lifecycle, changed, labels) = (old.lifecycle, old.changed, old.labels.clone());
        let label_lost = old.labels.keys().any(|key| !new.labels.contains_key(key));
        let rest = Instance { lifecycle, changed, labels, ..new.clone() };
        if label_lost || rest != *old {
            return None;
        }
    }
    Some(changes)
}
