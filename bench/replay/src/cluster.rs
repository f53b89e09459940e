//! Moves the virtual clock: arrivals, decisions, engine steps, and the news about them, each at its time.
//!
//! One heap of events; ties in the order of their making, so one seed gives one run. `routing` finds a worker for each
//! request as the product's client and shard do, `waiting` is the shard's queue, `serving` is what engines do and what is heard of it, `faults` what goes
//! wrong and how it is mended. Bounds: the traffic.

mod clock;
mod faults;
mod routing;
mod serving;
mod waiting;

use std::{cmp::Reverse, collections::BinaryHeap, sync::Arc, time::Duration};

use starling_actors::route::{
    desk::{Desk, Ticket},
    fleet::{Heard, Places, Standing},
    policy::PolicyError,
    queue::Queue,
};
use starling_engine::{
    EngineError, EngineKind, LoadError, LoadedModel, ModelOptions,
    simulated::{SimulatedModel, Timing},
};
use starling_ids::{BlockHash, Incarnation, ModelId, NameError, NodeId, TokenId, WorkerId};
use starling_kv::{
    events::KvEvent,
    hash::HashSeed,
    index::{IndexError, IndexLimits, PrefixIndex},
};
use thiserror::Error;

use super::{setup::Setup, trace::Asked, worker::SimWorker};
use clock::{Due, Event};
use waiting::Waiter;

/// A worker queues so many; nobody is refused for want of a place in the queue.
const WAITING_MAX: u32 = u32::MAX / 2;

/// Why a cluster cannot be simulated.
#[derive(Debug, Error)]
pub enum SimError {
    /// The policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The engine's options.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// An engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The index refused something.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The traffic or the setup asks for what cannot be.
    #[error("{0}")]
    Setup(String),
}

/// What became of a request. Times begin when it came, unless said otherwise.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// When it came, since the traffic began.
    pub at: Duration,
    /// To its first token.
    pub ttft: Duration,
    /// To its last token.
    pub e2e: Duration,
    /// From its coming until a worker took it into its batch.
    pub queued: Duration,
    /// Mean time between tokens; zero for answers of one token.
    pub itl_mean: Duration,
    /// Tokens in the prompt.
    pub prompt: u32,
    /// Of them, found in the cache.
    pub cached: u32,
    /// Of them, predicted to be found.
    pub predicted: u32,
    /// Of them, prompt and answer of the request that it goes on from.
    pub base: u32,
    /// Tokens in the answer.
    pub answer: u32,
    /// Where.
    pub worker: usize,
    /// Its index in the traffic.
    pub index: usize,
}

/// A run's outcome.
#[derive(Debug, Default)]
pub struct Run {
    /// Requests that ended, in the order of the traffic.
    pub served: Vec<Served>,
    /// Requests that did not.
    pub failed: usize,
    /// Decisions without a shard.
    pub fallbacks: usize,
    /// Times that a request took a place in the shard's queue.
    pub waited: usize,
    /// Time each worker spent computing.
    pub busy: Vec<Duration>,
    /// Virtual time from the first arrival to the last token.
    pub lasted: Duration,
    /// Wall time of all decisions, lookups included.
    pub deciding: Duration,
    /// For a sample of the decisions: milliseconds by which another worker would have begun the answer sooner, by what the
    /// engines really had queued and cached at that moment.
    pub regrets: Vec<f64>,
    /// Requests that ended in each second; for capacity.
    pub ended: Vec<Duration>,
}

/// One request on its way.
#[derive(Debug, Default)]
struct Live {
    tokens: Option<Arc<[TokenId]>>,
    hashes: Arc<[BlockHash]>,
    /// Tokens of the answer, kept while others go on from it.
    said: Vec<TokenId>,
    followers: Vec<usize>,
    /// Requests that must end before it comes.
    waits: usize,
    gateway: usize,
    ticket: Option<(usize, Ticket)>,
    first: Option<Duration>,
    count: u32,
    done: bool,
    served: Served,
}

/// A gateway: whom it takes to be alive, and what it has in flight at each worker.
#[derive(Debug)]
struct Gateway {
    routers: Vec<NodeId>,
    own: Vec<u32>,
}

/// What a router can do for those who ask it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Router {
    /// It owns nothing and follows nobody.
    Standby,
    /// Inventories are on their way.
    Rebuilding,
    /// It decides, by this desk.
    Decides(usize),
    Dead,
}

/// How far a worker's events go into the index.
#[derive(Debug)]
enum Following {
    Live,
    /// Its inventory is on the way; what it tells meanwhile waits.
    Catching(Vec<KvEvent>),
    Nobody,
}

