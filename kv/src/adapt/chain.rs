//! How far a sequence has come in our blocks, and the events that say so.

use starling_ids::{BlockHash, TokenId};

use crate::{
    events::KvEvent,
    hash::{HashSeed, block_hash},
    index::Tier,
};

/// What a block's hash goes on from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Before {
    /// Nothing full yet: the seed of the sequence.
    Seed(HashSeed),
    /// Our last full block.
    Block(BlockHash),
}

impl Before {
    pub(super) fn block(self) -> Option<BlockHash> {
        if let Self::Block(hash) = self { Some(hash) } else { None }
    }

    fn then(self, tokens: &[TokenId]) -> BlockHash {
        match self {
            Self::Seed(seed) => block_hash(seed, None, tokens),
            // With a parent the seed has no part in it.
            Self::Block(parent) => block_hash(HashSeed(0), Some(parent), tokens),
        }
    }
}

/// How far a sequence has come: our last full block, and the tokens after it.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) before: Before,
    pub(super) tail: Box<[TokenId]>,
}

/// Our blocks on their way into one event.
pub(super) struct Chain {
    pub(super) tier: Tier,
    parent: Option<BlockHash>,
    blocks: Vec<BlockHash>,
}

impl Chain {
    pub(super) fn new(tier: Tier) -> Self {
        Self { tier, parent: None, blocks: Vec::new() }
    }

    pub(super) fn push(&mut self, parent: Option<BlockHash>, name: BlockHash, out: &mut Vec<KvEvent>) {
        if self.blocks.last().copied() != parent || self.blocks.is_empty() {
            self.end(out);
            self.parent = parent;
        }
        self.blocks.push(name);
    }

    pub(super) fn end(&mut self, out: &mut Vec<KvEvent>) {
        let (parent, blocks) = (self.parent, std::mem::take(&mut self.blocks));
        if !blocks.is_empty() {
            out.push(match self.tier {
                Tier::Device => KvEvent::Stored { parent, blocks },
                tier => KvEvent::StoredBelow { tier, parent, blocks },
            });
        }
    }
}

/// Our blocks that become full with `tokens`, and where the sequence is then.
pub(super) fn grow(place: Place, tokens: &[TokenId], block_tokens: usize) -> (Box<[BlockHash]>, Place) {
    let all = [&place.tail, tokens].concat();
    let (mut before, mut names) = (place.before, Vec::with_capacity(all.len() / block_tokens));
    let full = all.chunks_exact(block_tokens);
    let tail = full.remainder().into();
    for block in full {
        let name = before.then(block);
        names.push(name);
        before = Before::Block(name);
    }
    (names.into(), Place { before, tail })
}
