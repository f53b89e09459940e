//! What every node offers: one versioned record per node, and the snapshot that everybody reads.
//!
//! How [`crate::mesh`] puts it together:
//!
//! ```text
//! let directory = DirectoryHandle::new(first_record);                 // before membership, which is given it
//! supervisor.add(directory_child(&directory, DirectoryArgs { view: view.subscribe(), membership, caller, ops })).await?;
//! directory.publish(|record| record.instances.push(..))?;             // raises the version, tells the cluster
//! directory.snapshot(); directory.watch(); directory.set_reachable(node, incarnation, false);
//! ```
//!
//! How a change travels: its version is a rumour of gossip, and where it is small ([`RecordDelta`]) the rumour carries it.
//! Else each node pulls a [`Patch`] from whoever told it. What is lost on the way, the periodic comparison of [`Tally`]
//! sums finds. Pure parts: [`DirectoryEngine`] (all of it on a virtual clock), [`DirectoryCore`] (what is held),
//! [`Lifecycle`] (which steps a life has). The actor is a thin shell.

mod actor;
mod asks;
mod core;
mod delta;
mod down;
mod engine;
mod exchange;
mod lifecycle;
mod own;
mod patch;
mod pulls;
mod record;
mod tally;

#[cfg(test)]
mod tests;

pub use actor::{DirectoryArgs, DirectoryHandle, OP_DIRECTORY, directory_child};
pub use core::{DirectoryCore, Heard, Refused, Turnover};
pub use delta::{DELTA_MAX, RecordDelta, SmallChange};
pub use engine::{COALESCE, COALESCE_FROM, DirectoryEffect, DirectoryEngine, sync_every};
pub use exchange::{Ask, ENTRIES_MAX, PATCHES_BYTES_MAX, Told, WANTS_MAX, Want};
pub use lifecycle::{IllegalStep, Lifecycle};
pub use own::{LABEL_MAX, OwnRecord, PublishError};
pub use patch::{Patch, PatchError, RECORD_MAX};
pub use pulls::PULLS_MAX;
pub use record::{
    Instance, InstanceKind, NodeRecord, NodeState, NodeView, Routable, Snapshot, Withdrawn, endpoint_hash,
};
pub use tally::{BUCKETS, Entry, Stamp, Tally};
