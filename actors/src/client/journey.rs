//! One request on its way: to a worker that takes it, and on to another one when that is lost.
//!
//! Called by [`super::ClusterClient::generate`] and by the stream of its frames. A request goes elsewhere at once when it
//! was refused or could not be sent. A request that was lost mid-answer goes on elsewhere from its prompt and the tokens
//! that reached this client: draws depend on seed and position alone, so the answer is the one that the lost worker would
//! have given. Bounds: [`TRIES_MAX`] workers for each beginning, all tries together within [`crate::route::retries`], [`FRUITLESS_MAX`] losses without a new token between
//! them, [`REACH_WAIT`] for a link to come back before it began and [`WAIT_MAX`] for a worker after, the call's own deadline over all.

use std::{sync::Arc, time::Duration};

use serde::Serialize;
use starling_cluster::stream::{Context, FaultKind, Opened, StreamError};
use starling_ids::{AttemptId, Incarnation, Metric, WorkerId};
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    Inner, REACH_WAIT,
    budget::Charge,
    outcome::{Tries, is_fault},
    question::Hashing,
    route::{Hold, Routed, route},
    slip::Slip,
    stream::Leg,
};
use crate::{
    generate::{Accepted, GenerateError, GenerateFrame, GenerateSpec, KvSource, Moves, RouteNote, RouteRequest, SoFar},
    names,
    route::wishes::REVISION,
};

/// Workers tried for one beginning of a request.
const TRIES_MAX: u32 = 3;

/// Refusals for want of room that a request waits out in a shard's queue.
const CROWDED_MAX: u32 = 16;

/// Longest wait for a worker's yes or no. It answers between two engine steps; longer means that it is frozen.
const ACCEPT_MAX: Duration = Duration::from_secs(10);

/// Losses in a row without a new token: more, and it is the request that kills its workers.
const FRUITLESS_MAX: u32 = 2;

/// How long an answer that has begun waits for some worker when there is none: an actor's restart takes seconds.
const WAIT_MAX: Duration = Duration::from_secs(15);
const WAIT_STEP: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub(super) struct Journey {
    pub(super) inner: Arc<Inner>,
    pub(super) ask: RouteRequest,
    hashing: Hashing,
    pub(super) spec: GenerateSpec,
    pub(super) context: Context,
    pub(super) deadline: Instant,
    /// When it was asked.
    pub(super) begun: Instant,
    /// Workers lost so far.
    pub(super) losses: u32,
    /// What its tenant paid, if it has a budget.
    pub(super) charge: Option<Charge>,
    /// Where decisions are written down, if anywhere.
    pub(super) slip: Option<Slip>,
    fruitless: u32,
    /// It runs there, and looks for a place to go on.
    moves: Option<Moves>,
    /// Which weights began the answer, when their worker says so.
    revision: Option<String>,
}

/// [`crate::generate::WorkerRequest`] without owning it.
#[derive(Serialize)]
struct Sent<'a> {
    spec: &'a GenerateSpec,
    worker: &'a WorkerId,
    incarnation: Incarnation,
    source: Option<&'a KvSource>,
    moves: Option<&'a Moves>,
    may_move: bool,
}

impl Journey {
    pub(super) fn new(
        inner: Arc<Inner>,
        (ask, hashing): (RouteRequest, Hashing),
        spec: GenerateSpec,
        context: Context,
        deadline: Instant,
    ) -> Self {
        let (begun, losses, fruitless) = (Instant::now(), 0, 0);
        let (charge, slip, moves, revision) = (None, None, None, None);
        Self { inner, ask, hashing, spec, context, deadline, begun, losses, charge, slip, fruitless, moves, revision }
    }

    /// A worker that takes the request, and its stream.
    pub(super) async fn begin(&mut self) -> Result<(Opened, Routed), GenerateError> {
        self.inner.failures.request();
        let found = timeout_at(self.deadline, self.find_or_wait()).await;
        let found = found.map_err(|_| GenerateError::Deadline)??;
        self.charge.iter_mut().for_each(Charge::taken);
        Ok(found)
    }

