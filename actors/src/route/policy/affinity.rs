//! Policies that keep like with like by a hash, without knowing any cache.

use std::hash::Hasher;

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
    rank: Rank,
}

impl PrefixHash {
    /// Of so many blocks, with a bound on load (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
    #[must_use]
    pub fn new(blocks: usize, overload: f64) -> Self {
        Self { blocks, overload, rank: Rank::default() }
    }
}

impl Scorer for PrefixHash {
    fn name(&self) -> &'static str {
        "prefix-hash"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        let bound = load_bound(question, self.overload);
        self.rank = Rank { key: first_block(question.ask.hashes, self.blocks), bound };
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        self.rank.cost(question, slot)
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
    rank: Rank,
}

impl Session {
    /// See the type.
    #[must_use]
    pub fn new(hard: bool, overload: f64) -> Self {
        Self { hard, overload, rank: Rank::default() }
    }
}

impl Scorer for Session {
    fn name(&self) -> &'static str {
        "session"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        let bound = if self.hard { f64::MAX } else { load_bound(question, self.overload) };
        let key = question.ask.session.map(|session| {
            let mut hasher = XxHash3_64::with_seed(0);
            hasher.write(session.as_bytes());
            hasher.finish()
        });
        self.rank = Rank { key, bound };
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        self.rank.cost(question, slot)
    }
}

/// What keeps a request together with others, if anything does, and the load up to which its worker keeps it.
#[derive(Debug, Clone, Copy, Default)]
struct Rank {
    key: Option<u64>,
    bound: f64,
}

impl Rank {
    /// A worker's rank for the key in [0, 1), the lowest wins; one over the bound comes after all that are not. Without a key
    /// the least loaded.
    fn cost(self, question: &Question<'_>, slot: Slot) -> f64 {
        let load = f64::from(question.fleet.in_flight(slot));
        let Some(key) = self.key else { return load };
        let rank = (mix(question.fleet.key(slot), key) >> 11) as f64 / (1u64 << 53) as f64;
        if load + 1.0 > self.bound { rank + 1.0 } else { rank }
    }
}

fn load_bound(question: &Question<'_>, overload: f64) -> f64 {
    let mean = (question.fleet.in_flight_total() + 1) as f64 / question.fleet.len().max(1) as f64;
    (mean * overload).ceil().max(AT_EASE)
}
