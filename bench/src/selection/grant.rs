//! How long a shard's lock is held to give one of those that wait to a worker.
//!
//! Called by [`super::measure`]. Sixty-four requests wait with prompts of 10,000 tokens, each held in part by eight workers. One
//! worker has room at a time; half of the others would take a request beyond what keeps them busy, half have no KV blocks
//! left, as it is when a cluster is full. What was given away comes back after each sample, so that as many wait at the next.

use std::time::{Duration, Instant};

use starling_actors::route::{
    desk::{Ask, Decision},
    policy::PolicyName,
    queue::{
        Claim, Queue, QueueConfig,
        turns::{Caches, Waits, hand_out},
    },
};
use starling_ids::{BlockHash, WorkerId};
use starling_kv::{
    events::KvEvent,
    hash::{HashSeed, block_hashes},
    index::{Holder, Overlap, PrefixIndex},
};

use super::fixture::{BLOCK, LIFE, Shard, ask, worker};

/// Requests that wait.
const WAITING: usize = 64;
/// Tokens of each prompt.
const TOKENS: u32 = 10_000;
/// Between two grants.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
struct Waiter {
    number: usize,
    hashes: Vec<BlockHash>,
}

impl Waits for Waiter {
    fn ask(&self) -> Ask<'_> {
        ask(self.number, TOKENS, &self.hashes)
    }

    fn is_gone(&self) -> bool {
        false
    }
}

struct Known(PrefixIndex);

impl Caches for Known {
    fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap> {
        let mut overlaps = Vec::new();
        self.0.overlaps(chain, &mut overlaps);
        overlaps
    }

    fn who(&self, holder: Holder) -> Option<WorkerId> {
        self.0.who(holder).map(|(worker, ..)| worker)
    }

    fn gave(&self, _: &Decision, _: &[BlockHash], _: u32) {}
}

/// Nanoseconds for each that was given away.
pub(super) fn grants(policy: PolicyName, workers: usize, samples: usize) -> Result<Vec<u64>, String> {
    let (mut shard, index) = Shard::full(policy, workers)?;
    let prompts: Vec<Vec<BlockHash>> = (0..WAITING).map(prompt).collect();
    for (number, prompt) in prompts.iter().enumerate() {
        for part in 0..workers.min(8) {
            let holder = worker((number * 7 + part * (workers / 8).max(1)) % workers)?;
            let stored = KvEvent::Stored { parent: None, blocks: prompt[..70 * (part + 1)].to_vec() };
            index.apply(&holder, LIFE, &stored).map_err(|error| error.to_string())?;
        }
    }
    let known = Known(index);
    let mut queue: Queue<Waiter> = Queue::new(QueueConfig::default());
    let mut now = Duration::from_secs(2);
    for (number, hashes) in prompts.into_iter().enumerate() {
        wait(&mut queue, Waiter { number, hashes }, now)?;
    }
    let mut times = Vec::with_capacity(samples);
    while times.len() < samples {
        now += PAUSE;
        let began = Instant::now();
        let gone = hand_out(&mut queue, &mut shard.desk, &known, now);
        let took = super::since(began);
        let given = gone.len() as u64;
        if given == 0 {
            return Err("nobody was given to a worker".to_owned());
        }
        times.push(took / given);
        for (entry, decision) in gone {
            shard.desk.release(decision.ticket);
            let Waiter { number, hashes } = entry.payload;
            wait(&mut queue, Waiter { number: number + WAITING, hashes }, now)?;
        }
    }
    Ok(times)
}

fn wait(queue: &mut Queue<Waiter>, waiter: Waiter, now: Duration) -> Result<(), String> {
    let prefill = Duration::from_millis(400);
    let deadline = now + Duration::from_secs(60);
    let cost_tokens = u64::from(TOKENS);
    let claim = Claim { weight: 1, deadline, miss_tokens: cost_tokens, cost_tokens, prefill, ..Claim::default() };
    queue.offer(claim, waiter, now).map(|_| ()).map_err(|(refusal, _)| format!("{refusal:?}"))
}

fn prompt(number: usize) -> Vec<BlockHash> {
    let own = 10_000_000 + number as u32 * 100_000;
    block_hashes(HashSeed(1), &(own..own + TOKENS).collect::<Vec<u32>>(), BLOCK as usize)
}
