//! The engine with tiers below its device, over a backend whose memory tells a wrong block from a right one.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use starling_ids::{ModelId, TokenId};
use starling_kv::{
    hash::HashSeed,
    tier::{BlockFile, DiskOptions, TierOptions},
};

use super::super::*;
use crate::{
    backend::BlockSlot,
    contract::{EngineLimits, FinishReason, ModelCard, SamplingParams, StopParams},
};

const BLOCK: usize = 4;
/// Bytes that the memory keeps for each token: the digest before it, the token, the digest after it, and a pattern.
const STATE: usize = 256;
const BLOCK_BYTES: usize = BLOCK * STATE;
/// Bytes of a block's place on disk.
const PLACE: u64 = 4_096;
/// What the backend says that a token takes, so that every tier is worth its while.
const TOKEN_TAKES: Duration = Duration::from_millis(60);

fn digest(before: u64, token: TokenId) -> u64 {
    (before ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

fn token_after(state: u64) -> TokenId {
    1 + ((state >> 20) % 40) as TokenId
}

/// What a prompt is answered with, computed alone.
fn answer(prompt: &[TokenId], tokens_max: usize) -> Vec<TokenId> {
    let mut state = prompt.iter().fold(7, |state, token| digest(state, *token));
    let next = |_| {
        let token = token_after(state);
        state = digest(state, token);
        token
    };
    (0..tokens_max).map(next).collect()
}

fn state_bytes(before: u64, token: TokenId) -> [u8; STATE] {
    let after = digest(before, token);
    let mut bytes = [0; STATE];
    bytes[..8].copy_from_slice(&before.to_le_bytes());
    bytes[8..12].copy_from_slice(&token.to_le_bytes());
    bytes[12..20].copy_from_slice(&after.to_le_bytes());
    for (index, byte) in bytes[20..].iter_mut().enumerate() {
        *byte = (after >> (index % 8 * 8)) as u8 ^ index as u8;
    }
    bytes
}

/// Every position before a computed one is read and checked, byte by byte, against the one before it.
#[derive(Debug)]
struct Pattern {
    memory: Vec<u8>,
}

impl Pattern {
    fn at(item: &BatchItem<'_>, position: usize) -> usize {
        item.blocks[position / BLOCK].0 as usize * BLOCK_BYTES + position % BLOCK * STATE
    }

    fn read(&self, item: &BatchItem<'_>) -> u64 {
        let mut state = 7;
        for position in 0..item.start {
            let bytes = &self.memory[Self::at(item, position)..][..STATE];
            let token = TokenId::from_le_bytes(bytes[8..12].try_into().expect("4 bytes"));
            assert_eq!(bytes, state_bytes(state, token), "position {position} is of another prefix");
            state = digest(state, token);
        }
        state
    }
}

impl Backend for Pattern {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        let (mut rows, mut tokens) = (Vec::new(), 0);
        for item in &batch.items {
            let mut state = self.read(item);
            for (index, token) in item.tokens.iter().enumerate() {
                let at = Self::at(item, item.start + index);
                self.memory[at..at + STATE].copy_from_slice(&state_bytes(state, *token));
                state = digest(state, *token);
            }
            tokens += item.tokens.len() as u32;
            if item.wants_logits {
                rows.push(Row::Token(token_after(state)));
            }
        }
        Ok(Computed { rows, takes: TOKEN_TAKES * tokens })
    }

    fn read_block(&self, slot: BlockSlot) -> Vec<u8> {
        self.memory[slot.0 as usize * BLOCK_BYTES..][..BLOCK_BYTES].to_vec()
    }

    fn write_block(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), EngineError> {
        self.memory[slot.0 as usize * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(bytes);
        Ok(())
    }
}

fn engine(kv_blocks: u32, options: &TierOptions) -> CoreEngine<Pattern> {
    let card = ModelCard {
        id: ModelId::new("m").expect("name"),
        architecture: "test".into(),
        context_length: 120,
        vocab_size: 100,
        block_tokens: BLOCK as u32,
        bundle_digest: String::new(),
        eos_ids: vec![],
        hash_seed: HashSeed(1),
    };
    let limits = EngineLimits { sequences_max: 64, waiting_max: 2_000, batch_tokens_max: 64, kv_blocks };
    let backend = Pattern { memory: vec![0; kv_blocks as usize * BLOCK_BYTES] };
    let mut engine = CoreEngine::new(backend, Capabilities { card, layout_digest: 5, limits });
    engine.open_tiers(options).expect("opens");
    engine
}

fn tiers(folder: &Path, host_blocks: u64, disk_blocks: u64) -> TierOptions {
    let disk = DiskOptions { folder: folder.to_owned(), bytes: disk_blocks * PLACE, file: None };
    let host_bytes = host_blocks * (BLOCK_BYTES + 4 * BLOCK) as u64;
    TierOptions { host_bytes, disk: (disk_blocks > 0).then_some(disk) }
}

fn request(id: u64, prompt: &[TokenId], tokens_max: u32) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(id),
        prompt: Arc::from(prompt),
        answered: 0,
        hash_seed: HashSeed(1),
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max, tokens_min: 0, token_ids: vec![], ignore_eos: true },
        logprobs: None,
        priority: 0,
    }
}

