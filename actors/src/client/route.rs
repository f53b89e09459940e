//! Asks the shard that owns a prompt's slot; when no shard answers, chooses by itself and says so.
//!
//! Called by the generate loop before each try. The reservation is a stream that stays open: dropping [`Routed`]
//! gives it back before the next worker is tried.

use std::time::Duration;

use bytes::Bytes;
use starling_cluster::stream::{Context, Fault, FaultKind, Opened, StreamError, StreamRx, StreamTx};
use starling_ids::{Incarnation, Metric, NodeId, WorkerId};
use tokio::time::timeout;

use super::{Inner, SIGN_MAX, outcome::Tries, own_load::OwnGuard};
use crate::{
    generate::{KvSource, RouteNote, RouteReply, RouteRequest, WISHES},
    indexer::knowledge::WorkerStatus,
    names,
    route::{
        catalog::{Catalog, CatalogWorker},
        fallback::two_choices,
        receipt::Receipt,
        slots::{rank, slot_of},
    },
    router_shard::LEAVE,
};

/// Longest wait for a shard; a decision takes microseconds, so this is a dead or frozen node.
const SHARD_MAX: Duration = Duration::from_millis(1_500);

/// Shards asked before this client decides by itself.
const SHARDS_TRIED: usize = 2;

/// How often a request that lost its place in a queue, with the shard that kept it, asks for another.
const PLACES_LOST_MAX: u32 = 20;
/// Before it does: a shard is restarted in a tenth of a second.
const PLACE_LOST_WAIT: Duration = Duration::from_millis(150);

/// Where to go, and the hold on it.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) hit_blocks: u32,
    pub(super) source: Option<KvSource>,
    pub(super) receipt: Option<Receipt>,
    pub(super) hold: Hold,
}

/// What is given back when the request ends.
#[derive(Debug)]
pub(super) struct Hold {
    /// The shard's reservation; its end gives it back. `None` without a shard.
    reservation: Option<Line>,
    _own: OwnGuard,
}

/// The open stream to a shard; its end says that nothing more is wanted.
#[derive(Debug)]
struct Line {
    tx: Option<StreamTx>,
    rx: StreamRx,
}

impl Line {
    /// Waits in the shard's queue. A shard that does not say that the place is kept is frozen.
    async fn turn(&mut self) -> Result<Bytes, StreamError> {
        loop {
            let frame = timeout(SIGN_MAX, self.rx.recv()).await;
            let silent = |_| StreamError::Inactive(u64::try_from(SIGN_MAX.as_millis()).unwrap_or(u64::MAX));
            let ended = || StreamError::Broken("the shard ended it without a word".to_owned());
            let frame = frame.map_err(silent)?.ok_or_else(ended)??;
            if !frame.is_empty() {
                return Ok(frame);
            }
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(tx) = self.tx.take() {
            tx.end();
        }
    }
}

impl Hold {
    /// Waits until the shard wishes that the request goes on at another worker. Cancelling the wait loses nothing.
    pub(super) async fn asked(&mut self) {
        if let Some(line) = &mut self.reservation {
            // A shard has nothing to say for as long as the request runs.
            line.rx.set_inactivity(None);
            while let Some(Ok(frame)) = line.rx.recv().await {
                if frame == LEAVE {
                    return;
                }
            }
            // A shard that is gone wishes nothing; what it held is given back with the rest.
        }
        std::future::pending().await
    }

    /// Whether a shard decided, which has a queue.
    pub(super) fn by_shard(&self) -> bool {
        self.reservation.is_some()
    }

