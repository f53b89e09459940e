//! Looks at the models that this node plans for, once an interval, and has done what [`crate::plan`] decides.
//!
//! Parent: `planner` supervisor, so that a planner that keeps failing takes no router along. Children: none; a clock and a hook
//! that runs are tasks of its state. Mailbox: one look at most, and the end of one hook. Of the live routers the first in rank for a
//! model plans it, the one that also owns its first slot: when it goes, the next one looks at the same counters and waits before its
//! first change as after any. Owns: one [`Plan`] a model led, what it said last.
//! Never: two changes at one time; a worker's end before it was drained. Acts by operations of the workers' nodes and by a
//! [`hook`]. Bounds: [`MODELS_MAX`] models; every wait has a deadline.
//! If it dies: nothing that runs is lost; the next life begins like a new leader. Workers that were drained to be stopped stay
//! drained, and whoever stops workers is not told of them again.

mod ask;
pub mod board;
pub mod hook;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_cluster::supervise::{Handle, TaskOwner};
use starling_ids::{Metric, ModelId, NodeId};
use tokio::time::MissedTickBehavior;

use crate::{
    plan::{Action, Baseline, Mode, Observation, Outlook, Plan, Rules},
    route::{catalog::Catalog, slots, split::Role},
    router_shard::ShardShared,
    view::View,
};
use board::{Board, PlanRow};
use hook::{Hook, Order};

/// Models that one node plans for; of more, the first by name.
const MODELS_MAX: usize = 256;

/// How a node plans.
#[derive(Debug, Clone, Default)]
pub struct PlannerOptions {
    /// Targets and bounds. Its `scales` follows from `hook`.
    pub rules: Rules,
    /// What starts and stops workers; `None` when nothing does.
    pub hook: Option<Hook>,
}

/// What outlives a planner's restarts.
pub(crate) struct PlannerShared {
    view: Arc<View>,
    shard: Arc<ShardShared>,
    rules: Rules,
    hook: Option<Hook>,
    began: Instant,
    board: Mutex<Board>,
    handle: Handle<PlannerMsg>,
}

impl PlannerShared {
    /// A planner of this node's router. Answers what it said, from now on.
    pub(crate) fn new(view: &Arc<View>, shard: &Arc<ShardShared>, options: PlannerOptions) -> Arc<Self> {
        let PlannerOptions { rules, hook } = options;
        let rules = Rules { scales: hook.is_some(), ..rules };
        let (view, shard, board) = (view.clone(), shard.clone(), Mutex::new(Board::default()));
        let (began, handle) = (Instant::now(), Handle::new());
        let shared = Arc::new(Self { view, shard, rules, hook, began, board, handle });
        ask::serve(&shared);
        shared
    }

    pub(crate) fn handle(&self) -> &Handle<PlannerMsg> {
        &self.handle
    }

    /// Whether it plans at all.
    pub(crate) fn is_on(&self) -> bool {
        self.rules.mode != Mode::Off
    }

    /// What it said last of each model that it leads.
    pub(crate) fn rows(&self) -> Vec<PlanRow> {
        lock(&self.board).rows(self.view.mesh().node(), &self.rules, self.began.elapsed())
    }
}

/// What it is told, by tasks of its own.
#[derive(Debug)]
pub(crate) enum PlannerMsg {
    /// An interval is over.
    Look,
    /// The hook that ran for a model has ended.
    Hooked(ModelId, Result<(), String>),
}

impl ractor::Message for PlannerMsg {}

/// The actor.
pub(crate) struct Planner;

/// What one life owns.
pub(crate) struct PlannerState {
    shared: Arc<PlannerShared>,
    led: BTreeMap<ModelId, Led>,
    /// A look is under way or in the mailbox: no other one is sent meanwhile.
    told: Arc<AtomicBool>,
    /// Orders for the hook, one a model at most; the first one runs.
    orders: VecDeque<(ModelId, Order)>,
    tasks: TaskOwner,
}

/// One model.
#[derive(Debug)]
struct Led {
    plan: Plan,
    baseline: Baseline,
}

impl Actor for Planner {
    type Msg = PlannerMsg;
    type State = PlannerState;
    type Arguments = Arc<PlannerShared>;

