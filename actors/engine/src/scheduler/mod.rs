//! Which sequence computes what in the next step: a state machine that holds no model.
//!
//! Called by the engine: [`Scheduler::submit`], [`Scheduler::cancel`] between steps; [`Scheduler::plan`], then the
//! computation, then [`Scheduler::commit`] with what came out. It owns the sequences and their use of the block pool.
//! Never: computes, samples, reads a clock. Bounds: `waiting_max` queued, `sequences_max` in a step,
//! `batch_tokens_max` tokens in a step.
//!
//! Order is rank: lower priority number first, then arrival. The first of the running sequences can always go on,
//! because it may take the blocks of all others; so every sequence ends.

mod admit;
mod commit;
mod fetch;
mod guests;
mod handover;
mod plan;
mod sequence;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use starling_ids::{BlockHash, TokenId};
use starling_kv::{pool::BlockPool, tier::Ticket};

pub use commit::{Advance, Outcome};
pub use fetch::{Awaited, Below, Fetch};
pub use guests::Adoption;
pub use handover::{Carried, HandedOver};
pub use plan::{Plan, PlanItem};
pub use sequence::Sequence;

use crate::contract::{Capabilities, EngineLimits, EngineLoad, SequenceId, SequenceRequest, SubmitError};
use fetch::Fetching;
use sequence::Rank;

/// Totals since start.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    generated: u64,
    prefilled: u64,
    cached: u64,
    recomputed: u64,
    preemptions: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Scheduler {
    limits: EngineLimits,
    context_length: usize,
    vocab_size: u32,
    eos_ids: Vec<TokenId>,
    pool: BlockPool,
    sequences: HashMap<SequenceId, Sequence>,
    waiting: BTreeSet<Rank>,
    running: BTreeSet<Rank>,
    /// Those that hold their blocks and wait for some of them to come from a lower tier.
    fetching: BTreeMap<Rank, Fetching>,
    /// Tickets whose blocks nobody waits for any more, until the engine takes them.
    abandoned: Vec<Ticket>,
    tickets: u64,
    /// Full blocks that a running sequence is about to fill, and which one.
    claims: HashMap<BlockHash, SequenceId>,
    arrivals: u64,
    totals: Totals,
    /// Pins and room that transfers hold.
    guests: usize,
}

impl Scheduler {
    /// An empty scheduler with an empty pool.
    ///
    /// A step always has room for one token of each running sequence: a smaller `batch_tokens_max` is raised to that.
    #[must_use]
    pub fn new(capabilities: &Capabilities) -> Self {
        let mut limits = capabilities.limits.clone();
        limits.sequences_max = limits.sequences_max.max(1);
        limits.batch_tokens_max = limits.batch_tokens_max.max(limits.sequences_max);
        let card = &capabilities.card;
        Self {
            pool: BlockPool::new(limits.kv_blocks, card.block_tokens as usize),
            context_length: card.context_length as usize,
            vocab_size: card.vocab_size,
            eos_ids: card.eos_ids.clone(),
            limits,
            sequences: HashMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            fetching: BTreeMap::new(),
            abandoned: Vec::new(),
            tickets: 0,
            claims: HashMap::new(),
            arrivals: 0,
            totals: Totals::default(),
            guests: 0,
        }
    }

    /// Queues a sequence. A refused one leaves nothing behind.
    pub fn submit(&mut self, request: &SequenceRequest) -> Result<(), SubmitError> {
        self.validate(request)?;
        // A second use of an id breaks the contract; its first sequence gives everything back rather than leak.
        self.cancel(request.id);
        self.arrivals += 1;
        let mut sequence = Sequence::new(request, self.arrivals, self.pool.block_tokens());
        sequence.expect_cached(self.matchable(&sequence).len());
        self.waiting.insert(sequence.rank());
        self.sequences.insert(request.id, sequence);
        Ok(())
    }

