//! One sequence: its tokens, how many of them are computed, which blocks hold them.
//!
//! Called by the scheduler alone. Never: touches the pool.

use starling_ids::{BlockHash, TokenId};
use starling_kv::{hash::BlockHasher, pool::BlockSlot};

use crate::contract::{SequenceId, SequenceRequest, StopParams};

/// Who goes first: priority, then arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) priority: i32,
    pub(super) arrival: u64,
    pub(super) id: SequenceId,
}

/// A live sequence.
#[derive(Debug)]
pub struct Sequence {
    rank: Rank,
    /// Prompt, then answer.
    tokens: Vec<TokenId>,
    prompt_len: usize,
    hasher: BlockHasher,
    block_tokens: usize,
    pub(super) stop: StopParams,
    /// In order; they cover `computed` positions and maybe more.
    pub(super) blocks: Vec<BlockSlot>,
    /// Leading tokens whose keys and values are in the blocks.
    pub(super) computed: usize,
    /// Leading blocks that are known to the pool.
    pub(super) published: usize,
    /// A hash collision: its further blocks stay its own.
    pub(super) private: bool,
    /// Leading blocks that were in the cache at first admission.
    pub(super) matched: Option<usize>,
    /// Tokens of a partly filled block that came with it from another engine.
    pub(super) carried: usize,
    /// Of the prompt's last tokens, so many were chosen elsewhere.
    pub(super) answered: usize,
    /// The cache hit is still to be reported, on the first delta.
    pub(super) unreported: bool,
    /// The block a running sequence fills and this one waits for.
    pub(super) waits_for: Option<BlockHash>,
    /// Blocks that were asked of a lower tier did not come: they are computed.
    pub(super) fetch_failed: bool,
    /// Prompt tokens believed to be in the cache while it waits.
    expected_cached: usize,
}

impl Sequence {
    pub(super) fn new(request: &SequenceRequest, arrival: u64, block_tokens: usize) -> Self {
        let mut hasher = BlockHasher::new(request.hash_seed, block_tokens);
        hasher.extend(&request.prompt);
        // What was said elsewhere is no longer waited for here.
        let tokens_min = request.stop.tokens_min.saturating_sub(request.answered);
        Self {
            rank: Rank { priority: request.priority, arrival, id: request.id },
            tokens: request.prompt.to_vec(),
            prompt_len: request.prompt.len(),
            hasher,
            block_tokens,
            stop: StopParams { tokens_min, ..request.stop.clone() },
            blocks: Vec::new(),
            computed: 0,
            published: 0,
            private: false,
            matched: None,
            carried: 0,
            answered: request.answered as usize,
            unreported: true,
            waits_for: None,
            fetch_failed: false,
            expected_cached: 0,
        }
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.rank.id
    }

    /// Prompt, then answer.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Tokens in the prompt.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Tokens in the answer so far.
    #[must_use]
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// The blocks that hold its computed tokens, in order.
    #[must_use]
    pub fn blocks(&self) -> &[BlockSlot] {
        &self.blocks
    }

    /// Tokens still to be computed before the next one can be chosen.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Prompt tokens still to be computed; an estimate while it waits.
    pub(super) fn prefill_left(&self) -> usize {
        self.prompt_len.saturating_sub(self.computed.max(self.expected_cached))
    }

    pub(super) fn expect_cached(&mut self, blocks: usize) {
        self.expected_cached = blocks * self.block_tokens;
    }

    /// Hashes of its full blocks.
    pub(crate) fn hashes(&self) -> &[BlockHash] {
        self.hasher.hashes()
    }

    /// Hashes of the full blocks that the pool does not know from it.
    pub(super) fn unpublished(&self) -> &[BlockHash] {
        self.hasher.hashes().get(self.published..).unwrap_or_default()
    }

    /// Positions its blocks cover beyond those computed.
    pub(super) fn room(&self) -> usize {
        (self.blocks.len() * self.block_tokens).saturating_sub(self.computed)
    }

    /// Blocks it still needs for all its tokens and one more.
    pub(super) fn growth(&self) -> usize {
        (self.tokens.len() + 1).div_ceil(self.block_tokens).saturating_sub(self.blocks.len())
    }

    /// The tokens of its block `index`, which is full.
    pub(super) fn block(&self, index: usize) -> &[TokenId] {
        &self.tokens[index * self.block_tokens..(index + 1) * self.block_tokens]
    }

    pub(super) fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.hasher.extend(&self.tokens);
    }

    /// Back to the queue: the tokens stay, the blocks are gone.
    pub(super) fn reset(&mut self) -> Vec<BlockSlot> {
        (self.computed, self.published, self.waits_for) = (0, 0, None);
        self.expect_cached(0);
        std::mem::take(&mut self.blocks)
    }
}
