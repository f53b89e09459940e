//! Decides where requests go: the only one who does for the slots this node owns.
//!
//! Parent: `router` supervisor. Children: none; the tasks that hold reservations belong to its state.
//! Mailbox: questions about past decisions, rare. Requests do not pass it: they are decided on the stream's own task
//! under a lock that is held for some microseconds, by one [`Desk`] a model. While every worker is taken a request waits on its own
//! stream ([`waiting`]), in the order of its [`crate::route::queue`]; whoever gives a reservation back hands it on in the same step.
//! Owns: the desks with their load books and receipts, the queues, the reservations. A reservation is an open stream; its
//! end, cancel or break gives it back by a guard, and a place in the queue as well.
//! Never: counts in anything but a guard, nor knows a worker that the directory does not.
//! If it dies: reservations are gone with it and gauges at zero; requests in flight go on; the next life starts with
//! empty desks and leans on the workers' own reports until its book is whole again.

mod keeper;
mod mind;
#[cfg(test)]
mod tests;
mod waiting;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use starling_cluster::{
    discovery::{Instance, InstanceKind},
    stream::{Context, Fault, FaultKind, Incoming, StreamHandler, StreamRx, StreamTx},
    supervise::{Handle, TaskOwner, Tasks},
};
use starling_ids::{Metric, ModelId, NodeId, RequestId};
use tokio::sync::Notify;

use crate::{
    announce::{announce, withdraw},
    generate::{RouteNote, RouteReply, RouteRequest},
    indexer::knowledge::Knowledge,
    names,
    plan::SeenAll,
    route::{
        desk::{Decision, Desk, Ticket},
        policy::{PolicyConfig, PolicyError},
        queue::QueueConfig,
        receipt::Receipt,
        regret::Regret,
        spread::SpreadRule,
    },
    seat::{Seat, Seated},
    view::View,
};
use keeper::Standing;
use mind::{Answer, Grant, Letter, Mind, Question};
use waiting::{Waiting, balance, pump, wait};

/// Reservations held at one time.
const RESERVATIONS_MAX: usize = 65_536;

/// Decisions told at one time when somebody asks for the newest.
const NEWEST_MAX: usize = 200;

/// What a shard says on a reservation whose request should go on at another worker.
pub(crate) const LEAVE: &[u8] = b"leave";

/// How long a reservation outlives its request's deadline; only a client that vanished leaves it to that.
const GRACE: Duration = Duration::from_secs(5);

/// What outlives a shard's restarts.
pub(crate) struct ShardShared {
    pub(crate) view: Arc<View>,
    pub(crate) knowledge: Arc<Knowledge>,
    rules: ShardRules,
    seat: Arc<Seat<Face>>,
    handle: Handle<ShardMsg>,
    standing: Standing,
}

/// What a shard decides by.
#[derive(Debug, Clone, Default)]
pub(crate) struct ShardRules {
    pub(crate) policy: PolicyConfig,
    pub(crate) queue: QueueConfig,
    pub(crate) spread: SpreadRule,
    /// Its node joins others.
    pub(crate) joins: bool,
}

impl ShardShared {
    pub(crate) fn new(
        view: &Arc<View>,
        knowledge: &Arc<Knowledge>,
        rules: ShardRules,
    ) -> Result<Arc<Self>, PolicyError> {
        rules.policy.build()?;
        let (view, knowledge, standing) = (view.clone(), knowledge.clone(), Standing::default());
        let shared = Arc::new(Self { view, knowledge, rules, seat: Arc::default(), handle: Handle::new(), standing });
        let endpoints = shared.view.mesh().endpoints();
        endpoints.serve(names::router_route(), Arc::new(RouteDoor(shared.clone())));
        Ok(shared)
    }

    pub(crate) fn handle(&self) -> &Handle<ShardMsg> {
        &self.handle
    }

    /// Why a request went where it went; empty when this shard does not remember it.
    pub(crate) async fn explain(&self, request: RequestId) -> Vec<Receipt> {
        let ask = |reply| ShardMsg::Explain(request, reply);
        self.handle.call(ask, Duration::from_secs(1)).await.unwrap_or_default()
    }

