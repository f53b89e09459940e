//! Which models can be asked for now, and which workers serve them: a pure reading of the directory.
//!
//! Called by the client, the indexer and the router shard, so that what is listed, what is indexed and what is
//! routed are one and the same. A worker counts when it is routable by the directory's one rule
//! ([`NodeView::routable`]), its card is here, and the card agrees with its model's. Never: loads, which are not in the directory.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use starling_cluster::{
    blobs::BlobDigest,
    discovery::{Instance, InstanceKind, Lifecycle, NodeState, NodeView, Routable, Snapshot},
};
use starling_engine::{Capabilities, EngineLimits, ModelCard};
use starling_ids::{Incarnation, ModelId, NodeId, WorkerId};

use super::{
    split::Role,
    spread::PARTS_MAX,
    wishes::{ADAPTER, Labels},
};
use crate::names;

/// A worker's label, of the value `off`, that says that it tells nothing of its blocks.
pub const SILENT: &str = "kv-events";

/// A router's label of this beginning, and a model's name after it, tells over how many slots that one's decisions should be
/// spread.
pub const PARTS: &str = "parts.";

/// A worker that can be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogWorker {
    /// Who.
    pub id: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Bounds of its engine.
    pub limits: EngineLimits,
    /// What it is for.
    pub role: Role,
    /// Its node failed a probe and may refute: taken only when no other worker is left.
    pub suspect: bool,
    /// Labels of its node and its own.
    pub labels: Arc<Labels>,
}

impl CatalogWorker {
    /// Whether it tells nothing of its blocks, so that what it holds must be guessed.
    #[must_use]
    pub fn silent(&self) -> bool {
        self.labels.get(SILENT).is_some_and(|value| value == "off")
    }
}

/// A model and who serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogModel {
    /// The card of the first worker; all others agree with it.
    pub card: ModelCard,
    /// The blob with its tokenizer, as the first worker names it; all hold the same text under the card's digest.
    pub bundle: Option<BlobDigest>,
    /// Sorted by id, at least one.
    pub workers: Vec<CatalogWorker>,
}

impl CatalogModel {
    /// LoRA adapters that some worker of it has.
    #[must_use]
    pub fn adapters(&self) -> BTreeSet<&str> {
        let labels = self.workers.iter().flat_map(|worker| worker.labels.keys());
        labels.filter_map(|key| key.strip_prefix(ADAPTER)).collect()
    }
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
    /// Models whose decisions are spread over several shards, and over how many.
    pub parts: BTreeMap<ModelId, u32>,
    /// Models that some worker names, whether it can be asked now or not.
    pub announced: BTreeSet<ModelId>,
    /// Models of workers that serve and cannot be asked from here yet: no link leads to them now, or the rest of their record
    /// or their card is on its way. It is known what they wait for, and that it takes seconds at most.
    pub awaited: BTreeSet<ModelId>,
    /// Serving workers that cannot be asked from here only because no link leads to them now: what is known of them stays so
    /// until the directory says more.
    pub cut_off: BTreeSet<(WorkerId, Incarnation)>,
    /// Records of members have not come yet, and no model is known so far.
    pub blank: bool,
    /// Cards of serving workers that are not here yet; their workers are left out until they are.
    pub missing: BTreeSet<BlobDigest>,
}

/// What is known of a card.
#[derive(Debug, Clone)]
pub enum Card {
    /// Not here yet.
    Missing,
    /// What a worker can do.
    Known(Arc<Capabilities>),
    /// Bytes that are no card to this release.
    Unreadable,
}

impl Catalog {
    /// Reads the directory; `cards` gives what is known of a worker's card.
    #[must_use]
    pub fn read(snapshot: &Snapshot, cards: impl Fn(BlobDigest) -> Card) -> Self {
        let mut catalog = Self::default();
        for (view, instance, routable) in snapshot.routable(InstanceKind::Worker) {
            catalog.add_worker(view, instance, routable, &cards);
        }
        let named = snapshot.instances(InstanceKind::Worker).filter_map(|(_, instance)| instance.model.clone());
        catalog.announced = named.collect();
        let cut = snapshot.instances(InstanceKind::Worker).filter(|(view, instance)| {
            instance.lifecycle == Lifecycle::Serving && (view.state == NodeState::Unreachable || view.record.partial)
        });
        catalog.awaited.extend(cut.filter_map(|(_, instance)| instance.model.clone()));
        let unreachable = snapshot.instances(InstanceKind::Worker).filter(|(view, instance)| {
            instance.lifecycle == Lifecycle::Serving && view.state == NodeState::Unreachable
        });
        catalog.cut_off.extend(unreachable.filter_map(|(view, instance)| {
            let index = names::worker_index(&instance.endpoint)?;
            Some((WorkerId { node: view.record.node.clone(), index }, view.record.incarnation))
        }));
        let unread = snapshot.nodes.iter().any(|view| view.record.version == 0);
        catalog.blank = unread && catalog.announced.is_empty();
        for (view, instance, routable) in snapshot.routable(InstanceKind::Router) {
            catalog.add_parts(instance);
            let suspect = routable == Routable::LastResort;
            let list = if suspect { &mut catalog.routers_suspect } else { &mut catalog.routers };
            list.push(view.record.node.clone());
        }
        catalog
    }

