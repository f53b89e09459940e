//! What a request would cost on a worker, in milliseconds: the default of Starling.
//!
//! The time until its first token there, plus what those lose by it that run there or come later. Every term is time, so that a
//! hit, a queue, a slow machine and a full cache weigh against each other by what they do to somebody's clock. What many
//! workers hold of the prompt is not held against those that lack it: see [`super::shared`].

use super::{Params, PolicyError, Question, Scorer, shared::Shared};
use crate::route::{
    columns::{Columns, Worker, larger},
    desk::Ask,
    fleet::{Fleet, Slot},
};

/// Weight of what others lose: their tokens come later by this prefill, each of them.
const HARM: f64 = 0.25;
/// Weight of what later requests lose when a conversation moves: what is computed here although its worker holds it is taken from
/// them. Without it conversations leave for queues shorter than the prefill this costs, which makes the queues longer.
const LATER: f64 = 2.0;

/// See the module.
#[derive(Debug, Clone)]
pub struct Cost {
    harm: f64,
    later: f64,
    /// The same for the present request: nothing for one that does not go on from what somebody holds.
    moving: f64,
    shared: Shared,
}

impl Default for Cost {
    fn default() -> Self {
        Self::new(HARM, LATER)
    }
}

/// The terms of a cost, milliseconds each.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Terms {
    /// Until the prompt tokens queued before it are computed, in steps that also decode.
    pub queue: f64,
    /// Computing the prompt tokens that the cache lacks, but for those that are loaded.
    pub prefill: f64,
    /// Loading blocks from the worker's own slower tiers, where that is sooner than computing them.
    pub load: f64,
    /// Waiting for a place in a full batch.
    pub place: f64,
    /// Waiting for KV blocks.
    pub blocks: f64,
    /// What running answers lose.
    pub harm: f64,
    /// What requests lose that come later.
    pub later: f64,
    /// Of [`Self::prefill`] and [`Self::later`], what later requests bear; taken off. It is no time of this request's.
    pub shared: f64,
}

impl Terms {
    /// Until the first token.
    #[must_use]
    pub fn first_token(&self) -> f64 {
        self.computed() + self.load
    }

    /// The same of one that loads nothing.
    #[inline(always)]
    fn computed(&self) -> f64 {
        self.queue + self.prefill + self.place + self.blocks
    }

    /// Their sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.first_token() + self.harm + self.later - self.shared
    }

    /// The same of one that loads nothing and shares nothing.
    #[inline(always)]
    fn plain(&self) -> f64 {
        self.computed() + self.harm + self.later
    }
}

/// Time to the first token of a prompt on a worker by its own account alone, milliseconds.
pub(in crate::route) fn by_its_account(fleet: &Fleet, slot: Slot, missed: u32, answer: f64) -> f64 {
    let heard = &fleet.heard[slot];
    let load = (heard.running + heard.waiting, heard.prefill_tokens, u64::from(heard.blocks_pinned));
    let mut alone = Columns::default();
    alone.widen();
    alone.refresh(0, fleet.rates[slot], fleet.places[slot], load);
    let request = Request { answer: answer.max(1.0), harm: 0.0, later: 0.0, blocks: 0.0 };
    request.judge(alone.worker(0), f64::from(missed), 0.0).first_token()
}

/// What of a request is the same on every worker.
#[derive(Debug, Clone, Copy)]
struct Request {
    /// Tokens of an answer.
    answer: f64,
    /// Weight of what running answers lose, for each millisecond of prefill.
    harm: f64,
    /// Weight of what later requests lose, likewise.
    later: f64,
    /// KV blocks for prompt and answer.
    blocks: f64,
}

impl Request {
    fn of(ask: &Ask<'_>, cost: &Cost) -> Self {
        let answer = ask.answer_expected.max(1.0);
        let tokens = f64::from(ask.prompt_tokens) + ask.answer_expected;
        let blocks = (tokens / f64::from(ask.block_tokens.max(1))).ceil();
        Self { answer, harm: cost.harm / answer.min(64.0), later: cost.moving, blocks }
    }

    /// On a worker that lacks `missed` tokens of the prompt and holds `hits` blocks of it. No branch and no call, so that a
    /// column of workers is judged several at a time; inlined by force, or the columns are gone through one by one.
    #[inline(always)]
    fn judge(self, worker: Worker, missed: f64, hits: f64) -> Terms {
        let lacking = larger(self.blocks - hits, 0.0) - worker.free;
        let own = missed * worker.prefill;
        Terms {
            queue: worker.queue,
            prefill: own + round_up(missed / worker.step_tokens) * worker.step,
            load: 0.0,
            place: worker.place * self.answer,
            blocks: larger(lacking, 0.0) * worker.block * self.answer,
            harm: worker.harm * missed * self.harm,
            later: own * self.later,
            shared: 0.0,
        }
    }
}

