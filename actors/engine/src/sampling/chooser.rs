//! How one sequence chooses: its parameters and what they need to remember of prompt and answer.
//!
//! Called by the engine when a sequence comes and with each token it takes. Never: draws.

use std::collections::HashMap;

use starling_ids::TokenId;

use crate::contract::{SamplingParams, SequenceRequest};

/// The state of one sequence's choices.
#[derive(Debug, Clone)]
pub struct Chooser {
    params: SamplingParams,
    logprobs: Option<u8>,
    tokens_min: u32,
    vocab_size: u32,
    generated: u32,
    /// Tokens that would end the sequence.
    ending: Vec<TokenId>,
    /// Tokens of prompt and answer with their count in the answer; empty when no penalty needs it.
    seen: HashMap<TokenId, u32>,
}

impl Chooser {
    /// For a new sequence. `eos_ids` are the model's own end tokens.
    #[must_use]
    pub fn new(request: &SequenceRequest, eos_ids: &[TokenId], vocab_size: u32) -> Self {
        let mut ending = request.stop.token_ids.clone();
        if !request.stop.ignore_eos {
            ending.extend_from_slice(eos_ids);
        }
        let mut chooser = Self {
            params: request.sampling.clone(),
            logprobs: request.logprobs,
            tokens_min: request.stop.tokens_min,
            vocab_size,
            generated: 0,
            ending,
            seen: HashMap::new(),
        };
        let (prompt, said) = request.prompt.split_at(request.prompt.len().saturating_sub(request.answered as usize));
        if chooser.repeats() {
            chooser.seen = prompt.iter().map(|token| (*token, 0)).collect();
        }
        said.iter().for_each(|token| chooser.accept(*token));
        chooser
    }

    /// Its parameters.
    #[must_use]
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// How many of the likeliest tokens to report, when log-probabilities are wanted.
    #[must_use]
    pub fn logprobs(&self) -> Option<u8> {
        self.logprobs
    }

    /// Takes note of the token that was chosen.
    pub fn accept(&mut self, token: TokenId) {
        self.generated += 1;
        if self.repeats() || self.counts() {
            *self.seen.entry(token).or_insert(0) += 1;
        }
    }

    /// The first token from `token` on that may be chosen now; for backends that name a token instead of logits.
    #[must_use]
    pub fn nearest_allowed(&self, token: TokenId) -> TokenId {
        let vocab = self.vocab_size.max(1);
        let mut candidates = (0..vocab).map(|step| token.wrapping_add(step) % vocab);
        candidates.find(|id| !self.masks(*id)).unwrap_or(token)
    }

    /// True when [`Chooser::apply`] would change anything.
    pub(super) fn changes_logits(&self) -> bool {
        self.masking()
            || !self.params.logit_bias.is_empty()
            || ((self.repeats() || self.counts()) && !self.seen.is_empty())
    }

    /// Penalties, bias, masks.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let params = &self.params;
        for (token, count) in &self.seen {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            if self.repeats() {
                *logit =
                    if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
            }
            if *count > 0 {
                *logit -= params.presence_penalty + params.frequency_penalty * *count as f32;
            }
        }
        for (token, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if self.masking() {
            for token in &self.ending {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    fn repeats(&self) -> bool {
        self.params.repetition_penalty != 1.0
    }

    fn counts(&self) -> bool {
        self.params.presence_penalty != 0.0 || self.params.frequency_penalty != 0.0
    }

    fn masking(&self) -> bool {
        self.generated < self.tokens_min && !self.ending.is_empty()
    }

    fn masks(&self, token: TokenId) -> bool {
        self.masking() && self.ending.contains(&token)
    }
}
