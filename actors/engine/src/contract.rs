//! What every engine promises, and the data that crosses that line.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, ModelId, TokenId};
use starling_kv::{
    events::KvEvent,
    hash::HashSeed,
    tier::{DiskError, TierInventory, TierOptions, TierReader, TierStats},
};
use thiserror::Error;

use crate::backend::{BlockSlot, KvMemory};
pub use crate::scheduler::{Adoption, Carried, HandedOver};

/// What a model is, as far as anyone who does not hold its weights must know. Travels in the directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name it is served under.
    pub id: ModelId,
    /// `llama`, or `simulated`.
    pub architecture: String,
    /// Longest prompt plus answer, in tokens.
    pub context_length: u32,
    /// Number of token ids; every id is below it.
    pub vocab_size: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// sha256 of the tokenizer bundle, hex. Names the bundle when it is fetched over the mesh.
    pub bundle_digest: String,
    /// Tokens that end an answer.
    pub eos_ids: Vec<TokenId>,
    /// Seeds the block hashes of this model: model name and tokenizer digest. A request adds adapter and salt.
    pub hash_seed: HashSeed,
}

/// Bounds of one engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineLimits {
    /// Sequences decoded in one step.
    pub sequences_max: u32,
    /// Sequences queued behind them; one more is refused with [`SubmitError::Full`].
    pub waiting_max: u32,
    /// Tokens computed in one step, prefill chunks and decodes together.
    pub batch_tokens_max: u32,
    /// KV blocks in the pool.
    pub kv_blocks: u32,
}

/// What an engine offers; fixed for its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// The model.
    pub card: ModelCard,
    /// Digest of the KV layout; blocks move only between equal layouts.
    pub layout_digest: u64,
    /// Bounds.
    pub limits: EngineLimits,
}

/// A sequence inside one engine; the caller chooses it and never uses it twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// How the next token is chosen. Greedy when `temperature` is 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 to 2; 0 is greedy.
    pub temperature: f32,
    /// (0, 1]; nucleus mass.
    pub top_p: f32,
    /// Keep the k likeliest; 0 keeps all.
    pub top_k: u32,
    /// [0, 1]; drop tokens below this share of the likeliest.
    pub min_p: f32,
    /// Same seed, same prompt, same parameters: same tokens. The draw at position i depends on (seed, i) alone.
    pub seed: u64,
    /// (0, 2]; 1 is off; divides positive logits of tokens already in prompt or answer, multiplies negative ones.
    pub repetition_penalty: f32,
    /// [-2, 2]; subtracted once from tokens already in the answer.
    pub presence_penalty: f32,
    /// [-2, 2]; subtracted per occurrence in the answer.
    pub frequency_penalty: f32,
    /// Added to logits; (token, bias in [-100, 100]).
    pub logit_bias: Vec<(TokenId, f32)>,
}

impl SamplingParams {
    /// The likeliest token each time, nothing else.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

/// When a sequence ends. Stop *strings* are the gateway's, which holds the text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopParams {
    /// At most this many new tokens, at least 1.
    pub tokens_max: u32,
    /// No stop token is chosen before this many.
    pub tokens_min: u32,
    /// Tokens that end the sequence besides the model's own; the one that ends it is reported.
    pub token_ids: Vec<TokenId>,
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

/// One sequence to complete.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceRequest {
    /// Chosen by the caller.
    pub id: SequenceId,
    /// The prompt; not empty, every id below the vocabulary's size.
    pub prompt: Arc<[TokenId]>,
    /// So many of the prompt's last tokens are the answer so far, when an answer that broke elsewhere is continued here.
    /// Penalties, `tokens_min` and the draws see them as answer; `tokens_max` counts new ones alone.
    pub answered: u32,
    /// Seed of the block hashes: the card's seed plus adapter and tenant salt. Different seeds never share blocks.
    pub hash_seed: HashSeed,
    /// How to choose.
    pub sampling: SamplingParams,
    /// When to end.
    pub stop: StopParams,
    /// Report log-probabilities: `Some(k)` reports the chosen token's and the k likeliest's (k 0 to 20).
    pub logprobs: Option<u8>,
    /// Lower runs first; equal priorities in order of arrival.
    pub priority: i32,
}

/// A token and how likely it was, natural logarithm, before temperature and filters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub id: TokenId,
    /// ln p.
    pub logprob: f32,
}

/// One chosen token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The token.
    pub id: TokenId,
    /// ln p, when asked for.
    pub logprob: Option<f32>,
    /// The likeliest, best first, when asked for.
    pub top: Vec<TokenLogprob>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// An end-of-sequence or stop token; it is the last token of the last delta.
    Stop,
    /// Token budget or context used up.
    Length,
    /// Cancelled by the caller; no delta follows.
    Cancelled,
    /// The engine failed on it; the client sees an error, never a short answer.
    Error,
}