    /// Tells the shard how the request gets on. A note that finds no credit is left out: the shard does without.
    pub(super) fn note(&self, note: RouteNote) {
        if let Some(tx) = self.reservation.as_ref().and_then(|line| line.tx.as_ref())
            && let Ok(bytes) = rmp_serde::to_vec(&note)
        {
            tx.try_send(bytes.into()).ok();
        }
    }
}

/// Finds a worker for one try. `None` when there is nobody left; `tries` knows why.
pub(super) async fn route(inner: &Inner, ask: &RouteRequest, context: &Context, tries: &mut Tries) -> Option<Routed> {
    for lost in 0..=PLACES_LOST_MAX {
        match ask_shards(inner, ask, context).await {
            Asked::Routed(routed) => return Some(*routed),
            Asked::Refused(fault) => {
                tries.note_shard(fault);
                return None;
            }
            // The shard is being restarted: whoever waited goes on to wait, instead of running to a full worker with all others.
            Asked::PlaceLost if lost < PLACES_LOST_MAX => tokio::time::sleep(PLACE_LOST_WAIT).await,
            Asked::Nobody if lost > 0 && lost < PLACES_LOST_MAX => tokio::time::sleep(PLACE_LOST_WAIT).await,
            Asked::PlaceLost | Asked::Nobody => break,
        }
    }
    metrics::counter!(Metric::RouterFallbacks.name()).increment(1);
    match choose(inner, &inner.view.catalog(), ask) {
        Some(reply) => Some(routed(inner, reply, None)),
        None => {
            let limits = ask.wishes.limits().map_or_else(String::new, |limits| format!(" that {limits}"));
            let nobody = format!("no worker is left for `{}`{limits}", ask.model);
            tries.note_shard(Fault::new(FaultKind::NotFound, nobody));
            None
        }
    }
}

enum Asked {
    Routed(Box<Routed>),
    Refused(Fault),
    /// The shard in whose queue it waited is gone.
    PlaceLost,
    /// No shard decides.
    Nobody,
}

async fn ask_shards(inner: &Inner, ask: &RouteRequest, context: &Context) -> Asked {
    let catalog = inner.view.catalog();
    let slot = slot_of(ask.session.as_deref(), ask.hashes.first().copied(), catalog.parts_of(&ask.model));
    let mut shards = rank(&ask.model, slot, catalog.routers.clone());
    shards.extend(rank(&ask.model, slot, catalog.routers_suspect.clone()));
    let last_word = |fault: &Fault| match fault.kind {
        FaultKind::Overloaded | FaultKind::DeadlineExceeded => true,
        kind => kind == FaultKind::Invalid && fault.param.as_deref() == Some(WISHES),
    };
    for shard in shards.iter().take(SHARDS_TRIED) {
        let mut waited = false;
        match ask_shard(inner, shard, (ask, context), &mut waited).await {
            Ok((reply, line)) => return Asked::Routed(Box::new(routed(inner, reply, Some(line)))),
            Err(StreamError::Rejected(fault) | StreamError::Failed(fault)) if last_word(&fault) => {
                return Asked::Refused(fault);
            }
            Err(error) => {
                tracing::debug!(%shard, %error, request = %ask.request, "router shard gave no decision");
                if waited {
                    return Asked::PlaceLost;
                }
            }
        }
    }
    Asked::Nobody
}

async fn ask_shard(
    inner: &Inner,
    shard: &NodeId,
    (ask, context): (&RouteRequest, &Context),
    waited: &mut bool,
) -> Result<(RouteReply, Line), StreamError> {
    let mesh = inner.view.mesh();
    let unreadable = |error: &dyn std::fmt::Display| StreamError::Broken(format!("not understood: {error}"));
    let snapshot = mesh.snapshot();
    let node = snapshot.node(shard).ok_or_else(|| StreamError::UnknownNode(shard.clone()))?;
    let body: Bytes = rmp_serde::to_vec(ask).map_err(|error| unreadable(&error))?.into();
    let endpoint = names::router_route();
    let opening = mesh.open(shard, node.record.incarnation, &endpoint, context.clone(), body);
    let opened = timeout(SHARD_MAX, opening).await.map_err(|_| StreamError::Deadline)?;
    let Opened { mut reply, tx, rx } = opened?;
    let mut line = Line { tx: Some(tx), rx };
    if reply.is_empty() {
        *waited = true;
        reply = line.turn().await?;
    }
    let reply = rmp_serde::from_slice(&reply).map_err(|error| unreadable(&error))?;
    Ok((reply, line))
}

/// The choice without a shard: two drawn at random, the less loaded one, suspects only when there is nobody else.
fn choose(inner: &Inner, catalog: &Catalog, ask: &RouteRequest) -> Option<RouteReply> {
    let model = catalog.models.get(&ask.model)?;
    let may =
        |worker: &&CatalogWorker| !ask.exclude.contains(&worker.id) && ask.wishes.allow(&worker.id, &worker.labels);
    let left = || model.workers.iter().filter(may);
    let mut workers: Vec<&CatalogWorker> = left().filter(|worker| !worker.suspect).collect();
    if workers.is_empty() {
        workers = left().collect();
    }
    let works = |worker: &&CatalogWorker| inner.failures.allows(&worker.id, worker.incarnation);
    if workers.iter().any(works) {
        workers.retain(works);
    }
    let lives = workers.iter().map(|worker| (&worker.id, worker.incarnation));
    let known = match &inner.knowledge {
        Some(knowledge) => knowledge.survey(lives, &[]),
        None => vec![None; workers.len()],
    };
    let loads: Vec<u32> = workers.iter().zip(known).map(|(worker, status)| last_load(inner, worker, status)).collect();
    let chosen = workers.get(two_choices(&loads, rand::random())?)?;
    let (worker, incarnation) = (chosen.id.clone(), chosen.incarnation);
    Some(RouteReply { worker, incarnation, hit_blocks: 0, source: None, receipt: None })
}

fn last_load(inner: &Inner, worker: &CatalogWorker, status: Option<WorkerStatus>) -> u32 {
    let own = inner.own.of(&worker.id, worker.incarnation);
    let reported = status.and_then(|status| status.report).map(|(_, report)| report.load);
    own.max(reported.map_or(0, |load| load.running.saturating_add(load.waiting)))
}

fn routed(inner: &Inner, reply: RouteReply, reservation: Option<Line>) -> Routed {
    let RouteReply { worker, incarnation, hit_blocks, source, receipt } = reply;
    let hold = Hold { reservation, _own: inner.own.count(&worker, incarnation) };
    Routed { worker, incarnation, hit_blocks, source, receipt, hold }
}
