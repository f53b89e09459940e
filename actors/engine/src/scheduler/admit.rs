//! From the queue into the batch: prefix match, room, and waiting for a twin.
//!
//! Called by the planner at the end of a plan. Never: preempts for a newcomer, computes a block twice at once.

use starling_kv::pool::{BlockSlot, BlockState};

use super::{Below, Plan, Scheduler, sequence::Rank, sequence::Sequence};

/// What became of one that waits.
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    /// It runs now.
    Admitted,
    /// It has its blocks and waits for some of them to come from a lower tier.
    Fetches,
    /// A running sequence fills the block it needs next; others may pass.
    TwinFills,
    /// The pool has no room for it; others do not pass, or it would wait for ever.
    NoRoom,
}

impl Scheduler {
    /// Admits in rank order while the step has room.
    pub(super) fn admit(&mut self, plan: &mut Plan, below: &mut dyn Below) {
        let slots = (self.limits.sequences_max as usize).saturating_sub(self.active());
        if slots == 0 || plan.budget == 0 || self.waiting.is_empty() {
            return;
        }
        let queue: Vec<Rank> = self.waiting.iter().copied().collect();
        let mut admitted = 0;
        for rank in queue {
            if admitted == slots || plan.budget == 0 {
                break;
            }
            match self.try_admit(rank, plan, below) {
                Admission::Admitted => admitted += 1,
                Admission::Fetches => {
                    admitted += 1;
                    continue;
                }
                Admission::TwinFills => continue,
                Admission::NoRoom => break,
            }
            self.plan_one(rank, plan);
        }
    }

    fn try_admit(&mut self, rank: Rank, plan: &mut Plan, below: &mut dyn Below) -> Admission {
        let Some(sequence) = self.sequences.get(&rank.id) else { return Admission::NoRoom };
        if sequence.waits_for.is_some_and(|hash| self.claims.contains_key(&hash)) {
            return Admission::TwinFills;
        }
        if !sequence.blocks().is_empty() {
            // It came from another engine with its blocks.
            if self.active() > 0 && !self.fits(sequence, &[]) {
                return Admission::NoRoom;
            }
            self.resume(rank);
            return Admission::Admitted;
        }
        let matched = self.matchable(sequence);
        let next = sequence.hashes().get(matched.len()).filter(|_| matched.len() < matchable_blocks(sequence, self));
        let twin = next.copied().filter(|hash| self.claims.contains_key(hash));
        let fits = self.active() == 0 || self.fits(sequence, &matched);
        let Some(sequence) = self.sequences.get_mut(&rank.id) else { return Admission::NoRoom };
        sequence.expect_cached(matched.len());
        sequence.waits_for = twin;
        if twin.is_some() {
            return Admission::TwinFills;
        }
        if !fits {
            return Admission::NoRoom;
        }
        self.take(rank, matched);
        if self.fetch(rank, plan, below) { Admission::Fetches } else { Admission::Admitted }
    }

    /// Pins what is cached, claims what it will fill.
    fn take(&mut self, rank: Rank, matched: Vec<BlockSlot>) {
        let Some(sequence) = self.sequences.get_mut(&rank.id) else { return };
        matched.iter().for_each(|slot| self.pool.pin(*slot));
        let cached = matched.len() * self.pool.block_tokens();
        (sequence.computed, sequence.published) = (cached, matched.len());
        if sequence.matched.is_none() {
            sequence.matched = Some(matched.len());
            self.totals.cached += cached as u64;
        }
        sequence.blocks = matched;
        if !sequence.private {
            for hash in sequence.unpublished() {
                self.claims.entry(*hash).or_insert(rank.id);
            }
        }
        self.waiting.remove(&rank);
        self.running.insert(rank);
    }

    /// The cached blocks it may start from. Never all of it: the last token is always computed, for its logits.
    pub(super) fn matchable(&self, sequence: &Sequence) -> Vec<BlockSlot> {
        if sequence.private {
            return Vec::new();
        }
        let blocks = matchable_blocks(sequence, self).min(sequence.hashes().len());
        self.pool.match_prefix(&sequence.hashes()[..blocks], sequence.tokens())
    }

    /// Room for all its tokens and one more, beside what the running ones still need and a small reserve.
    fn fits(&self, sequence: &Sequence, matched: &[BlockSlot]) -> bool {
        let idle = matched.iter().filter(|slot| self.pool.state(**slot) == BlockState::Ready).count();
        let needed = sequence.growth().saturating_sub(matched.len());
        let promised: usize = self
            .running
            .iter()
            .chain(self.fetching.keys())
            .filter_map(|rank| self.sequences.get(&rank.id))
            .map(Sequence::growth)
            .sum();
        let reserve = self.limits.kv_blocks as usize / 100;
        needed + idle + promised + reserve <= self.pool.available() as usize
    }
}

pub(super) fn matchable_blocks(sequence: &Sequence, scheduler: &Scheduler) -> usize {
    sequence.tokens().len().saturating_sub(1) / scheduler.pool.block_tokens()
}
