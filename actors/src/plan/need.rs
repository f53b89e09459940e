//! How many workers a load takes, from what workers have learned about their own speed and from what has piled up.
//!
//! Prompts take `requests × tokens that are not cached × time a token` of workers' time, and no more of a worker's than leaves
//! the wait for it within the target. Answers take as many workers as give all tokens at the largest batch whose steps keep the
//! target. What waits already is to be gone within [`DRAIN_LOOKS`] looks. What runs counts as well, so that a load whose answers
//! have not ended yet is seen. Pure.

use serde::{Deserialize, Serialize};

use super::{
    fleet::{Fleet, Sides},
    rules::Rules,
    times::Times,
    window::{Observation, WorkerSeen},
};
use crate::route::rates::Rates;

/// Looks within which what waits should be gone.
const DRAIN_LOOKS: f64 = 6.0;
/// Part of what comes that is added at most for what has piled up, or one worker when that is more.
const PILED_MAX: f64 = 1.25;
/// Weight of one interval in what requests are usually like.
const SHAPE_PACE: f64 = 0.5;
/// Share of KV blocks held above which more workers are needed.
const KV_MAX: f64 = 0.9;
/// A side used less than this is not what makes a target missed.
const BUSY: f64 = 0.5;
/// First tokens or steps that must have been seen before a missed target counts.
const SAMPLES_MIN: u64 = 10;
/// From so many on the slowest in a hundred are looked at, below it the middle.
const SAMPLES_TAIL: u64 = 200;
/// How far a missed target presses: just enough for one worker more.
pub(super) const MISSED: f64 = 1.1;

/// What requests are usually like.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Tokens of a prompt.
    pub prompt: f64,
    /// Tokens of an answer; 0 before one has ended.
    pub answer: f64,
    /// Share of a prompt's blocks that are cached where it goes, 0 to 1.
    pub cached: f64,
    /// Intervals in it.
    known: (u32, u32, u32),
}

impl Default for Shape {
    fn default() -> Self {
        Self { prompt: 0.0, answer: 0.0, cached: 0.0, known: (0, 0, 0) }
    }
}

impl Shape {
    /// Takes an interval. Where nothing came it stays as it was.
    pub fn learn(&mut self, observation: &Observation) {
        let seen = &observation.seen;
        let take = |value: &mut f64, known: &mut u32, sum: u64, count: u64| {
            if count == 0 {
                return;
            }
            let mean = sum as f64 / count as f64;
            *value = if *known == 0 { mean } else { *value + (mean - *value) * SHAPE_PACE };
            *known = known.saturating_add(1);
        };
        take(&mut self.prompt, &mut self.known.0, seen.prompt_tokens, seen.arrivals);
        take(&mut self.answer, &mut self.known.1, seen.answer_tokens, seen.ended);
        take(&mut self.cached, &mut self.known.2, seen.hit_blocks, seen.blocks);
    }
}

/// What is needed, and the figures it comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Need {
    /// Workers.
    pub sides: Sides,
    /// Those that what comes takes, without what has piled up: which side starves does not change it.
    pub flow: Sides,
    /// Milliseconds of a worker for one prompt token: the mean of the workers that know theirs.
    pub prefill_ms: f64,
    /// Sequences of a batch whose steps keep the target.
    pub batch: f64,
    /// Share of the workers' time that prompts took, 0 to about 1.
    pub prefill_use: f64,
    /// Share of their batches that answers took, by the batch that keeps the target.
    pub decode_use: f64,
    /// Share of their KV blocks that live sequences hold, 0 to 1.
    pub kv_use: f64,
    /// The target for the first token was missed, and more workers would help.
    pub ttft_missed: bool,
    /// The target between tokens was missed, likewise.
    pub itl_missed: bool,
}

