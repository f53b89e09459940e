//! The scheduler without a model: a memory of prefix digests stands for the KV cache, so that a wrong block, a block
//! read before it was written and a wrong prefix all show as a wrong token.

use std::{collections::HashMap, sync::Arc, time::Duration};

use proptest::prelude::*;
use starling_kv::{hash::HashSeed, pool::BlockSlot, tier::Worth};

use super::*;
use crate::contract::{EngineLimits, FinishReason, ModelCard, SamplingParams, StopParams};

mod handover;

const BLOCK: usize = 4;
const EOS: TokenId = 0;
const VOCAB: u32 = 100;

fn capabilities(limits: EngineLimits) -> Capabilities {
    let card = ModelCard {
        id: starling_ids::ModelId::new("m").expect("name"),
        architecture: "simulated".into(),
        context_length: 64,
        vocab_size: VOCAB,
        block_tokens: BLOCK as u32,
        bundle_digest: String::new(),
        eos_ids: vec![EOS],
        hash_seed: HashSeed(1),
    };
    Capabilities { card, layout_digest: 0, limits }
}

fn limits(sequences_max: u32, batch_tokens_max: u32, kv_blocks: u32) -> EngineLimits {
    EngineLimits { sequences_max, waiting_max: 100, batch_tokens_max, kv_blocks }
}

fn request(id: u64, prompt: &[TokenId], tokens_max: u32) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(id),
        prompt: Arc::from(prompt),
        answered: 0,
        hash_seed: HashSeed(1),
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max, tokens_min: 0, token_ids: vec![], ignore_eos: false },
        logprobs: None,
        priority: 0,
    }
}

