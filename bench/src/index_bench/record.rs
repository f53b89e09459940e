//! Makes an operation log of a request trace: mock workers with an LRU cache of blocks each, as an engine keeps one.
//!
//! Called by `index record`. A request goes to the worker that holds most of its prefix, unless that one has been given too much;
//! the choice is made here once, so that every index is asked and told the same. Events as of a paged engine:
//! what must make room is removed, tails of old prompts first, then what is new is stored.

use std::{
    collections::{BTreeMap, HashMap},
    io::BufRead,
};

use serde::Deserialize;

use super::log::{Log, Op};

/// Tokens of a block in the trace.
const TRACE_BLOCK: u32 = 512;

/// How to make a log.
#[derive(Debug, Clone, Copy)]
pub struct Recording {
    /// Mock workers.
    pub workers: u32,
    /// Blocks of each one's cache; 0 for one that is never full.
    pub cache_blocks: usize,
    /// Tokens of a block.
    pub block_tokens: u32,
}

#[derive(Debug, Deserialize)]
struct Request {
    hash_ids: Vec<u32>,
}

/// Reads a trace in Mooncake's format and makes its log.
///
/// # Errors
/// A line that cannot be read, with its number.
pub fn record(trace: impl BufRead, how: Recording) -> Result<Log, String> {
    let mut log = Log { workers: how.workers, ..Log::default() };
    let mut workers: Vec<Mock> = (0..how.workers).map(|_| Mock::default()).collect();
    let most = if how.cache_blocks == 0 { usize::MAX } else { how.cache_blocks };
    for (number, line) in trace.lines().enumerate() {
        let wrong = |error: &dyn std::fmt::Display| format!("line {}: {error}", number + 1);
        let line = line.map_err(|error| wrong(&error))?;
        let request: Request = serde_json::from_str(&line).map_err(|error| wrong(&error))?;
        let parts = TRACE_BLOCK / how.block_tokens;
        let chain: Vec<u32> =
            request.hash_ids.iter().flat_map(|id| (0..parts).map(move |part| id * parts + part)).collect();
        let range = log.push_blocks(chain.iter().copied());
        log.ops.push(Op::Find { chain: range });
        let worker = choose(&workers, &chain);
        let chain = &chain[..chain.len().min(most)];
        let (stored, removed) = workers[worker].take(chain, most);
        let worker = worker as u32;
        if !removed.is_empty() {
            let blocks = log.push_blocks(removed);
            log.ops.push(Op::Remove { worker, blocks });
        }
        if stored < chain.len() {
            let parent = stored.checked_sub(1).map(|at| chain[at]);
            let chain = log.push_blocks(chain[stored..].iter().copied());
            log.ops.push(Op::Store { worker, parent, chain });
        }
    }
    Ok(log)
}

/// The worker that holds most of the chain, less a share of what it was given beyond the one that was given least.
fn choose(workers: &[Mock], chain: &[u32]) -> usize {
    let least = workers.iter().map(|worker| worker.given).min().unwrap_or(0);
    let score = |worker: &Mock| worker.hit(chain) as i64 - ((worker.given - least) / 8) as i64;
    let best = workers.iter().enumerate().max_by_key(|(at, worker)| (score(worker), std::cmp::Reverse(*at)));
    best.map_or(0, |(at, _)| at)
}

/// A worker's cache: blocks by when they were used last.
#[derive(Debug, Default)]
struct Mock {
    used: HashMap<u32, u64>,
    order: BTreeMap<u64, u32>,
    clock: u64,
    /// Blocks it computed so far.
    given: usize,
}

impl Mock {
    fn hit(&self, chain: &[u32]) -> usize {
        chain.iter().take_while(|block| self.used.contains_key(block)).count()
    }

    /// Serves a request: how much of it was there, and what went to make room.
    fn take(&mut self, chain: &[u32], most: usize) -> (usize, Vec<u32>) {
        let hit = self.hit(chain);
        // Its own blocks are in use while it runs; its tail leaves before its head later.
        for block in chain.iter().rev() {
            self.clock += 1;
            if let Some(old) = self.used.insert(*block, self.clock) {
                self.order.remove(&old);
            }
            self.order.insert(self.clock, *block);
        }
        let mut removed = Vec::new();
        while self.used.len() > most {
            let Some((_, block)) = self.order.pop_first() else { break };
            self.used.remove(&block);
            removed.push(block);
        }
        self.given += chain.len() - hit;
        (hit, removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_log_reads_back_and_its_removals_keep_the_cache_size() {
        let trace: String = (0..60u32)
            .map(|n| format!("{{\"timestamp\":0,\"hash_ids\":[0,{},{}]}}\n", n % 7 + 1, n % 23 + 10))
            .collect();
        let how = Recording { workers: 2, cache_blocks: 300, block_tokens: 16 };
        let log = record(trace.as_bytes(), how).expect("a trace");
        let mut bytes = Vec::new();
        log.write(&mut bytes).expect("written");
        assert_eq!(Log::read(&mut bytes.as_slice()).expect("read"), log);
        let mut oracle = crate::index_bench::oracle::Oracle::new(2);
        for op in &log.ops {
            oracle.apply(&log, op);
        }
        assert!(oracle.memberships() <= 600);
        let (found, stored, removed) = log.totals();
        assert_eq!(found, 60 * 96);
        assert_eq!(stored - removed, oracle.memberships());
        assert!(removed > 0);
    }
}
