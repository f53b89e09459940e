//! What a computed step changes: positions, known blocks, new tokens, ends.
//!
//! Called once after each computation, with one outcome for each item that wanted logits, in item order.
//! Never: makes a block known before it is computed, or keeps one of a sequence that failed.

use starling_ids::TokenId;
use starling_kv::pool::{BlockKey, Filled};

use super::{Plan, PlanItem, Scheduler, Sequence};
use crate::contract::{FinishReason, SequenceId};

/// What became of an item's logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The chosen token.
    Token(TokenId),
    /// No token could be chosen; the sequence ends with an error.
    Failed,
}

/// What the step did for one sequence that got a token or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advance {
    /// Whose.
    pub id: SequenceId,
    /// Its number in order of arrival.
    pub arrival: u64,
    /// Prompt tokens taken from the cache, once per sequence.
    pub cached_tokens: Option<u32>,
    /// Set on the last one.
    pub finish: Option<FinishReason>,
}

impl Scheduler {
    /// Takes the results of a plan. The advances are those of the items that wanted logits, in item order.
    pub fn commit(&mut self, plan: &Plan, outcomes: &[Outcome]) -> Vec<Advance> {
        let mut outcomes = outcomes.iter().copied();
        let mut advances = Vec::with_capacity(plan.items.len());
        for item in &plan.items {
            // A missing outcome is a fault of the computation, not a reason to wait.
            let outcome = item.wants_logits.then(|| outcomes.next().unwrap_or(Outcome::Failed));
            advances.extend(self.commit_item(item, outcome));
        }
        advances
    }

    fn commit_item(&mut self, item: &PlanItem, outcome: Option<Outcome>) -> Option<Advance> {
        let mut sequence = self.sequences.remove(&item.id)?;
        sequence.computed = item.start + item.count;
        self.totals.prefilled += sequence.prompt_len().min(sequence.computed).saturating_sub(item.start) as u64;
        if outcome != Some(Outcome::Failed) {
            self.publish(&mut sequence);
        }
        let finish = match outcome {
            None => {
                self.sequences.insert(item.id, sequence);
                return None;
            }
            Some(Outcome::Failed) => Some(FinishReason::Error),
            Some(Outcome::Token(token)) => {
                sequence.push(token);
                self.totals.generated += 1;
                self.finish_after(&sequence, token)
            }
        };
        let cached = sequence.matched.unwrap_or(0) * self.pool.block_tokens() + sequence.carried;
        if sequence.unreported && sequence.answered > 0 {
            self.totals.recomputed += (sequence.prompt_len() - 1).saturating_sub(cached) as u64;
        }
        let advance = Advance {
            id: item.id,
            arrival: sequence.rank().arrival,
            cached_tokens: std::mem::take(&mut sequence.unreported).then_some(cached as u32),
            finish,
        };
        match finish {
            None => {
                self.sequences.insert(item.id, sequence);
            }
            Some(reason) => self.retire(&sequence, reason),
        }
        Some(advance)
    }

    /// Makes its newly full blocks known, its own or those of a twin with the same content.
    pub(super) fn publish(&mut self, sequence: &mut Sequence) {
        while !sequence.private && (sequence.published + 1) * self.pool.block_tokens() <= sequence.computed {
            let index = sequence.published;
            let Some(hash) = sequence.hashes().get(index).copied() else { break };
            let parent = index.checked_sub(1).and_then(|before| sequence.blocks.get(before)).copied();
            let key = BlockKey { hash, parent, tokens: sequence.block(index) };
            match self.pool.fill(sequence.blocks[index], key) {
                Filled::Stored => {}
                Filled::Shared(other) => sequence.blocks[index] = other,
                Filled::Private => {
                    self.drop_claims(sequence);
                    sequence.private = true;
                    break;
                }
            }
            sequence.published += 1;
            if self.claims.get(&hash) == Some(&sequence.id()) {
                self.claims.remove(&hash);
            }
        }
    }

    fn finish_after(&self, sequence: &Sequence, token: TokenId) -> Option<FinishReason> {
        let stop = &sequence.stop;
        let ends = stop.token_ids.contains(&token) || (!stop.ignore_eos && self.eos_ids.contains(&token));
        if ends && sequence.generated() > stop.tokens_min as usize {
            return Some(FinishReason::Stop);
        }
        let full = sequence.tokens().len() >= self.length_max();
        (full || sequence.generated() >= stop.tokens_max as usize).then_some(FinishReason::Length)
    }

    /// The end: blocks back, full ones kept for reuse unless it failed.
    fn retire(&mut self, sequence: &Sequence, reason: FinishReason) {
        self.running.remove(&sequence.rank());
        self.drop_claims(sequence);
        match reason {
            FinishReason::Error => self.pool.discard_all(sequence.blocks()),
            _ => self.pool.release_all(sequence.blocks()),
        }
    }
}