/// What one step did for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceDelta {
    /// Whose.
    pub id: SequenceId,
    /// New tokens, in order; often one, empty only when `finish` is an error.
    pub tokens: Vec<SampledToken>,
    /// Prompt tokens taken from the cache; on the sequence's first delta, or on its last where an engine says it only then.
    pub cached_tokens: Option<u32>,
    /// Set once, on the last delta.
    pub finish: Option<FinishReason>,
}

/// The engine's own account of how busy it is: the truth for its queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineLoad {
    /// Sequences in the batch.
    pub running: u32,
    /// Sequences queued.
    pub waiting: u32,
    /// Prompt tokens still to be computed, running and waiting together.
    pub prefill_tokens: u64,
    /// Blocks pinned by live sequences.
    pub blocks_pinned: u32,
    /// Blocks kept for reuse.
    pub blocks_cached: u32,
    /// Blocks in the pool.
    pub blocks_total: u32,
    /// Tokens sampled since start.
    pub tokens_generated: u64,
    /// Prompt tokens computed since start.
    pub tokens_prefilled: u64,
    /// Prompt tokens taken from the cache since start.
    pub tokens_cached: u64,
    /// Tokens of answers begun elsewhere, and of their prompts, that were computed here again since start.
    #[serde(default)]
    pub tokens_recomputed: u64,
}

/// A step that was computed in another process, as far as it could be seen from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// How long it took.
    pub took: Duration,
    /// Prompt tokens it computed.
    pub prefilled: u64,
    /// Tokens it sampled.
    pub sampled: u64,
}

/// What one step returned.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Per sequence, in the order of their submission.
    pub deltas: Vec<SequenceDelta>,
    /// Blocks stored and removed by this step, in order.
    pub events: Vec<KvEvent>,
    /// How long the caller must let pass before it delivers this output. Zero for an engine that computes.
    pub takes: Duration,
    /// True when there was nothing to do: the caller waits for a command instead of stepping again.
    pub idle: bool,
    /// Steps of an engine in another process, to learn its speed from; `None` when this call was the step.
    pub measured: Option<Vec<Measured>>,
}

/// Why a sequence was refused; nothing of it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// Nothing to complete.
    #[error("prompt is empty")]
    Empty,
    /// No room for one new token.
    #[error("prompt has {prompt} tokens, the context holds {context} including the answer")]
    TooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// The model's context length.
        context: usize,
    },
    /// The pool could never hold it, however empty.
    #[error("prompt needs {blocks} KV blocks, the pool has {pool}")]
    PoolTooSmall {
        /// Blocks for prompt and one new token.
        blocks: usize,
        /// Blocks in the pool.
        pool: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is not below the vocabulary size {vocab}")]
    UnknownToken {
        /// The id.
        id: TokenId,
        /// The vocabulary's size.
        vocab: u32,
    },
    /// The queue is full; try again later or elsewhere.
    #[error("{waiting} sequences wait already, the limit is {limit}")]
    Full {
        /// Now waiting.
        waiting: usize,
        /// The bound.
        limit: usize,
    },
    /// The engine cannot be given this; another kind of engine may be.
    #[error("`{param}` cannot be given to an engine of kind {engine}")]
    Unsupported {
        /// The parameter, as clients call it.
        param: &'static str,
        /// The kind of engine.
        engine: &'static str,
    },
    /// The engine runs in another process, which cannot be asked now.
    #[error("the engine is away: {0}")]
    Away(String),
}

/// Why a sequence ended with [`FinishReason::Error`] where there is more to say than that.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SequenceFault {
    /// The engine's process is gone, silent, or said what cannot be understood.
    #[error("{0}")]
    Gone(String),
    /// It has no room.
    #[error("{0}")]
    Busy(String),
    /// It says that the request is wrong.
    #[error("{0}")]
    Refused(String),
}

/// Wakes the thread that steps an engine.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// A fault of the engine itself; its actor is restarted.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The computation failed.
    #[error("engine step failed: {0}")]
    Step(String),
    /// A block with this content cannot be taken.
    #[error("block refused: {0}")]
    Block(String),
}

