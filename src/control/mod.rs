//! The operations that every node answers for the command line, and the question itself.
//!
//! [`rows`] are the words, [`keys`] those about keys, [`serve`] the answers of a running node, `view` the same for the page, [`ask`] the client without membership.

mod ask;
mod keys;
mod rows;
mod serve;
mod view;

pub use ask::{AskError, ask};
pub use keys::{KeyRow, KeysAsk, KeysTold};
pub use rows::{ActorRow, Caches, ClusterActors, InstanceRow, Missing, NodeRow, Plans, RequestRow, Requests, Why};
pub use serve::serve;
pub(crate) use view::view;

/// Names of the operations.
pub mod op {
    /// Every member: answers `Vec<NodeRow>`.
    pub const NODES: &str = "node/nodes";
    /// Every instance: answers `Vec<InstanceRow>`.
    pub const INSTANCES: &str = "node/instances";
    /// Every actor of every member: answers `ClusterActors`.
    pub const ACTORS: &str = "node/actors";
    /// The actors of the asked node alone: answers `Vec<ActorRow>`.
    pub const ACTORS_LOCAL: &str = "node/actors-local";
    /// A request's id as text: answers `Why`.
    pub const WHY: &str = "node/why";
    /// How many (u32): the newest decisions of all routers; answers a [`super::Requests`].
    pub const REQUESTS: &str = "node/requests";
    /// What the planner says of every model: answers a [`super::Plans`].
    pub const PLAN: &str = "node/plan";
    /// The caches of every worker: answers a [`super::Caches`].
    pub const CACHES: &str = "node/caches";
    /// (worker as `NODE/INDEX`, role): gives it the role; answers the role before.
    pub const ROLE: &str = "node/role";
    /// (worker as `NODE/INDEX`, nothing): drains it; answers how many requests it has in flight.
    pub const DRAIN: &str = "node/drain";
    /// (worker as `NODE/INDEX`, fault): puts it into the worker's simulated engine; answers the fault before.
    pub const FAULT: &str = "node/fault";
    /// A [`super::KeysAsk`]: answers a [`super::KeysTold`].
    pub const KEYS: &str = "node/keys";
    /// A path: makes that actor panic; answers whether there is one.
    pub const PANIC: &str = "node/panic";
}