/// See the module.
pub struct Cluster<'a> {
    setup: &'a Setup,
    asked: &'a [Asked],
    now: Duration,
    queue: BinaryHeap<Reverse<Due>>,
    serial: u64,
    model: ModelId,
    gateways: Vec<Gateway>,
    nodes: Vec<NodeId>,
    routers: Vec<Router>,
    /// One for each decider there ever was; those of dead routers are gone.
    desks: Vec<Option<Desk>>,
    index: PrefixIndex,
    following: Vec<Following>,
    workers: Vec<SimWorker>,
    /// Each worker's last account.
    heard: Vec<Option<Heard>>,
    live: Vec<Live>,
    next: usize,
    seed: HashSeed,
    context: u32,
    run: Run,
    frozen: Option<(usize, Duration, Duration)>,
    /// Of the one shard, while every worker is taken.
    line: Queue<Waiter>,
    /// A look at those that wait is on the clock.
    looks: bool,
}

impl<'a> Cluster<'a> {
    /// An idle cluster in front of its traffic.
    ///
    /// # Errors
    /// What the policy, the engine or the setup does not take.
    pub fn new(setup: &'a Setup, asked: &'a [Asked]) -> Result<Self, SimError> {
        check(setup, asked)?;
        let context = asked.iter().map(|asked| asked.prompt + asked.answer + 1).max().unwrap_or(1).max(1_024);
        let options = options(setup);
        let model =
            SimulatedModel::with_timing(&options, setup.timing)?.with_context(context).with_blocks(setup.blocks);
        let mut workers = Vec::with_capacity(setup.workers);
        for number in 0..setup.workers {
            let id = WorkerId { node: NodeId::new(&format!("w{number}"))?, index: 0 };
            workers.push(SimWorker::new(id, model.core_engine()));
        }
        let nodes: Vec<NodeId> =
            (0..setup.gateways).map(|at| NodeId::new(&format!("g{at}"))).collect::<Result<_, _>>()?;
        let own = || Gateway { routers: nodes.clone(), own: vec![0; setup.workers] };
        let mut cluster = Self {
            setup,
            asked,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            serial: 0,
            model: model.card().id.clone(),
            gateways: std::iter::repeat_with(own).take(setup.gateways).collect(),
            routers: vec![Router::Standby; setup.gateways],
            nodes,
            desks: Vec::new(),
            index: PrefixIndex::new(IndexLimits::default()),
            following: (0..setup.workers).map(|_| Following::Live).collect(),
            heard: vec![None; setup.workers],
            workers,
            live: std::iter::repeat_with(Live::default).take(asked.len()).collect(),
            next: 0,
            seed: model.card().hash_seed,
            context,
            run: Run::default(),
            frozen: None,
            line: Queue::new(setup.queue.clone().unwrap_or_default()),
            looks: false,
        };
        cluster.staff()?;
        cluster.link_turns();
        cluster.plan_faults();
        Ok(cluster)
    }

    /// Workers into the index, deciders at their desks.
    fn staff(&mut self) -> Result<(), SimError> {
        for worker in &self.workers {
            self.index.add_worker(worker.id.clone(), worker.incarnation)?;
        }
        let deciders = if self.setup.decide_apart { self.setup.gateways } else { 1 };
        for number in 0..deciders {
            let desk = self.new_desk(number as u64)?;
            self.desks.push(Some(desk));
        }
        if !self.setup.decide_apart {
            let owner = self.ranked(0).first().copied().unwrap_or_default();
            self.routers[owner] = Router::Decides(0);
        }
        Ok(())
    }

    fn new_desk(&self, number: u64) -> Result<Desk, PolicyError> {
        let mut desk = Desk::new(self.setup.policy.build()?, self.setup.seed.wrapping_add(number));
        if let Some(queue) = &self.setup.queue {
            desk = desk.with_rooms(queue.rooms);
        }
        let places = Places {
            sequences: self.setup.sequences,
            waiting: WAITING_MAX,
            step_tokens: self.setup.step_tokens,
            blocks: self.setup.blocks,
            ..Places::default()
        };
        for worker in &self.workers {
            desk.seat(&worker.id, worker.incarnation, places, Standing::Sound);
        }
        Ok(desk)
    }

    /// Who goes on from whom.
    fn link_turns(&mut self) {
        for (at, asked) in self.asked.iter().enumerate() {
            self.live[at].waits = asked.after.len();
            for before in &asked.after {
                self.live[*before].followers.push(at);
            }
        }
    }

