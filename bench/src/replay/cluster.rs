//! Moves the virtual clock: arrivals, decisions, engine steps, and the news about them, each at its time.
//!
//! One heap of events; ties in the order of their making, so one seed gives one run.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    error::Error,
    sync::Arc,
    time::Duration,
};

use starling_actors::{
    report::LoadReport,
    route::{
        desk::{Ask, Desk, Ticket},
        fleet::{Heard, Places, Standing},
        policy::PolicyConfig,
        receipt::Outcome,
    },
};
use starling_engine::{
    EngineKind, LoadedModel, ModelOptions, SamplingParams, SequenceId, SequenceRequest, StopParams,
    simulated::{SimulatedModel, Timing},
};
use starling_ids::{BlockHash, Incarnation, NodeId, RequestId, TokenId, WorkerId};
use starling_kv::{
    events::KvEvent,
    hash::{HashSeed, block_hashes},
    index::{IndexLimits, PrefixIndex},
};

use super::{trace::Asked, worker::SimWorker};

/// Tokens per block.
pub const BLOCK: u32 = 16;
/// Token ids that made-up prompts use.
const VOCABULARY: u32 = 256;

/// What is simulated.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Engines.
    pub workers: usize,
    /// Gateways; requests come to them in turn.
    pub gateways: usize,
    /// How workers are chosen.
    pub policy: PolicyConfig,
    /// Whether each gateway decides by itself, as routers do elsewhere, or one shard for all.
    pub decide_apart: bool,
    /// KV blocks of [`BLOCK`] tokens in each engine.
    pub blocks: u32,
    /// Sequences in a batch.
    pub sequences: u32,
    /// Tokens in a step.
    pub step_tokens: u32,
    /// How long steps take.
    pub timing: Timing,
    /// From one node to another.
    pub wire: Duration,
    /// Draws.
    pub seed: u64,
    /// At most this many requests at once; the next comes when one ends. None: they come when the trace says.
    pub concurrency: Option<usize>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            workers: 8,
            gateways: 1,
            policy: PolicyConfig::default(),
            decide_apart: false,
            blocks: 65_536,
            sequences: 256,
            step_tokens: 8_192,
            timing: Timing::published(),
            wire: Duration::from_micros(200),
            seed: 1,
            concurrency: None,
        }
    }
}

/// What became of a request.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// When it came.
    pub at: Duration,
    /// From its coming to its first token.
    pub ttft: Duration,
    /// From its coming to its last token.
    pub e2e: Duration,
    /// The longest and the mean time between tokens; zero for answers of one token.
    pub itl_max: Duration,
    /// See above.
    pub itl_mean: Duration,
    /// Tokens in the prompt.
    pub prompt: u32,
    /// Of them, found in the cache.
    pub cached: u32,
    /// Of them, predicted to be found.
    pub predicted: u32,
    /// Tokens in the answer.
    pub answer: u32,
    /// Where.
    pub worker: usize,
}

/// A run's outcome.
#[derive(Debug, Default)]
pub struct Run {
    /// Requests that ended, in the order of their coming.
    pub served: Vec<Served>,
    /// Requests that never ended.
    pub failed: usize,
    /// Time each worker spent computing.
    pub busy: Vec<Duration>,
    /// Virtual time from the first arrival to the last token.
    pub lasted: Duration,
    /// Wall time of all decisions, lookups included.
    pub deciding: Duration,
}

#[derive(Debug)]
enum Event {
    Arrive(usize),
    Submit { worker: usize, request: usize },
    Stepped { worker: usize },
    News { worker: usize, events: Vec<KvEvent>, report: Option<Box<LoadReport>> },
    Confirmed { request: usize, number: u64 },
    Prefilled(usize),
    Ended(usize),
}

#[derive(Debug, Default)]
struct Live {
    tokens: Vec<TokenId>,
    ticket: Option<Ticket>,
    desk: usize,
    first: Option<Duration>,
    last: Duration,
    gap_max: Duration,
    count: u32,
    done: bool,
    served: Served,
}

/// See the module.
pub struct Cluster<'a> {
    setup: &'a Setup,
    asked: &'a [Asked],
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: HashMap<u64, Event>,
    serial: u64,
    desks: Vec<Desk>,
    index: PrefixIndex,
    workers: Vec<SimWorker>,
    live: Vec<Live>,
    next: usize,
    seed: HashSeed,
    deciding: Duration,
    context: u32,
}

