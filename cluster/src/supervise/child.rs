//! What a supervisor needs to know about a child, and the wrapper that every supervised actor runs in.
//!
//! The wrapper counts messages, drops the state as soon as the actor fails (before the parent hears of it),
//! and lets [`super::ActorBook::inject_panic`] in. Actor files stay plain [`ractor::Actor`]s.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
};

use futures::{FutureExt, future::BoxFuture};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr, SupervisionEvent};

use super::{ActorState, ActorStats, Handle};

/// When a child that ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// Always.
    Permanent,
    /// When it panicked, returned an error or was killed; not when it stopped by itself.
    Transient,
    /// Never; its place is given up when it ends.
    Temporary,
}

type StartFn = dyn Fn(ActorCell) -> BoxFuture<'static, Result<ActorCell, SpawnErr>> + Send + Sync;

/// How to start one child, as often as needed.
#[derive(Clone)]
pub struct ChildSpec {
    /// Unique among its siblings; the last part of its path.
    pub name: String,
    /// What it is, for tables and the restart counter's label.
    pub kind: &'static str,
    /// When to start it again.
    pub restart: Restart,
    pub(crate) stats: Arc<ActorStats>,
    pub(crate) start: Arc<StartFn>,
}

impl std::fmt::Debug for ChildSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChildSpec({}, {}, {:?})", self.name, self.kind, self.restart)
    }
}

/// A child whose actor and arguments `make` builds for every start; `handle` leads to the living one.
///
/// Starting runs in the supervisor: `pre_start` is short, long work belongs into messages or tasks.
pub fn child<A: Actor>(
    name: impl Into<String>,
    kind: &'static str,
    restart: Restart,
    handle: &Handle<A::Msg>,
    make: impl FnMut() -> (A, A::Arguments) + Send + 'static,
) -> ChildSpec {
    let stats = handle.stats().clone();
    let (handle, make) = (handle.clone(), Mutex::new(make));
    let start = move |supervisor: ActorCell| {
        let (inner, arguments) = (make.lock().unwrap_or_else(PoisonError::into_inner))();
        let handle = handle.clone();
        async move {
            let actor = Supervised { inner, stats: handle.stats().clone() };
            let (actor, _ended) = Actor::spawn_linked(None, actor, arguments, supervisor).await?;
            Ok(handle.set(actor))
        }
        .boxed()
    };
    ChildSpec { name: name.into(), kind, restart, stats, start: Arc::new(start) }
}

impl ChildSpec {
    /// Runs `reachable` after each start, when the child's handle leads to its new life and no earlier.
    pub(crate) fn then(mut self, reachable: impl Fn() + Send + Sync + 'static) -> Self {
        let (start, reachable) = (self.start, Arc::new(reachable));
        self.start = Arc::new(move |supervisor| {
            let (starting, reachable) = (start(supervisor), reachable.clone());
            async move {
                let cell = starting.await?;
                reachable();
                Ok(cell)
            }
            .boxed()
        });
        self
    }
}

/// An actor and what supervision adds around it.
pub(crate) struct Supervised<A> {
    pub(crate) inner: A,
    pub(crate) stats: Arc<ActorStats>,
}

/// The actor's state; taken out and dropped when it fails or stops, so that its guards run at that moment.
pub(crate) struct Life<A: Actor>(Option<A::State>);

impl<A: Actor> Supervised<A> {
    /// Runs one handler; a panic or an error drops the state before anybody is told.
    async fn guarded<'a, F>(&self, life: &'a mut Life<A>, run: impl FnOnce(&'a mut A::State) -> F) -> Outcome
    where
        F: Future<Output = Outcome>,
    {
        let Some(state) = life.0.as_mut() else { return Err("the actor has no state any more".into()) };
        match AssertUnwindSafe(async { run(state).await }).catch_unwind().await {
            Ok(outcome) => outcome,
            Err(panic) => Err(panic_text(panic.as_ref()).into()),
        }
    }
}

type Outcome = Result<(), ActorProcessingErr>;

impl<A: Actor> Actor for Supervised<A> {
    type Msg = A::Msg;
    type State = Life<A>;
    type Arguments = A::Arguments;

    async fn pre_start(
        &self,
        myself: ActorRef<A::Msg>,
        arguments: A::Arguments,
    ) -> Result<Life<A>, ActorProcessingErr> {
        self.stats.born();
        Ok(Life(Some(self.inner.pre_start(myself, arguments).await?)))
    }

    async fn post_start(&self, myself: ActorRef<A::Msg>, life: &mut Life<A>) -> Outcome {
        self.stats.set_state(ActorState::Running);
        let outcome = self.guarded(life, |state| self.inner.post_start(myself, state)).await;
        end_if_failed(life, outcome)
    }

    async fn post_stop(&self, myself: ActorRef<A::Msg>, life: &mut Life<A>) -> Outcome {
        self.stats.set_state(ActorState::Stopping);
        let outcome = self.guarded(life, |state| self.inner.post_stop(myself, state)).await;
        drop(life.0.take());
        outcome
    }

    async fn handle(&self, myself: ActorRef<A::Msg>, message: A::Msg, life: &mut Life<A>) -> Outcome {
        self.stats.taken();
        let run = |state| async move {
            self.stats.panic_if_asked();
            self.inner.handle(myself, message, state).await
        };
        let outcome = self.guarded(life, run).await;
        end_if_failed(life, outcome)
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<A::Msg>,
        event: SupervisionEvent,
        life: &mut Life<A>,
    ) -> Outcome {
        let run = |state| async move {
            self.stats.panic_if_asked();
            self.inner.handle_supervisor_evt(myself, event, state).await
        };
        let outcome = self.guarded(life, run).await;
        end_if_failed(life, outcome)
    }
}

fn end_if_failed<A: Actor>(life: &mut Life<A>, outcome: Outcome) -> Outcome {
    if outcome.is_err() {
        drop(life.0.take());
    }
    outcome
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("no text"))
}