    /// The newest decisions with their models, newest first, and how long ago each was taken; at most [`NEWEST_MAX`].
    pub(crate) async fn newest(&self, count: usize) -> Vec<(ModelId, Duration, Receipt)> {
        let ask = |reply| ShardMsg::Newest(count.min(NEWEST_MAX), reply);
        self.handle.call(ask, Duration::from_secs(1)).await.unwrap_or_default()
    }

    /// Asks every request to go on elsewhere; how many there are.
    #[cfg(test)]
    pub(crate) fn ask_all_to_leave(&self) -> usize {
        self.seat.now().map_or(0, |face| lock(&face.mind).ask_all_to_leave())
    }

    /// Reservations held now; none while it is being restarted.
    pub(crate) fn reservations(&self) -> usize {
        self.seat.now().map_or(0, |face| lock(&face.mind).desks.reservations())
    }

    /// Requests that wait for a worker with room; none while it is being restarted.
    pub(crate) fn waiting(&self) -> usize {
        self.seat.now().map_or(0, |face| lock(&face.mind).waiting())
    }

    /// What came and went since its life began; `None` while it is being restarted.
    pub(crate) fn seen(&self) -> Option<SeenAll> {
        self.seat.now().map(|face| lock(&face.mind).seen())
    }

    /// Takes no new slots; other shards do.
    pub(crate) fn drain(&self) {
        self.standing.drain();
        self.publish();
    }

    /// Writes the directory's entry.
    fn publish(&self) {
        let (lifecycle, labels) = self.standing.entry();
        let entry = Instance { labels, ..Instance::new(names::router_route(), InstanceKind::Router, lifecycle) };
        announce(self.view.mesh(), entry);
    }

    /// Takes its door and its entry away.
    pub(crate) fn close(&self) {
        self.view.mesh().endpoints().remove(&names::router_route());
        withdraw(self.view.mesh(), &names::router_route());
    }
}

/// What a shard is asked.
#[derive(Debug)]
pub(crate) enum ShardMsg {
    /// The decisions about a request.
    Explain(RequestId, RpcReplyPort<Vec<Receipt>>),
    /// So many of the newest decisions.
    Newest(usize, RpcReplyPort<Vec<(ModelId, Duration, Receipt)>>),
}

impl ractor::Message for ShardMsg {}

/// The face of a living shard.
#[derive(Debug)]
pub(crate) struct Face {
    mind: Arc<Mutex<Mind>>,
    tasks: Tasks,
    /// Told when somebody begins to wait.
    waits: Arc<Notify>,
}

/// The actor.
pub(crate) struct RouterShard;

/// What one life owns.
pub(crate) struct ShardState {
    _seated: Seated<Face>,
    mind: Arc<Mutex<Mind>>,
    _tasks: TaskOwner,
}

impl Actor for RouterShard {
    type Msg = ShardMsg;
    type State = ShardState;
    type Arguments = Arc<ShardShared>;

    async fn pre_start(
        &self,
        _myself: ActorRef<ShardMsg>,
        shared: Arc<ShardShared>,
    ) -> Result<ShardState, ActorProcessingErr> {
        let mind = Mind::new(shared.rules.clone(), &shared.knowledge, rand::random())?;
        let mind = Arc::new(Mutex::new(mind));
        shared.knowledge.repeat_reports();
        let tasks = TaskOwner::new(RESERVATIONS_MAX);
        let face = Face { mind: mind.clone(), tasks: tasks.tasks(), waits: Arc::default() };
        if !face.tasks.spawn(pump(Arc::downgrade(&mind), shared.view.clone(), face.waits.clone())) {
            return Err("the queue is not looked after".into());
        }
        if !face.tasks.spawn(keeper::keep(Arc::downgrade(&mind), shared.clone())) {
            return Err("its slots are not looked after".into());
        }
        if !face.tasks.spawn(balance(Arc::downgrade(&mind), shared.view.clone())) {
            return Err("running requests are not looked after".into());
        }
        let seated = shared.seat.sit(Arc::new(face));
        Ok(ShardState { _seated: seated, mind, _tasks: tasks })
    }

