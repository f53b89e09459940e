//! What a shard decides with, and the order in which it does: desks, queues, and the step from one to the other.
//!
//! Called under the shard's lock, for some microseconds. Never: sends anything; what is to be told to those that waited
//! comes back as [`Letter`]s, posted when the lock is free.

use std::{collections::HashMap, sync::Arc, time::Duration};

use starling_cluster::{
    discovery::NodeRecord,
    stream::{Fault, FaultKind},
};
use starling_ids::{BlockHash, Metric, ModelId, RequestId, WorkerId};
use starling_kv::index::{Holder, Overlap};
use tokio::sync::{Notify, oneshot};

use super::{Reserved, ShardRules};
use crate::{
    generate::{RouteRequest, TENANT, WISHES},
    indexer::knowledge::Knowledge,
    plan::{Seen, SeenAll},
    route::{
        catalog::Catalog,
        desk::{Ask, Decision, Desk, Ticket},
        desks::Desks,
        policy::PolicyError,
        queue::{
            Claim, Entry, Place, Queue, QueueConfig, Reason, Refusal,
            rooms::HeldBack,
            turns::{self, Caches, Waits},
        },
        receipt::{Outcome, Receipt},
        spread::{Spread, SpreadRule},
    },
};

/// How often it looks who is silent.
const SWEEP: Duration = Duration::from_millis(100);

/// What one request that waited is told.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) to: oneshot::Sender<Verdict>,
    pub(super) model: ModelId,
    pub(super) verdict: Result<Grant, Fault>,
}

/// A decision, and its receipt for a request that wishes to have it.
pub(super) type Grant = (Decision, Option<Box<Receipt>>);

/// What comes out of waiting.
pub(super) type Verdict = Result<Reserved, Fault>;

/// One request to be decided.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) request: RouteRequest,
    pub(super) block_tokens: u32,
    pub(super) tenant: Arc<str>,
    pub(super) priority: i32,
    /// On the knowledge's clock.
    pub(super) deadline: Duration,
    /// The node where the request came in, while it is known.
    pub(super) origin: Option<Arc<NodeRecord>>,
}

impl Question {
    fn ask(&self) -> Ask<'_> {
        let request = &self.request;
        Ask {
            request: request.request,
            prompt_tokens: request.prompt_tokens,
            block_tokens: self.block_tokens,
            hashes: &request.hashes,
            choices: request.choices,
            answer_tokens_max: request.answer_tokens_max,
            answer_expected: 0.0,
            session: request.session.as_deref(),
            exclude: &request.exclude,
            failed: &request.failed,
            leaves: request.leaves.as_ref(),
            told: false,
            wishes: Some(&request.wishes),
            origin: self.origin.as_ref().map(|record| &record.labels),
            overdue: false,
        }
    }
}

/// One request that waits.
#[derive(Debug)]
struct Asked {
    question: Question,
    to: oneshot::Sender<Verdict>,
}

impl Waits for Asked {
    fn ask(&self) -> Ask<'_> {
        self.question.ask()
    }

    fn is_gone(&self) -> bool {
        self.to.is_closed()
    }
}

impl Caches for Knowledge {
    fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap> {
        Self::overlaps(self, chain)
    }

    fn who(&self, holder: Holder) -> Option<WorkerId> {
        Self::who(self, holder)
    }

    fn gave(&self, decision: &Decision, chain: &[BlockHash], blocks_max: u32) {
        Self::gave(self, &decision.worker, decision.incarnation, chain, blocks_max);
    }
}

/// What became of a question.
pub(super) enum Answer {
    Granted(Grant),
    Waits(Place, oneshot::Receiver<Verdict>),
    Refused(Fault),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Mind {
    pub(super) desks: Desks,
    queues: HashMap<ModelId, Queue<Asked>>,
    config: QueueConfig,
    knowledge: Arc<Knowledge>,
    swept: Duration,
    rule: SpreadRule,
    spreads: HashMap<ModelId, Spread>,
    /// How the reservations are told to leave their worker.
    leave: HashMap<(ModelId, Ticket), Arc<Notify>>,
    /// What came and went, for whoever plans.
    seen: HashMap<ModelId, Seen>,
    life: u64,
}

impl Mind {
    pub(super) fn new(rules: ShardRules, knowledge: &Arc<Knowledge>, seed: u64) -> Result<Self, PolicyError> {
        let ShardRules { policy, queue: config, spread: rule, .. } = rules;
        let desks = Desks::new(policy, seed)?.with_rooms(config.rooms);
        let (queues, spreads, swept) = (HashMap::new(), HashMap::new(), Duration::ZERO);
        let (leave, seen, knowledge) = (HashMap::new(), HashMap::new(), knowledge.clone());
        Ok(Self { desks, queues, config, knowledge, swept, rule, spreads, leave, seen, life: seed })
    }