    /// Every worker with its model's card.
    pub fn workers(&self) -> impl Iterator<Item = (&ModelCard, &CatalogWorker)> {
        self.models.values().flat_map(|model| model.workers.iter().map(move |worker| (&model.card, worker)))
    }

    /// Over how many slots a model's decisions are spread.
    #[must_use]
    pub fn parts_of(&self, model: &ModelId) -> u32 {
        self.parts.get(model).copied().unwrap_or(1)
    }

    /// What a router wishes for hot models: the highest wish of all is in force.
    fn add_parts(&mut self, router: &Instance) {
        for (key, value) in &router.labels {
            let Some(model) = key.strip_prefix(PARTS).and_then(|name| ModelId::new(name).ok()) else { continue };
            let wish = value.parse().unwrap_or(1).clamp(1, PARTS_MAX);
            if wish > 1 {
                let parts = self.parts.entry(model).or_insert(1);
                *parts = wish.max(*parts);
            }
        }
    }

    /// Whether a model cannot be asked for now, but in a moment: a request for it should wait for that moment.
    #[must_use]
    pub fn may_come(&self, model: &ModelId) -> bool {
        !self.models.contains_key(model) && (self.blank || self.awaited.contains(model))
    }

    fn add_worker(
        &mut self,
        view: &NodeView,
        instance: &Instance,
        routable: Routable,
        cards: impl Fn(BlobDigest) -> Card,
    ) {
        let Some(index) = names::worker_index(&instance.endpoint) else { return };
        let id = WorkerId { node: view.record.node.clone(), index };
        // Only the vital part of its record has come: the rest is on its way.
        let Some(digest) = instance.card.filter(|_| !view.record.partial) else { return };
        let capabilities = match cards(digest) {
            Card::Known(capabilities) => capabilities,
            Card::Missing => {
                self.missing.insert(digest);
                self.awaited.extend(instance.model.clone());
                return;
            }
            Card::Unreadable => {
                self.refused.push((id, "its card cannot be read; it runs another release".to_owned()));
                return;
            }
        };
        let worker = CatalogWorker {
            id,
            incarnation: view.record.incarnation,
            limits: capabilities.limits.clone(),
            // A word of a newer release is no reason to leave a worker out.
            role: instance.labels.get("role").and_then(|role| role.parse().ok()).unwrap_or_default(),
            suspect: routable == Routable::LastResort,
            labels: Arc::new(labels(view, instance)),
        };
        match self.models.get_mut(&capabilities.card.id) {
            None => {
                let (card, workers) = (capabilities.card.clone(), vec![worker]);
                self.models.insert(card.id.clone(), CatalogModel { card, bundle: instance.bundle, workers });
            }
            Some(model) => match disagreement(&model.card, &capabilities.card) {
                None => {
                    model.bundle = model.bundle.or(instance.bundle);
                    model.workers.push(worker);
                }
                Some(reason) => self.refused.push((worker.id, reason)),
            },
        }
    }
}

/// Labels of the node, and over them those of the instance but the epoch, which is another one after every restart.
fn labels(view: &NodeView, instance: &Instance) -> Labels {
    let own = instance.labels.iter().filter(|(key, _)| *key != "epoch");
    view.record.labels.iter().chain(own).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Why two cards of one name cannot serve the same requests.
fn disagreement(first: &ModelCard, other: &ModelCard) -> Option<String> {
    let name = &first.id;
    if first.block_tokens != other.block_tokens {
        let (a, b) = (first.block_tokens, other.block_tokens);
        return Some(format!(
            "blocks of {b} tokens, while `{name}` is served with blocks of {a}: their hashes differ, so it gets no requests and no \
             blocks; start its engine with blocks of {a} tokens, or serve it under another name"
        ));
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
