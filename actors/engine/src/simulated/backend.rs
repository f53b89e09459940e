//! A backend that computes nothing but the digest of each prefix, and says how long the real thing would take.
//!
//! Called by the engine for each step. Its KV memory holds one state for each token: a block that was not written, or
//! that belongs to another prefix, gives another answer or an error here as it would with a real model.
//! Bounds: 32 bytes for each token of the pool, in memory that transports of this process and of others can reach.

use std::sync::Arc;

use starling_kv::transport::Region;

use super::{
    text::{Language, State},
    timing::{Timing, Work},
};
use crate::{
    backend::{Backend, Batch, BatchItem, BlockSlot, Computed, KvMemory, Row},
    contract::EngineError,
};

/// See the module.
#[derive(Debug)]
pub struct SimBackend {
    language: Arc<Language>,
    timing: Timing,
    block_tokens: usize,
    tokens: usize,
    memory: Option<Region>,
}

impl SimBackend {
    /// With empty memory for `blocks` blocks.
    pub(super) fn new(language: Arc<Language>, timing: Timing, blocks: u32, block_tokens: usize) -> Self {
        let tokens = blocks as usize * block_tokens;
        let memory = Region::private(tokens * State::BYTES);
        let memory = memory.inspect_err(|error| tracing::error!(%error, "no memory for the states of tokens")).ok();
        Self { language, timing, block_tokens, tokens, memory }
    }

    /// Where a position of a sequence is in memory.
    fn place(&self, item: &BatchItem<'_>, position: usize) -> Result<usize, EngineError> {
        let slot = item.blocks.get(position / self.block_tokens);
        let at = slot.map(|slot| slot.0 as usize * self.block_tokens + position % self.block_tokens);
        at.filter(|at| *at < self.tokens)
            .ok_or_else(|| EngineError::Step(format!("position {position} is in no block of this cache")))
    }

    fn state(&self, at: usize) -> Option<State> {
        let mut bytes = [0; State::BYTES];
        self.memory.as_ref()?.read((at * State::BYTES) as u64, &mut bytes)?;
        Some(State::from_bytes(&bytes))
    }

    fn keep(&self, at: usize, state: State) -> Option<()> {
        self.memory.as_ref()?.write((at * State::BYTES) as u64, &state.to_bytes())
    }

    fn run(&mut self, item: &BatchItem<'_>) -> Result<State, EngineError> {
        let mut state = match item.start.checked_sub(1) {
            None => State::default(),
            Some(before) => self.state(self.place(item, before)?).unwrap_or_default(),
        };
        if item.start > 0 && state.digest == 0 {
            return Err(EngineError::Step(format!("position {} was never computed", item.start - 1)));
        }
        for (offset, token) in item.tokens.iter().enumerate() {
            state = self.language.after(state, *token);
            let at = self.place(item, item.start + offset)?;
            self.keep(at, state).ok_or_else(|| EngineError::Step(format!("no memory for position {at}")))?;
        }
        Ok(state)
    }
}

impl Backend for SimBackend {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        let mut work = Work { cache_tokens: self.tokens, ..Work::default() };
        let mut rows = Vec::with_capacity(batch.items.len());
        for item in &batch.items {
            let state = self.run(item)?;
            work.add(item.start, item.tokens.len());
            if item.wants_logits {
                rows.push(Row::Token(self.language.next(state)));
            }
        }
        Ok(Computed { rows, takes: self.timing.step(work) })
    }

    fn read_block(&self, slot: BlockSlot) -> Vec<u8> {
        let mut bytes = vec![0; self.block_tokens * State::BYTES];
        let at = slot.0 as u64 * bytes.len() as u64;
        let read = self.memory.as_ref().and_then(|memory| memory.read(at, &mut bytes));
        read.map(|()| bytes).unwrap_or_default()
    }

    fn memory(&self) -> Option<KvMemory> {
        let block_bytes = (self.block_tokens * State::BYTES) as u64;
        self.memory.as_ref().map(|region| KvMemory { region: region.clone(), block_bytes })
    }

    fn write_block(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), EngineError> {
        let wanted = self.block_tokens * State::BYTES;
        let memory = self.memory.as_ref().filter(|_| bytes.len() == wanted);
        let written = memory.and_then(|memory| memory.write(slot.0 as u64 * wanted as u64, bytes));
        written.ok_or_else(|| {
            let given = bytes.len();
            EngineError::Block(format!("{given} bytes for block {}, a block has {wanted}", slot.0))
        })
    }
}