    /// Serves the traffic. `progress` is told now and then how many have ended, and at which virtual time.
    ///
    /// # Errors
    /// What an engine says when it fails.
    pub fn run(mut self, mut progress: impl FnMut(usize, Duration)) -> Result<Run, SimError> {
        match self.setup.concurrency {
            Some(most) => (0..most).for_each(|_| self.arrive_next()),
            None => self.arrive_next(),
        }
        let mut begun = None;
        while let Some(Reverse(due)) = self.queue.pop() {
            self.now = due.at;
            if matches!(due.event, Event::Arrive(_)) {
                begun.get_or_insert(due.at);
            }
            let ended = matches!(due.event, Event::Ended(_));
            self.happen(due.event)?;
            if ended && self.run.ended.len().is_multiple_of(256) {
                progress(self.run.ended.len(), self.now);
            }
        }
        let last = self.run.ended.last().copied().unwrap_or_default();
        Ok(Run {
            lasted: last.saturating_sub(begun.unwrap_or_default()),
            busy: self.workers.iter().map(|worker| worker.busy).collect(),
            failed: self.live.iter().filter(|live| !live.done).count(),
            served: self.live.into_iter().filter(|live| live.done).map(|live| live.served).collect(),
            ..self.run
        })
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.serial += 1;
        self.queue.push(Reverse(Due { at: self.now + delay, serial: self.serial, event }));
    }

    /// The next request that comes by itself.
    fn arrive_next(&mut self) {
        while self.asked.get(self.next).is_some_and(|asked| !asked.after.is_empty()) {
            self.next += 1;
        }
        let Some(asked) = self.asked.get(self.next) else { return };
        let delay = match self.setup.concurrency {
            Some(_) => Duration::ZERO,
            None => asked.at.saturating_sub(self.now),
        };
        self.after(delay, Event::Arrive(self.next));
        self.next += 1;
    }

    fn happen(&mut self, event: Event) -> Result<(), SimError> {
        match event {
            Event::Arrive(request) => {
                self.arrive(request);
                if self.setup.concurrency.is_none() && self.asked[request].after.is_empty() {
                    self.arrive_next();
                }
            }
            Event::Ask { request, tried } => self.ask(request, tried),
            Event::Decide { request, router, tried } => self.decide_at(request, router, tried),
            Event::Look => self.look(),
            Event::Submit { worker, request } => {
                self.submit(worker, request);
                self.step(worker)?;
            }
            Event::Stepped { worker } => {
                self.stepped(worker);
                self.step(worker)?;
            }
            Event::News { worker, events, report } => self.hear(worker, events, report)?,
            Event::Confirmed { request, number } => self.at_desk(request, |desk, ticket| desk.confirm(ticket, number)),
            Event::Prefilled(request) => self.at_desk(request, |desk, ticket| {
                // False for one that is not held any more.
                desk.prefilled(ticket);
            }),
            Event::Ended(request) => {
                self.ended(request);
                self.hand_out();
            }
            Event::KillOwner => self.kill_owner(),
            Event::Noticed { gateway, router } => self.noticed(gateway, router),
            Event::TakeOver { router } => self.take_over(router)?,
            Event::Snapshot { worker } => self.snapshot(worker),
            Event::Inventory { worker, blocks } => self.take_inventory(worker, &blocks)?,
        }
        Ok(())
    }

    fn at_desk(&mut self, request: usize, act: impl FnOnce(&mut Desk, Ticket)) {
        if let Some((desk, ticket)) = self.live[request].ticket
            && let Some(Some(desk)) = self.desks.get_mut(desk)
        {
            act(desk, ticket);
        }
    }
}

fn options(setup: &Setup) -> ModelOptions {
    ModelOptions {
        kind: EngineKind::Simulated,
        path: None,
        served_name: None,
        threads: 1,
        kv_bytes: 0,
        sequences_max: setup.sequences,
        waiting_max: WAITING_MAX,
        batch_tokens_max: setup.step_tokens,
        kernel: starling_engine::KernelChoice::Auto,
        activations: starling_engine::Activations::default(),
    }
}

fn check(setup: &Setup, asked: &[Asked]) -> Result<(), SimError> {
    if setup.workers == 0 || setup.gateways == 0 {
        return Err(SimError::Setup("at least one worker and one gateway are needed".to_owned()));
    }
    if setup.gateways == 1 && setup.faults != super::setup::Faults::default() {
        return Err(SimError::Setup("kills and freezes need at least two gateways".to_owned()));
    }
    let longest = asked.iter().enumerate().max_by_key(|(_, one)| one.prompt + one.answer);
    let needed = longest.map_or(0, |(_, one)| (one.prompt + one.answer + 1).div_ceil(super::setup::BLOCK));
    if needed > setup.blocks {
        let at = longest.map_or(0, |(at, _)| at + 1);
        let blocks = setup.blocks;
        return Err(SimError::Setup(format!("request {at} needs {needed} KV blocks, a worker has {blocks}")));
    }
    Ok(())
}

/// Alone on an idle worker, from its coming to its first token: what a prompt of so many uncached tokens takes, milliseconds.
#[must_use]
pub fn alone_ms(timing: &Timing, uncached: u32, step_tokens: u32) -> f64 {
    timing.prefill(u64::from(uncached.max(1)), step_tokens).as_secs_f64() * 1e3
}

/// All workers are in their first life.
const LIFE: Incarnation = Incarnation(1);