    async fn pre_start(
        &self,
        myself: ActorRef<PlannerMsg>,
        shared: Arc<PlannerShared>,
    ) -> Result<PlannerState, ActorProcessingErr> {
        *lock(&shared.board) = Board::default();
        let (tasks, told) = (TaskOwner::new(2), Arc::<AtomicBool>::default());
        if !tasks.tasks().spawn(tick(shared.rules.interval, told.clone(), myself)) {
            return Err("nobody says when to look".into());
        }
        Ok(PlannerState { shared, led: BTreeMap::new(), told, orders: VecDeque::new(), tasks })
    }

    async fn handle(
        &self,
        myself: ActorRef<PlannerMsg>,
        message: PlannerMsg,
        state: &mut PlannerState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            PlannerMsg::Look => {
                state.look().await;
                state.told.store(false, Ordering::SeqCst);
                state.run_hook(&myself, false);
            }
            PlannerMsg::Hooked(model, result) => {
                state.hooked(&model, result);
                state.run_hook(&myself, true);
            }
        }
        Ok(())
    }
}

/// Says when an interval is over.
async fn tick(interval: Duration, told: Arc<AtomicBool>, planner: ActorRef<PlannerMsg>) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !told.swap(true, Ordering::SeqCst) && planner.send_message(PlannerMsg::Look).is_err() {
            return;
        }
    }
}

impl PlannerState {
    fn now(&self) -> Duration {
        self.shared.began.elapsed()
    }

    /// Looks at every model that this node leads.
    async fn look(&mut self) {
        let catalog = self.shared.view.catalog();
        let routers = live_routers(&catalog);
        self.lead(&catalog, &routers);
        if self.led.is_empty() {
            return;
        }
        let seen = ask::seen(self.shared.view.mesh(), &routers).await;
        let now = self.now();
        let models: Vec<ModelId> = self.led.keys().cloned().collect();
        for model in models {
            let Some(raw) = ask::raw(&self.shared, &catalog, &model, &seen) else { continue };
            let Some(led) = self.led.get_mut(&model) else { continue };
            if let Some(worker) = led.plan.draining().cloned()
                && ask::is_empty(self.shared.view.mesh(), &worker).await
            {
                led.plan.emptied(&worker);
            }
            let Some(observation) = led.baseline.take(raw, now) else { continue };
            let outlook = led.plan.look(&observation, now);
            let carried_out = led.plan.carries_out(&outlook.decision.action);
            show(&model, &outlook);
            self.note(&model, &outlook, carried_out);
            if carried_out {
                self.carry_out(&model, &outlook, &observation).await;
            }
        }
    }

    /// Takes over the models that this node leads now, and leaves those that it does not lead any more.
    fn lead(&mut self, catalog: &Catalog, routers: &[NodeId]) {
        let (own, now) = (self.shared.view.mesh().node().clone(), self.now());
        let leads = |model: &ModelId| slots::rank(model, 0, routers.to_vec()).first() == Some(&own);
        let mine: Vec<ModelId> = catalog.models.keys().filter(|model| leads(model)).take(MODELS_MAX).cloned().collect();
        let mut board = lock(&self.shared.board);
        self.led.retain(|model, _| {
            let stays = mine.contains(model);
            if !stays {
                tracing::info!(%model, "another node plans for this model, or nobody needs to");
                board.forget(model);
                leave(model);
            }
            stays
        });
        self.orders.retain(|(model, _)| mine.contains(model));
        for model in mine {
            if !self.led.contains_key(&model) {
                tracing::info!(%model, mode = %self.shared.rules.mode, "this node plans for a model");
                board.lead(&model, now);
                let (plan, baseline) = (Plan::new(self.shared.rules, now), Baseline::default());
                self.led.insert(model, Led { plan, baseline });
            }
        }
        // Far below 2^52, so exact.
        metrics::gauge!(Metric::PlannerLeads.name()).set(self.led.len() as f64);
    }