    /// A model that has just lost all its links has them again within seconds: its requests wait for that instead of failing.
    async fn find_or_wait(&mut self) -> Result<(Opened, Routed), GenerateError> {
        let until = Instant::now() + REACH_WAIT;
        loop {
            let found = self.find(Tries::default()).await;
            let lost = matches!(found, Err(GenerateError::Unavailable(_)));
            let view = self.inner.view.clone();
            if !lost || !view.catalog().may_come(&self.ask.model) || Instant::now() >= until {
                return found;
            }
            view.reach(&self.ask.model, until).await;
            if !view.catalog().models.contains_key(&self.ask.model) || !self.inner.failures.retry() {
                return found;
            }
        }
    }

    /// Takes note of what an answer said, so that it can go on elsewhere.
    pub(super) fn said(&mut self, frame: &GenerateFrame) {
        self.charge.iter_mut().for_each(|charge| charge.answered(frame.tokens.len()));
        if self.spec.so_far.is_empty() {
            self.spec.so_far.resize_with(self.spec.choices as usize, SoFar::default);
        }
        if let Some(so_far) = self.spec.so_far.get_mut(frame.choice as usize) {
            so_far.tokens.extend(frame.tokens.iter().map(|token| token.id));
            so_far.ended |= frame.finish.is_some();
            self.fruitless = 0;
        }
    }

    /// Goes on elsewhere after `worker` was lost by `error`. `None` when this is no loss to go on from, or nobody can.
    pub(super) async fn resume(&mut self, worker: &WorkerId, error: &StreamError) -> Option<(Opened, Routed)> {
        if !goes_on(error) {
            return None;
        }
        (self.fruitless, self.losses) = (self.fruitless + 1, self.losses + 1);
        if self.fruitless > FRUITLESS_MAX {
            count("gave_up");
            return None;
        }
        tracing::info!(request = %self.ask.request, %worker, %error, "its worker was lost; the request goes on elsewhere");
        self.ask.begun = true;
        if !self.spec.so_far.is_empty() {
            self.ask.wishes.revision.clone_from(&self.revision);
        }
        let until = self.deadline.min(Instant::now() + WAIT_MAX);
        let outcome = timeout_at(until, async {
            loop {
                let mut tries = Tries::default();
                tries.failed.push(worker.clone());
                match self.find(tries).await {
                    Ok(found) => return Some(found),
                    Err(GenerateError::Unavailable(_) | GenerateError::Overloaded { .. }) => {
                        tokio::time::sleep(WAIT_STEP).await;
                    }
                    Err(_) => return None,
                }
            }
        });
        let outcome = outcome.await.ok().flatten();
        count(if outcome.is_some() { "resumed" } else { "failed" });
        outcome
    }

    /// The same request, to find the worker that takes it over from another one. Its attempts have numbers of their own.
    pub(super) fn fork(&mut self, moves: Moves) -> Self {
        let fork = Self {
            inner: self.inner.clone(),
            ask: RouteRequest { begun: true, leaves: Some(moves.worker.clone()), ..self.ask.clone() },
            spec: self.spec.clone(),
            context: self.context.clone(),
            moves: Some(moves),
            charge: None,
            slip: self.slip.clone(),
            revision: self.revision.clone(),
            ..*self
        };
        self.context.attempt = AttemptId(self.context.attempt.0.saturating_add(TRIES_MAX + CROWDED_MAX));
        fork
    }

    /// A worker that is about to take the request over, when there is one.
    pub(super) async fn follow(mut self) -> Option<Leg> {
        match self.find(Tries::away_from(self.moves.as_ref().map(|moves| &moves.worker))).await {
            Ok((opened, routed)) => Some(Leg::new(opened, routed, self.attempt())),
            Err(error) => {
                tracing::debug!(request = %self.ask.request, %error, "nobody takes the request over");
                None
            }
        }
    }

    /// The number of the attempt that was made last.
    pub(super) fn attempt(&self) -> AttemptId {
        AttemptId(self.context.attempt.0.saturating_sub(1))
    }

    /// Tokens that came of its answers which have not ended.
    pub(super) fn answered(&self) -> usize {
        self.spec.so_far.iter().filter(|so_far| !so_far.ended).map(|so_far| so_far.tokens.len()).sum()
    }

