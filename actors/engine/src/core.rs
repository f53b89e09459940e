//! The engine that drives a backend: scheduler decides, backend computes, sampler chooses, scheduler takes note.
//!
//! Called by the worker actor through [`Engine`]; calls the scheduler, the sampler and the backend, in that order.
//! Never: reads a clock, starts a thread, keeps a sequence after its last delta. Bounds: those of the scheduler.

use std::{collections::HashMap, time::Duration};

use starling_ids::{BlockHash, TokenId};
use starling_kv::{
    events::KvEvent,
    hash::HashSeed,
    pool::{Adopted, BlockSlot, BlockState},
    tier::{DiskError, TierInventory, TierOptions, TierReader, TierStats},
};

use crate::{
    backend::{Backend, Batch, BatchItem, Computed, KvMemory, Row},
    contract::{
        Capabilities, Carried, Engine, EngineError, EngineLoad, ExportedBlock, HandedOver, SampledToken, SequenceDelta,
        SequenceId, SequenceRequest, StepOutput, SubmitError, TokenLogprob,
    },
    sampling::{Chooser, Sampler},
    scheduler::{Adoption, Outcome, Plan, Scheduler},
};

mod lower;

/// An engine over any backend.
#[derive(Debug)]
pub struct CoreEngine<B> {
    backend: B,
    capabilities: Capabilities,
    scheduler: Scheduler,
    sampler: Sampler,
    /// How each live sequence chooses.
    choosers: HashMap<SequenceId, Chooser>,
    /// What lies below the device.
    lower: lower::Lower,
}

impl<B: Backend> CoreEngine<B> {
    /// An idle engine. The backend's KV memory has `capabilities.limits.kv_blocks` blocks of `card.block_tokens` tokens.
    #[must_use]
    pub fn new(backend: B, capabilities: Capabilities) -> Self {
        Self {
            scheduler: Scheduler::new(&capabilities),
            sampler: Sampler::default(),
            choosers: HashMap::new(),
            lower: lower::Lower::default(),
            backend,
            capabilities,
        }
    }

    /// What decides; for tests and for inspection.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// What computes; for tests and for inspection.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Runs the plan and chooses a token for each item that wants one, in item order.
    fn compute(&mut self, plan: &Plan) -> Result<(Vec<Option<SampledToken>>, Duration), EngineError> {
        let mut batch = Batch { items: Vec::with_capacity(plan.items.len()) };
        for item in &plan.items {
            let lost = || EngineError::Step(format!("planned sequence {} is not known", item.id.0));
            let sequence = self.scheduler.sequence(item.id).ok_or_else(lost)?;
            batch.items.push(BatchItem {
                tokens: &sequence.tokens()[item.start..item.start + item.count],
                start: item.start,
                blocks: sequence.blocks(),
                wants_logits: item.wants_logits,
            });
        }
        let Computed { rows, takes } = self.backend.forward(&batch)?;
        let wanted = plan.items.iter().filter(|item| item.wants_logits);
        if rows.len() != wanted.clone().count() {
            return Err(EngineError::Step(format!("{} rows for {} items", rows.len(), wanted.count())));
        }
        let mut chosen = Vec::with_capacity(rows.len());
        for (item, row) in wanted.zip(rows) {
            let position = item.start + item.count;
            let chooser = self.choosers.get_mut(&item.id);
            chosen.push(chooser.and_then(|chooser| choose(&mut self.sampler, chooser, row, position)));
        }
        Ok((chosen, takes))
    }