impl<'a> Cluster<'a> {
    /// An idle cluster in front of a trace.
    ///
    /// # Errors
    /// What the policy or the engine does not take.
    pub fn new(setup: &'a Setup, asked: &'a [Asked]) -> Result<Self, Box<dyn Error>> {
        let context = asked.iter().map(|asked| asked.prompt + asked.answer + 1).max().unwrap_or(1).max(1_024);
        let options = ModelOptions {
            kind: EngineKind::Simulated,
            path: None,
            served_name: None,
            threads: 1,
            kv_bytes: 0,
            sequences_max: setup.sequences,
            waiting_max: u32::MAX / 2,
            batch_tokens_max: setup.step_tokens,
            kernel: starling_engine::KernelChoice::Auto,
            activations: starling_engine::Activations::default(),
        };
        let model =
            SimulatedModel::with_timing(&options, setup.timing)?.with_context(context).with_blocks(setup.blocks);
        let index = PrefixIndex::new(IndexLimits::default());
        let mut workers = Vec::with_capacity(setup.workers);
        for number in 0..setup.workers {
            let id = WorkerId { node: NodeId::new(&format!("w{number}"))?, index: 0 };
            index.add_worker(id.clone(), Incarnation(1))?;
            workers.push(SimWorker::new(id, model.core_engine()));
        }
        let deciders = if setup.decide_apart { setup.gateways.max(1) } else { 1 };
        let mut desks = Vec::with_capacity(deciders);
        let places = Places {
            sequences: setup.sequences,
            waiting: u32::MAX / 2,
            step_tokens: setup.step_tokens,
            blocks: setup.blocks,
            ..Places::default()
        };
        for number in 0..deciders {
            let mut desk = Desk::new(setup.policy.build()?, setup.seed.wrapping_add(number as u64));
            for worker in &workers {
                desk.seat(&worker.id, worker.incarnation, places, Standing::Sound);
            }
            desks.push(desk);
        }
        Ok(Self {
            setup,
            asked,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            serial: 0,
            desks,
            index,
            workers,
            live: std::iter::repeat_with(Live::default).take(asked.len()).collect(),
            next: 0,
            seed: model.card().hash_seed,
            deciding: Duration::ZERO,
            context,
        })
    }

    /// Serves the trace.
    ///
    /// # Errors
    /// What an engine says when it fails.
    pub fn run(mut self, mut progress: impl FnMut(usize, Duration)) -> Result<Run, Box<dyn Error>> {
        match self.setup.concurrency {
            Some(most) => (0..most).for_each(|_| self.arrive_next()),
            None => self.arrive_next(),
        }
        let mut ended = 0;
        while let Some(Reverse((at, serial))) = self.queue.pop() {
            self.now = at;
            let Some(event) = self.events.remove(&serial) else { continue };
            if matches!(event, Event::Ended(_)) {
                ended += 1;
                if ended % 256 == 0 {
                    progress(ended, self.now);
                }
            }
            self.happen(event)?;
        }
        let begun = self.live.iter().map(|live| live.served.at).min().unwrap_or_default();
        let failed = self.live.iter().filter(|live| !live.done).count();
        Ok(Run {
            lasted: self.now.saturating_sub(begun),
            busy: self.workers.iter().map(|worker| worker.busy).collect(),
            served: self.live.into_iter().filter(|live| live.done).map(|live| live.served).collect(),
            failed,
            deciding: self.deciding,
        })
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.serial += 1;
        self.queue.push(Reverse((self.now + delay, self.serial)));
        self.events.insert(self.serial, event);
    }

    fn arrive_next(&mut self) {
        let Some(asked) = self.asked.get(self.next) else { return };
        let delay = match self.setup.concurrency {
            Some(_) => Duration::ZERO,
            None => asked.at.saturating_sub(self.now),
        };
        self.after(delay, Event::Arrive(self.next));
        self.next += 1;
    }

    fn happen(&mut self, event: Event) -> Result<(), Box<dyn Error>> {
        match event {
            Event::Arrive(request) => {
                self.arrive(request);
                if self.setup.concurrency.is_none() {
                    self.arrive_next();
                }
            }
            Event::Submit { worker, request } => {
                self.submit(worker, request)?;
                self.step(worker)?;
            }
            Event::Stepped { worker } => {
                self.stepped(worker);
                self.step(worker)?;
            }
            Event::News { worker, events, report } => self.hear(worker, &events, report)?,
            Event::Confirmed { request, number } => {
                let live = &self.live[request];
                if let Some(ticket) = live.ticket {
                    self.desks[live.desk].confirm(ticket, number);
                }
            }
            Event::Prefilled(request) => {
                let live = &self.live[request];
                if let Some(ticket) = live.ticket {
                    self.desks[live.desk].prefilled(ticket);
                }
            }
            Event::Ended(request) => {
                let live = &mut self.live[request];
                if let Some(ticket) = live.ticket.take() {
                    let outcome = Outcome { answer_tokens: live.count, ..Outcome::default() };
                    self.desks[live.desk].ended(ticket, outcome);
                    self.desks[live.desk].release(ticket);
                }
                if self.setup.concurrency.is_some() {
                    self.arrive_next();
                }
            }
        }
        Ok(())
    }

