//! Decides where requests go: the only one who does for the slots this node owns.
//!
//! Parent: `router` supervisor. Children: none; the tasks that hold reservations belong to its state.
//! Mailbox: questions about past decisions, rare. Requests do not pass it: they are decided on the stream's own task
//! under a lock that is held for some microseconds, by one [`Desk`] a model.
//! Owns: the desks with their load books and receipts, the reservations. A reservation is an open stream; its end, cancel or
//! break gives it back by a guard.
//! Never: counts in anything but a guard, nor knows a worker that the directory does not.
//! If it dies: reservations are gone with it and gauges at zero; requests in flight go on; the next life starts with
//! empty desks and leans on the workers' own reports until its book is whole again.

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use starling_cluster::{
    discovery::{Instance, InstanceKind, Lifecycle},
    stream::{Context, Fault, FaultKind, Incoming, StreamHandler, StreamRx, StreamTx},
    supervise::{Handle, TaskOwner, Tasks},
};
use starling_ids::{Metric, ModelId, RequestId};

use crate::{
    announce::{announce, withdraw},
    generate::{RouteNote, RouteReply, RouteRequest},
    indexer::knowledge::Knowledge,
    names,
    route::{
        desk::{Ask, Decision, Desk, Ticket},
        desks::Desks,
        policy::{PolicyConfig, PolicyError},
        receipt::Receipt,
    },
    seat::{Seat, Seated},
    view::View,
};

/// Reservations held at one time.
const RESERVATIONS_MAX: usize = 65_536;

/// How long a reservation outlives its request's deadline; only a client that vanished leaves it to that.
const GRACE: Duration = Duration::from_secs(5);

/// How often it looks who is silent.
const SWEEP: Duration = Duration::from_millis(100);

/// What outlives a shard's restarts.
pub(crate) struct ShardShared {
    pub(crate) view: Arc<View>,
    pub(crate) knowledge: Arc<Knowledge>,
    policy: PolicyConfig,
    seat: Arc<Seat<Face>>,
    handle: Handle<ShardMsg>,
}

impl ShardShared {
    pub(crate) fn new(
        view: &Arc<View>,
        knowledge: &Arc<Knowledge>,
        policy: PolicyConfig,
    ) -> Result<Arc<Self>, PolicyError> {
        policy.build()?;
        let (view, knowledge) = (view.clone(), knowledge.clone());
        let shared = Arc::new(Self { view, knowledge, policy, seat: Arc::default(), handle: Handle::new() });
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

    /// Reservations held now; none while it is being restarted.
    pub(crate) fn reservations(&self) -> usize {
        self.seat.now().map_or(0, |face| lock(&face.mind).desks.reservations())
    }

    /// Writes the directory's entry.
    pub(crate) fn publish(&self, lifecycle: Lifecycle) {
        announce(self.view.mesh(), Instance::new(names::router_route(), InstanceKind::Router, lifecycle));
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
}

impl ractor::Message for ShardMsg {}

/// What decisions are made with.
#[derive(Debug)]
pub(crate) struct Mind {
    desks: Desks,
    swept: Duration,
}

/// The face of a living shard.
#[derive(Debug)]
pub(crate) struct Face {
    mind: Arc<Mutex<Mind>>,
    tasks: Tasks,
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
        let desks = Desks::new(shared.policy.clone(), rand::random())?;
        let mind = Arc::new(Mutex::new(Mind { desks, swept: Duration::ZERO }));
        shared.knowledge.repeat_reports();
        let tasks = TaskOwner::new(RESERVATIONS_MAX);
        let face = Face { mind: mind.clone(), tasks: tasks.tasks() };
        let seated = shared.seat.sit(Arc::new(face));
        shared.publish(Lifecycle::Serving);
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
                let receipts = lock(&state.mind).desks.explain(request);
                // An asker that has gone needs no answer.
                reply.send(receipts).ok();
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
            let Incoming { context, body, acceptor, .. } = incoming;
            match decide(&shared, &body) {
                Err(fault) => {
                    count(fault.kind.label());
                    acceptor.reject(fault);
                }
                Ok(Reserved { face, guard, reply }) => {
                    count("routed");
                    // An opener that has gone drops the guard here, which gives the reservation back.
                    let Some((tx, rx)) = acceptor.accept(reply) else { return };
                    // Refused when the shard died just now: the guard gives the reservation back.
                    face.tasks.spawn(hold(guard, tx, rx, context));
                }
            }
        }
        .boxed()
    }
}

