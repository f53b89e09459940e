//! The directory as the cast reads it: a catalog, read anew only when the directory or a card changed.
//!
//! Called by the client, the indexer and the router shard of a node. Owns the tasks that follow the directory and fetch
//! cards; they end with it. Bounds: one fetch a card, [`FETCHES_MAX`] at one time.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use starling_cluster::{blobs::BlobDigest, discovery::Snapshot, mesh::Mesh, supervise::TaskOwner};
use starling_ids::ModelId;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{cards::Cards, route::catalog::Catalog};

/// Cards being fetched at one time.
const FETCHES_MAX: usize = 32;
/// Longest fetch of a card; then it is asked for again.
const FETCH_TIME_MAX: Duration = Duration::from_secs(10);
/// Between two tries for a card that nobody gave.
const AGAIN: Duration = Duration::from_millis(500);

/// Shared by everybody on a node who needs to know which workers there are.
#[derive(Debug)]
pub struct View {
    mesh: Mesh,
    cards: Cards,
    read: ArcSwapOption<Read>,
    /// Rises with every change of the directory and with every card that came.
    changes: watch::Sender<u64>,
    fetching: Mutex<BTreeSet<BlobDigest>>,
    tasks: TaskOwner,
}

#[derive(Debug)]
struct Read {
    snapshot: Arc<Snapshot>,
    change: u64,
    catalog: Arc<Catalog>,
}

impl View {
    /// A view of this node's directory. Must be called within the runtime: it follows the directory from now on.
    #[must_use]
    pub fn new(mesh: &Mesh) -> Arc<Self> {
        let view = Arc::new(Self {
            mesh: mesh.clone(),
            cards: Cards::default(),
            read: ArcSwapOption::empty(),
            changes: watch::Sender::new(0),
            fetching: Mutex::default(),
            tasks: TaskOwner::new(FETCHES_MAX + 1),
        });
        let follower = follow(Arc::downgrade(&view), mesh.watch());
        if !view.tasks.tasks().spawn(follower) {
            tracing::error!("the directory is not followed");
        }
        view
    }

    /// What can be asked for now.
    #[must_use]
    pub fn catalog(self: &Arc<Self>) -> Arc<Catalog> {
        let (change, snapshot) = (*self.changes.borrow(), self.mesh.snapshot());
        if let Some(read) = self.read.load().as_ref()
            && read.change == change
            && Arc::ptr_eq(&read.snapshot, &snapshot)
        {
            return read.catalog.clone();
        }
        let blobs = self.mesh.blobs();
        let catalog = Arc::new(Catalog::read(&snapshot, |digest| self.cards.get(&blobs, digest)));
        catalog.missing.iter().for_each(|digest| self.fetch(*digest));
        self.read.store(Some(Arc::new(Read { snapshot, change, catalog: catalog.clone() })));
        catalog
    }

    /// Resolves with every change of the directory, and with every card that came.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Resolves when a model can be asked for, when there is nothing to wait for, or at `until`, whichever is first.
    pub async fn reach(self: &Arc<Self>, model: &ModelId, until: Instant) {
        let mut changes = self.watch();
        let came = async { while self.catalog().may_come(model) && changes.changed().await.is_ok() {} };
        // Whoever waited looks at the catalog again, also when the time is over.
        timeout_at(until, came).await.ok();
    }

    /// The node.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn fetching(&self) -> std::sync::MutexGuard<'_, BTreeSet<BlobDigest>> {
        self.fetching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches a card in the background. One for which there is no room is asked for when the catalog is read next.
    fn fetch(self: &Arc<Self>, digest: BlobDigest) {
        if !self.fetching().insert(digest) {
            return;
        }
        if !self.tasks.tasks().spawn(fetch(Arc::downgrade(self), digest)) {
            self.fetching().remove(&digest);
        }
    }

    /// The catalog is read anew.
    fn changed(self: &Arc<Self>) {
        self.changes.send_modify(|change| *change += 1);
    }
}

/// Reads the catalog at every change, so that cards are fetched before somebody waits for them.
async fn follow(view: Weak<View>, mut snapshots: watch::Receiver<Arc<Snapshot>>) {
    loop {
        let Some(strong) = view.upgrade() else { return };
        strong.changed();
        drop(strong.catalog());
        drop(strong);
        if snapshots.changed().await.is_err() {
            return;
        }
    }
}

/// Ends with the card, or with a pause after which whoever reads the catalog asks for it again.
async fn fetch(view: Weak<View>, digest: BlobDigest) {
    let Some(blobs) = view.upgrade().map(|view| view.mesh.blobs()) else { return };
    let fetched = blobs.get(digest, FETCH_TIME_MAX).await;
    drop(blobs);
    if let Err(error) = &fetched {
        tracing::warn!(%digest, %error, "a worker's card is not here; the worker is not asked until it is");
        tokio::time::sleep(AGAIN).await;
    }
    let Some(view) = view.upgrade() else { return };
    if let Ok(bytes) = fetched {
        view.cards.note(digest, &bytes);
    }
    view.fetching().remove(&digest);
    view.changed();
    drop(view.catalog());
}