    fn validate(&self, request: &SequenceRequest) -> Result<(), SubmitError> {
        let prompt = request.prompt.len();
        let named = request.sampling.logit_bias.iter().map(|(id, _)| id).chain(&request.stop.token_ids);
        if prompt == 0 {
            return Err(SubmitError::Empty);
        }
        if let Some(id) = request.prompt.iter().chain(named).find(|id| **id >= self.vocab_size) {
            return Err(SubmitError::UnknownToken { id: *id, vocab: self.vocab_size });
        }
        if prompt >= self.context_length {
            return Err(SubmitError::TooLong { prompt, context: self.context_length });
        }
        let (blocks, pool) = ((prompt + 1).div_ceil(self.pool.block_tokens()), self.limits.kv_blocks as usize);
        if blocks > pool {
            return Err(SubmitError::PoolTooSmall { blocks, pool });
        }
        let (waiting, limit) = (self.waiting.len(), self.limits.waiting_max as usize);
        // With room in the batch the queue is only a corridor: the next step empties it.
        let corridor = (self.limits.sequences_max as usize).saturating_sub(self.active());
        if waiting >= limit + corridor {
            return Err(SubmitError::Full { waiting, limit });
        }
        Ok(())
    }

    /// Ends a sequence and gives its blocks back; full ones stay for reuse. False when it is not known.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.sequences.remove(&id) else { return false };
        self.waiting.remove(&sequence.rank());
        self.running.remove(&sequence.rank());
        self.abandon(sequence.rank());
        self.drop_claims(&sequence);
        self.pool.release_all(sequence.blocks());
        true
    }

    /// A live sequence.
    #[must_use]
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// True when there is nothing to compute until the next submission.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The blocks.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The blocks, for import and clearing between steps.
    pub fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    /// Times a sequence gave its blocks up for another since start.
    #[must_use]
    pub fn preemptions(&self) -> u64 {
        self.totals.preemptions
    }

    /// How busy it is.
    #[must_use]
    pub fn load(&self) -> EngineLoad {
        let counts = self.pool.counts();
        EngineLoad {
            running: self.active() as u32,
            waiting: self.waiting.len() as u32,
            prefill_tokens: self.sequences.values().map(|sequence| sequence.prefill_left() as u64).sum(),
            blocks_pinned: counts.pinned + counts.filling,
            blocks_cached: counts.ready,
            blocks_total: self.limits.kv_blocks,
            tokens_generated: self.totals.generated,
            tokens_prefilled: self.totals.prefilled,
            tokens_cached: self.totals.cached,
            tokens_recomputed: self.totals.recomputed,
        }
    }

    /// Sequences that hold blocks: those in the batch and those about to be.
    fn active(&self) -> usize {
        self.running.len() + self.fetching.len()
    }

    /// Longest sequence: the model's context, or what the pool holds when that is less.
    fn length_max(&self) -> usize {
        self.context_length.min(self.limits.kv_blocks as usize * self.pool.block_tokens())
    }

    /// The end of a sequence's claims: another one that waits for those blocks goes ahead.
    fn drop_claims(&mut self, sequence: &Sequence) {
        for hash in sequence.unpublished() {
            if self.claims.get(hash) == Some(&sequence.id()) {
                self.claims.remove(hash);
            }
        }
    }

    /// Conservation: the pool is whole, and every pinned block is accounted for by live sequences. For tests.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()?;
        let held: usize = self.sequences.values().map(|sequence| sequence.blocks().len()).sum();
        let counts = self.pool.counts();
        let at_rest = self.sequences.is_empty() && self.guests == 0;
        if at_rest && (counts.pinned + counts.filling > 0 || !self.claims.is_empty()) {
            return Err(format!("at rest: {counts:?}, {} claims", self.claims.len()));
        }
        if held + self.guests < (counts.pinned + counts.filling) as usize {
            return Err(format!("{counts:?}, sequences hold {held}"));
        }
        let queued = self.waiting.len() + self.active();
        if queued != self.sequences.len() || self.active() > self.limits.sequences_max as usize {
            return Err(format!("{queued} queued, {} known", self.sequences.len()));
        }
        Ok(())
    }
}