    /// Writes down what was decided, and says so once.
    fn note(&self, model: &ModelId, outlook: &Outlook, carried_out: bool) {
        let news = lock(&self.shared.board).note(model, outlook, carried_out, self.now());
        if news {
            let outcome = if carried_out { "begun" } else { "advised" };
            let action = outlook.decision.action.label();
            metrics::counter!(Metric::PlannerDecisions.name(), "action" => action, "outcome" => outcome).increment(1);
            tracing::info!(%model, action = %outlook.decision.action, reason = outlook.decision.reason, outcome, "planner");
        }
    }

    async fn carry_out(&mut self, model: &ModelId, outlook: &Outlook, observation: &Observation) {
        let mesh = self.shared.view.mesh();
        let result = match &outlook.decision.action {
            Action::Hold => return,
            Action::Switch { worker, to, .. } => ask::set_role(mesh, worker, *to).await,
            Action::Drain { worker, .. } => ask::drain(mesh, worker).await.map(|_| ()),
            Action::Scale { .. } => {
                let leader = mesh.node();
                let order =
                    Order::new(model, leader, &outlook.decision, observation, lock(&self.shared.board).number());
                self.orders.push_back((model.clone(), order));
                return;
            }
        };
        self.carried_out(model, result);
    }

    /// What was begun was done, or not.
    fn carried_out(&mut self, model: &ModelId, result: Result<(), String>) {
        let now = self.now();
        let Some(led) = self.led.get_mut(model) else { return };
        match &result {
            Ok(()) => led.plan.done(now),
            Err(error) => {
                tracing::warn!(%model, error, "what the planner decided was not done");
                led.plan.failed(now);
            }
        }
        lock(&self.shared.board).ended(model, result);
    }

    /// Runs the hook for the first order, one at a time. `free` says that the one before has ended.
    fn run_hook(&mut self, myself: &ActorRef<PlannerMsg>, free: bool) {
        let running = self.orders.front().is_some_and(|(_, order)| order.runs());
        if running && !free {
            return;
        }
        let Some(hook) = self.shared.hook.clone() else { return };
        let Some((model, order)) = self.orders.front_mut() else { return };
        order.begin();
        let (model, text, planner) = (model.clone(), order.json(), myself.clone());
        let running = async move {
            let result = hook.run(text).await;
            let outcome = if result.is_ok() { "ok" } else { "failed" };
            metrics::counter!(Metric::PlannerHooks.name(), "outcome" => outcome).increment(1);
            // A planner that has ended needs no answer.
            planner.send_message(PlannerMsg::Hooked(model, result)).ok();
        };
        if !self.tasks.tasks().spawn(running)
            && let Some((model, _)) = self.orders.pop_front()
        {
            self.carried_out(&model, Err("the hook was not started: another one has not ended".to_owned()));
        }
    }

    fn hooked(&mut self, model: &ModelId, result: Result<(), String>) {
        self.orders.retain(|(known, order)| known != model || !order.runs());
        self.carried_out(model, result);
    }
}

/// Nodes with a router that can lead; those that failed a probe only when there is no other.
fn live_routers(catalog: &Catalog) -> Vec<NodeId> {
    if catalog.routers.is_empty() { catalog.routers_suspect.clone() } else { catalog.routers.clone() }
}

/// Shows what is wanted.
fn show(model: &ModelId, outlook: &Outlook) {
    for role in [Role::Both, Role::Prefill, Role::Decode] {
        let labels = [("model", model.to_string()), ("role", role.to_string())];
        metrics::gauge!(Metric::PlannerWanted.name(), &labels).set(f64::from(outlook.wanted.count(role)));
    }
    metrics::gauge!(Metric::PlannerPressure.name(), "model" => model.to_string()).set(outlook.pressure);
}

/// Another node shows it now.
fn leave(model: &ModelId) {
    for role in [Role::Both, Role::Prefill, Role::Decode] {
        let labels = [("model", model.to_string()), ("role", role.to_string())];
        metrics::gauge!(Metric::PlannerWanted.name(), &labels).set(0.0);
    }
    metrics::gauge!(Metric::PlannerPressure.name(), "model" => model.to_string()).set(0.0);
}

fn lock(board: &Mutex<Board>) -> MutexGuard<'_, Board> {
    board.lock().unwrap_or_else(PoisonError::into_inner)
}
