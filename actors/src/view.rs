//! The directory as the cast reads it: a catalog, read anew only when the directory changed.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use starling_cluster::{discovery::Snapshot, mesh::Mesh};
use tokio::sync::watch;

use crate::route::catalog::Catalog;

/// Shared by everybody on a node who needs to know which workers there are.
#[derive(Debug)]
pub struct View {
    mesh: Mesh,
    read: ArcSwapOption<(Arc<Snapshot>, Arc<Catalog>)>,
}

impl View {
    /// A view of this node's directory.
    #[must_use]
    pub fn new(mesh: &Mesh) -> Arc<Self> {
        Arc::new(Self { mesh: mesh.clone(), read: ArcSwapOption::empty() })
    }

    /// What can be asked for now.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        let snapshot = self.mesh.snapshot();
        if let Some(read) = self.read.load().as_ref()
            && Arc::ptr_eq(&read.0, &snapshot)
        {
            return read.1.clone();
        }
        let catalog = Arc::new(Catalog::read(&snapshot));
        self.read.store(Some(Arc::new((snapshot, catalog.clone()))));
        catalog
    }

    /// Resolves with every change of the directory.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.mesh.watch()
    }

    /// The node.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }
}
