//! What the programming model needs of a node beyond its public doors.
//!
//! Called by [`crate::program`] alone.

use std::sync::{Arc, Weak};

use starling_ids::{Incarnation, NodeId};

use super::{Inner, Mesh};
use crate::{
    discovery::{NodeRecord, Snapshot},
    program::Programs,
    stream::StreamError,
};

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

    /// This node's record as it is now.
    pub(crate) fn own_record(&self) -> Arc<NodeRecord> {
        self.inner.directory.own()
    }

    /// Whether a node lives in this incarnation as far as this one knows: what [`Mesh::open`] would refuse at once.
    pub(crate) fn lives(&self, node: &NodeId, incarnation: Incarnation) -> Result<(), StreamError> {
        let own = (*node == self.inner.node).then_some(self.inner.incarnation);
        match own.or_else(|| self.known_incarnation(node)) {
            None => Err(self.not_a_member(node)),
            Some(current) if incarnation < current => {
                Err(StreamError::Stale { node: node.clone(), wanted: incarnation, current })
            }
            Some(_) => Ok(()),
        }
    }

    /// Resolves when the node has ended, by whatever way.
    pub(crate) async fn ended(&self) {
        self.inner.root.ended().await;
    }

    /// Runs a task in the node's set of handlers; false when it is full or closed.
    pub(crate) fn spawn_handler(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        self.inner.handlers.spawn(task)
    }

    /// The actors of programs on this node.
    pub(crate) fn programs(&self) -> &Programs {
        &self.inner.programs
    }
}