struct Reserved {
    face: Arc<Face>,
    guard: Reservation,
    reply: Bytes,
}

fn decide(shared: &ShardShared, body: &[u8]) -> Result<Reserved, Fault> {
    let request: RouteRequest = rmp_serde::from_slice(body)
        .map_err(|error| Fault::new(FaultKind::Invalid, format!("the question cannot be read: {error}")))?;
    let restarting = || Fault::new(FaultKind::Unavailable, "the router shard is starting");
    let face = shared.seat.now().ok_or_else(restarting)?;
    let unserved = || Fault::new(FaultKind::NotFound, format!("no worker serves `{}` now", request.model));
    let catalog = shared.view.catalog();
    let block_tokens = catalog.models.get(&request.model).ok_or_else(unserved)?.card.block_tokens;
    let holders = shared.knowledge.holders(&request.hashes);
    let now = shared.knowledge.now();
    let ask = Ask {
        request: request.request,
        prompt_tokens: request.prompt_tokens,
        block_tokens,
        hashes: &request.hashes,
        choices: request.choices,
        answer_tokens_max: request.answer_tokens_max,
        answer_expected: 0.0,
        session: request.session.as_deref(),
        exclude: &request.exclude,
        failed: &request.failed,
    };
    let mut mind = lock(&face.mind);
    mind.desks.sync(&catalog);
    mind.listen(&shared.knowledge, now);
    let desk = mind.desks.desk(&request.model).ok_or_else(unserved)?;
    let hits: Vec<_> =
        holders.iter().filter_map(|(worker, depth)| Some((desk.fleet().slot(worker)?, *depth))).collect();
    let decision = desk.decide(&ask, &hits, now);
    drop(mind);
    let refused = || Fault::new(FaultKind::Overloaded, "every worker refused this request").retry_after_ms(1_000);
    let Decision { ticket, worker, incarnation, hit_blocks, .. } = decision.ok_or_else(refused)?;
    let guard = Reservation::new(face.mind.clone(), request.model, ticket);
    metrics::counter!(Metric::RouterHitPredicted.name()).increment(u64::from(hit_blocks));
    let reply = rmp_serde::to_vec(&RouteReply { worker, incarnation, hit_blocks })
        .map_err(|error| Fault::new(FaultKind::Internal, format!("the reply could not be encoded: {error}")))?;
    Ok(Reserved { face, guard, reply: reply.into() })
}

impl Mind {
    /// Takes over what the workers told, and who of them is silent.
    fn listen(&mut self, knowledge: &Knowledge, now: Duration) {
        for (worker, incarnation, at, report) in knowledge.take_reports() {
            self.desks.hear(&worker, incarnation, at, &report);
        }
        if now.saturating_sub(self.swept) >= SWEEP || self.swept == Duration::ZERO {
            self.swept = now;
            for (worker, sound) in knowledge.soundness() {
                self.desks.judge(&worker, sound);
            }
        }
    }
}

/// Holds a reservation until its stream ends in whatever way, and hears meanwhile how the request gets on.
async fn hold(guard: Reservation, tx: StreamTx, mut rx: StreamRx, context: Context) {
    let limit = context.time_left.saturating_add(GRACE).min(Duration::from_secs(86_400));
    let listening = async {
        // The holder's half ends in every case: with an end, by its drop, or with its link. A cancel of ours would overtake
        // the last note and is not looked at.
        while let Some(Ok(frame)) = rx.recv().await {
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
        self.at_desk(|desk, ticket| match note {
            RouteNote::Admitted(number) => desk.confirm(ticket, number),
            RouteNote::Prefilled => desk.prefilled(ticket),
            RouteNote::Ended(outcome) => desk.ended(ticket, outcome),
        });
    }

    fn at_desk(&self, act: impl FnOnce(&mut Desk, Ticket)) {
        if let Some(desk) = lock(&self.mind).desks.desk(&self.model) {
            act(desk, self.ticket);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        metrics::gauge!(Metric::RouterReservations.name()).decrement(1.0);
        self.at_desk(|desk, ticket| {
            // Not held any more when its worker's life is over.
            desk.release(ticket);
        });
    }
}

fn lock(mind: &Mutex<Mind>) -> MutexGuard<'_, Mind> {
    mind.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(outcome: &'static str) {
    metrics::counter!(Metric::RouterDecisions.name(), "outcome" => outcome).increment(1);
}
