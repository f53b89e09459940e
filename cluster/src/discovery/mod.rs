//! What every node offers: one versioned record per node, and the snapshot that everybody reads.

mod record;

pub use record::{Instance, InstanceKind, Lifecycle, NodeRecord, NodeState, NodeView, Snapshot};
