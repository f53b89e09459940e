//! The simulated engine: real scheduling, real blocks, made-up answers, predicted times.
//!
//! Everything above the backend is the embedded engine's own code; only the computation is replaced: by a digest of the
//! prefix (`text`) and a timing model (`timing`). It needs no model file: its tokenizer is made by code (`bundle`).
//! Called by [`crate::loader::load`]. Never: waits; a step says how long it takes and its caller lets that pass.

mod backend;
mod bundle;
pub mod faults;
#[cfg(test)]
mod tests;
mod text;
mod timing;

use std::sync::Arc;

use starling_ids::{ModelId, TokenId};
use starling_kv::{
    hash::{HashSeed, SeedParts},
    layout::{KvDtype, KvLayout, KvOrder},
};

pub use backend::SimBackend;
pub use timing::{Curve, Polynomial, Terms, Timing, TimingError};

use crate::{
    bundle::TokenizerBundle,
    contract::{Capabilities, Engine, EngineLimits, ModelCard},
    core::CoreEngine,
    loader::{LoadError, LoadedModel, ModelOptions},
};
use text::Language;

/// Tokens per block.
const BLOCK_TOKENS: u32 = 16;
/// Longest prompt plus answer of the made-up model, in tokens; a token is a byte.
const CONTEXT_LENGTH: u32 = 32_768;
/// What one token of cache is said to cost, so that `kv_bytes` gives a pool of a realistic size. It takes 32 in truth.
const TOKEN_BYTES: usize = 4_096;
/// Fewer blocks hold no conversation.
const BLOCKS_MIN: usize = 64;

/// A tokenizer, a vocabulary of words and a timing model, shared by the engines of a process.
#[derive(Debug, Clone)]
pub struct SimulatedModel {
    card: ModelCard,
    bundle: TokenizerBundle,
    language: Arc<Language>,
    timing: Timing,
    limits: EngineLimits,
}

/// A tokenizer and what an engine must know of it.
struct Voice {
    bundle: TokenizerBundle,
    eos_ids: Vec<TokenId>,
    vocab_size: u32,
    context_length: u32,
}

impl SimulatedModel {
    /// With the default timing.
    ///
    /// # Errors
    /// As [`SimulatedModel::with_timing`].
    pub fn load(options: &ModelOptions) -> Result<Self, LoadError> {
        Self::with_timing(options, Timing::default())
    }

    /// With a timing of the caller's. A path, when there is one, names a model file whose tokenizer and context it borrows.
    ///
    /// # Errors
    /// [`LoadError::Options`] when the timing makes no sense; those of reading the file; [`LoadError::Malformed`] when its
    /// tokenizer cannot write the words of an answer.
    pub fn with_timing(options: &ModelOptions, timing: Timing) -> Result<Self, LoadError> {
        let timing = timing.validated().map_err(|error| LoadError::Options(error.to_string()))?;
        let voice = Voice::of(options)?;
        let malformed = |reason| LoadError::Malformed { path: options.path.clone().unwrap_or_default(), reason };
        let language = Language::new(&voice.bundle.tokenizer_json, &voice.eos_ids).map_err(malformed)?;
        let named = |error: starling_ids::NameError| LoadError::Options(error.to_string());
        let id = options.served_name.clone().map_or_else(|| ModelId::new("simulated").map_err(named), Ok)?;
        let bundle_digest = voice.bundle.digest();
        let seed = SeedParts { model: id.as_str(), tokenizer_digest: &bundle_digest, ..SeedParts::default() };
        let blocks = (options.kv_bytes / (TOKEN_BYTES * BLOCK_TOKENS as usize)).max(BLOCKS_MIN);
        Ok(Self {
            card: ModelCard {
                hash_seed: HashSeed::new(seed),
                id,
                architecture: "simulated".to_owned(),
                context_length: voice.context_length,
                vocab_size: voice.vocab_size,
                block_tokens: BLOCK_TOKENS,
                bundle_digest,
                eos_ids: voice.eos_ids,
            },
            bundle: voice.bundle,
            language: Arc::new(language),
            timing,
            limits: EngineLimits {
                sequences_max: options.sequences_max,
                waiting_max: options.waiting_max,
                batch_tokens_max: options.batch_tokens_max,
                kv_blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            },
        })
    }

    /// The same with another context length, in tokens.
    #[must_use]
    pub fn with_context(mut self, tokens: u32) -> Self {
        self.card.context_length = tokens;
        self
    }

    /// The same with another number of KV blocks, at least 64.
    #[must_use]
    pub fn with_blocks(mut self, blocks: u32) -> Self {
        self.limits.kv_blocks = blocks.max(BLOCKS_MIN as u32);
        self
    }

    /// The layout of its blocks: 32 bytes a token, as four f32 each for keys and values would be.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        let (dtype, order) = (KvDtype::F32, KvOrder::LayerKvTokenHeadDim);
        let block_tokens = BLOCK_TOKENS;
        KvLayout { layers: 1, kv_heads: 1, head_dim: 4, dtype, block_tokens, order, tp_rank: 0, tp_size: 1 }
    }

    /// A new engine that is not behind the trait; for tests and simulations.
    #[must_use]
    pub fn core_engine(&self) -> CoreEngine<SimBackend> {
        let backend =
            SimBackend::new(Arc::clone(&self.language), self.timing, self.limits.kv_blocks, BLOCK_TOKENS as usize);
        let (card, layout_digest) = (self.card.clone(), self.layout().digest());
        CoreEngine::new(backend, Capabilities { card, layout_digest, limits: self.limits.clone() })
    }
}

impl LoadedModel for SimulatedModel {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn layout(&self) -> Option<KvLayout> {
        Some(Self::layout(self))
    }

    fn numbers(&self) -> u64 {
        // What it computes depends on the tokens alone.
        1
    }

    fn bundle(&self) -> &TokenizerBundle {
        &self.bundle
    }

    fn engine(&self) -> Box<dyn Engine> {
        Box::new(self.core_engine())
    }
}

impl Voice {
    fn of(options: &ModelOptions) -> Result<Self, LoadError> {
        let Some(path) = &options.path else {
            return Ok(Self {
                bundle: bundle::byte_level(),
                eos_ids: vec![bundle::END],
                vocab_size: bundle::VOCAB_SIZE,
                context_length: CONTEXT_LENGTH,
            });
        };
        let borrowed = crate::embedded::bundle_from(path)?;
        Ok(Self {
            bundle: borrowed.bundle,
            eos_ids: borrowed.eos_ids,
            vocab_size: borrowed.vocab_size,
            context_length: borrowed.context_length,
        })
    }
}