    async fn handle(
        &self,
        _myself: ActorRef<ShardMsg>,
        message: ShardMsg,
        state: &mut ShardState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ShardMsg::Explain(request, reply) => {
                let receipts = lock(&state.mind).explain(request);
                // An asker that has gone needs no answer.
                reply.send(receipts).ok();
                Ok(())
            }
            ShardMsg::Newest(count, reply) => {
                let newest = lock(&state.mind).newest(count);
                // As above.
                reply.send(newest).ok();
                Ok(())
            }
        }
    }
}

/// Takes questions where to go.
struct RouteDoor(Arc<ShardShared>);

impl StreamHandler for RouteDoor {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let shared = self.0.clone();
        async move {
            let Incoming { peer, context, body, acceptor } = incoming;
            match decide(&shared, &peer, &context, &body) {
                Err(fault) => {
                    count(fault.kind.label());
                    acceptor.reject(fault);
                }
                Ok((face, Outcome::Routed(Reserved { guard, reply }))) => {
                    count("routed");
                    // An opener that has gone drops the guard here, which gives the reservation back.
                    let Some((tx, rx)) = acceptor.accept(reply) else { return };
                    // Refused when the shard died just now: the guard gives the reservation back.
                    face.tasks.spawn(hold(guard, tx, rx, context));
                }
                Ok((face, Outcome::Waits(waiting))) => {
                    count("queued");
                    let Some((tx, rx)) = acceptor.accept(Bytes::new()) else { return };
                    face.waits.notify_one();
                    face.tasks.spawn(wait(waiting, tx, rx, context));
                }
            }
        }
        .boxed()
    }
}

/// What became of a question at once.
enum Outcome {
    Routed(Reserved),
    Waits(Waiting),
}

/// A reservation and what its client is told.
#[derive(Debug)]
struct Reserved {
    guard: Reservation,
    reply: Bytes,
}

fn decide(shared: &ShardShared, peer: &NodeId, context: &Context, body: &[u8]) -> Result<(Arc<Face>, Outcome), Fault> {
    let request: RouteRequest = rmp_serde::from_slice(body)
        .map_err(|error| Fault::new(FaultKind::Invalid, format!("the question cannot be read: {error}")))?;
    let restarting = || Fault::new(FaultKind::Unavailable, "the router shard is starting");
    let face = shared.seat.now().ok_or_else(restarting)?;
    let catalog = shared.view.catalog();
    let served = catalog.models.get(&request.model).ok_or_else(|| mind::unserved(&request.model))?;
    let overlaps = shared.knowledge.overlaps(&request.hashes);
    let now = shared.knowledge.now();
    let question = Question {
        block_tokens: served.card.block_tokens,
        tenant: context.tenant.as_str().into(),
        priority: context.priority,
        deadline: now.saturating_add(context.time_left),
        origin: shared.view.mesh().snapshot().node(peer).map(|node| node.record.clone()),
        request,
    };
    let mut mind = lock(&face.mind);
    mind.sync(&catalog, now);
    let model = question.request.model.clone();
    let (answer, letters) = mind.decide(question, &overlaps, now);
    drop(mind);
    post(&face.mind, letters);
    let outcome = match answer {
        Answer::Refused(fault) => return Err(fault),
        Answer::Granted(grant) => Outcome::Routed(reserved(&face.mind, model, grant)?),
        Answer::Waits(place, turn) => Waiting::new(&face.mind, model, place, turn).at_once()?,
    };
    Ok((face, outcome))
}

/// A decision with its guard: dropped, it is given back.
fn reserved(mind: &Arc<Mutex<Mind>>, model: ModelId, (decision, receipt): Grant) -> Result<Reserved, Fault> {
    let Decision { ticket, worker, incarnation, hit_blocks, source, .. } = decision;
    let guard = Reservation::new(mind.clone(), model, ticket);
    metrics::counter!(Metric::RouterHitPredicted.name()).increment(u64::from(hit_blocks));
    let reply =
        rmp_serde::to_vec(&RouteReply { worker, incarnation, hit_blocks, source, receipt: receipt.map(|it| *it) })
            .map_err(|error| Fault::new(FaultKind::Internal, format!("the reply could not be encoded: {error}")))?;
    Ok(Reserved { guard, reply: reply.into() })
}