fn digest(before: u64, token: TokenId) -> u64 {
    (before ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

fn token_after(state: u64) -> TokenId {
    ((state >> 20) % 40) as TokenId
}

/// What a sequence must give, computed alone from its prompt.
fn answer(prompt: &[TokenId], tokens_max: usize) -> Vec<TokenId> {
    let mut state = prompt.iter().fold(7, |state, token| digest(state, *token));
    let mut tokens = Vec::new();
    while tokens.len() < tokens_max && prompt.len() + tokens.len() < 64 {
        let token = token_after(state);
        tokens.push(token);
        state = digest(state, token);
        if token == EOS {
            break;
        }
    }
    tokens
}

/// A lower tier that keeps everything, brings it after some steps, and now and then not.
#[derive(Default)]
struct Shelf {
    on: bool,
    blocks: HashMap<BlockHash, Vec<Option<u64>>>,
    under_way: Vec<(usize, Fetch)>,
    chance: u64,
    fetched: usize,
}

impl Below for Shelf {
    fn worth(&mut self, chain: &[BlockHash]) -> Option<Worth> {
        let blocks = chain.iter().take_while(|hash| self.blocks.contains_key(hash)).count();
        (self.on && blocks > 0).then(|| Worth { blocks, deadline: Duration::from_secs(1 + self.random() % 3) })
    }
}

impl Shelf {
    fn random(&mut self) -> u64 {
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.chance >> 33
    }
}

struct Harness {
    scheduler: Scheduler,
    shelf: Shelf,
    memory: Vec<Option<u64>>,
    answers: HashMap<SequenceId, Vec<TokenId>>,
    finished: Vec<(SequenceId, FinishReason)>,
    cached: HashMap<SequenceId, u32>,
    steps: usize,
    computed: usize,
}

impl Harness {
    fn new(limits: EngineLimits) -> Self {
        Self {
            memory: vec![None; limits.kv_blocks as usize * BLOCK],
            scheduler: Scheduler::new(&capabilities(limits)),
            shelf: Shelf::default(),
            answers: HashMap::new(),
            finished: Vec::new(),
            cached: HashMap::new(),
            steps: 0,
            computed: 0,
        }
    }

    fn compute(&mut self, plan: &Plan) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        let mut written = std::collections::HashSet::new();
        for item in &plan.items {
            let sequence = self.scheduler.sequence(item.id).expect("live");
            let at = |position: usize| sequence.blocks()[position / BLOCK].0 as usize * BLOCK + position % BLOCK;
            let mut state = match item.start {
                0 => 7,
                start => self.memory[at(start - 1)].expect("read after write"),
            };
            for position in item.start..item.start + item.count {
                state = digest(state, sequence.tokens()[position]);
                assert!(written.insert(at(position)), "two items write one place");
                self.memory[at(position)] = Some(state);
            }
            self.computed += item.count;
            if item.wants_logits {
                outcomes.push(Outcome::Token(token_after(state)));
            }
        }
        outcomes
    }

    /// Blocks leave the device and come back, as an engine moves them.
    fn move_blocks(&mut self, plan: &Plan) {
        for evicted in self.scheduler.pool_mut().take_evicted() {
            let at = evicted.slot.0 as usize * BLOCK;
            self.shelf.blocks.insert(evicted.hash, self.memory[at..at + BLOCK].to_vec());
        }
        for fetch in plan.fetches.clone() {
            let due = self.steps + (self.shelf.random() % 4) as usize;
            self.shelf.under_way.push((due, fetch));
        }
    }

    fn take_arrivals(&mut self) {
        let gone = self.scheduler.take_abandoned();
        self.shelf.under_way.retain(|(_, fetch)| !gone.contains(&fetch.ticket));
        let (due, later) =
            std::mem::take(&mut self.shelf.under_way).into_iter().partition(|(due, _)| *due <= self.steps);
        self.shelf.under_way = later;
        let due: Vec<(usize, Fetch)> = due;
        for (_, fetch) in due {
            let lost = self.shelf.random().is_multiple_of(4);
            let arrive = if lost { self.shelf.random() as usize % fetch.chain.len() } else { fetch.chain.len() };
            for (index, hash) in fetch.chain.iter().enumerate().take(arrive) {
                let awaited = self.scheduler.awaited(fetch.ticket, index).expect("not given up");
                let at = awaited.slot.0 as usize * BLOCK;
                self.memory[at..at + BLOCK].copy_from_slice(&self.shelf.blocks[hash]);
            }
            self.shelf.fetched += arrive;
            self.scheduler.fetched(fetch.ticket, arrive);
            assert_eq!(self.scheduler.awaited(fetch.ticket, 0), None);
        }
        let now = Duration::from_secs(self.steps as u64);
        for ticket in self.scheduler.overdue(now.saturating_sub(Duration::from_secs(3))) {
            self.shelf.under_way.retain(|(_, fetch)| fetch.ticket != ticket);
            self.scheduler.fetched(ticket, 0);
        }
    }

    fn step(&mut self) -> Plan {
        self.take_arrivals();
        let plan = self.scheduler.plan(&mut self.shelf);
        self.move_blocks(&plan);
        assert!(
            plan.items.iter().map(|item| item.count).sum::<usize>() <= self.scheduler.limits.batch_tokens_max as usize
        );
        let stands = self.scheduler.is_idle() || self.scheduler.fetching() > 0 || self.scheduler.guests() > 0;
        assert!(!plan.items.is_empty() || stands, "one at least goes on");
        let outcomes = self.compute(&plan);
        for (advance, outcome) in self.scheduler.commit(&plan, &outcomes).into_iter().zip(outcomes) {
            let Outcome::Token(token) = outcome else { continue };
            self.answers.entry(advance.id).or_default().push(token);
            self.finished.extend(advance.finish.map(|reason| (advance.id, reason)));
            if let Some(cached) = advance.cached_tokens {
                assert_eq!(self.cached.insert(advance.id, cached), None, "reported once");
            }
        }
        self.scheduler.check().expect("nothing is lost");
        self.steps += 1;
        plan
    }

    fn run(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
            assert!(self.steps < 5_000, "it ends");
        }
        let counts = self.scheduler.pool().counts();
        assert_eq!((counts.pinned, counts.filling), (0, 0), "zero at rest");
        assert_eq!(self.scheduler.fetching(), 0);
    }
}