#[derive(Debug, Default)]
struct Run {
    answers: HashMap<u64, Vec<TokenId>>,
    cached: HashMap<u64, u32>,
    steps: usize,
}

/// Steps until idle; every delta is entered, the engine is checked after each step.
fn run(engine: &mut CoreEngine<Pattern>, seen: &mut Run, mut between: impl FnMut(&mut CoreEngine<Pattern>, usize)) {
    let began = Instant::now();
    loop {
        let output = engine.step().expect("step");
        engine.scheduler.check().expect("nothing is lost");
        for delta in output.deltas {
            assert_ne!(delta.finish, Some(FinishReason::Error));
            seen.answers.entry(delta.id.0).or_default().extend(delta.tokens.iter().map(|token| token.id));
            if let Some(cached) = delta.cached_tokens {
                assert_eq!(seen.cached.insert(delta.id.0, cached), None, "reported once");
            }
        }
        seen.steps += 1;
        if output.idle {
            return;
        }
        between(engine, seen.steps);
        assert!(began.elapsed() < Duration::from_secs(120), "it ends");
    }
}

fn one(engine: &mut CoreEngine<Pattern>, id: u64, prompt: &[TokenId]) -> (Vec<TokenId>, u32) {
    let mut seen = Run::default();
    engine.submit(request(id, prompt, 3)).expect("room");
    run(engine, &mut seen, |_, _| ());
    (seen.answers.remove(&id).expect("answered"), seen.cached[&id])
}

fn prompt(family: u32, length: usize) -> Vec<TokenId> {
    (0..length as u32).map(|at| 1 + (family * 7 + at * (3 + family % 5)) % 97).collect()
}

/// Nothing is on its way any more, and every place is accounted for.
fn assert_at_rest(engine: &CoreEngine<Pattern>) {
    let began = Instant::now();
    let stats = || engine.tier_stats().expect("tiers");
    while stats().leaving + stats().reading > 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", stats());
        std::thread::park_timeout(Duration::from_millis(1));
    }
    engine.scheduler.check().expect("nothing is lost");
    assert_eq!(engine.scheduler.pool().available(), engine.capabilities.limits.kv_blocks);
    assert_eq!((engine.scheduler.fetching(), engine.lower.waiting.len(), engine.choosers.len()), (0, 0, 0));
    engine.lower.tiers.as_ref().expect("tiers").check().expect("whole");
}