    /// Over how many parts each model's decisions should be spread, as far as this shard sees. Called about once in
    /// [`crate::route::spread::WINDOW`].
    pub(super) fn wishes(&mut self, catalog: &Catalog) -> Vec<(ModelId, u32)> {
        let (now, routers) = (self.now(), catalog.routers.len());
        self.spreads.retain(|model, _| catalog.announced.contains(model));
        self.seen.retain(|model, _| catalog.announced.contains(model));
        let wish = |(model, spread): (&ModelId, &mut Spread)| {
            (model.clone(), spread.look(self.rule, (catalog.parts_of(model), routers), now))
        };
        self.spreads.iter_mut().map(wish).collect()
    }

    pub(super) fn now(&self) -> Duration {
        self.knowledge.now()
    }

    pub(super) fn explain(&self, request: RequestId) -> Vec<Receipt> {
        self.desks.explain(request)
    }

    /// The newest decisions, newest first, and how long ago each was taken.
    pub(super) fn newest(&self, count: usize) -> Vec<(ModelId, Duration, Receipt)> {
        let now = self.now();
        let newest = self.desks.newest(count).into_iter();
        newest.map(|(model, receipt)| (model, now.saturating_sub(receipt.at), receipt)).collect()
    }

    /// Whether to leave its worker is told to this reservation by what is returned, until it is released.
    pub(super) fn listens(&mut self, model: &ModelId, ticket: Ticket) -> Arc<Notify> {
        self.leave.entry((model.clone(), ticket)).or_default().clone()
    }

    /// Tells all running requests to leave.
    #[cfg(test)]
    pub(super) fn ask_all_to_leave(&self) -> usize {
        self.leave.values().for_each(|told| told.notify_one());
        self.leave.len()
    }

    /// Tells running requests to leave workers that have become much slower than others.
    pub(super) fn rebalance(&mut self, catalog: &Arc<Catalog>) {
        let now = self.now();
        self.sync(catalog, now);
        for (model, ticket, shift) in self.desks.rebalance(now) {
            if let Some(told) = self.leave.get(&(model, ticket)) {
                metrics::counter!(Metric::RouterRebalanced.name()).increment(1);
                tracing::info!(
                    ?ticket,
                    from_ms = shift.from_ms,
                    to_ms = shift.to_ms,
                    "a running request is asked to go elsewhere"
                );
                told.notify_one();
            }
        }
    }

    /// What came and went since this life began, and what waits.
    pub(super) fn seen(&self) -> SeenAll {
        let waiting = |model: &ModelId| u32::try_from(self.queues.get(model).map_or(0, Queue::len)).unwrap_or(u32::MAX);
        let of = |(model, seen): (&ModelId, &Seen)| (model.clone(), Seen { waiting: waiting(model), ..seen.clone() });
        SeenAll { life: self.life, models: self.seen.iter().map(of).collect() }
    }

    /// A request ended well.
    pub(super) fn ended(&mut self, model: &ModelId, outcome: &Outcome) {
        self.seen.entry(model.clone()).or_default().ended(outcome);
    }

    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.queues.values().map(Queue::len).sum()
    }

    /// Takes over the directory, what the workers told, and who of them is silent.
    pub(super) fn sync(&mut self, catalog: &Arc<Catalog>, now: Duration) {
        self.desks.sync(catalog);
        for (worker, incarnation, at, report) in self.knowledge.take_reports() {
            self.desks.hear(&worker, incarnation, at, &report);
        }
        if now.saturating_sub(self.swept) >= SWEEP || self.swept == Duration::ZERO {
            self.swept = now;
            self.knowledge.expire_guesses();
            for (worker, sound) in self.knowledge.soundness() {
                self.desks.judge(&worker, sound);
            }
            self.show_breakers(now);
        }
    }