/// What `rate` requests a second take. `lasting` says that targets were missed for long enough to count.
#[must_use]
pub fn need(
    observation: &Observation,
    shape: &Shape,
    rate: f64,
    fleet: Fleet,
    (rules, lasting): (&Rules, bool),
) -> Need {
    let sound: Vec<&WorkerSeen> = observation.workers.iter().filter(|worker| worker.sound).collect();
    let rates = mean_rates(&sound);
    let drain_secs = rules.interval.as_secs_f64() * DRAIN_LOOKS;
    let waiting = f64::from(observation.seen.waiting) / drain_secs;
    let token_ms = prompt_token_ms(&sound, rates);
    let prompts = Prompts::new(shape, (token_ms, rates.step_ms), rules);
    let answers = Answers::new(observation, &sound, shape, (rates, rules));
    let queued: u64 = sound.iter().map(|worker| worker.queued_tokens).sum();
    let queued = queued as f64 * token_ms / 1e3 / drain_secs;
    let flow = Sides { prefill: prompts.workers(rate, 0.0), decode: answers.workers(rate, shape) };
    let sides = Sides {
        prefill: piled(prompts.workers(rate + waiting, queued), flow.prefill),
        decode: piled(answers.workers(rate + waiting, shape).max(answers.held()), flow.decode),
    };
    let mut need = Need { sides, flow, prefill_ms: token_ms, batch: answers.batch, ..Need::default() };
    let shares = fleet.shares(need.sides);
    let of = |work: f64, there: f64| if there > 0.0 { work / there } else { 0.0 };
    let prefilled: u64 = sound.iter().map(|worker| worker.prefilled).sum();
    need.prefill_use = of(prefilled as f64 * token_ms / (observation.window.as_secs_f64() * 1e3), shares.prefill);
    need.decode_use = of(answers.running / answers.batch, shares.decode);
    need.kv_use = answers.kv_use;
    need.miss(observation, prompts.alone_ms, rules);
    if lasting {
        need.press(fleet);
    }
    need
}

/// What has piled up calls for a part more than what comes, and it goes over time: for more it would be paid long after.
fn piled(all: f64, flow: f64) -> f64 {
    all.min((flow * PILED_MAX).max(flow + 1.0))
}

impl Need {
    /// Which targets were missed on a side that has work and where more workers would help.
    fn miss(&mut self, observation: &Observation, alone_ms: f64, rules: &Rules) {
        let late = |times: &Times, target: f64| {
            let quantile = if times.count() >= SAMPLES_TAIL { 0.99 } else { 0.5 };
            times.count() >= SAMPLES_MIN && times.quantile(quantile).is_some_and(|ms| ms > target * 1.1)
        };
        let seen = &observation.seen;
        // A prompt that takes longer than that by itself does so among any number of workers.
        self.ttft_missed =
            late(&seen.ttft, rules.ttft_ms) && self.prefill_use.max(self.decode_use) > BUSY && alone_ms < rules.ttft_ms;
        self.itl_missed = late(&seen.itl, rules.itl_ms) && self.decode_use > BUSY && self.batch > 1.0;
    }

    /// A target that was missed presses for one worker more.
    fn press(&mut self, fleet: Fleet) {
        // A first token also waits for a place among the answers.
        let by_prompts = self.prefill_use >= self.decode_use;
        if self.ttft_missed && by_prompts {
            let there = fleet.left_for_prefill(self.sides.decode, MISSED);
            self.sides.prefill = self.sides.prefill.max(there * MISSED);
        }
        if self.itl_missed || (self.ttft_missed && !by_prompts) {
            let there = fleet.left_for_decode(self.sides.prefill, MISSED);
            self.sides.decode = self.sides.decode.max(there * MISSED);
        }
    }
}

/// What prompts take.
struct Prompts {
    /// Milliseconds of a worker for each.
    work_ms: f64,
    /// Until the first token of one that is alone.
    alone_ms: f64,
    /// Share of a worker's time that they may take.
    bearable: f64,
}

impl Prompts {
    fn new(shape: &Shape, (token_ms, step_ms): (f64, f64), rules: &Rules) -> Self {
        let work_ms = shape.prompt * (1.0 - shape.cached).clamp(0.0, 1.0) * token_ms;
        let alone_ms = work_ms + step_ms;
        // A queue of one server whose work takes equally long waits `u / (2 (1 - u))` of it at the use u; solved for u.
        let spare = 2.0 * (rules.ttft_ms - alone_ms).max(0.0);
        let bearable = if work_ms > 0.0 { spare / (spare + work_ms) } else { 1.0 };
        Self { work_ms, alone_ms, bearable: bearable.clamp(0.3, rules.use_max) }
    }

