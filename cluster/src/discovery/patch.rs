//! News of one record as it travels: all of it, its vital part, or what changed since a version.
//!
//! Called by the directory's core on both sides. Pure. A patch of any holder, not only of the node itself, can be applied.
//! Bounds: [`RECORD_MAX`] encoded bytes for the record that results.

use std::{collections::BTreeMap, net::SocketAddr};

use serde::{Deserialize, Serialize};
use starling_ids::{EndpointName, Incarnation, ModelId, NodeId};
use thiserror::Error;

use super::{Instance, InstanceKind, Lifecycle, NodeRecord, record::Withdrawn, record::endpoint_hash};
use crate::blobs::BlobDigest;

/// Longest encoded record in bytes; one patch always fits one session message.
pub const RECORD_MAX: usize = 192 * 1024;

/// News of one record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patch {
    /// Whose.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// The version it leads to.
    pub version: u64,
    /// The oldest version it can be applied to; 0: it stands alone.
    pub since: u64,
    /// Instances of the record it leads to.
    pub count: u32,
    pub(super) address: SocketAddr,
    http: Option<SocketAddr>,
    roles: Vec<String>,
    software: String,
    parts: Vec<Part>,
    /// What makes it whole; without it, it is the vital part.
    rest: Option<Rest>,
}

/// The vital part of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Part(EndpointName, InstanceKind, Lifecycle, Option<ModelId>, u64);

/// What follows after the vital part: the node's labels, its withdrawals, the details of each instance in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Rest {
    labels: BTreeMap<String, String>,
    withdrawn: Withdrawn,
    details: Vec<Detail>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Detail(BTreeMap<String, String>, Option<BlobDigest>, Option<BlobDigest>, Option<u32>, Option<u64>);

/// Why a patch leads nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PatchError {
    /// It builds on a version that is not held here.
    #[error("it builds on a version that is not held here")]
    Gap,
    /// Its parts do not fit together, or the record would be over [`RECORD_MAX`].
    #[error("not a record")]
    Malformed,
}

impl Patch {
    /// What turns `since` into this record; all of it where that cannot be told or nothing is held.
    #[must_use]
    pub fn whole(record: &NodeRecord, since: u64) -> Self {
        let known = since > 0 && since >= record.withdrawn.forgotten && since <= record.version && !record.partial;
        let since = if known { since } else { 0 };
        let news: Vec<&Instance> =
            record.instances.iter().filter(|instance| since == 0 || instance.changed > since).collect();
        let details = news.iter().map(|instance| {
            let Instance { labels, card, bundle, capacity, layout, .. } = instance;
            Detail(labels.clone(), *card, *bundle, *capacity, *layout)
        });
        let rest =
            Rest { labels: record.labels.clone(), withdrawn: record.withdrawn.clone(), details: details.collect() };
        // Who holds only the vital part cannot pass on more.
        let rest = (!record.partial).then_some(rest);
        Self { since, rest, ..Self::with_parts(record, &news) }
    }

    /// Who, where, and what it serves: what a newcomer needs first.
    #[must_use]
    pub fn vital(record: &NodeRecord) -> Self {
        Self::with_parts(record, &record.instances.iter().collect::<Vec<_>>())
    }

    fn with_parts(record: &NodeRecord, news: &[&Instance]) -> Self {
        let part = |instance: &&Instance| {
            let Instance { endpoint, kind, lifecycle, model, changed, .. } = instance;
            Part(endpoint.clone(), *kind, *lifecycle, model.clone(), *changed)
        };
        Self {
            node: record.node.clone(),
            incarnation: record.incarnation,
            version: record.version,
            since: 0,
            count: u32::try_from(record.instances.len()).unwrap_or(u32::MAX),
            address: record.address,
            http: record.http,
            roles: record.roles.clone(),
            software: record.software.clone(),
            parts: news.iter().map(part).collect(),
            rest: None,
        }
    }

    /// Whether it is more than the vital part.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.rest.is_some()
    }

    /// The record that results from applying it to what is held of the same life.
    pub fn apply(self, held: &NodeRecord) -> Result<NodeRecord, PatchError> {
        if self.since > 0 && (held.version < self.since || held.version > self.version || held.partial) {
            return Err(PatchError::Gap);
        }
        let partial = self.rest.is_none();
        let (labels, withdrawn, details) = match self.rest {
            Some(rest) if rest.details.len() == self.parts.len() => (rest.labels, rest.withdrawn, rest.details),
            Some(_) => return Err(PatchError::Malformed),
            None if self.since > 0 => return Err(PatchError::Malformed),
            None => (BTreeMap::new(), Withdrawn::default(), Vec::new()),
        };
        let mut instances: BTreeMap<EndpointName, Instance> = BTreeMap::new();
        if self.since > 0 {
            let stays = |instance: &&Instance| {
                let hash = endpoint_hash(&instance.endpoint);
                !withdrawn.recent.iter().any(|(gone, version)| *gone == hash && *version >= instance.changed)
            };
            let kept = held.instances.iter().filter(stays);
            instances.extend(kept.map(|instance| (instance.endpoint.clone(), instance.clone())));
        }
        let mut details = details.into_iter();
        for Part(endpoint, kind, lifecycle, model, changed) in self.parts {
            let mut instance = Instance { model, changed, ..Instance::new(endpoint.clone(), kind, lifecycle) };
            if let Some(Detail(labels, card, bundle, capacity, layout)) = details.next() {
                instance = Instance { labels, card, bundle, capacity, layout, ..instance };
            }
            instances.insert(endpoint, instance);
        }
        if instances.len() != self.count as usize || withdrawn.recent.len() > Withdrawn::KEPT {
            return Err(if self.since > 0 { PatchError::Gap } else { PatchError::Malformed });
        }
        let record = NodeRecord {
            node: self.node,
            incarnation: self.incarnation,
            version: self.version,
            address: self.address,
            http: self.http,
            roles: self.roles,
            software: self.software,
            labels,
            instances: instances.into_values().collect(),
            withdrawn,
            partial,
        };
        if encoded_len(&record) > RECORD_MAX { Err(PatchError::Malformed) } else { Ok(record) }
    }
}

/// Bytes of a value in MessagePack. One that does not encode counts as too long.
#[must_use]
pub(super) fn encoded_len<T: Serialize>(value: &T) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    rmp_serde::encode::write(&mut count, value).map_or(usize::MAX, |()| count.0)
}