    /// Tells the scheduler and makes the deltas, in order of submission.
    fn conclude(&mut self, plan: &Plan, chosen: Vec<Option<SampledToken>>) -> Vec<SequenceDelta> {
        let outcomes: Vec<Outcome> = chosen
            .iter()
            .map(|token| token.as_ref().map_or(Outcome::Failed, |token| Outcome::Token(token.id)))
            .collect();
        let advances = self.scheduler.commit(plan, &outcomes);
        let mut deltas: Vec<(u64, SequenceDelta)> = Vec::with_capacity(advances.len());
        for (advance, token) in advances.into_iter().zip(chosen) {
            if advance.finish.is_some() {
                self.choosers.remove(&advance.id);
            }
            let tokens = token.into_iter().collect();
            let (cached_tokens, finish) = (advance.cached_tokens, advance.finish);
            deltas.push((advance.arrival, SequenceDelta { id: advance.id, tokens, cached_tokens, finish }));
        }
        deltas.sort_unstable_by_key(|(arrival, _)| *arrival);
        deltas.into_iter().map(|(_, delta)| delta).collect()
    }
}

/// The next token of one sequence, or `None` when its logits are not numbers.
fn choose(sampler: &mut Sampler, chooser: &mut Chooser, row: Row<'_>, position: usize) -> Option<SampledToken> {
    let token = match row {
        Row::Dense(logits) => sampler.choose(logits, chooser, position as u64).ok()?,
        Row::Token(id) => {
            let id = chooser.nearest_allowed(id);
            let certain =
                chooser.logprobs().map(|k| (0.0, if k > 0 { vec![TokenLogprob { id, logprob: 0.0 }] } else { vec![] }));
            let (logprob, top) = certain.map_or((None, Vec::new()), |(logprob, top)| (Some(logprob), top));
            SampledToken { id, logprob, top }
        }
    };
    chooser.accept(token.id);
    Some(token)
}