    /// Workers for so many a second, and so many seconds' work a second beside.
    fn workers(&self, rate: f64, beside: f64) -> f64 {
        (rate * self.work_ms / 1e3 + beside) / self.bearable
    }
}

/// What answers take.
struct Answers {
    /// Sequences in a batch whose steps keep the target.
    batch: f64,
    tokens_per_second: f64,
    running: f64,
    kv_use: f64,
    /// Workers that answer.
    there: f64,
    use_max: f64,
}

impl Answers {
    fn new(observation: &Observation, sound: &[&WorkerSeen], shape: &Shape, (rates, rules): (Rates, &Rules)) -> Self {
        let answering = || sound.iter().filter(|worker| worker.role.decodes());
        let there = answering().count() as f64;
        let sum = |of: fn(&WorkerSeen) -> u32| answering().map(|worker| f64::from(of(worker))).sum::<f64>();
        let (blocks, pinned) = (sum(|worker| worker.blocks), sum(|worker| worker.blocks_pinned));
        let each = there.max(1.0);
        let context = shape.prompt + shape.answer / 2.0;
        let tokens = blocks / each * f64::from(observation.block_tokens);
        let fitting = if context > 0.0 && tokens > 0.0 { KV_MAX * tokens / context } else { f64::MAX };
        let in_time = (rules.itl_ms - rates.step_ms) / rates.decode_ms_per_sequence.max(1e-6);
        let batch = in_time.min(fitting).min(sum(|worker| worker.sequences_max) / each).max(1.0);
        let step_ms = (rates.step_ms + batch * rates.decode_ms_per_sequence).max(1e-6);
        Self {
            batch,
            tokens_per_second: batch / step_ms * 1e3,
            running: sum(|worker| worker.running),
            kv_use: if blocks > 0.0 { (pinned / blocks).min(1.0) } else { 0.0 },
            there,
            use_max: rules.use_max,
        }
    }

    /// Workers for so many a second; by what runs before an answer has ended.
    fn workers(&self, rate: f64, shape: &Shape) -> f64 {
        if shape.answer > 0.0 { rate * shape.answer / self.tokens_per_second / self.use_max } else { self.held() }
    }

    /// Workers for what runs.
    fn held(&self) -> f64 {
        let by_kv = if self.kv_use > KV_MAX { self.kv_use / KV_MAX * self.there } else { 0.0 };
        (self.running / self.batch / self.use_max).max(by_kv)
    }
}

/// Milliseconds of a worker for a prompt token: its own, and its part of the steps, which are full where there is much to do.
fn prompt_token_ms(sound: &[&WorkerSeen], rates: Rates) -> f64 {
    let sum: f64 = sound.iter().map(|worker| f64::from(worker.step_tokens.max(1))).sum();
    let step_tokens = (sum / sound.len().max(1) as f64).max(1.0);
    rates.prefill_ms_per_token + rates.step_ms / step_tokens
}

/// The mean of what workers have learned; the prior while none has.
fn mean_rates(sound: &[&WorkerSeen]) -> Rates {
    let known: Vec<Rates> = sound.iter().filter_map(|worker| worker.rates).filter(is_sane).collect();
    if known.is_empty() {
        return Rates::default();
    }
    let mean = |of: fn(&Rates) -> f64| known.iter().map(of).sum::<f64>() / known.len() as f64;
    Rates {
        prefill_ms_per_token: mean(|rates| rates.prefill_ms_per_token),
        decode_ms_per_sequence: mean(|rates| rates.decode_ms_per_sequence),
        step_ms: mean(|rates| rates.step_ms),
    }
}

fn is_sane(rates: &Rates) -> bool {
    let Rates { prefill_ms_per_token, decode_ms_per_sequence, step_ms } = *rates;
    [prefill_ms_per_token, decode_ms_per_sequence, step_ms].iter().all(|ms| ms.is_finite() && *ms >= 0.0)
}
