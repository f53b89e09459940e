//! The handle of a supervisor: add and remove children, stop a subtree.
//!
//! Called by whoever builds the actor tree; asks the actor in [`super::supervisor`]. Bounds: each question has a
//! limit in time.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ractor::{Actor, ActorCell, RpcReplyPort};
use thiserror::Error;

use super::{
    ActorBook, ActorState, ChildSpec, Handle, Policy, Restart, Unavailable,
    child::{Supervised, child},
    supervisor::Supervisor,
};

/// Longest start of a child, and longest wait for a supervisor's answer.
const START_MAX: Duration = Duration::from_secs(60);

/// Why a supervisor did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SuperviseError {
    /// There is a child of this name.
    #[error("there is already an actor {0}")]
    Duplicate(String),
    /// There is no child of this name.
    #[error("there is no actor {0}")]
    Unknown(String),
    /// The child's start failed; it was not added.
    #[error("actor {path} did not start: {reason}")]
    Start {
        /// Its path.
        path: String,
        /// What it said.
        reason: String,
    },
    /// The supervisor itself gave no answer.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

pub(super) type Reply = RpcReplyPort<Result<(), SuperviseError>>;

/// What a supervisor is asked.
pub(crate) enum SupervisorMsg {
    Add(Box<ChildSpec>, Reply),
    Remove(String, Reply),
    /// The backoff of a child is over; `life` tells a late timer from a current one.
    Restart {
        name: String,
        life: u64,
    },
}

impl ractor::Message for SupervisorMsg {}

/// What outlives a restart of the supervisor itself.
pub(crate) struct Shared {
    path: String,
    pub(super) book: ActorBook,
    pub(super) policy: Policy,
    specs: Mutex<Vec<ChildSpec>>,
}

impl Shared {
    pub(super) fn child_path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}/{name}", self.path) }
    }

    pub(super) fn specs(&self) -> MutexGuard<'_, Vec<ChildSpec>> {
        self.specs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, spec: &ChildSpec) {
        self.specs().retain(|known| known.name != spec.name);
        spec.stats.set_state(ActorState::Stopped);
        self.book.remove(&self.child_path(&spec.name));
    }
}

/// Adds and removes children of one supervisor. Cheap to clone.
#[derive(Clone)]
pub struct SupervisorHandle {
    handle: Handle<SupervisorMsg>,
    shared: Arc<Shared>,
    /// The supervisor above and the name there; none for the root.
    parent: Option<(Box<SupervisorHandle>, String)>,
}

impl std::fmt::Debug for SupervisorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SupervisorHandle({})", self.shared.path)
    }
}

impl SupervisorHandle {
    /// Starts the root supervisor of a node. It stands in the book as `root`; its children have no prefix.
    pub async fn root(book: ActorBook, policy: Policy) -> Result<Self, SuperviseError> {
        let handle = Handle::new();
        let shared = Arc::new(Shared { path: String::new(), book, policy, specs: Mutex::default() });
        handle.stats().set_path("root");
        let actor = Supervised { inner: Supervisor, stats: handle.stats().clone() };
        let started = Actor::spawn(None, actor, shared.clone()).await;
        let (actor, _ended) =
            started.map_err(|error| SuperviseError::Start { path: "root".to_owned(), reason: error.to_string() })?;
        let cell = handle.set(actor);
        shared.book.put("root", "supervisor", handle.stats().clone(), Some(cell));
        Ok(Self { handle, shared, parent: None })
    }

    /// Starts a child and keeps it running. A child that fails its first start is not added.
    pub async fn add(&self, spec: ChildSpec) -> Result<(), SuperviseError> {
        self.handle.call(|reply| SupervisorMsg::Add(Box::new(spec), reply), START_MAX).await?
    }

    /// Stops a child (kills it after the policy's `stop_max`) and waits for its end.
    pub async fn remove(&self, name: &str) -> Result<(), SuperviseError> {
        let patience = self.shared.policy.stop_max * 2 + START_MAX;
        self.handle.call(|reply| SupervisorMsg::Remove(name.to_owned(), reply), patience).await?
    }

    /// Adds a supervisor as a child.
    pub async fn child_supervisor(&self, name: &str, policy: Policy) -> Result<Self, SuperviseError> {
        let (path, book) = (self.shared.child_path(name), self.shared.book.clone());
        let shared = Arc::new(Shared { path, book, policy, specs: Mutex::default() });
        let handle = Handle::new();
        let args = shared.clone();
        let make = move || (Supervisor, args.clone());
        self.add(child::<Supervisor>(name, "supervisor", Restart::Permanent, &handle, make)).await?;
        Ok(Self { handle, shared, parent: Some((Box::new(self.clone()), name.to_owned())) })
    }

    /// Stops all children in reverse order of their start, each from its leaves up, then the supervisor.
    pub async fn stop_all(&self) -> Result<(), SuperviseError> {
        if let Some((parent, name)) = &self.parent {
            return parent.remove(name).await;
        }
        if let Some(actor) = self.handle.actor() {
            stop(&actor.get_cell(), Duration::from_secs(60)).await;
        }
        self.shared.book.remove("root");
        Ok(())
    }

    /// Resolves when this supervisor's present life has ended. For the root: the node cannot go on.
    pub async fn ended(&self) {
        if let Some(actor) = self.handle.actor() {
            // Without a timeout there is nothing that can fail.
            actor.get_cell().wait(None).await.ok();
        }
    }

    /// The book that its children are listed in.
    #[must_use]
    pub fn book(&self) -> &ActorBook {
        &self.shared.book
    }

    /// Its path; empty for the root.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.shared.path
    }
}

/// Stops an actor, or kills it when it takes longer than `patience`.
pub(super) async fn stop(cell: &ActorCell, patience: Duration) {
    if cell.stop_and_wait(None, Some(patience)).await.is_err() {
        // Killing only fails for an actor that is already gone.
        cell.kill_and_wait(Some(Duration::from_secs(1))).await.ok();
    }
}
