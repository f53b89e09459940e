//! Supervision: every actor of a node is a child of a supervisor, is restarted when it dies, and is listed.
//!
//! ractor gives actors, links between parent and child, and the news that a child ended. This module adds
//! what it leaves open: child specifications, restart with exponential backoff and an intensity limit
//! ([`Policy`]), an ordered stop from leaf to root, handles that survive a restart ([`Handle`]), and the book
//! of all actors ([`ActorBook`]). An actor file needs nothing of it: it implements [`ractor::Actor`] and keeps
//! its resources in its state, where they are dropped under panic, error, kill, stop and drain alike.

mod book;
mod child;
mod handle;
mod policy;
mod supervisor;
mod tasks;
mod tree;

#[cfg(test)]
mod tests;

pub use book::{ActorBook, ActorRow, ActorState, ActorStats};
pub use child::{ChildSpec, Restart, child};
pub use handle::{Handle, Unavailable};
pub use policy::Policy;
pub use tasks::{TaskOwner, Tasks};
pub use tree::{SuperviseError, SupervisorHandle};
