//! The supervisor actor: starts children, restarts those that die, stops them in reverse order.
//!
//! Called through [`SupervisorHandle`]; children report to it through ractor's supervision events.
//! Never: decides when to restart (that is [`super::policy`]), nor waits for a child to stop while it handles
//! a message. Bounds: one entry a child; one timer a child that waits for its restart.
//! If it dies: its children are killed with it; its parent starts it again and it starts its permanent and
//! transient children again from their specifications. More failures than its policy allows fail it on
//! purpose, so the trouble climbs; at the root it ends the node.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use starling_ids::Metric;
use thiserror::Error;
use tokio::task::JoinSet;

use super::{
    ActorBook, ActorState, ChildSpec, Handle, Policy, Restart, Unavailable,
    child::{Supervised, child},
    policy::FailureLog,
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

type Reply = RpcReplyPort<Result<(), SuperviseError>>;

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
    book: ActorBook,
    policy: Policy,
    specs: Mutex<Vec<ChildSpec>>,
}

impl Shared {
    fn child_path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}/{name}", self.path) }
    }

    fn specs(&self) -> MutexGuard<'_, Vec<ChildSpec>> {
        self.specs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, spec: &ChildSpec) {
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

/// The actor. Its arguments are what outlives it.
pub(crate) struct Supervisor;

pub(crate) struct State {
    shared: Arc<Shared>,
    children: Vec<Child>,
    failures: FailureLog,
    /// Restart timers and waits for stopping children; aborted with the state.
    tasks: JoinSet<()>,
}

struct Child {
    spec: ChildSpec,
    cell: Option<ActorCell>,
    started: Instant,
    failures_in_row: u32,
    life: u64,
    /// Who waits for its removal; none means that it is not leaving.
    leaving: Option<Vec<Reply>>,
}

impl Actor for Supervisor {
    type Msg = SupervisorMsg;
    type State = State;
    type Arguments = Arc<Shared>;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMsg>,
        shared: Arc<Shared>,
    ) -> Result<State, ActorProcessingErr> {
        // Temporary children ended with the former life.
        let (again, gone): (Vec<_>, Vec<_>) =
            shared.specs().iter().cloned().partition(|spec| spec.restart != Restart::Temporary);
        gone.iter().for_each(|spec| shared.forget(spec));
        let mut state = State { shared, children: Vec::new(), failures: FailureLog::default(), tasks: JoinSet::new() };
        for spec in again {
            spec.stats.restarted();
            state.start(&myself, spec).await?;
        }
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<SupervisorMsg>,
        message: SupervisorMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        while state.tasks.try_join_next().is_some() {}
        match message {
            SupervisorMsg::Add(spec, reply) => {
                let answer = state.add(&myself, *spec).await;
                // The asker may have gone; the child is in the book either way.
                reply.send(answer).ok();
            }
            SupervisorMsg::Remove(name, reply) => state.remove(&name, reply),
            SupervisorMsg::Restart { name, life } => return state.restart(&myself, &name, life).await,
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMsg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(cell, error) => state.ended(&myself, &cell, Some(error.to_string())),
            SupervisionEvent::ActorTerminated(cell, last, reason) => {
                // What the child held goes back before its successor starts.
                drop(last);
                state.ended(&myself, &cell, reason.filter(|reason| reason == "killed"))
            }
            _ => Ok(()),
        }
    }

    async fn post_stop(&self, _myself: ActorRef<SupervisorMsg>, state: &mut State) -> Result<(), ActorProcessingErr> {
        state.tasks.abort_all();
        for child in state.children.drain(..).rev() {
            if let Some(cell) = &child.cell {
                stop(cell, state.shared.policy.stop_max).await;
            }
            state.shared.forget(&child.spec);
        }
        Ok(())
    }
}

impl State {
    async fn add(&mut self, myself: &ActorRef<SupervisorMsg>, spec: ChildSpec) -> Result<(), SuperviseError> {
        let path = self.shared.child_path(&spec.name);
        if self.children.iter().any(|child| child.spec.name == spec.name) {
            return Err(SuperviseError::Duplicate(path));
        }
        self.shared.specs().push(spec.clone());
        let started = self.start(myself, spec.clone()).await;
        started.map_err(|error| {
            self.shared.forget(&spec);
            SuperviseError::Start { path, reason: error.to_string() }
        })
    }

    async fn start(&mut self, myself: &ActorRef<SupervisorMsg>, spec: ChildSpec) -> Result<(), ActorProcessingErr> {
        let path = self.shared.child_path(&spec.name);
        spec.stats.set_path(&path);
        spec.stats.set_state(ActorState::Starting);
        let cell = (spec.start)(myself.get_cell()).await?;
        self.shared.book.put(&path, spec.kind, spec.stats.clone(), Some(cell.clone()));
        let started = Instant::now();
        self.children.push(Child { spec, cell: Some(cell), started, failures_in_row: 0, life: 0, leaving: None });
        Ok(())
    }