/// The next whole number, of one from 0 to 2^51; [`f64::ceil`] is a call on the oldest x86-64 processors.
#[inline(always)]
fn round_up(number: f64) -> f64 {
    // Beyond 2^52 there are no halves, so the sum is rounded to a whole number.
    const WHOLE: f64 = (1u64 << 52) as f64;
    let nearest = (number + WHOLE) - WHOLE;
    nearest + if nearest < number { 1.0 } else { 0.0 }
}

/// How surely a prompt goes on from what one worker holds of it, 0 to 1: a conversation is held nearly whole, what prompts have in
/// common is a part of each. A copy of the latter serves all who come to its worker, so it takes nothing from anybody.
fn going_on(ask: &Ask<'_>, deepest: u32) -> f64 {
    let held = f64::from(deepest) * f64::from(ask.block_tokens) / f64::from(ask.prompt_tokens.max(1));
    (2.0 * held - 1.0).clamp(0.0, 1.0)
}

impl Cost {
    /// With these weights of what running answers and later requests lose, 0 to 10 each.
    #[must_use]
    pub fn new(harm: f64, later: f64) -> Self {
        Self { harm, later, moving: 0.0, shared: Shared::default() }
    }

    pub(super) fn make(params: &mut Params) -> Result<Self, PolicyError> {
        let harm = params.number("harm", 0.0..=10.0, HARM)?;
        Ok(Self::new(harm, params.number("later", 0.0..=10.0, LATER)?))
    }

    /// Term by term.
    #[must_use]
    pub fn judge(&self, question: &Question<'_>, slot: Slot) -> Terms {
        let request = Request::of(question.ask, self);
        let (load, hits) = (question.load(slot), question.hits[slot]);
        let missed = question.computed_tokens(slot);
        let worker = question.fleet.columns.worker(slot);
        let shared = self.shared.spared(hits + load.blocks) * f64::from(question.ask.block_tokens);
        // Loaded blocks need room like computed ones.
        let terms = request.judge(worker, f64::from(missed), f64::from(hits));
        Terms { load: load.ms, shared: shared * worker.prefill, ..terms }
    }
}

impl Scorer for Cost {
    fn name(&self) -> &'static str {
        "ms"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        self.judge(question, slot).total()
    }

    fn prepare(&mut self, question: &Question<'_>) {
        let mut deepest = question.hits.iter().copied().max().unwrap_or_default();
        for slot in 0..question.below.len() {
            deepest = deepest.max(question.hits[slot] + question.load(slot).blocks);
        }
        self.moving = self.later * going_on(question.ask, deepest);
        self.shared.learn(question.hits, self.moving);
    }

    fn add(&self, question: &Question<'_>, weight: f64, costs: &mut [f64]) {
        let request = Request::of(question.ask, self);
        let (prompt, block) = (f64::from(question.ask.prompt_tokens), f64::from(question.ask.block_tokens));
        let width = costs.len().min(question.fleet.width()).min(question.hits.len());
        let (costs, hits) = (&mut costs[..width], &question.hits[..width]);
        let lacks = |hits: f64| larger(prompt - hits * block, 1.0);
        let lower = question.below.iter().take(width).enumerate().filter(|(_, below)| below.any());
        let lower: Vec<(Slot, f64)> = lower.map(|(slot, _)| (slot, costs[slot])).collect();
        question.fleet.columns.each(costs, hits, |worker, hits| {
            // The last token is always computed, for what follows it.
            let hits = f64::from(hits);
            weight * request.judge(worker, lacks(hits), hits).plain()
        });
        if !self.shared.is_empty() {
            let prefill = question.fleet.columns.prefill(width);
            for ((cost, hits), prefill) in costs.iter_mut().zip(hits).zip(prefill) {
                *cost -= weight * self.shared.spared(*hits) * block * prefill;
            }
        }
        // The few that would load something, one by one.
        for (slot, before) in lower {
            costs[slot] = before + weight * self.cost(question, slot);
        }
    }

    fn terms(&self, question: &Question<'_>, slot: Slot, told: &mut dyn FnMut(&'static str, f64)) {
        let Terms { queue, prefill, load, place, blocks, harm, later, shared } = self.judge(question, slot);
        let first = [("queue", queue), ("prefill", prefill), ("place", place), ("blocks", blocks)];
        for (name, ms) in first.into_iter().chain([("harm", harm), ("later", later)]) {
            told(name, ms);
        }
        if load > 0.0 {
            told("load", load);
        }
        if shared > 0.0 {
            told("shared", -shared);
        }
    }
}
