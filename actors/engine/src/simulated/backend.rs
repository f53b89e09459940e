//! A backend that computes nothing but the digest of each prefix, and says how long the real thing would take.
//!
//! Called by the engine for each step. Its KV memory holds one state for each token: a block that was not written, or
//! that belongs to another prefix, gives another answer or an error here as it would with a real model.
//! Bounds: 32 bytes for each token of the pool.

use std::sync::Arc;

use super::{
    text::{Language, State},
    timing::{Timing, Work},
};
use crate::{
    backend::{Backend, Batch, BatchItem, BlockSlot, Computed, Row},
    contract::EngineError,
};

/// See the module.
#[derive(Debug)]
pub struct SimBackend {
    language: Arc<Language>,
    timing: Timing,
    block_tokens: usize,
    memory: Vec<State>,
}

impl SimBackend {
    /// With empty memory for `blocks` blocks.
    pub(super) fn new(language: Arc<Language>, timing: Timing, blocks: u32, block_tokens: usize) -> Self {
        Self { language, timing, block_tokens, memory: vec![State::default(); blocks as usize * block_tokens] }
    }

    /// Where a position of a sequence is in memory.
    fn place(&self, item: &BatchItem<'_>, position: usize) -> Result<usize, EngineError> {
        let slot = item.blocks.get(position / self.block_tokens);
        let at = slot.map(|slot| slot.0 as usize * self.block_tokens + position % self.block_tokens);
        at.filter(|at| *at < self.memory.len())
            .ok_or_else(|| EngineError::Step(format!("position {position} is in no block of this cache")))
    }

    fn run(&mut self, item: &BatchItem<'_>) -> Result<State, EngineError> {
        let mut state = match item.start.checked_sub(1) {
            None => State::default(),
            Some(before) => self.memory[self.place(item, before)?],
        };
        if item.start > 0 && state.digest == 0 {
            return Err(EngineError::Step(format!("position {} was never computed", item.start - 1)));
        }
        for (offset, token) in item.tokens.iter().enumerate() {
            state = self.language.after(state, *token);
            let at = self.place(item, item.start + offset)?;
            self.memory[at] = state;
        }
        Ok(state)
    }
}

impl Backend for SimBackend {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        let mut work = Work { cache_tokens: self.memory.len(), ..Work::default() };
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
        let at = slot.0 as usize * self.block_tokens;
        let states = self.memory.get(at..at + self.block_tokens).unwrap_or_default();
        states.iter().flat_map(|state| state.to_bytes()).collect()
    }

    fn write_block(&mut self, slot: BlockSlot, bytes: &[u8]) -> Result<(), EngineError> {
        let (at, wanted) = (slot.0 as usize * self.block_tokens, self.block_tokens * State::BYTES);
        let (states, rest) = bytes.as_chunks::<{ State::BYTES }>();
        let place = self.memory.get_mut(at..at + self.block_tokens);
        let Some(place) = place.filter(|place| rest.is_empty() && place.len() == states.len()) else {
            return Err(EngineError::Block(format!(
                "{} bytes for block {}, a block has {wanted}",
                bytes.len(),
                slot.0
            )));
        };
        for (state, bytes) in place.iter_mut().zip(states) {
            *state = State::from_bytes(bytes);
        }
        Ok(())
    }
}
