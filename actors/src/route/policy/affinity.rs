//! Policies that keep like with like by a hash, without knowing any cache.

use std::hash::Hasher;

use starling_ids::{NodeId, WorkerId};
use twox_hash::XxHash3_64;

use super::{Question, Scorer, first_block, mix};
use crate::route::fleet::Slot;

/// A worker with so many requests is not overloaded, however idle the others are.
const AT_EASE: f64 = 4.0;

/// Requests whose prompts begin alike go to one worker, by rendezvous over the prompt's first blocks, while that worker
/// has at most `overload` times the mean load.
#[derive(Debug, Clone, Copy)]
pub struct PrefixHash {
    /// Blocks looked at; prompts that are equal in these are alike.
    pub blocks: usize,
    /// Times the mean load at which the next in rank takes over; above 1.
    pub overload: f64,
    bound: f64,
}

impl PrefixHash {
    /// Of so many blocks, with a bound on load (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
    #[must_use]
    pub fn new(blocks: usize, overload: f64) -> Self {
        Self { blocks, overload, bound: f64::MAX }
    }
}

impl Scorer for PrefixHash {
    fn name(&self) -> &'static str {
        "prefix-hash"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        self.bound = load_bound(question, self.overload);
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        match first_block(question.ask.hashes, self.blocks) {
            Some(key) => rendezvous(question, slot, key, self.bound),
            None => f64::from(question.fleet.in_flight(slot)),
        }
    }
}

/// Requests of one session go to one worker: always (`hard`), or while that worker has at most `overload` times the
/// mean load. Requests without a session go to the least loaded.
#[derive(Debug, Clone, Copy)]
pub struct Session {
    /// Never move a session while its worker lives.
    pub hard: bool,
    /// Times the mean load at which a session moves.
    pub overload: f64,
    bound: f64,
}

impl Session {
    /// See the type.
    #[must_use]
    pub fn new(hard: bool, overload: f64) -> Self {
        Self { hard, overload, bound: f64::MAX }
    }
}

impl Scorer for Session {
    fn name(&self) -> &'static str {
        "session"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        self.bound = if self.hard { f64::MAX } else { load_bound(question, self.overload) };
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        match question.ask.session {
            Some(session) => {
                let mut hasher = XxHash3_64::with_seed(0);
                hasher.write(session.as_bytes());
                rendezvous(question, slot, hasher.finish(), self.bound)
            }
            None => f64::from(question.fleet.in_flight(slot)),
        }
    }
}

/// A worker's rank for a key in [0, 1), the lowest wins; one over the bound comes after all that are not.
fn rendezvous(question: &Question<'_>, slot: Slot, key: u64, bound: f64) -> f64 {
    let Some((worker, _)) = question.fleet.life(slot) else { return f64::MAX };
    let rank = (mix(worker_key(worker), key) >> 11) as f64 / (1u64 << 53) as f64;
    let over = f64::from(question.fleet.in_flight(slot)) + 1.0 > bound;
    if over { rank + 1.0 } else { rank }
}

fn load_bound(question: &Question<'_>, overload: f64) -> f64 {
    let total: u32 = question.fleet.workers().map(|(_, slot)| question.fleet.in_flight(slot)).sum();
    let mean = f64::from(total + 1) / question.fleet.len().max(1) as f64;
    (mean * overload).ceil().max(AT_EASE)
}

/// The same number for a worker on every node, whatever its slot there.
fn worker_key(WorkerId { node, index }: &WorkerId) -> u64 {
    let key = |node: &NodeId| {
        let mut hasher = XxHash3_64::with_seed(1);
        hasher.write(node.as_str().as_bytes());
        hasher.finish()
    };
    mix(key(node), u64::from(*index))
}