#[test]
fn xfr_11_every_block_that_comes_back_is_the_one_that_went() {
    let folder = tempfile::tempdir().expect("folder");
    // 64 at once of 16 families with 12 blocks each, a pool of 32 blocks: nothing stays on the device for long.
    let mut engine = engine(32, &tiers(folder.path(), 40, 400));
    let mut seen = Run::default();
    let jobs: Vec<Vec<TokenId>> = (0..192).map(|id| prompt(id % 16, 20 + (id as usize * 5) % 29)).collect();
    for round in jobs.chunks(64).enumerate() {
        let (round, jobs) = round;
        for (index, prompt) in jobs.iter().enumerate() {
            engine.submit(request((round * 64 + index) as u64, prompt, 4)).expect("room");
        }
        run(&mut engine, &mut seen, |_, _| ());
    }
    for (id, prompt) in jobs.iter().enumerate() {
        assert_eq!(seen.answers[&(id as u64)], answer(prompt, 4), "{id}");
        let cached = seen.cached[&(id as u64)] as usize;
        assert!(cached < prompt.len() && cached.is_multiple_of(BLOCK), "{cached} of {}", prompt.len());
    }
    assert_at_rest(&engine);
    let stats = engine.tier_stats().expect("tiers");
    assert!(stats.host.fetched > 0 && stats.disk.fetched > 0, "{stats:?}");
    assert_eq!((stats.disk.corrupt, stats.disk.unreadable, stats.disk.unwritten), (0, 0, 0));
}

#[test]
fn xfr_12_a_thousand_requests_a_tenth_aborted_leave_nothing_behind() {
    let folder = tempfile::tempdir().expect("folder");
    let mut engine = engine(48, &tiers(folder.path(), 20, 200));
    let mut seen = Run::default();
    let jobs: Vec<Vec<TokenId>> = (0..1_000).map(|id| prompt(id * 17 % 40, 8 + (id as usize * 11) % 40)).collect();
    let mut cancelled = std::collections::HashSet::new();
    for (round, chunk) in jobs.chunks(100).enumerate() {
        for (index, prompt) in chunk.iter().enumerate() {
            engine.submit(request((round * 100 + index) as u64, prompt, 3)).expect("room");
        }
        // One of ten leaves, each after another number of steps: queued, fetching, computing or done.
        let mut leaving: Vec<u64> = (0..10).map(|n| (round * 100 + n * 10 + (n + round) % 10) as u64).collect();
        run(&mut engine, &mut seen, |engine, _| {
            if let Some(id) = leaving.pop()
                && engine.cancel(SequenceId(id))
            {
                cancelled.insert(id);
            }
        });
    }
    assert!(cancelled.len() > 50, "{}", cancelled.len());
    for (id, prompt) in jobs.iter().enumerate().filter(|(id, _)| !cancelled.contains(&(*id as u64))) {
        assert_eq!(seen.answers[&(id as u64)], answer(prompt, 3), "{id}");
    }
    assert_at_rest(&engine);
    assert!(engine.tier_stats().expect("tiers").fetched > 0);
    engine.clear_cache();
    assert_eq!(engine.scheduler.pool().counts().free, 48, "the pool is as at the start");
    let stats = engine.tier_stats().expect("tiers");
    assert_eq!((stats.host.blocks, stats.disk.blocks), (0, 0));
}

#[test]
fn a_new_life_knows_what_its_disk_kept_and_computes_the_rest() {
    let folder = tempfile::tempdir().expect("folder");
    let options = tiers(folder.path(), 0, 100);
    let long = prompt(3, 62);
    let mut first = engine(64, &options);
    assert_eq!(one(&mut first, 1, &long), (answer(&long, 3), 0));
    assert_eq!(first.tier_stats().expect("tiers").disk.stored, 0, "nothing had to leave");
    first.close(Duration::from_secs(30));
    drop(first);
    let mut second = engine(64, &options);
    let kept: usize = second.tier_inventory().iter().map(|(_, blocks)| blocks.len()).sum();
    assert_eq!(kept, 16, "62 tokens and 2 of the answer");
    let (said, cached) = one(&mut second, 1, &long);
    assert_eq!((said, cached), (answer(&long, 3), 60));
    assert_eq!(second.load().tokens_prefilled, 2);
    assert_at_rest(&second);
    // A device that holds nothing new has nothing to write a second time.
    let before = second.tier_stats().expect("tiers").disk.stored;
    second.close(Duration::from_secs(30));
    assert_eq!(before, 0);
}

