//! Decides where requests go: the only one who does for the slots this node owns.
//!
//! Parent: `router` supervisor. Children: none; the tasks that hold reservations belong to its state.
//! Mailbox: questions about past decisions, rare. Requests do not pass it: they are decided on the stream's own task
//! under a lock that is held for some microseconds, by one [`Decider`].
//! Owns: the load book, the receipts, the reservations. A reservation is an open stream; its end, cancel or
//! break gives it back by a guard.
//! Never: counts in anything but a guard, nor knows a worker that the directory does not.
//! If it dies: reservations are gone with it and gauges at zero; requests in flight go on; the next life starts with
//! an empty book and leans on the workers' own reports until its book is whole again.

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
use starling_ids::{Metric, RequestId};

use crate::{
    announce::{announce, withdraw},
    generate::{RouteReply, RouteRequest},
    indexer::knowledge::{Knowledge, WorkerStatus},
    names,
    route::{
        catalog::{CatalogModel, CatalogWorker},
        decide::{Ask, Candidate, Decider, Heard},
        load_book::ReservationKey,
        receipt::Receipt,
    },
    seat::{Seat, Seated},
    view::View,
};

/// Reservations held at one time.
const RESERVATIONS_MAX: usize = 65_536;

/// How long a reservation outlives its request's deadline; only a client that vanished leaves it to that.
const GRACE: Duration = Duration::from_secs(5);

/// What outlives a shard's restarts.
pub(crate) struct ShardShared {
    pub(crate) view: Arc<View>,
    pub(crate) knowledge: Arc<Knowledge>,
    seat: Arc<Seat<Face>>,
    handle: Handle<ShardMsg>,
}

impl ShardShared {
    pub(crate) fn new(view: &Arc<View>, knowledge: &Arc<Knowledge>) -> Arc<Self> {
        let (view, knowledge) = (view.clone(), knowledge.clone());
        let shared = Arc::new(Self { view, knowledge, seat: Arc::default(), handle: Handle::new() });
        let endpoints = shared.view.mesh().endpoints();
        endpoints.serve(names::router_route(), Arc::new(RouteDoor(shared.clone())));
        shared
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
        self.seat.now().map_or(0, |face| lock(&face.decider).reservations())
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

/// The face of a living shard.
#[derive(Debug)]
pub(crate) struct Face {
    decider: Arc<Mutex<Decider>>,
    tasks: Tasks,
}

/// The actor.
pub(crate) struct RouterShard;

/// What one life owns.
pub(crate) struct ShardState {
    _seated: Seated<Face>,
    decider: Arc<Mutex<Decider>>,
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
        let decider = Arc::new(Mutex::new(Decider::new(rand::random())));
        let tasks = TaskOwner::new(RESERVATIONS_MAX);
        let face = Face { decider: decider.clone(), tasks: tasks.tasks() };
        let seated = shared.seat.sit(Arc::new(face));
        shared.publish(Lifecycle::Serving);
        Ok(ShardState { _seated: seated, decider, _tasks: tasks })
    }

    async fn handle(
        &self,
        _myself: ActorRef<ShardMsg>,
        message: ShardMsg,
        state: &mut ShardState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ShardMsg::Explain(request, reply) => {
                let receipts = lock(&state.decider).explain(request);
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
    let catalog = shared.view.catalog();
    let model = catalog
        .models
        .get(&request.model)
        .ok_or_else(|| Fault::new(FaultKind::NotFound, format!("no worker serves `{}` now", request.model)))?;
    let candidates = candidates(&shared.knowledge, model, &request);
    let ask = Ask {
        request: request.request,
        model: &request.model,
        prompt_tokens: request.prompt_tokens,
        block_tokens: model.card.block_tokens,
        choices: request.choices,
        answer_tokens_max: request.answer_tokens_max,
        exclude: &request.exclude,
        failed: &request.failed,
    };
    let decision = lock(&face.decider)
        .decide(&ask, &candidates, shared.knowledge.now())
        .ok_or_else(|| Fault::new(FaultKind::Overloaded, "every worker refused this request").retry_after_ms(1_000))?;
    let guard = Reservation::new(face.decider.clone(), decision.key.clone());
    metrics::counter!(Metric::RouterHitPredicted.name()).increment(u64::from(decision.hit_blocks));
    let ReservationKey { worker, incarnation, .. } = decision.key;
    let reply = rmp_serde::to_vec(&RouteReply { worker, incarnation, hit_blocks: decision.hit_blocks })
        .map_err(|error| Fault::new(FaultKind::Internal, format!("the reply could not be encoded: {error}")))?;
    Ok(Reserved { face, guard, reply: reply.into() })
}

/// The workers of a model as the decision sees them.
fn candidates(knowledge: &Knowledge, model: &CatalogModel, request: &RouteRequest) -> Vec<Candidate> {
    let lives = model.workers.iter().map(|worker| (&worker.id, worker.incarnation));
    let known = knowledge.survey(lives, &request.hashes);
    model.workers.iter().zip(known).map(|(worker, status)| candidate(worker, status)).collect()
}

fn candidate(worker: &CatalogWorker, status: Option<WorkerStatus>) -> Candidate {
    let heard = status.as_ref().and_then(|status| status.report.as_ref()).map(|(at, report)| Heard {
        at: *at,
        sequences: report.load.running.saturating_add(report.load.waiting),
        prefill_tokens: report.load.prefill_tokens,
        rates: report.rates,
    });
    Candidate {
        worker: worker.id.clone(),
        incarnation: worker.incarnation,
        hit_blocks: status.as_ref().map_or(0, |status| status.hit_blocks),
        sequences_max: worker.limits.sequences_max,
        heard,
        // One that is not followed yet has just come into the directory.
        doubtful: worker.suspect || status.is_some_and(|status| !status.sound),
    }
}

/// Holds a reservation until its stream ends in whatever way.
async fn hold(guard: Reservation, tx: StreamTx, rx: StreamRx, context: Context) {
    let limit = context.time_left.saturating_add(GRACE).min(Duration::from_secs(86_400));
    if tokio::time::timeout(limit, tx.cancelled()).await.is_err() {
        tracing::debug!(request = %context.request, "a reservation outlived its request");
    }
    drop(guard);
    tx.end();
    drop(rx);
}

/// One reservation in the book; dropping it gives it back.
#[derive(Debug)]
struct Reservation {
    decider: Arc<Mutex<Decider>>,
    key: ReservationKey,
}

impl Reservation {
    fn new(decider: Arc<Mutex<Decider>>, key: ReservationKey) -> Self {
        metrics::gauge!(Metric::RouterReservations.name()).increment(1.0);
        Self { decider, key }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        metrics::gauge!(Metric::RouterReservations.name()).decrement(1.0);
        lock(&self.decider).release(&self.key);
    }
}

fn lock(decider: &Mutex<Decider>) -> MutexGuard<'_, Decider> {
    decider.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(outcome: &'static str) {
    metrics::counter!(Metric::RouterDecisions.name(), "outcome" => outcome).increment(1);
}
