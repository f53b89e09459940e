//! What the programming model needs of a node beyond its public doors.
//!
//! Called by [`crate::program`] alone.

use std::sync::{Arc, Weak};

use super::{Inner, Mesh};
use crate::{discovery::Snapshot, program::Programs};

/// A handle that keeps no node alive; for handlers that the node itself holds.
#[derive(Clone)]
pub(crate) struct WeakMesh(Weak<Inner>);

impl WeakMesh {
    /// The node, while somebody holds it.
    pub(crate) fn upgrade(&self) -> Option<Mesh> {
        self.0.upgrade().map(|inner| Mesh { inner })
    }
}

impl Mesh {
    /// The same node, not kept alive.
    pub(crate) fn downgrade(&self) -> WeakMesh {
        WeakMesh(Arc::downgrade(&self.inner))
    }

    /// The snapshot with this node's record as it is this moment: what was just published is in it already.
    pub(crate) fn current(&self) -> Arc<Snapshot> {
        let (snapshot, own) = (self.snapshot(), self.inner.directory.own());
        let found = snapshot.nodes.binary_search_by(|view| view.record.node.cmp(&own.node));
        let behind = |at: &usize| snapshot.nodes[*at].record.version != own.version;
        let Some(at) = found.ok().filter(behind) else { return snapshot };
        let mut current = Snapshot::clone(&snapshot);
        current.nodes[at].record = own;
        Arc::new(current)
    }

    /// The actors of programs on this node.
    pub(crate) fn programs(&self) -> &Programs {
        &self.inner.programs
    }
}
