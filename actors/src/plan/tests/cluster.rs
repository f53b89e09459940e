//! A cluster as water: prompts and answers flow through its workers, and the planner looks at it once an interval.

use std::time::Duration;

use starling_ids::{Incarnation, NodeId, WorkerId};

use crate::{
    plan::{Action, Fleet, Mode, Observation, Outlook, Plan, Rules, Seen, WorkerSeen},
    route::{rates::Rates, split::Role},
};

/// Parts of an interval that are reckoned one by one.
const PARTS: u32 = 20;

/// Prompts that wait for a worker, in milliseconds of its work, and answers, at most.
const QUEUE_MS: f64 = 30_000.0;
const ANSWERS: f64 = 256.0;

/// What comes in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) rate: f64,
    pub(super) prompt: f64,
    pub(super) answer: f64,
}

/// Speeds of one worker: 20 prompts of 500 tokens a second, or 320 tokens of answers a second in batches of 16.
pub(super) const RATES: Rates = Rates { prefill_ms_per_token: 0.1, decode_ms_per_sequence: 1.0, step_ms: 9.0 };

#[derive(Debug, Clone)]
struct Worker {
    id: u16,
    role: Role,
    /// Looks until it is there.
    comes_in: u32,
    drains: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) rules: Rules,
    pub(super) plan: Plan,
    workers: Vec<Worker>,
    next: u16,
    pub(super) now: Duration,
    prompts_ms: f64,
    running: f64,
    arrived: f64,
    ended: f64,
    /// Looks that a new worker takes.
    pub(super) start_looks: u32,
    /// By how much its workers are slower than they say.
    pub(super) slower: f64,
    /// Whether what starts and stops workers fails.
    pub(super) fails: bool,
    /// What was carried out, and when.
    pub(super) changes: Vec<(Duration, Action)>,
    pub(super) last: Option<Outlook>,
}

impl Cluster {
    pub(super) fn new(fleet: Fleet, rules: Rules) -> Self {
        let mut cluster = Self {
            rules,
            plan: Plan::new(rules, Duration::ZERO),
            workers: Vec::new(),
            next: 0,
            now: Duration::ZERO,
            prompts_ms: 0.0,
            running: 0.0,
            arrived: 0.0,
            ended: 0.0,
            start_looks: 1,
            slower: 1.0,
            fails: false,
            changes: Vec::new(),
            last: None,
        };
        cluster.grow_to(fleet, 0);
        cluster
    }

    pub(super) fn acting() -> Rules {
        Rules { mode: Mode::Act, scales: true, ..Rules::default() }
    }

    /// Those that are there.
    pub(super) fn fleet(&self) -> Fleet {
        let there = self.workers.iter().filter(|worker| worker.comes_in == 0 && !worker.drains);
        there.fold(Fleet::default(), |fleet, worker| fleet.with(worker.role))
    }

    /// Processes that run, whatever they do.
    pub(super) fn processes(&self) -> u32 {
        self.workers.len() as u32
    }

    pub(super) fn grow_to(&mut self, fleet: Fleet, comes_in: u32) {
        for role in [Role::Both, Role::Prefill, Role::Decode] {
            let there = self.workers.iter().filter(|worker| worker.role == role && !worker.drains).count() as u32;
            for _ in there..fleet.count(role) {
                self.workers.push(Worker { id: self.next, role, comes_in, drains: false });
                self.next += 1;
            }
        }
    }

    /// One interval, and the look after it.
    pub(super) fn look(&mut self, load: Load) -> Outlook {
        let observation = self.flow(load);
        self.look_at(&observation)
    }

    /// The look alone.
    pub(super) fn look_at(&mut self, observation: &Observation) -> Outlook {
        let outlook = self.plan.look(observation, self.now);
        if self.plan.carries_out(&outlook.decision.action) {
            self.carry_out(&outlook.decision.action);
        }
        self.last = Some(outlook.clone());
        outlook
    }

    fn carry_out(&mut self, action: &Action) {
        self.changes.push((self.now, action.clone()));
        match action {
            Action::Hold => {}
            Action::Switch { worker, to, .. } => {
                let found = self.workers.iter_mut().find(|known| known.id == worker.index).expect("there");
                found.role = *to;
                self.plan.done(self.now);
            }
            Action::Scale { .. } if self.fails => self.plan.failed(self.now),
            Action::Scale { wanted, remove } => {
                self.workers.retain(|known| !remove.iter().any(|gone| gone.index == known.id));
                self.grow_to(*wanted, self.start_looks);
                self.plan.done(self.now);
            }
            Action::Drain { worker, .. } => {
                self.workers.iter_mut().find(|known| known.id == worker.index).expect("there").drains = true;
                self.plan.emptied(worker);
            }
        }
    }

