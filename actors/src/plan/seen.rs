//! What a router has seen of each model since its shard began: counters that only rise, so that whoever asks takes differences.
//!
//! Counted by the router shard, asked by whoever plans. They cross nodes as MessagePack; fields are only ever appended. Pure.

use serde::{Deserialize, Serialize};
use starling_ids::ModelId;

use super::times::Times;
use crate::route::receipt::Outcome;

/// All that one router has seen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SeenAll {
    /// Another number for each life of the shard; its counters begin at zero with it.
    pub life: u64,
    /// By model; one that nobody asked for may be missing.
    pub models: Vec<(ModelId, Seen)>,
}

impl SeenAll {
    /// What was seen of one model; nothing of one that is missing.
    #[must_use]
    pub fn of(&self, model: &ModelId) -> Seen {
        let found = self.models.iter().find(|(known, _)| known == model);
        Seen { life: self.life, ..found.map(|(_, seen)| seen.clone()).unwrap_or_default() }
    }
}

/// Counters of one model at one router.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Of which life of the shard.
    pub life: u64,
    /// Requests that came; one that comes again after a worker refused or lost it is the same request.
    pub arrivals: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Full blocks of the prompts that were given to a worker.
    pub blocks: u64,
    /// Those of them that were in its cache.
    pub hit_blocks: u64,
    /// Requests that ended well.
    pub ended: u64,
    /// Tokens of their answers.
    pub answer_tokens: u64,
    /// From a request to its first token.
    pub ttft: Times,
    /// Between two tokens of an answer: the mean of each.
    pub itl: Times,
    /// Waits for a worker with room, of the requests that waited.
    pub waits: Times,
    /// Requests that wait for one now.
    pub waiting: u32,
}

impl Seen {
    /// A request came.
    pub fn arrived(&mut self, prompt_tokens: u32) {
        self.arrivals += 1;
        self.prompt_tokens += u64::from(prompt_tokens);
    }

    /// A request was given to a worker that has so many of its blocks.
    pub fn granted(&mut self, blocks: usize, hit_blocks: u32) {
        let blocks = blocks as u64;
        self.blocks += blocks;
        self.hit_blocks += u64::from(hit_blocks).min(blocks);
    }

    /// A request ended well.
    pub fn ended(&mut self, outcome: &Outcome) {
        self.ended += 1;
        self.answer_tokens += u64::from(outcome.answer_tokens);
        self.ttft.add(outcome.ttft_ms);
        if outcome.answer_tokens > 1 {
            self.itl.add((outcome.total_ms - outcome.ttft_ms).max(0.0) / f64::from(outcome.answer_tokens - 1));
        }
    }

    /// What was counted since `before`; all of it when that was another life.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.life != before.life {
            return self.clone();
        }
        Self {
            life: self.life,
            arrivals: self.arrivals.saturating_sub(before.arrivals),
            prompt_tokens: self.prompt_tokens.saturating_sub(before.prompt_tokens),
            blocks: self.blocks.saturating_sub(before.blocks),
            hit_blocks: self.hit_blocks.saturating_sub(before.hit_blocks),
            ended: self.ended.saturating_sub(before.ended),
            answer_tokens: self.answer_tokens.saturating_sub(before.answer_tokens),
            ttft: self.ttft.since(&before.ttft),
            itl: self.itl.since(&before.itl),
            waits: self.waits.since(&before.waits),
            waiting: self.waiting,
        }
    }

    /// Adds what another router saw.
    pub fn merge(&mut self, other: &Self) {
        self.arrivals += other.arrivals;
        self.prompt_tokens += other.prompt_tokens;
        self.blocks += other.blocks;
        self.hit_blocks += other.hit_blocks;
        self.ended += other.ended;
        self.answer_tokens += other.answer_tokens;
        self.ttft.merge(&other.ttft);
        self.itl.merge(&other.itl);
        self.waits.merge(&other.waits);
        self.waiting = self.waiting.saturating_add(other.waiting);
    }
}