#[test]
fn xfr_10_a_block_changed_on_disk_is_computed_again() {
    let folder = tempfile::tempdir().expect("folder");
    let options = tiers(folder.path(), 0, 100);
    let long = prompt(5, 62);
    let mut first = engine(64, &options);
    one(&mut first, 1, &long);
    first.close(Duration::from_secs(30));
    drop(first);
    // Blocks were written in the order of their chain: one byte of the seventh.
    let path = folder.path().join("blocks");
    let mut bytes = std::fs::read(&path).expect("blocks");
    bytes[6 * PLACE as usize + 500] ^= 1;
    std::fs::write(&path, &bytes).expect("changed");
    let mut second = engine(64, &options);
    assert_eq!(one(&mut second, 1, &long), (answer(&long, 3), 6 * BLOCK as u32));
    let stats = second.tier_stats().expect("tiers");
    assert_eq!((stats.disk.corrupt, stats.fetched), (1, 6));
    assert_at_rest(&second);
}

/// A file that cannot be read to an end while it is held.
#[derive(Debug, Default)]
struct Held {
    bytes: Mutex<Vec<u8>>,
    held: Mutex<bool>,
    released: Condvar,
}

impl BlockFile for Held {
    fn load_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let held = self.held.lock().expect("lock");
        drop(self.released.wait_while(held, |held| *held).expect("lock"));
        buffer.copy_from_slice(&self.bytes.lock().expect("lock")[at as usize..at as usize + buffer.len()]);
        Ok(())
    }

    fn store_at(&self, new: &[u8], at: u64) -> io::Result<()> {
        let mut bytes = self.bytes.lock().expect("lock");
        let end = at as usize + new.len();
        let len = bytes.len().max(end);
        bytes.resize(len, 0);
        bytes[at as usize..end].copy_from_slice(new);
        Ok(())
    }
}

#[test]
fn xfr_13_a_disk_that_hangs_costs_a_deadline_and_no_answer() {
    let folder = tempfile::tempdir().expect("folder");
    let file = Arc::new(Held::default());
    let mut options = tiers(folder.path(), 0, 200);
    options.disk.as_mut().expect("disk").file = Some(file.clone());
    let mut engine = engine(16, &options);
    let jobs: Vec<Vec<TokenId>> = (0..6).map(|family| prompt(family, 40)).collect();
    for (id, prompt) in jobs.iter().enumerate() {
        one(&mut engine, id as u64, prompt);
    }
    assert_at_rest(&engine);
    *file.held.lock().expect("lock") = true;
    let began = Instant::now();
    let mut seen = Run::default();
    for (id, prompt) in jobs.iter().enumerate() {
        engine.submit(request(100 + id as u64, prompt, 3)).expect("room");
    }
    run(&mut engine, &mut seen, |_, _| ());
    for (id, prompt) in jobs.iter().enumerate() {
        assert_eq!(seen.answers[&(100 + id as u64)], answer(prompt, 3));
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let late = engine.tier_stats().expect("tiers").late;
    assert!((1..=6).contains(&late), "{late}: the first hangs, then nobody is sent there");
    *file.held.lock().expect("lock") = false;
    file.released.notify_all();
    assert_at_rest(&engine);
}

#[test]
fn an_engine_without_a_disk_that_works_goes_on_without_it() {
    let folder = tempfile::tempdir().expect("folder");
    let options = tiers(folder.path(), 8, 100);
    let holder = engine(64, &options);
    let mut other = engine(32, &TierOptions::default());
    assert!(other.tier_stats().is_none());
    assert!(other.open_tiers(&options).is_err(), "the folder is in use");
    assert_eq!(other.tier_stats().map(|stats| (stats.host.blocks_max, stats.disk.blocks_max)), Some((8, 0)));
    assert_eq!(one(&mut other, 1, &prompt(1, 30)).0, answer(&prompt(1, 30), 3));
    drop(holder);
}
