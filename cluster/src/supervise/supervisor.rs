//! The supervisor actor: starts children, restarts those that die, stops them in reverse order.
//!
//! Called through [`super::SupervisorHandle`]; children report to it through ractor's supervision events.
//! Never: decides when to restart (that is [`super::policy`]), nor waits for a child to stop while it handles
//! a message. Bounds: one entry a child; one timer a child that waits for its restart.
//! If it dies: its children are killed with it; its parent starts it again and it starts its permanent and
//! transient children again from their specifications. More failures than its policy allows fail it on
//! purpose, so the trouble climbs; at the root it ends the node.

use std::{sync::Arc, time::Instant};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use starling_ids::Metric;
use tokio::task::JoinSet;

use super::{
    ActorState, ChildSpec, Restart,
    policy::FailureLog,
    tree::{Reply, Shared, SuperviseError, SupervisorMsg, stop},
};

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