#[test]
fn a_prompt_is_chunked_and_answered() {
    let mut harness = Harness::new(limits(4, 8, 32));
    let prompt: Vec<TokenId> = (1..22).collect();
    harness.scheduler.submit(&request(1, &prompt, 5)).expect("room");
    let first = harness.step();
    assert_eq!(first.items, [PlanItem { id: SequenceId(1), start: 0, count: 8, wants_logits: false }]);
    harness.run();
    assert_eq!(harness.answers[&SequenceId(1)], answer(&prompt, 5));
    assert_eq!(harness.cached[&SequenceId(1)], 0);
}

#[test]
fn decodes_come_before_prefill_chunks() {
    let mut harness = Harness::new(limits(4, 8, 32));
    harness.scheduler.submit(&request(1, &[5, 6], 20)).expect("room");
    harness.step();
    harness.scheduler.submit(&request(2, &(1..31).collect::<Vec<_>>(), 2)).expect("room");
    let plan = harness.step();
    assert_eq!((plan.items[0].id, plan.items[0].count), (SequenceId(1), 1));
    assert_eq!((plan.items[1].id, plan.items[1].count), (SequenceId(2), 7));
    harness.run();
}

#[test]
fn a_cached_prefix_is_reused_but_never_the_whole_prompt() {
    let mut harness = Harness::new(limits(4, 64, 32));
    let prompt: Vec<TokenId> = (1..=16).collect();
    for id in [1, 2] {
        harness.scheduler.submit(&request(id, &prompt, 3)).expect("room");
        harness.run();
    }
    assert_eq!(harness.cached[&SequenceId(2)], 12);
    assert_eq!(harness.answers[&SequenceId(1)], harness.answers[&SequenceId(2)]);
    assert_eq!(harness.scheduler.load().tokens_cached, 12);
}

#[test]
fn an_answer_becomes_a_prefix_for_the_next_turn() {
    let mut harness = Harness::new(limits(4, 64, 32));
    let prompt: Vec<TokenId> = (1..=7).collect();
    harness.scheduler.submit(&request(1, &prompt, 6)).expect("room");
    harness.run();
    let turn = [prompt.as_slice(), &harness.answers[&SequenceId(1)], &[50, 51]].concat();
    harness.scheduler.submit(&request(2, &turn, 2)).expect("room");
    harness.run();
    assert_eq!(harness.cached[&SequenceId(2)], 12, "7 + 5 computed of 6 are three full blocks");
}

#[test]
fn equal_prompts_at_once_are_computed_once() {
    let mut harness = Harness::new(limits(8, 16, 64));
    let prompt: Vec<TokenId> = (1..=41).collect();
    for id in 0..8 {
        harness.scheduler.submit(&request(id, &prompt, 1)).expect("room");
    }
    harness.run();
    assert_eq!(harness.computed, 41 + 7, "the others compute their last token only");
}

#[test]
fn a_twin_goes_ahead_when_the_first_is_cancelled() {
    let mut harness = Harness::new(limits(8, 8, 64));
    let prompt: Vec<TokenId> = (1..=41).collect();
    harness.scheduler.submit(&request(1, &prompt, 1)).expect("room");
    harness.scheduler.submit(&request(2, &prompt, 1)).expect("room");
    harness.step();
    assert_eq!(harness.scheduler.load().waiting, 1);
    assert!(harness.scheduler.cancel(SequenceId(1)));
    assert!(!harness.scheduler.cancel(SequenceId(1)));
    harness.run();
    assert_eq!(harness.answers[&SequenceId(2)], answer(&prompt, 1));
    assert_eq!(harness.cached[&SequenceId(2)], 8, "what the first had finished");
}

