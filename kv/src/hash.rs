//! Tokens to block hashes.
//!
//! Only full blocks have a hash. It is chained: xxh3-128 over (hash of the block before it, token ids as
//! little-endian u32), the first block over the seed. xxh3 is specified at
//! <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>. Golden vectors below keep every
//! release and every node equal.

mod sixteen;
pub(crate) mod xxh3;

use std::hash::{BuildHasherDefault, Hasher};

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

/// Tokens per block up to which hashing needs no memory of its own.
const STACK_TOKENS: usize = 64;

/// The hash of one full block after `parent`, or after the seed for a first block.
#[must_use]
pub fn block_hash(seed: HashSeed, parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
    let before = parent.map_or(seed.0, |hash| hash.0);
    if let Ok(sixteen) = <&[TokenId; 16]>::try_from(tokens) {
        return BlockHash(sixteen::hash(before, sixteen));
    }
    if tokens.len() > STACK_TOKENS {
        let mut bytes = vec![0; 16 + 4 * tokens.len()];
        return hash_into(&mut bytes, before, tokens);
    }
    let mut bytes = [0u8; 16 + 4 * STACK_TOKENS];
    hash_into(&mut bytes[..16 + 4 * tokens.len()], before, tokens)
}

/// Lays out and hashes; `bytes` is exactly as long as the input.
fn hash_into(bytes: &mut [u8], before: u128, tokens: &[TokenId]) -> BlockHash {
    lay_out(bytes, before, tokens);
    BlockHash(XxHash3_128::oneshot(bytes))
}

fn lay_out(bytes: &mut [u8], before: u128, tokens: &[TokenId]) {
    let (head, body) = bytes.split_at_mut(16);
    head.copy_from_slice(&before.to_le_bytes());
    for (place, token) in body.chunks_exact_mut(4).zip(tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
}

/// An image, a sound or the like in a prompt: tokens that stand for it say nothing of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Media {
    /// Its first token's place in the sequence.
    pub start: usize,
    /// Tokens that stand for it.
    pub len: usize,
    /// Digest of its content.
    pub digest: u128,
}

/// As [`block_hash`], for a block whose first token is the sequence's number `start`: media that reach into it count,
/// each by its digest and by how much of it came before. Without any, it is the same hash.
#[must_use]
pub fn media_block_hash(
    seed: HashSeed,
    parent: Option<BlockHash>,
    (start, tokens): (usize, &[TokenId]),
    media: &[Media],
) -> BlockHash {
    if media.is_empty() {
        return block_hash(seed, parent, tokens);
    }
    let end = start + tokens.len();
    let mut inside = media.iter().filter(|one| one.start < end && one.start + one.len > start).peekable();
    if inside.peek().is_none() {
        return block_hash(seed, parent, tokens);
    }
    let mut bytes = vec![0; 16 + 4 * tokens.len()];
    lay_out(&mut bytes, parent.map_or(seed.0, |hash| hash.0), tokens);
    for one in inside {
        bytes.extend_from_slice(&one.digest.to_le_bytes());
        // Where in the block it begins, or how much of it lies before the block.
        bytes.extend_from_slice(&(one.start as i64 - start as i64).to_le_bytes());
    }
    BlockHash(XxHash3_128::oneshot(&bytes))
}

/// The hashes of all full blocks of `tokens`; a partial block at the end has none.
#[must_use]
pub fn block_hashes(seed: HashSeed, tokens: &[TokenId], block_tokens: usize) -> Vec<BlockHash> {
    let mut hasher = BlockHasher::new(seed, block_tokens);
    hasher.extend(tokens);
    hasher.hashes
}

/// Hashes of a sequence that grows. Reads each token once, keeps none.
#[derive(Debug, Clone)]
pub struct BlockHasher {
    seed: HashSeed,
    block_tokens: usize,
    media: Vec<Media>,
    hashes: Vec<BlockHash>,
}

impl BlockHasher {
    /// Nothing hashed yet. `block_tokens` is at least 1.
    #[must_use]
    pub fn new(seed: HashSeed, block_tokens: usize) -> Self {
        Self { seed, block_tokens: block_tokens.max(1), media: Vec::new(), hashes: Vec::new() }
    }

