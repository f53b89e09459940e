//! When a shard takes slots, and over how many shards a hot model is spread: what its entry in the directory says of both.
//!
//! A shard whose node joins others says that it is warming until it has the inventory of every worker that can be asked;
//! meanwhile clients go on asking the shards before it, which know all that. One that drains is left at once and still answers.
//! Called by the shard actor, one task a life. Bounds: [`WARM_MAX`] of warming; a label for each model that was ever hot.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use starling_cluster::discovery::Lifecycle;
use starling_ids::{ModelId, NodeId};

use super::{Mind, ShardShared, lock};
use crate::route::{
    catalog::{Catalog, PARTS},
    spread::WINDOW,
};

/// How long a shard waits for what it does not know yet.
const WARM_MAX: Duration = Duration::from_secs(5);

/// Between two looks while it does.
const WARM_LOOK: Duration = Duration::from_millis(20);

/// What a shard says of itself; outlives its restarts.
#[derive(Debug, Default)]
pub(super) struct Standing(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    warm: bool,
    draining: bool,
    /// Wishes that were ever more than one part.
    parts: BTreeMap<ModelId, u32>,
}

impl Standing {
    pub(super) fn drain(&self) {
        self.lock().draining = true;
    }

    /// The lifecycle and the labels of its entry.
    pub(super) fn entry(&self) -> (Lifecycle, BTreeMap<String, String>) {
        let inner = self.lock();
        let lifecycle = match (inner.draining, inner.warm) {
            (true, _) => Lifecycle::Draining,
            (false, true) => Lifecycle::Serving,
            (false, false) => Lifecycle::Warming,
        };
        let labels = inner.parts.iter().map(|(model, parts)| (format!("{PARTS}{model}"), parts.to_string()));
        (lifecycle, labels.collect())
    }

    fn warm(&self) {
        self.lock().warm = true;
    }

    fn is_warm(&self) -> bool {
        self.lock().warm
    }

    /// Takes wishes over; true when one of them is another one than before.
    fn wish(&self, wishes: Vec<(ModelId, u32)>) -> bool {
        let mut inner = self.lock();
        let mut changed = false;
        for (model, parts) in wishes {
            if parts > 1 || inner.parts.contains_key(&model) {
                changed |= inner.parts.insert(model, parts) != Some(parts);
            }
        }
        changed
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishes the shard's entry, and again when something about it changes. Ends with the shard's life.
pub(super) async fn keep(mind: Weak<Mutex<Mind>>, shared: Arc<ShardShared>) {
    if !shared.standing.is_warm() {
        shared.publish();
        warm(&shared).await;
        shared.standing.warm();
    }
    shared.publish();
    loop {
        tokio::time::sleep(WINDOW).await;
        let Some(mind) = mind.upgrade() else { return };
        let catalog = shared.view.catalog();
        let wishes = lock(&mind).wishes(&catalog);
        drop(mind);
        if shared.standing.wish(wishes) {
            shared.publish();
        }
    }
}

/// Waits until this shard may take over.
async fn warm(shared: &ShardShared) {
    let ready = async {
        loop {
            let catalog = shared.view.catalog();
            let alone = shared.view.mesh().snapshot().nodes.len() < 2;
            let whole = || shared.knowledge.covers(sound(&catalog));
            if takes_over(&catalog, shared.view.mesh().node(), shared.rules.joins && alone, whole) {
                return;
            }
            tokio::time::sleep(WARM_LOOK).await;
        }
    };
    if tokio::time::timeout(WARM_MAX, ready).await.is_err() {
        tracing::info!("the shard takes slots before it has heard every worker");
    }
}

/// Workers whose inventory can be expected.
fn sound(catalog: &Catalog) -> impl Iterator<Item = (&starling_ids::WorkerId, starling_ids::Incarnation)> {
    catalog.workers().filter(|(_, worker)| !worker.suspect).map(|(_, worker)| (&worker.id, worker.incarnation))
}

/// Whether a shard does better than who decides now: other shards that know all, or clients by themselves. `lost` says that
/// its node should know others and does not yet.
fn takes_over(catalog: &Catalog, own: &NodeId, lost: bool, whole: impl FnOnce() -> bool) -> bool {
    if lost || catalog.blank || !catalog.missing.is_empty() {
        return false;
    }
    let others = catalog.routers.iter().any(|router| router != own);
    !others || whole()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_takes_over_when_it_knows_as_much_as_the_others() {
        let (own, other) = (NodeId::new("own").expect("name"), NodeId::new("other").expect("name"));
        let first = Catalog::default();
        assert!(takes_over(&first, &own, false, || false), "nobody else decides");
        assert!(!takes_over(&first, &own, true, || true), "it has not met the others");
        let second = Catalog { routers: vec![other, own.clone()], ..Catalog::default() };
        assert!(!takes_over(&second, &own, false, || false) && takes_over(&second, &own, false, || true));
        let blank = Catalog { blank: true, ..Catalog::default() };
        assert!(!takes_over(&blank, &own, false, || true), "records are on their way");
    }

    #[test]
    fn an_entry_says_what_is_wished_until_it_is_taken_back() {
        let (standing, model) = (Standing::default(), ModelId::new("m").expect("name"));
        assert_eq!(standing.entry(), (Lifecycle::Warming, BTreeMap::new()));
        standing.warm();
        assert!(!standing.wish(vec![(model.clone(), 1)]), "one part is no news");
        assert!(standing.wish(vec![(model.clone(), 4)]) && !standing.wish(vec![(model.clone(), 4)]));
        assert_eq!(standing.entry().1["parts.m"], "4");
        assert!(standing.wish(vec![(model, 1)]), "labels stay in the directory, so it is taken back by a word");
        assert_eq!(standing.entry(), (Lifecycle::Serving, BTreeMap::from([("parts.m".to_owned(), "1".to_owned())])));
        standing.drain();
        assert_eq!(standing.entry().0, Lifecycle::Draining);
    }
}