#[test]
fn lower_priority_number_runs_first_and_the_last_is_preempted() {
    let mut harness = Harness::new(limits(2, 16, 8));
    let with = |id: u64, priority: i32| SequenceRequest { priority, ..request(id, &[id as TokenId; 9], 12) };
    harness.scheduler.submit(&with(1, 5)).expect("room");
    harness.scheduler.submit(&with(2, 0)).expect("room");
    harness.scheduler.submit(&with(3, -1)).expect("room");
    let first = harness.step();
    assert_eq!(first.items[0].id, SequenceId(3));
    harness.run();
    let order: Vec<u64> = harness.finished.iter().map(|(id, _)| id.0).collect();
    assert_eq!(order.last(), Some(&1));
    for id in 1..4 {
        assert_eq!(harness.answers[&SequenceId(id)], answer(&[id as TokenId; 9], 12), "{id}");
    }
}

#[test]
fn refusals_leave_nothing_behind() {
    let mut scheduler = Scheduler::new(&capabilities(EngineLimits { waiting_max: 1, ..limits(1, 8, 4) }));
    assert_eq!(scheduler.submit(&request(1, &[], 1)), Err(SubmitError::Empty));
    assert_eq!(scheduler.submit(&request(1, &[VOCAB], 1)), Err(SubmitError::UnknownToken { id: VOCAB, vocab: VOCAB }));
    assert_eq!(scheduler.submit(&request(1, &[1; 64], 1)), Err(SubmitError::TooLong { prompt: 64, context: 64 }));
    assert_eq!(scheduler.submit(&request(1, &[1; 16], 1)), Err(SubmitError::PoolTooSmall { blocks: 5, pool: 4 }));
    assert!(scheduler.is_idle());
    scheduler.submit(&request(1, &[1; 3], 1)).expect("batch");
    scheduler.submit(&request(2, &[1; 3], 1)).expect("queue");
    assert_eq!(scheduler.submit(&request(3, &[1; 3], 1)), Err(SubmitError::Full { waiting: 2, limit: 1 }));
}

#[test]
fn a_pool_smaller_than_the_context_ends_an_answer_with_length() {
    let mut harness = Harness::new(limits(2, 16, 4));
    let stop = StopParams { tokens_max: 50, tokens_min: 0, token_ids: vec![], ignore_eos: true };
    harness.scheduler.submit(&SequenceRequest { stop, ..request(1, &[3; 5], 50) }).expect("room");
    harness.run();
    assert_eq!(harness.finished, [(SequenceId(1), FinishReason::Length)]);
    assert_eq!(harness.answers[&SequenceId(1)].len(), 11);
}

#[test]
fn a_failed_sequence_leaves_no_block_in_the_cache() {
    let mut harness = Harness::new(limits(2, 8, 16));
    harness.scheduler.submit(&request(1, &[3; 14], 5)).expect("room");
    harness.step();
    let plan = harness.scheduler.plan(&mut ());
    let advances = harness.scheduler.commit(&plan, &[Outcome::Failed]);
    assert_eq!(advances[0].finish, Some(FinishReason::Error));
    assert_eq!(harness.scheduler.pool().counts().free, 16);
    harness.scheduler.check().expect("nothing is lost");
}

#[test]
fn blocks_that_left_the_device_come_back_instead_of_being_computed() {
    let mut harness = Harness::new(limits(4, 64, 14));
    harness.shelf = Shelf { on: true, chance: 3, ..Shelf::default() };
    harness.scheduler.pool_mut().note_evicted();
    let prompts: Vec<Vec<TokenId>> = (0..4).map(|n| (0..40).map(|at| 1 + (n * 11 + at) % 90).collect()).collect();
    for round in 0..3 {
        for (n, prompt) in prompts.iter().enumerate() {
            let id = round * 10 + n as u64;
            harness.scheduler.submit(&request(id, prompt, 2)).expect("room");
            harness.run();
            assert_eq!(harness.answers[&SequenceId(id)], answer(prompt, 2));
        }
    }
    assert!(harness.shelf.fetched > 20, "{}", harness.shelf.fetched);
    assert!(harness.computed + BLOCK * harness.shelf.fetched <= 3 * 4 * 41, "{}", harness.computed);
    let cached: u32 = harness.cached.values().sum();
    assert_eq!(harness.scheduler.load().tokens_cached, u64::from(cached));
}

