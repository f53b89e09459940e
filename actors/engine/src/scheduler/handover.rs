//! A live sequence that leaves this engine for another one, or comes from one, with its blocks.
//!
//! Called by the engine between steps. A sequence that leaves keeps computing while its full blocks are lent; the hand-over
//! ends it here and passes the rest of its blocks, the partly filled one too, to whoever sends them. One that comes runs at
//! once with what came, or waits in line with it when the batch is full, until a running one has no other block left. Never: keeps a block of a sequence that has left, or
//! computes on what did not come. Bounds: what is lent is the sequence's own, so it takes no block from others while that lives;
//! it counts among the guests, of which others get fewer meanwhile.

use starling_ids::TokenId;
use starling_kv::pool::BlockSlot;

use super::{Scheduler, Sequence, sequence::Rank};
use crate::contract::{SequenceId, SequenceRequest, SubmitError};

/// A sequence that has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandedOver {
    /// Its blocks after those that were lent, pinned; the last one may be filled in part. They are given back like lent ones.
    pub slots: Vec<BlockSlot>,
    /// Prompt, then answer.
    pub tokens: Vec<TokenId>,
    /// So many leading tokens lie in its blocks, those lent before included. Never all of them.
    pub computed: usize,
}

/// The blocks of a sequence that comes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Carried {
    /// Its first blocks, which were here: pinned as [`crate::Engine::lend`] does.
    pub here: Vec<BlockSlot>,
    /// Those after them, reserved as [`crate::Engine::reserve`] does: their bytes have come and were verified.
    pub came: Vec<BlockSlot>,
    /// So many leading tokens lie in them when all have come; the last block may be filled in part.
    pub computed: usize,
}

impl Scheduler {
    /// Pins the full blocks of a live sequence after its first `from`, which the same borrower has pinned already.
    /// `None` when it is not known.
    pub fn lend_live(&mut self, id: SequenceId, from: usize) -> Option<Vec<BlockSlot>> {
        let sequence = self.sequences.get(&id)?;
        let full = sequence.blocks.get(from..sequence.published).unwrap_or_default();
        let slots = full.to_vec();
        slots.iter().for_each(|slot| self.pool.pin(*slot));
        self.guests += slots.len();
        Some(slots)
    }

    /// Ends a live sequence here. `None` when it is not known; then it has ended.
    pub fn hand_over(&mut self, id: SequenceId, from: usize) -> Option<HandedOver> {
        let mut sequence = self.sequences.remove(&id)?;
        let rank = sequence.rank();
        self.waiting.remove(&rank);
        self.running.remove(&rank);
        self.abandon(rank);
        self.drop_claims(&sequence);
        let size = self.pool.block_tokens();
        let covered = sequence.computed.div_ceil(size).min(sequence.blocks.len());
        let mut first = std::mem::take(&mut sequence.blocks);
        let empty = first.split_off(covered);
        let slots = first.split_off(from.min(covered));
        self.guests += slots.len();
        self.pool.release_all(&empty);
        self.pool.release_all(&first);
        // One that was preempted has lost its blocks; those that were lent are still good.
        let computed = sequence.computed.max(from * size);
        Some(HandedOver { slots, tokens: sequence.tokens().to_vec(), computed })
    }

    /// Goes on with a sequence that computed elsewhere. All of `carried` is given up by the caller, also when it is refused.
    ///
    /// # Errors
    /// As [`Scheduler::submit`]; nothing of it is kept then.
    pub fn take_over(&mut self, request: &SequenceRequest, carried: Carried) -> Result<(), SubmitError> {
        let Carried { here, came, computed } = carried;
        self.guests = self.guests.saturating_sub(here.len() + came.len());
        if let Err(error) = self.validate(request) {
            self.pool.release_all(&came);
            self.pool.release_all(&here);
            return Err(error);
        }
        self.cancel(request.id);
        self.arrivals += 1;
        let mut sequence = Sequence::new(request, self.arrivals, self.pool.block_tokens());
        let first = here.len();
        let known = self.pool.match_prefix(sequence.hashes().get(..first).unwrap_or_default(), sequence.tokens());
        sequence.blocks = here;
        if known == sequence.blocks {
            sequence.published = first;
            self.settle(&mut sequence, came, computed);
        } else {
            self.pool.release_all(&came);
            self.pool.release_all(&sequence.reset());
            sequence.matched = Some(0);
        }
        self.place(sequence);
        Ok(())
    }

    /// Makes the full blocks that came known, and keeps the partly filled one.
    fn settle(&mut self, sequence: &mut Sequence, came: Vec<BlockSlot>, computed: usize) {
        let size = self.pool.block_tokens();
        // The last token is always computed, for its logits.
        let computed = computed.min(sequence.tokens().len().saturating_sub(1));
        let mut came = came.into_iter();
        while sequence.blocks.len() < computed.div_ceil(size) {
            let Some(slot) = came.next() else { break };
            sequence.blocks.push(slot);
        }
        self.pool.release_all(came.as_slice());
        sequence.computed = computed.min(sequence.blocks.len() * size);
        self.publish(sequence);
        let whole = sequence.blocks.len().min(sequence.computed / size);
        sequence.matched = Some(whole);
        sequence.carried = sequence.computed - whole * size;
    }

    /// Into the batch, or into the line when the batch is full.
    fn place(&mut self, mut sequence: Sequence) {
        let rank = sequence.rank();
        let room = self.active() < self.limits.sequences_max as usize;
        if !room && sequence.blocks().is_empty() {
            // It brought nothing: what is cached when its turn comes is what it finds.
            (sequence.matched, sequence.carried) = (None, 0);
        }
        self.sequences.insert(rank.id, sequence);
        if room {
            self.resume(rank);
        } else {
            self.waiting.insert(rank);
        }
    }

    /// Into the batch with the blocks it has.
    pub(super) fn resume(&mut self, rank: Rank) {
        let Some(sequence) = self.sequences.get(&rank.id) else { return };
        self.totals.cached += sequence.computed as u64;
        if !sequence.private {
            for hash in sequence.unpublished() {
                self.claims.entry(*hash).or_insert(rank.id);
            }
        }
        self.waiting.remove(&rank);
        self.running.insert(rank);
    }

    /// Takes the blocks of the last in line that waits with some: a running sequence needs one. What is full stays in the cache
    /// as long as it can. False when nobody waits with blocks.
    pub(super) fn reclaim(&mut self) -> bool {
        let holds = |rank: &&Rank| self.sequences.get(&rank.id).is_some_and(|sequence| !sequence.blocks().is_empty());
        let Some(rank) = self.waiting.iter().rev().find(holds).copied() else { return false };
        let Some(sequence) = self.sequences.get_mut(&rank.id) else { return false };
        (sequence.matched, sequence.carried) = (None, 0);
        let blocks = sequence.reset();
        self.pool.release_all(&blocks);
        true
    }
}