/// Tells those that waited. Never under the lock: what nobody waits for any more is given back here.
fn post(mind: &Arc<Mutex<Mind>>, letters: Vec<Letter>) {
    for Letter { to, model, verdict } in letters {
        let verdict = verdict.and_then(|grant| reserved(mind, model, grant));
        if let Err(unread) = to.send(verdict) {
            drop(unread);
        }
    }
}

/// Holds a reservation until its stream ends in whatever way, and hears meanwhile how the request gets on.
async fn hold(guard: Reservation, tx: StreamTx, mut rx: StreamRx, context: Context) {
    let limit = context.time_left.saturating_add(GRACE).min(Duration::from_secs(86_400));
    let leave = lock(&guard.mind).listens(&guard.model, guard.ticket);
    let listening = async {
        // The holder's half ends in every case: with an end, by its drop, or with its link. A cancel of ours would overtake
        // the last note and is not looked at.
        loop {
            let frame = tokio::select! {
                frame = rx.recv() => frame,
                () = leave.notified() => {
                    // A client of an older release reads nothing here and stays.
                    tx.try_send(Bytes::from_static(LEAVE)).ok();
                    continue;
                }
            };
            let Some(Ok(frame)) = frame else { break };
            match rmp_serde::from_slice(&frame) {
                Ok(note) => guard.note(note),
                Err(error) => tracing::debug!(%error, "a note of a newer release"),
            }
        }
    };
    if tokio::time::timeout(limit, listening).await.is_err() {
        tracing::debug!(request = %context.request, "a reservation outlived its request");
    }
    drop(guard);
    tx.end();
    drop(rx);
}

/// One reservation at a desk; dropping it gives it back.
#[derive(Debug)]
struct Reservation {
    mind: Arc<Mutex<Mind>>,
    model: ModelId,
    ticket: Ticket,
}

impl Reservation {
    fn new(mind: Arc<Mutex<Mind>>, model: ModelId, ticket: Ticket) -> Self {
        metrics::gauge!(Metric::RouterReservations.name()).increment(1.0);
        Self { mind, model, ticket }
    }

    fn note(&self, note: RouteNote) {
        let ended = matches!(note, RouteNote::Ended(_));
        let mut mind = lock(&self.mind);
        let now = mind.now();
        if let RouteNote::Ended(outcome) = &note {
            mind.ended(&self.model, outcome);
        }
        let Some(desk) = mind.desks.desk(&self.model) else { return };
        let turned = turn_breaker(desk, self.ticket, note, now);
        let regret = desk.regret();
        if let Some(to) = turned {
            metrics::counter!(Metric::RouterBreakerTurns.name(), "to" => to).increment(1);
            mind.show_breakers(now);
        }
        drop(mind);
        if ended {
            show(&self.model, regret);
        }
    }
}

/// Takes a note; says whether it opened or closed its worker's breaker.
fn turn_breaker(desk: &mut Desk, ticket: Ticket, note: RouteNote, now: Duration) -> Option<&'static str> {
    match note {
        RouteNote::Admitted(number) => desk.confirm(ticket, number),
        RouteNote::Prefilled => return desk.prefilled(ticket).then_some("closed"),
        RouteNote::Ended(outcome) => desk.ended(ticket, outcome),
        RouteNote::Failed => return desk.failed(ticket, now).then_some("open"),
    }
    None
}

impl Drop for Reservation {
    fn drop(&mut self) {
        metrics::gauge!(Metric::RouterReservations.name()).decrement(1.0);
        let letters = lock(&self.mind).release(&self.model, self.ticket);
        post(&self.mind, letters);
    }
}

fn lock(mind: &Mutex<Mind>) -> MutexGuard<'_, Mind> {
    mind.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows how good decisions about a model were, as far as they were looked into.
fn show(model: &ModelId, regret: Regret) {
    let gauges = [
        (Metric::RouterRegret, regret.regret_ms),
        (Metric::RouterTtftError, regret.error_ms),
        (Metric::RouterTtftBias, regret.bias_ms),
    ];
    for (metric, ms) in gauges {
        metrics::gauge!(metric.name(), "model" => model.to_string()).set(ms / 1e3);
    }
}

fn count(outcome: &'static str) {
    metrics::counter!(Metric::RouterDecisions.name(), "outcome" => outcome).increment(1);
}
