//! What each worker really holds: a set per worker and nothing clever.
//!
//! Called by the replay's check. Standard library alone.

use std::collections::HashSet;

use super::log::{Log, Op};

/// See the module.
#[derive(Debug)]
pub struct Oracle {
    holds: Vec<HashSet<u32>>,
}

impl Oracle {
    /// Workers that hold nothing.
    #[must_use]
    pub fn new(workers: u32) -> Self {
        Self { holds: vec![HashSet::new(); workers as usize] }
    }

    /// Follows an operation.
    pub fn apply(&mut self, log: &Log, op: &Op) {
        match op {
            Op::Find { .. } => {}
            Op::Store { worker, chain, .. } => {
                self.holds[*worker as usize].extend(&log.blocks[chain.clone()]);
            }
            Op::Remove { worker, blocks } => {
                for block in &log.blocks[blocks.clone()] {
                    self.holds[*worker as usize].remove(block);
                }
            }
        }
    }

    /// (worker, leading blocks it holds) of each worker that holds the first block, by worker.
    #[must_use]
    pub fn scores(&self, chain: &[u32]) -> Vec<(u32, u32)> {
        let depth = |held: &HashSet<u32>| chain.iter().take_while(|block| held.contains(block)).count() as u32;
        let all = self.holds.iter().enumerate().map(|(worker, held)| (worker as u32, depth(held)));
        all.filter(|(_, depth)| *depth > 0).collect()
    }

    /// (worker, block) pairs.
    #[must_use]
    pub fn memberships(&self) -> usize {
        self.holds.iter().map(HashSet::len).sum()
    }
}