    fn arrive(&mut self, request: usize) {
        let asked = &self.asked[request];
        let tokens = asked.tokens(0, VOCABULARY);
        let hashes: Vec<BlockHash> = block_hashes(self.seed, &tokens, BLOCK as usize);
        let desk = request % self.desks.len();
        let ask = Ask {
            request: RequestId(request as u128),
            prompt_tokens: tokens.len() as u32,
            block_tokens: BLOCK,
            hashes: &hashes,
            choices: 1,
            answer_tokens_max: self.context,
            answer_expected: 0.0,
            session: None,
            exclude: &[],
            failed: &[],
        };
        let began = std::time::Instant::now();
        let fleet = self.desks[desk].fleet();
        let found = self.index.matches(&hashes, usize::MAX);
        let hits: Vec<(usize, u32)> =
            found.iter().filter_map(|hit| Some((fleet.slot(&hit.worker)?, hit.depth as u32))).collect();
        let decision = self.desks[desk].decide(&ask, &hits, self.now);
        self.deciding += began.elapsed();
        let Some(decision) = decision else { return };
        let live = &mut self.live[request];
        live.served = Served {
            at: self.now,
            prompt: tokens.len() as u32,
            predicted: decision.hit_blocks * BLOCK,
            ..Served::default()
        };
        live.tokens = tokens;
        live.ticket = Some(decision.ticket);
        live.desk = desk;
        let worker = self.workers.iter().position(|worker| worker.id == decision.worker).unwrap_or_default();
        live.served.worker = worker;
        // To the shard, its answer, to the worker.
        let hops = if self.setup.decide_apart { 1 } else { 3 };
        self.after(self.setup.wire * hops, Event::Submit { worker, request });
    }

    fn submit(&mut self, worker: usize, request: usize) -> Result<(), Box<dyn Error>> {
        let tokens: Arc<[TokenId]> = std::mem::take(&mut self.live[request].tokens).into();
        let sequence = SequenceRequest {
            id: SequenceId(request as u64),
            prompt: tokens,
            answered: 0,
            hash_seed: self.seed,
            sampling: SamplingParams::greedy(),
            stop: StopParams {
                tokens_max: self.asked[request].answer,
                tokens_min: 0,
                token_ids: Vec::new(),
                ignore_eos: true,
            },
            logprobs: None,
            priority: 0,
        };
        let number = self.workers[worker].submit(sequence)?;
        self.after(self.setup.wire * 2, Event::Confirmed { request, number });
        self.tell(worker, Vec::new());
        Ok(())
    }

    fn step(&mut self, worker: usize) -> Result<(), Box<dyn Error>> {
        if let Some(takes) = self.workers[worker].begin()? {
            self.after(takes, Event::Stepped { worker });
        }
        Ok(())
    }

    fn stepped(&mut self, worker: usize) {
        let Some(output) = self.workers[worker].stepping.take() else { return };
        for delta in output.deltas {
            let request = delta.id.0 as usize;
            let live = &mut self.live[request];
            let arrived = self.now + self.setup.wire;
            live.served.cached += delta.cached_tokens.unwrap_or(0);
            live.count += delta.tokens.len() as u32;
            let first = live.first.is_none();
            if first {
                live.first = Some(arrived);
                live.served.ttft = arrived - live.served.at;
            } else {
                live.gap_max = live.gap_max.max(arrived - live.last);
            }
            live.last = arrived;
            if delta.finish.is_some() {
                live.done = true;
                live.served.e2e = arrived - live.served.at;
                live.served.answer = live.count;
                live.served.itl_max = live.gap_max;
                let gaps = live.count.saturating_sub(1).max(1);
                live.served.itl_mean = live.served.e2e.saturating_sub(live.served.ttft) / gaps;
            }
            let over = live.done;
            if first {
                self.after(self.setup.wire * 2, Event::Prefilled(request));
            }
            if over {
                self.after(self.setup.wire * 2, Event::Ended(request));
            }
        }
        self.tell(worker, output.events);
    }

    fn tell(&mut self, worker: usize, events: Vec<KvEvent>) {
        let report = self.workers[worker].report(self.now).map(Box::new);
        if !events.is_empty() || report.is_some() {
            self.after(self.setup.wire, Event::News { worker, events, report });
        }
    }

    fn hear(
        &mut self,
        worker: usize,
        events: &[KvEvent],
        report: Option<Box<LoadReport>>,
    ) -> Result<(), Box<dyn Error>> {
        let SimWorker { id, incarnation, .. } = &self.workers[worker];
        for event in events {
            self.index.apply(id, *incarnation, event)?;
        }
        let Some(report) = report else { return Ok(()) };
        let heard = Heard {
            at: self.now,
            running: report.load.running,
            waiting: report.load.waiting,
            prefill_tokens: report.load.prefill_tokens,
            blocks_pinned: report.load.blocks_pinned,
            admitted: report.admitted,
            rates: report.rates,
            link: report.link,
        };
        for desk in &mut self.desks {
            desk.hear(id, *incarnation, heard);
        }
        Ok(())
    }
}