    /// What flows in one interval.
    pub(super) fn flow(&mut self, load: Load) -> Observation {
        for worker in &mut self.workers {
            worker.comes_in = worker.comes_in.saturating_sub(1);
        }
        let (fleet, mut seen) = (self.fleet(), Seen::default());
        let (window, part) = (self.rules.interval, self.rules.interval.as_secs_f64() / f64::from(PARTS));
        let (mut prefilled, mut generated) = (0.0, 0.0);
        let token_ms = RATES.prefill_ms_per_token * self.slower;
        let prompt_ms = load.prompt * token_ms;
        for _ in 0..PARTS {
            self.arrived += load.rate * part;
            self.prompts_ms += load.rate * part * prompt_ms;
            let shares = self.shares(fleet, load);
            let done = self.prompts_ms.min(shares.0 * part * 1e3);
            self.prompts_ms -= done;
            prefilled += done / token_ms;
            self.running += done / prompt_ms.max(1e-9);
            let batch = (self.running / shares.1.max(1e-9)).min(64.0);
            let step_ms = (RATES.step_ms + batch * RATES.decode_ms_per_sequence) * self.slower;
            let tokens = (batch * shares.1 / step_ms * part * 1e3).min(self.running * load.answer);
            generated += tokens;
            self.running -= tokens / load.answer;
            self.ended += tokens / load.answer;
            // More than that is refused, as a router does.
            let workers = f64::from(fleet.total());
            self.prompts_ms = self.prompts_ms.min(QUEUE_MS * workers);
            self.running = self.running.min(ANSWERS * workers);
            let wait_ms = self.prompts_ms / shares.0.max(1e-9);
            for _ in 0..take(&mut self.arrived) {
                seen.arrived(load.prompt as u32);
                seen.ttft.add(wait_ms + prompt_ms + RATES.step_ms);
            }
            for _ in 0..take(&mut self.ended) {
                seen.ended += 1;
                seen.answer_tokens += load.answer as u64;
                seen.itl.add(step_ms);
            }
        }
        self.now += window;
        let workers = self.seen(fleet, (prefilled, generated));
        Observation { window, seen, missing: Vec::new(), workers, block_tokens: 16 }
    }

    /// Workers' time for prompts and for answers, as engines share it out: prompts first.
    fn shares(&self, fleet: Fleet, load: Load) -> (f64, f64) {
        let prompts = load.rate * load.prompt * RATES.prefill_ms_per_token * self.slower / 1e3 + self.prompts_ms / 1e3;
        let (own, others) = (f64::from(fleet.prefill), f64::from(fleet.decode));
        let both = if own + f64::from(fleet.both) == 0.0 { others } else { f64::from(fleet.both) };
        let lent = (prompts - own).clamp(0.0, both * 0.9);
        let decode = if own + f64::from(fleet.both) == 0.0 { 0.0 } else { others };
        (own + lent, decode + both - lent)
    }

    fn seen(&self, fleet: Fleet, (prefilled, generated): (f64, f64)) -> Vec<WorkerSeen> {
        let answering = f64::from((fleet.decode + fleet.both).max(1));
        let computing = f64::from((fleet.prefill + fleet.both).max(1));
        let there = self.workers.iter().filter(|worker| worker.comes_in == 0 && !worker.drains);
        let of = |worker: &Worker| {
            let running = if worker.role.decodes() { (self.running / answering).min(64.0) } else { 0.0 };
            let queued = self.prompts_ms / RATES.prefill_ms_per_token / computing;
            WorkerSeen {
                running: running.round() as u32,
                queued_tokens: if worker.role.prefills() { queued as u64 } else { 0 },
                prefilled: if worker.role.prefills() { (prefilled / computing) as u64 } else { 0 },
                generated: if worker.role.decodes() { (generated / answering) as u64 } else { 0 },
                ..worker_seen(worker.id, worker.role)
            }
        };
        there.map(of).collect()
    }
}

/// A worker without work.
pub(super) fn worker_seen(id: u16, role: Role) -> WorkerSeen {
    WorkerSeen {
        id: WorkerId { node: NodeId::new("n").expect("name"), index: id },
        incarnation: Incarnation(1),
        role,
        sound: true,
        removable: true,
        rates: Some(RATES),
        sequences_max: 64,
        step_tokens: u32::MAX,
        blocks: 100_000,
        blocks_pinned: 0,
        running: 0,
        waiting: 0,
        queued_tokens: 0,
        prefilled: 0,
        generated: 0,
    }
}

/// The whole part, which is taken away.
fn take(value: &mut f64) -> u32 {
    let whole = value.floor().max(0.0);
    *value -= whole;
    whole as u32
}