#[derive(Debug, Clone)]
struct Job {
    prompt: Vec<TokenId>,
    tokens_max: u32,
    priority: i32,
    arrives: usize,
    cancelled: Option<usize>,
}

fn job() -> impl Strategy<Value = Job> {
    // Few tokens and repeated heads make shared prefixes and twins.
    let prompt = (prop::collection::vec(1u32..3, 1..8), 1usize..5).prop_map(|(head, times)| head.repeat(times));
    (prompt, 1u32..20, -1i32..2, 0usize..12, prop::option::weighted(0.2, 0usize..30)).prop_map(
        |(prompt, tokens_max, priority, arrives, cancelled)| Job { prompt, tokens_max, priority, arrives, cancelled },
    )
}

proptest! {
    /// Any load on any pool: all end, nothing leaks, and everyone gets what it would get alone with an endless pool.
    #[test]
    fn every_sequence_ends_with_its_own_answer(
        jobs in prop::collection::vec(job(), 1..14),
        sequences_max in 1u32..6,
        batch in 1u32..24,
        blocks in 13u32..26,
        tiers in prop::option::of(any::<u64>()),
    ) {
        let mut harness = Harness::new(limits(sequences_max, batch, blocks));
        if let Some(chance) = tiers {
            harness.shelf = Shelf { on: true, chance, ..Shelf::default() };
            harness.scheduler.pool_mut().note_evicted();
        }
        let last = jobs.iter().map(|job| job.arrives.max(job.cancelled.unwrap_or(0))).max().unwrap_or(0);
        let mut cancelled = std::collections::HashSet::new();
        for step in 0..=last {
            for (id, job) in jobs.iter().enumerate() {
                let name = SequenceId(id as u64);
                if job.arrives == step {
                    let request = SequenceRequest { priority: job.priority, ..request(name.0, &job.prompt, job.tokens_max) };
                    harness.scheduler.submit(&request).expect("fits");
                }
                if job.cancelled == Some(step) && harness.scheduler.cancel(name) {
                    cancelled.insert(name);
                }
            }
            harness.step();
        }
        harness.run();
        for (id, job) in jobs.iter().enumerate() {
            let name = SequenceId(id as u64);
            let wanted = answer(&job.prompt, job.tokens_max as usize);
            let got = harness.answers.get(&name).cloned().unwrap_or_default();
            if cancelled.contains(&name) {
                prop_assert!(wanted.starts_with(&got));
            } else {
                prop_assert_eq!(&got, &wanted);
                let ends = harness.finished.iter().filter(|(other, _)| *other == name).count();
                prop_assert_eq!(ends, 1);
                let cached = harness.cached[&name] as usize;
                prop_assert!(cached < job.prompt.len() && cached.is_multiple_of(BLOCK));
            }
        }
        prop_assert_eq!(harness.scheduler.pool().available(), blocks);
    }

    /// Equal priorities, no preemption: first tokens come in order of arrival.
    #[test]
    fn first_come_first_served(lengths in prop::collection::vec(1usize..30, 2..8), batch in 1u32..16) {
        let mut harness = Harness::new(limits(8, batch, 200));
        for (id, length) in lengths.iter().enumerate() {
            // Different first tokens: nobody waits for a twin.
            let prompt: Vec<TokenId> = std::iter::once(id as TokenId + 1).chain((0..*length as TokenId).map(|t| t % 7)).collect();
            harness.scheduler.submit(&request(id as u64, &prompt, 4)).expect("fits");
        }
        let mut first = Vec::new();
        while !harness.scheduler.is_idle() {
            let plan = harness.step();
            for item in plan.items.iter().filter(|item| item.wants_logits) {
                if !first.contains(&item.id.0) {
                    first.push(item.id.0);
                }
            }
        }
        prop_assert_eq!(first, (0..lengths.len() as u64).collect::<Vec<_>>());
    }
}
