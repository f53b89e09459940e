//! One sequence on its way through a server: what it asked for, what came, when it ends. Pure.
//!
//! Called by the engine with each chunk. Watches over what the contract promises whatever the server does: ids below the
//! vocabulary, the budget, stop tokens, an end token at the end of an answer that stopped.

use std::time::Instant;

use starling_ids::TokenId;

use super::dialect::{Chunk, End};
use crate::contract::{FinishReason, SampledToken, SequenceDelta, SequenceFault, SequenceRequest};

/// See the module.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) request: SequenceRequest,
    /// Tokens that came.
    pub(super) said: u32,
    /// Prompt tokens that the server had cached, as it says, or as its events let one guess.
    pub(super) cached: u32,
    /// The server said so.
    pub(super) cached_told: bool,
    /// What it said, on its way to the caller with the next tokens.
    untold: Option<u32>,
    /// When it was sent.
    pub(super) sent: Instant,
    /// When its last token came.
    pub(super) last: Option<Instant>,
}

/// What a chunk means.
#[derive(Debug)]
pub(super) struct Landed {
    /// For the caller, when there is anything.
    pub(super) delta: Option<SequenceDelta>,
    /// Why it failed, if it did.
    pub(super) fault: Option<SequenceFault>,
}

impl Flight {
    /// Sent now.
    pub(super) fn new(request: SequenceRequest, cached: u32, now: Instant) -> Self {
        Self { request, said: 0, cached, cached_told: false, untold: None, sent: now, last: None }
    }

    /// Blocks that its tokens fill.
    pub(super) fn blocks(&self, block_tokens: usize) -> u64 {
        (self.request.prompt.len() + self.said as usize).div_ceil(block_tokens.max(1)) as u64
    }

    /// Takes what came.
    pub(super) fn take(&mut self, chunk: Chunk, (eos, vocab): (&[TokenId], u32)) -> Landed {
        let Chunk { mut tokens, cached, end } = chunk;
        if let Some(odd) = tokens.iter().find(|token| token.id >= vocab) {
            let said =
                format!("the server says token {}, the model has {vocab}: is --model the server's model?", odd.id);
            return self.fail(SequenceFault::Gone(said));
        }
        let finish = match self.cut(&mut tokens) {
            Some(finish) => Some(finish),
            None => match end {
                None => None,
                Some(End::Length) => Some(FinishReason::Length),
                Some(End::Stop { told }) => {
                    // The last token of an answer that stopped is the one that ended it.
                    if !told && let Some(eos) = eos.first() {
                        tokens.push(SampledToken { id: *eos, logprob: None, top: Vec::new() });
                    }
                    Some(FinishReason::Stop)
                }
                Some(End::Fault(fault)) => return self.fail(fault),
            },
        };
        self.said = self.said.saturating_add(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        let cached = cached.map(|cached| cached.min(u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX)));
        if let Some(cached) = cached {
            (self.cached, self.cached_told, self.untold) = (cached, true, Some(cached));
        }
        if tokens.is_empty() && finish.is_none() {
            return Landed { delta: None, fault: None };
        }
        let delta = SequenceDelta { id: self.request.id, tokens, cached_tokens: self.untold.take(), finish };
        Landed { delta: Some(delta), fault: None }
    }

    /// Cuts tokens off behind a stop token or the budget, where the server went on.
    fn cut(&self, tokens: &mut Vec<SampledToken>) -> Option<FinishReason> {
        let (stop, said) = (&self.request.stop, self.said as usize);
        let least = (stop.tokens_min as usize).saturating_sub(self.request.answered as usize);
        let ends = |(at, token): (usize, &SampledToken)| said + at >= least && stop.token_ids.contains(&token.id);
        let room = (stop.tokens_max as usize).saturating_sub(said);
        let stopped = tokens.iter().enumerate().position(ends).filter(|at| *at < room);
        if let Some(at) = stopped {
            tokens.truncate(at + 1);
            return Some(FinishReason::Stop);
        }
        let over = tokens.len() > room;
        tokens.truncate(room);
        over.then_some(FinishReason::Length)
    }

    fn fail(&self, fault: SequenceFault) -> Landed {
        let (id, finish) = (self.request.id, Some(FinishReason::Error));
        let delta = SequenceDelta { id, tokens: Vec::new(), cached_tokens: None, finish };
        Landed { delta: Some(delta), fault: Some(fault) }
    }
}