    /// Shows how many workers are cut off.
    pub(super) fn show_breakers(&self, now: Duration) {
        // Far below 2^52, so exact.
        metrics::gauge!(Metric::RouterBreakersOpen.name()).set(self.desks.cut_off(now) as f64);
    }

    /// Decides at once while there is room and nobody waits; else the request takes its place, or is told why not. One that
    /// had its turn and was refused or lost by a worker does not wait behind others while there is room.
    pub(super) fn decide(
        &mut self,
        mut question: Question,
        overlaps: &[Overlap],
        now: Duration,
    ) -> (Answer, Vec<Letter>) {
        let request = &question.request;
        let model = request.model.clone();
        match self.spreads.get_mut(&model) {
            Some(spread) => spread.decided(),
            None => self.spreads.entry(model.clone()).or_default().decided(),
        }
        let Some(desk) = self.desks.desk(&model) else { return (Answer::Refused(unserved(&model)), Vec::new()) };
        let seen = self.seen.entry(model.clone()).or_default();
        if !request.begun && request.exclude.is_empty() && request.leaves.is_none() {
            seen.arrived(request.prompt_tokens);
        }
        let had_turn = request.begun || !request.exclude.is_empty();
        let nobody_waits = self.queues.get(&model).is_none_or(Queue::is_empty);
        if (had_turn || nobody_waits)
            && let Some(decision) =
                turns::decide(desk, &*self.knowledge, (question.ask(), Duration::ZERO), overlaps, now)
        {
            seen.granted(request.hashes.len(), decision.hit_blocks);
            return (Answer::Granted(told(desk, request, decision)), Vec::new());
        }
        let nobody = !desk.anyone_for(&question.ask());
        if nobody || !request.may_wait {
            return (Answer::Refused(refused(request, nobody)), Vec::new());
        }
        // Who refused for want of room may have some when the turn comes.
        question.request.exclude.clone_from(&question.request.failed);
        let held_back = if nobody_waits || had_turn { desk.held_back() } else { HeldBack::Turn };
        let claim = turns::claim(desk, &*self.knowledge, &question.ask(), overlaps, rights(&question));
        let queue = self.queues.entry(model.clone()).or_insert_with(|| Queue::new(self.config.clone()));
        let (to, turn) = oneshot::channel();
        let (place, displaced) = match queue.offer_held_back(claim, held_back, Asked { question, to }, now) {
            Ok(taken) => taken,
            Err((refusal, _)) => return (Answer::Refused(fault(refusal)), Vec::new()),
        };
        let mut letters = Vec::new();
        if let Some(displaced) = displaced {
            let retry_after = queue.retry_after(&displaced.claim);
            let verdict = Err(fault(Refusal { reason: Reason::Displaced, retry_after }));
            letters.push(Letter { to: displaced.payload.to, model: model.clone(), verdict });
        }
        letters.extend(self.hand_out(&model, now));
        (Answer::Waits(place, turn), letters)
    }

    /// Gives a reservation back and hands what is free to whoever is next.
    pub(super) fn release(&mut self, model: &ModelId, ticket: Ticket) -> Vec<Letter> {
        let now = self.now();
        self.leave.remove(&(model.clone(), ticket));
        if let Some(desk) = self.desks.desk(model) {
            // Not held any more when its worker's life is over.
            desk.release(ticket);
        }
        self.hand_out(model, now)
    }

    /// Somebody waits no longer.
    pub(super) fn leave(&mut self, model: &ModelId, place: Place) {
        let now = self.now();
        if let Some(queue) = self.queues.get_mut(model) {
            // Not there any more when its turn has come.
            queue.remove(place, now);
        }
    }

