//! Which models can be asked for now, and which workers serve them: a pure reading of the directory.
//!
//! Called by the client, the indexer and the router shard, so that what is listed, what is indexed and what is
//! routed are one and the same. A worker counts when it is serving, its node is a member and reachable, and
//! its card agrees with its model's. Never: loads, which are not in the directory.

use std::collections::{BTreeMap, BTreeSet};

use starling_cluster::discovery::{Instance, InstanceKind, Lifecycle, NodeState, NodeView, Snapshot};
use starling_engine::{Capabilities, EngineLimits, ModelCard};
use starling_ids::{Incarnation, ModelId, NodeId, WorkerId};

use crate::names;

/// A worker that can be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogWorker {
    /// Who.
    pub id: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Bounds of its engine.
    pub limits: EngineLimits,
    /// Its node failed a probe and may refute: taken only when no other worker is left.
    pub suspect: bool,
}

/// A model and who serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogModel {
    /// The card of the first worker; all others agree with it.
    pub card: ModelCard,
    /// Sorted by id, at least one.
    pub workers: Vec<CatalogWorker>,
}

/// All that can be asked for now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalog {
    /// By name.
    pub models: BTreeMap<ModelId, CatalogModel>,
    /// Serving workers left out, each with a sentence why.
    pub refused: Vec<(WorkerId, String)>,
    /// Nodes with a live router shard.
    pub routers: Vec<NodeId>,
    /// Nodes with a router shard that failed a probe and may refute.
    pub routers_suspect: Vec<NodeId>,
    /// Models that some worker names, whether it can be asked now or not.
    pub announced: BTreeSet<ModelId>,
}

impl Catalog {
    /// Reads the directory.
    #[must_use]
    pub fn read(snapshot: &Snapshot) -> Self {
        let mut catalog = Self::default();
        for (view, instance) in snapshot.instances(InstanceKind::Worker).filter(|(v, i)| takes_requests(v, i)) {
            catalog.add_worker(view, instance);
        }
        let named = snapshot.instances(InstanceKind::Worker).filter_map(|(_, instance)| instance.model.clone());
        catalog.announced = named.collect();
        for (view, _) in snapshot.instances(InstanceKind::Router).filter(|(v, i)| takes_requests(v, i)) {
            let suspect = view.state == NodeState::Suspect;
            let list = if suspect { &mut catalog.routers_suspect } else { &mut catalog.routers };
            list.push(view.record.node.clone());
        }
        catalog
    }

    /// Every worker with its model's card.
    pub fn workers(&self) -> impl Iterator<Item = (&ModelCard, &CatalogWorker)> {
        self.models.values().flat_map(|model| model.workers.iter().map(move |worker| (&model.card, worker)))
    }

    fn add_worker(&mut self, view: &NodeView, instance: &Instance) {
        let Some(index) = names::worker_index(&instance.endpoint) else { return };
        let id = WorkerId { node: view.record.node.clone(), index };
        let card = instance.card.as_ref().map(|bytes| rmp_serde::from_slice::<Capabilities>(bytes));
        let Some(Ok(capabilities)) = card else {
            self.refused.push((id, "its card cannot be read; it runs another release".to_owned()));
            return;
        };
        let worker = CatalogWorker {
            id,
            incarnation: view.record.incarnation,
            limits: capabilities.limits,
            suspect: view.state == NodeState::Suspect,
        };
        match self.models.get_mut(&capabilities.card.id) {
            None => {
                let model = CatalogModel { card: capabilities.card, workers: vec![worker] };
                self.models.insert(model.card.id.clone(), model);
            }
            Some(model) => match disagreement(&model.card, &capabilities.card) {
                None => model.workers.push(worker),
                Some(reason) => self.refused.push((worker.id, reason)),
            },
        }
    }
}

fn takes_requests(view: &NodeView, instance: &Instance) -> bool {
    instance.lifecycle == Lifecycle::Serving && view.state != NodeState::Unreachable
}

/// Why two cards of one name cannot serve the same requests.
fn disagreement(first: &ModelCard, other: &ModelCard) -> Option<String> {
    let name = &first.id;
    if first.block_tokens != other.block_tokens {
        let (a, b) = (first.block_tokens, other.block_tokens);
        return Some(format!("blocks of {b} tokens, while `{name}` is served with blocks of {a}"));
    }
    if first.bundle_digest != other.bundle_digest {
        return Some(format!("another tokenizer than `{name}` is served with"));
    }
    if first.hash_seed != other.hash_seed {
        return Some(format!("another hash seed than `{name}` is served with"));
    }
    None
}

#[cfg(test)]
mod tests;