/// One engine: a scheduler, a block pool and something that computes.
///
/// Calls are made by one thread; none blocks except [`Engine::step`], which computes one batch.
pub trait Engine: Send {
    /// Fixed facts.
    fn capabilities(&self) -> &Capabilities;
    /// Queues a sequence, or says why not.
    fn submit(&mut self, request: SequenceRequest) -> Result<(), SubmitError>;
    /// Ends a sequence between steps and gives its blocks back. False when it is not (or no longer) known.
    fn cancel(&mut self, id: SequenceId) -> bool;
    /// Computes one batch. Every sequence either advances, waits, or ends with a reason.
    fn step(&mut self) -> Result<StepOutput, EngineError>;
    /// How busy it is now.
    fn load(&self) -> EngineLoad;
    /// Whether it can be asked now, or why not. An engine in this process always can.
    ///
    /// # Errors
    /// A sentence that says what is missing.
    fn available(&self) -> Result<(), String> {
        Ok(())
    }
    /// Told once, before the first step: what to call when there is news although nobody gave a command.
    fn wake_by(&mut self, _wake: Waker) {}
    /// Why a sequence ended with an error, once, when there is more to say.
    fn fault(&mut self, _id: SequenceId) -> Option<SequenceFault> {
        None
    }
    /// Every block ready for reuse, parents before children: (parent, hash).
    fn inventory(&self) -> Vec<(Option<BlockHash>, BlockHash)>;
    /// The bytes of a ready block in the layout of [`Capabilities::layout_digest`] with its tokens, or `None` when it is gone.
    fn export_block(&self, hash: BlockHash) -> Option<ExportedBlock>;
    /// Takes a block exported elsewhere under the same layout and seed. It becomes ready for reuse.
    fn import_block(&mut self, block: &ExportedBlock) -> Result<Vec<KvEvent>, EngineError>;
    /// The memory its blocks lie in, for transports; `None` when blocks come and go by copies alone. Transports read blocks
    /// that are lent and write blocks that are reserved, without the engine.
    fn memory(&self) -> Option<KvMemory> {
        None
    }
    /// Pins the ready blocks of a chain after its first `from`, which the same borrower has pinned already. `hashes` are
    /// those of the full blocks of `tokens`; both are compared. The pins last until [`Engine::give_back`].
    fn lend(&mut self, _hashes: &[BlockHash], _tokens: &[TokenId], _from: usize) -> Vec<BlockSlot> {
        Vec::new()
    }
    /// Gives lent blocks, or reserved ones that nobody writes to any more, back: each pin and each room once.
    fn give_back(&mut self, _slots: &[BlockSlot]) {}
    /// Room for so many blocks that come from elsewhere: all of it, or `None`. It lasts until it is adopted or given back.
    fn reserve(&mut self, _blocks: usize) -> Option<Vec<BlockSlot>> {
        None
    }
    /// Makes reserved blocks ready for reuse, whose bytes have come and were verified: those of `tokens` from block `first`
    /// on. All of `slots` are given up by the caller, whatever is taken.
    fn adopt(&mut self, _seed: HashSeed, _tokens: &[TokenId], _first: usize, slots: &[BlockSlot]) -> Adoption {
        Adoption { taken: 0, spare: slots.len() }
    }
    /// Pins the full blocks of a live sequence after its first `from`, which the same borrower has pinned already, while it
    /// goes on. `None` when it is not (or no longer) known.
    fn lend_live(&mut self, _id: SequenceId, _from: usize) -> Option<Vec<BlockSlot>> {
        None
    }
    /// Ends a live sequence here, to go on elsewhere: no delta follows. `from` as in [`Engine::lend_live`].
    fn hand_over(&mut self, _id: SequenceId, _from: usize) -> Option<HandedOver> {
        None
    }
    /// Goes on with a sequence that was handed over elsewhere. `request.prompt` is all of its tokens. What is carried is given
    /// up by the caller, whatever becomes of it.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    fn take_over(&mut self, request: SequenceRequest, carried: Carried) -> Result<(), SubmitError> {
        self.give_back(&carried.came);
        self.give_back(&carried.here);
        self.submit(request)
    }
    /// Blocks stored and removed since the last step or call.
    fn take_events(&mut self) -> Vec<KvEvent> {
        Vec::new()
    }
    /// Forgets every block that no sequence pins; returns the events.
    fn clear_cache(&mut self) -> Vec<KvEvent>;
    /// Keeps blocks that leave the device on the tiers that `options` name, and brings them back when that is sooner than
    /// computing them. Called once, before the first sequence. An engine that has no use for tiers ignores it.
    ///
    /// # Errors
    /// Why the disk cannot be used; the engine goes on without it.
    fn open_tiers(&mut self, _options: &TierOptions) -> Result<(), DiskError> {
        Ok(())
    }
    /// What lies on the lower tiers.
    fn tier_inventory(&self) -> Vec<TierInventory> {
        Vec::new()
    }
    /// The lower tiers in numbers; `None` when there is none.
    fn tier_stats(&self) -> Option<TierStats> {
        None
    }
    /// Reads the lower tiers beside the engine, for workers that take blocks from there; `None` when there is none, or when the
    /// bytes of its blocks are not those of [`Engine::memory`].
    fn tier_reader(&self) -> Option<TierReader> {
        None
    }
    /// The end, in order: what is to outlive the engine is written to disk, within `limit`.
    fn close(&mut self, _limit: Duration) {}
}

/// A KV block outside its pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedBlock {
    /// Its hash.
    pub hash: BlockHash,
    /// The block before it, `None` for a first block.
    pub parent: Option<BlockHash>,
    /// Its tokens, compared before reuse so that a hash collision costs a miss, never a wrong answer.
    pub tokens: Vec<TokenId>,
    /// Digest of the layout the bytes are in.
    pub layout_digest: u64,
    /// Keys and values.
    pub bytes: Vec<u8>,
}