impl<B: Backend> Engine for CoreEngine<B> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, request: SequenceRequest) -> Result<(), SubmitError> {
        self.scheduler.submit(&request)?;
        let card = &self.capabilities.card;
        self.choosers.insert(request.id, Chooser::new(&request, &card.eos_ids, card.vocab_size));
        self.lower.note(self.scheduler.sequence(request.id));
        Ok(())
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        self.choosers.remove(&id);
        self.scheduler.cancel(id)
    }

    fn step(&mut self) -> Result<StepOutput, EngineError> {
        self.drop_overwritten();
        self.take_arrivals(Duration::ZERO);
        let plan = self.scheduler.plan(&mut self.lower);
        self.spill();
        self.lower.begin(&plan.fetches);
        if plan.items.is_empty() {
            if self.scheduler.is_idle() {
                return Ok(StepOutput { events: self.news(), idle: true, ..StepOutput::default() });
            }
            if self.scheduler.fetching() > 0 {
                self.take_arrivals(lower::ARRIVAL_WAIT);
                return Ok(StepOutput { events: self.news(), ..StepOutput::default() });
            }
            if self.scheduler.guests() > 0 {
                // Transfers hold what the first in rank needs; their leases end.
                return Ok(StepOutput { events: self.news(), idle: true, ..StepOutput::default() });
            }
            // The scheduler promises that this does not happen; a restart is better than a worker that stands still.
            return Err(EngineError::Step("sequences wait and none can go on".to_owned()));
        }
        let began = self.lower.now();
        let (chosen, takes) = self.compute(&plan)?;
        self.lower.computed(&plan, began, takes);
        let deltas = self.conclude(&plan, chosen);
        Ok(StepOutput { deltas, events: self.news(), takes, ..StepOutput::default() })
    }

    fn load(&self) -> EngineLoad {
        self.scheduler.load()
    }

    fn inventory(&self) -> Vec<(Option<BlockHash>, BlockHash)> {
        self.scheduler.pool().inventory()
    }

    fn export_block(&self, hash: BlockHash) -> Option<ExportedBlock> {
        let pool = self.scheduler.pool();
        let slot = pool.known(hash)?;
        let (parent, tokens) = pool.content(slot)?;
        debug_assert!(matches!(pool.state(slot), BlockState::Ready | BlockState::Pinned(_)));
        Some(ExportedBlock {
            hash,
            parent,
            tokens: tokens.to_vec(),
            layout_digest: self.capabilities.layout_digest,
            bytes: self.backend.read_block(slot),
        })
    }

    fn import_block(&mut self, block: &ExportedBlock) -> Result<Vec<KvEvent>, EngineError> {
        let refused = |reason: String| EngineError::Block(reason);
        if block.layout_digest != self.capabilities.layout_digest {
            let (theirs, ours) = (block.layout_digest, self.capabilities.layout_digest);
            return Err(refused(format!("its layout is {theirs:016x}, this engine's is {ours:016x}")));
        }
        check_hash(block, &self.capabilities)?;
        self.drop_overwritten();
        let pool = self.scheduler.pool_mut();
        let adopted = pool.adopt(block.hash, block.parent, &block.tokens).map_err(|error| refused(error.to_string()));
        // What made room for it, before it is overwritten.
        self.spill();
        let adopted = adopted?;
        if let Adopted::Write(slot) = adopted
            && let Err(error) = self.backend.write_block(slot, &block.bytes)
        {
            // Its bytes are not there, so it must not be found. What was evicted for it is told by the next step.
            self.scheduler.pool_mut().forget(slot);
            return Err(error);
        }
        Ok(self.news())
    }

    fn memory(&self) -> Option<KvMemory> {
        self.backend.memory()
    }

    fn lend(&mut self, hashes: &[BlockHash], tokens: &[TokenId], from: usize) -> Vec<BlockSlot> {
        self.scheduler.lend(hashes, tokens, from)
    }

    fn give_back(&mut self, slots: &[BlockSlot]) {
        self.scheduler.give_back(slots);
    }

    fn reserve(&mut self, blocks: usize) -> Option<Vec<BlockSlot>> {
        let room = self.scheduler.reserve(blocks);
        // What was evicted for it goes down before a transport writes over it.
        self.spill();
        room
    }

    fn adopt(&mut self, seed: HashSeed, tokens: &[TokenId], first: usize, slots: &[BlockSlot]) -> Adoption {
        self.scheduler.adopt(seed, tokens, first, slots)
    }

    fn lend_live(&mut self, id: SequenceId, from: usize) -> Option<Vec<BlockSlot>> {
        self.scheduler.lend_live(id, from)
    }

    fn hand_over(&mut self, id: SequenceId, from: usize) -> Option<HandedOver> {
        self.choosers.remove(&id);
        self.scheduler.hand_over(id, from)
    }

    fn take_over(&mut self, request: SequenceRequest, carried: Carried) -> Result<(), SubmitError> {
        self.scheduler.take_over(&request, carried)?;
        let card = &self.capabilities.card;
        self.choosers.insert(request.id, Chooser::new(&request, &card.eos_ids, card.vocab_size));
        self.lower.note(self.scheduler.sequence(request.id));
        Ok(())
    }

    fn take_events(&mut self) -> Vec<KvEvent> {
        self.news()
    }

    fn clear_cache(&mut self) -> Vec<KvEvent> {
        self.scheduler.pool_mut().clear();
        self.lower.clear();
        self.news()
    }

    fn open_tiers(&mut self, options: &TierOptions) -> Result<(), DiskError> {
        self.open_lower(options)
    }

    fn tier_inventory(&self) -> Vec<TierInventory> {
        self.lower.inventory()
    }

    fn tier_stats(&self) -> Option<TierStats> {
        self.lower.stats()
    }

    fn tier_reader(&self) -> Option<TierReader> {
        self.lower.reader()
    }

    fn close(&mut self, limit: Duration) {
        self.close_lower(limit);
    }
}

/// A block after another one must have the hash that its tokens give. A first block hangs on its seed, which may be
/// scoped by an adapter or a salt that only its sender knows.
fn check_hash(block: &ExportedBlock, capabilities: &Capabilities) -> Result<(), EngineError> {
    let Some(parent) = block.parent else { return Ok(()) };
    let right = starling_kv::hash::block_hash(capabilities.card.hash_seed, Some(parent), &block.tokens);
    if right == block.hash {
        return Ok(());
    }
    Err(EngineError::Block(format!("its hash is {}, its tokens give {right}", block.hash)))
}

#[cfg(test)]
mod tests;