    /// Stopping happens in a task, so that other children are served meanwhile; [`Self::ended`] finishes it.
    fn remove(&mut self, name: &str, reply: Reply) {
        let Some(at) = self.children.iter().position(|child| child.spec.name == name) else {
            reply.send(Err(SuperviseError::Unknown(self.shared.child_path(name)))).ok();
            return;
        };
        let child = &mut self.children[at];
        let Some(cell) = child.cell.clone() else {
            let child = self.children.remove(at);
            self.shared.forget(&child.spec);
            reply.send(Ok(())).ok();
            return;
        };
        child.spec.stats.set_state(ActorState::Stopping);
        if let Some(waiting) = child.leaving.as_mut() {
            waiting.push(reply);
            return;
        }
        child.leaving = Some(vec![reply]);
        let patience = self.shared.policy.stop_max;
        self.tasks.spawn(async move { stop(&cell, patience).await });
    }

    fn ended(
        &mut self,
        myself: &ActorRef<SupervisorMsg>,
        cell: &ActorCell,
        failure: Option<String>,
    ) -> Result<(), ActorProcessingErr> {
        let is_it = |child: &Child| child.cell.as_ref().is_some_and(|own| own.get_id() == cell.get_id());
        let Some(at) = self.children.iter().position(is_it) else { return Ok(()) };
        let child = &mut self.children[at];
        child.cell = None;
        let again = match child.spec.restart {
            Restart::Permanent => true,
            Restart::Transient => failure.is_some(),
            Restart::Temporary => false,
        };
        if child.leaving.is_some() || !again {
            let child = self.children.remove(at);
            self.shared.forget(&child.spec);
            if let Some(reason) = failure {
                tracing::warn!(actor = %child.spec.stats.path(), reason, "actor failed");
            }
            // Whoever asked for the removal may have gone.
            child.leaving.into_iter().flatten().for_each(|reply| drop(reply.send(Ok(()))));
            return Ok(());
        }
        self.schedule(myself, at, &failure.unwrap_or_else(|| "stopped by itself".to_owned()))
    }

    /// Plans the restart of the child at `at`, or fails the supervisor when there were too many.
    fn schedule(
        &mut self,
        myself: &ActorRef<SupervisorMsg>,
        at: usize,
        reason: &str,
    ) -> Result<(), ActorProcessingErr> {
        let (now, policy) = (Instant::now(), self.shared.policy);
        let child = &mut self.children[at];
        let path = child.spec.stats.path();
        child.spec.stats.set_state(ActorState::Restarting);
        if self.failures.record(now, &policy) {
            tracing::error!(actor = %path, reason, "too many failures, the supervisor gives up");
            return Err(format!(
                "{} failures within {:?}, the last of {path}: {reason}",
                policy.failures_max + 1,
                policy.window
            )
            .into());
        }
        let healthy = now.saturating_duration_since(child.started) >= policy.healthy_after;
        child.failures_in_row = if healthy { 1 } else { child.failures_in_row.saturating_add(1) };
        child.life += 1;
        let delay = policy.delay(child.failures_in_row);
        tracing::warn!(actor = %path, reason, delay_ms = delay.as_millis() as u64, "actor failed, will be restarted");
        let (myself, name, life) = (myself.clone(), child.spec.name.clone(), child.life);
        self.tasks.spawn(async move {
            tokio::time::sleep(delay).await;
            // A supervisor that has ended restarts nobody.
            myself.send_message(SupervisorMsg::Restart { name, life }).ok();
        });
        Ok(())
    }

    async fn restart(
        &mut self,
        myself: &ActorRef<SupervisorMsg>,
        name: &str,
        life: u64,
    ) -> Result<(), ActorProcessingErr> {
        let due = |child: &Child| child.spec.name == name && child.life == life && child.cell.is_none();
        let Some(at) = self.children.iter().position(due) else { return Ok(()) };
        let spec = self.children[at].spec.clone();
        spec.stats.restarted();
        metrics::counter!(Metric::ActorRestarts.name(), "kind" => spec.kind).increment(1);
        match (spec.start)(myself.get_cell()).await {
            Ok(cell) => {
                self.shared.book.put(&spec.stats.path(), spec.kind, spec.stats.clone(), Some(cell.clone()));
                let child = &mut self.children[at];
                child.cell = Some(cell);
                child.started = Instant::now();
                Ok(())
            }
            Err(error) => {
                self.children[at].started = Instant::now();
                self.schedule(myself, at, &error.to_string())
            }
        }
    }
}

/// Stops an actor, or kills it when it takes longer than `patience`.
async fn stop(cell: &ActorCell, patience: Duration) {
    if cell.stop_and_wait(None, Some(patience)).await.is_err() {
        // Killing only fails for an actor that is already gone.
        cell.kill_and_wait(Some(Duration::from_secs(1))).await.ok();
    }
}
