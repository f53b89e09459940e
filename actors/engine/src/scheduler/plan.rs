//! What the next step computes: one token of each decoding sequence first, then prefill chunks, then newcomers.
//!
//! Called once before each computation. Never: leaves two items that write one block, or an item whose sequence
//! lost its blocks to another one later in the same plan.

use super::{Below, Fetch, Scheduler, sequence::Rank};
use crate::contract::SequenceId;

/// A run of tokens of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanItem {
    /// Whose.
    pub id: SequenceId,
    /// Position of the first token.
    pub start: usize,
    /// How many, at least 1.
    pub count: usize,
    /// They are the last ones it has: a new token is to be chosen after them.
    pub wants_logits: bool,
}

/// One step.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// In the order of computation.
    pub items: Vec<PlanItem>,
    /// Sequences that gave up their blocks and wait again.
    pub preempted: Vec<SequenceId>,
    /// Blocks to ask for on lower tiers.
    pub fetches: Vec<Fetch>,
    /// Tokens left in this step.
    pub(super) budget: usize,
}

impl Scheduler {
    /// Decides the next step. Empty only when no sequence is known, or all wait for blocks of a lower tier.
    pub fn plan(&mut self, below: &mut dyn Below) -> Plan {
        let mut plan = Plan { budget: self.limits.batch_tokens_max as usize, ..Plan::default() };
        let order: Vec<Rank> = self.running.iter().copied().collect();
        let (decoding, prefilling): (Vec<Rank>, Vec<Rank>) =
            order.into_iter().partition(|rank| self.sequences.get(&rank.id).is_some_and(|s| s.remaining() == 1));
        for rank in decoding.into_iter().chain(prefilling) {
            // It may have lost its place to one before it.
            if self.running.contains(&rank) {
                self.plan_one(rank, &mut plan);
            }
        }
        // Room that was taken from one sequence is not for a newcomer.
        if plan.preempted.is_empty() {
            self.admit(&mut plan, below);
        }
        plan
    }

    /// Plans as many of its tokens as the step and the pool have room for.
    pub(super) fn plan_one(&mut self, rank: Rank, plan: &mut Plan) {
        let Some(remaining) = self.sequences.get(&rank.id).map(super::Sequence::remaining) else { return };
        let want = remaining.min(plan.budget);
        if want == 0 {
            return;
        }
        let count = self.make_room(rank, want, plan);
        let Some(sequence) = self.sequences.get(&rank.id).filter(|_| count > 0) else { return };
        plan.budget -= count;
        plan.items.push(PlanItem { id: rank.id, start: sequence.computed, count, wants_logits: count == remaining });
    }

    /// Blocks for up to `want` more tokens: free ones, else cached ones, else those of one that waits with blocks, else those of
    /// the last in rank behind it.
    /// How many tokens fit; 0 means that it stands still in this step and keeps what it has.
    fn make_room(&mut self, rank: Rank, want: usize, plan: &mut Plan) -> usize {
        loop {
            let Some(sequence) = self.sequences.get_mut(&rank.id) else { return 0 };
            while sequence.room() < want {
                let Some(slot) = self.pool.allocate() else { break };
                sequence.blocks.push(slot);
            }
            let room = sequence.room().min(want);
            if room > 0 {
                return room;
            }
            if self.reclaim() {
                continue;
            }
            let fetching = self.fetching.last_key_value().map(|(rank, _)| *rank);
            match self.running.last().copied().max(fetching) {
                Some(last) if last > rank => self.preempt(last, plan),
                _ => return 0,
            }
        }
    }

    /// Sends it back to the queue. Its tokens stay; its full blocks stay in the cache as long as they can.
    fn preempt(&mut self, rank: Rank, plan: &mut Plan) {
        let Some(mut sequence) = self.sequences.remove(&rank.id) else { return };
        self.drop_claims(&sequence);
        self.pool.release_all(&sequence.reset());
        self.sequences.insert(rank.id, sequence);
        self.running.remove(&rank);
        self.abandon(rank);
        self.waiting.insert(rank);
        let freed: usize = plan.items.iter().filter(|item| item.id == rank.id).map(|item| item.count).sum();
        plan.budget += freed;
        plan.items.retain(|item| item.id != rank.id);
        plan.preempted.push(rank.id);
        self.totals.preemptions += 1;
    }
}