    async fn find(&mut self, mut tries: Tries) -> Result<(Opened, Routed), GenerateError> {
        let (mut attempt, mut crowded) = (0, 0);
        self.hashing.go_on(&mut self.ask, &self.spec);
        while attempt < TRIES_MAX {
            if attempt > 0 && !self.inner.failures.retry() {
                metrics::counter!(Metric::GatewayRetriesDenied.name()).increment(1);
                break;
            }
            self.context.time_left = self.deadline.saturating_duration_since(Instant::now());
            self.ask.exclude.clone_from(&tries.exclude);
            self.ask.failed.clone_from(&tries.failed);
            let Some(routed) = route(&self.inner, &self.ask, &self.context, &mut tries).await else { break };
            // A shard of an older release may name the worker that is to be left, when the request has waited there.
            if self.moves.as_ref().is_some_and(|moves| moves.worker == routed.worker) {
                break;
            }
            if attempt + crowded > 0 {
                metrics::counter!(Metric::GatewayRetries.name()).increment(1);
            }
            let opened = self.open(&routed).await;
            self.context.attempt = AttemptId(self.context.attempt.0.saturating_add(1));
            match opened {
                Ok(opened) => {
                    self.revision = self.revision_of(&routed.worker);
                    if let (Some(slip), Some(receipt)) = (&self.slip, routed.receipt.clone()) {
                        slip.push(receipt);
                    }
                    // A worker of an older release does not say its number.
                    if let Ok(accepted) = rmp_serde::from_slice::<Accepted>(&opened.reply)
                        && accepted.number > 0
                    {
                        routed.hold.note(RouteNote::Admitted(accepted.number));
                    }
                    return Ok((opened, routed));
                }
                Err(error) => {
                    if is_fault(&error) && Instant::now() < self.deadline {
                        self.fault_of(&routed.worker, routed.incarnation, Some(&routed.hold));
                    }
                    // Nothing failed: the shard's book was behind, and now the request waits there for the next place.
                    let room = matches!(&error, StreamError::Rejected(fault) if fault.kind == FaultKind::Overloaded);
                    let waits = room && routed.hold.by_shard() && crowded < CROWDED_MAX;
                    (attempt, crowded) = if waits { (attempt, crowded + 1) } else { (attempt + 1, crowded) };
                    let Routed { worker, hold, .. } = routed;
                    // The refusing worker's count goes back before the next one is tried.
                    drop(hold);
                    tracing::debug!(request = %self.ask.request, %worker, %error, "worker did not take the request");
                    tries.note(&worker, error)?;
                }
            }
        }
        Err(tries.verdict())
    }

    /// Which weights a worker has, as its labels say.
    fn revision_of(&self, worker: &WorkerId) -> Option<String> {
        let catalog = self.inner.view.catalog();
        let workers = &catalog.models.get(&self.ask.model)?.workers;
        let at = workers.binary_search_by(|known| known.id.cmp(worker)).ok()?;
        workers[at].labels.get(REVISION).cloned()
    }

    /// A worker failed the request before its first token.
    pub(super) fn fault_of(&self, worker: &WorkerId, incarnation: Incarnation, hold: Option<&Hold>) {
        hold.iter().for_each(|hold| hold.note(RouteNote::Failed));
        self.inner.failures.failed(worker, incarnation);
    }

    async fn open(&self, routed: &Routed) -> Result<Opened, StreamError> {
        let sent = Sent {
            spec: &self.spec,
            worker: &routed.worker,
            incarnation: routed.incarnation,
            source: routed.source.as_ref().filter(|_| self.moves.is_none()),
            moves: self.moves.as_ref(),
            may_move: true,
        };
        let body = rmp_serde::to_vec(&sent).map_err(|error| StreamError::Broken(error.to_string()))?;
        let endpoint = names::worker_generate(routed.worker.index);
        let mesh = self.inner.view.mesh();
        let (node, context) = (&routed.worker.node, self.context.clone());
        let opening = mesh.open(node, routed.incarnation, &endpoint, context, body.into());
        timeout(ACCEPT_MAX, opening).await.map_err(|_| StreamError::Deadline)?
    }
}

/// Whether the worker was lost, and not the request.
fn goes_on(error: &StreamError) -> bool {
    match error {
        StreamError::Broken(_) | StreamError::Inactive(_) | StreamError::Connect { .. } => true,
        StreamError::Failed(fault) => {
            // A server behind a worker may find that it has no room only after the worker took the request.
            let worker =
                matches!(fault.kind, FaultKind::Unavailable | FaultKind::Draining | FaultKind::StaleIncarnation);
            worker || fault.kind == FaultKind::Overloaded
        }
        _ => false,
    }
}

fn count(outcome: &'static str) {
    metrics::counter!(Metric::GatewayResumed.name(), "outcome" => outcome).increment(1);
}