    /// Looks after all who wait: whose time is over, and for whom there is room now.
    pub(super) fn turn(&mut self, catalog: &Arc<Catalog>) -> Vec<Letter> {
        let now = self.now();
        self.sync(catalog, now);
        let mut letters = Vec::new();
        for (model, queue) in &mut self.queues {
            for (entry, refusal) in queue.expire(now) {
                letters.push(Letter { to: entry.payload.to, model: model.clone(), verdict: Err(fault(refusal)) });
            }
            if self.desks.desk(model).is_some() {
                continue;
            }
            while let Some(entry) = queue.next(now).and_then(|place| queue.take(place, now)) {
                let verdict = Err(unserved(model));
                letters.push(Letter { to: entry.payload.to, model: model.clone(), verdict });
            }
        }
        self.queues.retain(|model, queue| !queue.is_empty() || self.desks.desk(model).is_some());
        let waiting = self.queues.iter().filter(|(_, queue)| !queue.is_empty()).map(|(model, _)| model.clone());
        for model in waiting.collect::<Vec<_>>() {
            letters.extend(self.hand_out(&model, now));
        }
        letters
    }

    /// Hands room to those whose turn it is, until there is none.
    fn hand_out(&mut self, model: &ModelId, now: Duration) -> Vec<Letter> {
        let Some(queue) = self.queues.get_mut(model).filter(|queue| !queue.is_empty()) else { return Vec::new() };
        let Some(desk) = self.desks.desk(model) else { return Vec::new() };
        let gone = turns::hand_out(queue, desk, &*self.knowledge, now);
        let seen = self.seen.entry(model.clone()).or_default();
        let letter = |(entry, decision): (Entry<Asked>, Decision)| {
            let waited = now.saturating_sub(entry.since).as_secs_f64();
            metrics::histogram!(Metric::RouterQueueWait.name()).record(waited);
            seen.waits.add(waited * 1e3);
            let Asked { question, to } = entry.payload;
            seen.granted(question.request.hashes.len(), decision.hit_blocks);
            let verdict = Ok(told(desk, &question.request, decision));
            Letter { to, model: model.clone(), verdict }
        };
        gone.into_iter().map(letter).collect()
    }
}

/// A decision with its receipt, when the request wishes to have it.
fn told(desk: &Desk, request: &RouteRequest, decision: Decision) -> Grant {
    let receipt = if request.wishes.receipt { desk.receipt(decision.ticket) } else { None };
    (decision, receipt.map(Box::new))
}

/// Nobody takes the request, and it cannot wait: by its own wishes, or because all that it met refused it.
fn refused(request: &RouteRequest, nobody: bool) -> Fault {
    match request.wishes.limits().filter(|_| nobody && request.failed.is_empty()) {
        Some(limits) => Fault {
            param: Some(WISHES.to_owned()),
            ..Fault::new(FaultKind::Invalid, format!("no worker of `{}` that {limits} is here", request.model))
        },
        None => Fault::new(FaultKind::Overloaded, "every worker refused this request").retry_after_ms(1_000),
    }
}

/// What a request may claim; what it takes is added by the desk.
fn rights(question: &Question) -> Claim {
    Claim {
        tenant: question.tenant.clone(),
        weight: question.request.weight.clamp(1, 1_000),
        priority: question.priority,
        deadline: question.deadline,
        begun: question.request.begun,
        ..Claim::default()
    }
}

/// A refusal of the queue, as it crosses the wire; counted.
fn fault(refusal: Refusal) -> Fault {
    let Refusal { reason, retry_after } = refusal;
    metrics::counter!(Metric::RouterQueueRefused.name(), "reason" => reason.label()).increment(1);
    let retry_ms = u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX);
    let overloaded = |message: &str| Fault::new(FaultKind::Overloaded, message).retry_after_ms(retry_ms);
    match reason {
        Reason::TenantShare => {
            let message = "this tenant has as many requests waiting as it may; others have not";
            Fault { param: Some(TENANT.to_owned()), ..overloaded(message) }
        }
        Reason::Full => overloaded("the queue is full"),
        Reason::Hopeless => overloaded("at the present pace its turn would come too late"),
        Reason::Displaced => overloaded("a request with more right to it needed its place in the queue"),
        Reason::Waited => overloaded("it waited in the queue as long as any request may"),
        Reason::Deadline => Fault::new(FaultKind::DeadlineExceeded, "its time was over before its turn came"),
    }
}

pub(super) fn unserved(model: &ModelId) -> Fault {
    Fault::new(FaultKind::NotFound, format!("no worker serves `{model}` now"))
}
