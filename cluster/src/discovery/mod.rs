//! What every node offers: one versioned record per node, and the snapshot that everybody reads.
//!
//! How [`crate::mesh`] puts it together:
//!
//! ```text
//! let directory = DirectoryHandle::new(first_record);                 // before membership, which is given it
//! supervisor.add(directory_child(&directory, DirectoryArgs { view: view.subscribe(), membership, caller, ops })).await?;
//! directory.publish(|record| record.instances.push(..))?;             // raises the version, tells the cluster
//! directory.snapshot(); directory.watch(); directory.set_reachable(node, false);
//! ```

mod actor;
mod asks;
mod core;
mod own;
mod pulls;
mod record;

#[cfg(test)]
mod tests;

pub use actor::{DirectoryArgs, DirectoryHandle, OP_RECORD, OP_SYNC, directory_child};
pub use core::{Digest, DirectoryCore, RECORD_MAX, Refused};
pub use own::{OwnRecord, RecordTooLarge};
pub use record::{Instance, InstanceKind, Lifecycle, NodeRecord, NodeState, NodeView, Snapshot};