    /// Media of the sequence, known before the blocks that they reach into are hashed.
    #[must_use]
    pub fn with_media(mut self, media: Vec<Media>) -> Self {
        self.media = media;
        self
    }

    /// Hashes the blocks of `sequence` that have become full. `sequence` is all of it and continues what was given before.
    pub fn extend(&mut self, sequence: &[TokenId]) {
        let done = self.hashes.len() * self.block_tokens;
        let rest = sequence.get(done..).unwrap_or_default();
        // Asked at each token of an answer: mostly there is nothing to do.
        if rest.len() < self.block_tokens {
            return;
        }
        if self.media.is_empty() && self.block_tokens == 16 {
            self.extend_by_sixteen(rest);
            return;
        }
        self.hashes.reserve(rest.len() / self.block_tokens);
        for block in rest.chunks_exact(self.block_tokens) {
            let (parent, start) = (self.hashes.last().copied(), self.hashes.len() * self.block_tokens);
            self.hashes.push(media_block_hash(self.seed, parent, (start, block), &self.media));
        }
    }

    /// The usual case, with the hash before each block kept in registers.
    fn extend_by_sixteen(&mut self, rest: &[TokenId]) {
        let mut before = self.hashes.last().map_or(self.seed.0, |hash| hash.0);
        let (blocks, _) = rest.as_chunks::<16>();
        self.hashes.extend(blocks.iter().map(|block| {
            before = sixteen::hash(before, block);
            BlockHash(before)
        }));
    }

    /// One hash per full block so far.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }
}

/// Digest of a set of blocks, whatever their order: equal sets have equal digests, and a difference shows but for
/// a chance of 2⁻⁶⁴. Adding and removing a block are the same operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SetDigest(pub u64);

impl SetDigest {
    /// Adds a block that is not in the set, removes one that is.
    pub fn toggle(&mut self, hash: BlockHash) {
        let folded = (hash.0 >> 64) as u64 ^ (hash.0 as u64).rotate_left(32);
        // Spread, so that related hashes do not cancel each other out.
        let spread = (folded ^ (folded >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= spread ^ (spread >> 29);
    }
}

/// Digests of a set of blocks, one for each of 64 parts of it: where two sets differ, they tell in which parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketDigests(Box<[SetDigest; Self::BUCKETS]>);

impl Default for BucketDigests {
    fn default() -> Self {
        Self(Box::new([SetDigest(0); Self::BUCKETS]))
    }
}

impl BucketDigests {
    /// Parts of a set.
    pub const BUCKETS: usize = 64;
    /// Memory of one.
    pub(crate) const HEAP_BYTES: usize = Self::BUCKETS * 8;

    /// The part that a block belongs to, below [`Self::BUCKETS`].
    #[must_use]
    pub fn bucket(hash: BlockHash) -> usize {
        (hash.0 >> 122) as usize
    }

    /// Adds a block that is not in the set, removes one that is.
    pub fn toggle(&mut self, hash: BlockHash) {
        self.0[Self::bucket(hash)].toggle(hash);
    }

    /// The digest of the whole set.
    #[must_use]
    pub fn total(&self) -> SetDigest {
        SetDigest(self.0.iter().fold(0, |all, part| all ^ part.0))
    }

    /// The parts, by bucket.
    #[must_use]
    pub fn parts(&self) -> &[SetDigest; Self::BUCKETS] {
        &self.0
    }

    /// The buckets in which two sets differ.
    pub fn differing<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = usize> + 'a {
        (0..Self::BUCKETS).filter(|bucket| self.0[*bucket] != other.0[*bucket])
    }
}

/// Hashing for maps keyed by [`BlockHash`]: the key is a hash already, so one product is enough.
pub(crate) type HashKeyed = BuildHasherDefault<FoldHasher>;

/// See [`HashKeyed`].
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct FoldHasher(u64);

impl Hasher for FoldHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, key: u128) {
        // A widening product folded: each bit of the key reaches the low bits, which choose the place, and the high ones.
        let (high, low) = ((key >> 64) as u64 ^ 0x9e37_79b9_7f4a_7c15, key as u64 ^ 0xd1b5_4a32_d192_ed03);
        let product = u128::from(high) * u128::from(low);
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests;
