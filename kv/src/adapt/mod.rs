//! An engine's own names of blocks to ours, once, in the worker: what leaves a worker speaks one language.
//!
//! Engines name a block by a hash of their own (vLLM: Python's hash, or SHA-256; SGLang likewise, by its page). With each stored
//! block comes its parent and its tokens, from which [`Adapter`] makes the hash that a router computes for a prompt. Their blocks may
//! be larger than ours (one gives several) or smaller (several give one, which counts while all of them are there). Called by a
//! worker that fronts such an engine, through [`Feed`], which puts messages in order. Never: announces a block under a name that
//! other content could have; what cannot be named (media, an adapter without a name) is left out and counted, as are its children.
//! Bounds: `blocks_max` engine blocks, beyond which new ones are left out and counted.

mod chain;
mod feed;
mod loose;
mod wire;
mod words;

use std::collections::HashMap;

use starling_ids::{BlockHash, TokenId};

use self::{
    chain::{Before, Chain, Place, grow},
    words::{is_named, salt, tier},
};
pub use self::{
    feed::{Arrival, Feed, HELD_MESSAGES_MAX, Step},
    wire::{
        BLOCK_TOKENS_MAX, EngineBatch, EngineEvent, EngineHash, PAYLOAD_MAX, RemovedBlocks, StoredBlocks, Unnameable,
        WireError, decode,
    },
};
use crate::{
    events::KvEvent,
    hash::{HashKeyed, HashSeed},
    index::Tier,
};

/// Tiers in [`Tier::ALL`].
const TIERS: usize = Tier::ALL.len();

/// The kinds of cache in which a block stands for all that was before it. Others forget (sliding windows, Mamba states).
const WHOLE: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];

/// What was left out, and why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Blocks whose name depends on something that is not told: media, prompt embeddings, an adapter known by number only.
    pub unnamed: u64,
    /// Blocks whose parent is not known: it was left out, or its event was lost.
    pub orphans: u64,
    /// Blocks of a group of layers that forgets, or of a second group.
    pub groups: u64,
    /// Blocks in a place that is not this engine's (`EXTERNAL` and the like).
    pub places: u64,
    /// Blocks beyond the bound.
    pub over: u64,
    /// Events of a kind that is not known here.
    pub kinds: u64,
}

/// The engine's blocks cannot be told in ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the engine's blocks have {theirs} tokens and the model's have {ours}: one must be a multiple of the other (vLLM: --block-size, SGLang: --page-size)"
)]
pub struct BlockTokensDiffer {
    /// Tokens of the engine's block.
    pub theirs: usize,
    /// Tokens of ours.
    pub ours: usize,
}

/// One block of the engine.
#[derive(Debug)]
struct Known {
    parent: Option<EngineHash>,
    /// At this block's end.
    end: Place,
    /// Our blocks that become full with this one.
    names: Box<[BlockHash]>,
    /// Our blocks that became full with a later one and have tokens of this one.
    covers: Vec<BlockHash>,
    /// How often the engine said that it stored it, by tier: it may hold one twice.
    holds: [u32; TIERS],
}

/// See the module.
#[derive(Debug)]
pub struct Adapter {
    seed: HashSeed,
    /// The seed that a salt names, where salts are names of seeds.
    salts: Option<fn(&str) -> Option<HashSeed>>,
    block_tokens: usize,
    blocks_max: usize,
    /// The one group of layers that is read, once it is known.
    group: Option<u32>,
    known: HashMap<EngineHash, Known>,
    /// Our blocks, and on which tiers they are: what has been announced and not taken back.
    present: HashMap<BlockHash, [bool; TIERS], HashKeyed>,
    left_out: LeftOut,
}

impl Adapter {
    /// Nothing known yet. `seed` is the model's own, `block_tokens` what its card says, `blocks_max` bounds the engine blocks kept.
    #[must_use]
    pub fn new(seed: HashSeed, block_tokens: usize, blocks_max: usize) -> Self {
        Self {
            seed,
            salts: None,
            block_tokens: block_tokens.max(1),
            blocks_max,
            group: None,
            known: HashMap::new(),
            present: HashMap::default(),
            left_out: LeftOut::default(),
        }
    }

    /// Takes salts for names of seeds: whoever asks the engine gave it such ones. Blocks with another salt are left out, since
    /// nobody else's prompt should find them.
    #[must_use]
    pub fn salted_by(mut self, seed_of: fn(&str) -> Option<HashSeed>) -> Self {
        self.salts = Some(seed_of);
        self
    }

    /// What was left out since the beginning.
    #[must_use]
    pub fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// Our blocks on a tier, in no order.
    pub fn blocks(&self, tier: Tier) -> impl Iterator<Item = BlockHash> + '_ {
        self.present.iter().filter(move |(_, on)| on[tier as usize]).map(|(hash, _)| *hash)
    }

    /// One event in our words, appended to `out`.
    ///
    /// # Errors
    /// The sizes of blocks do not fit; nothing changed.
    pub fn apply(&mut self, event: &EngineEvent, out: &mut Vec<KvEvent>) -> Result<(), BlockTokensDiffer> {
        match event {
            EngineEvent::Stored(stored) => self.stored(stored, out)?,
            EngineEvent::Removed(removed) => self.removed(removed, out),
            EngineEvent::Cleared => self.clear(out),
            EngineEvent::Other => self.left_out.kinds += 1,
        }
        Ok(())
    }

    /// Forgets everything: the engine cleared its cache, or nobody knows what it has.
    pub fn clear(&mut self, out: &mut Vec<KvEvent>) {
        for tier in Tier::ALL {
            if self.present.values().any(|on| on[tier as usize]) {
                out.push(if tier == Tier::Device { KvEvent::Cleared } else { KvEvent::ClearedBelow { tier } });
            }
        }
        self.known.clear();
        self.present.clear();
    }

    fn stored(&mut self, stored: &StoredBlocks, out: &mut Vec<KvEvent>) -> Result<(), BlockTokensDiffer> {
        let (theirs, ours) = (stored.block_tokens, self.block_tokens);
        if theirs == 0 || (theirs % ours != 0 && ours % theirs != 0) {
            return Err(BlockTokensDiffer { theirs, ours });
        }
        let count = stored.hashes.len() as u64;
        if !self.reads(stored.group, stored.kind.as_deref()) {
            self.left_out.groups += count;
            return Ok(());
        }
        let Some(tier) = tier(stored.medium.as_deref()) else {
            self.left_out.places += count;
            return Ok(());
        };
        let Some(mut place) = self.beginning(stored) else { return Ok(()) };
        let (mut parent, mut chain) = (stored.parent, Chain::new(tier));
        for (at, (hash, tokens)) in stored.hashes.iter().zip(stored.tokens.chunks_exact(theirs)).enumerate() {
            let left = count - at as u64;
            if !is_named(stored, at) {
                self.left_out.unnamed += left;
                break;
            }
            if !self.known.contains_key(hash) && self.known.len() >= self.blocks_max {
                self.left_out.over += left;
                break;
            }
            let before = place.before;
            place = self.store(*hash, parent, tokens, (tier, place));
            self.announce(hash, (before, tokens.len()), &mut chain, out);
            parent = Some(*hash);
        }
        chain.end(out);
        Ok(())
    }

    /// Whether blocks of this group of layers stand for the whole prefix, and are the ones that are followed.
    fn reads(&mut self, group: Option<u32>, kind: Option<&str>) -> bool {
        if kind.is_some_and(|kind| !WHOLE.contains(&kind)) {
            return false;
        }
        let Some(group) = group else { return true };
        *self.group.get_or_insert(group) == group
    }

    /// Where the chain of an event begins; counts what is left out because there is no such place.
    fn beginning(&mut self, stored: &StoredBlocks) -> Option<Place> {
        let count = stored.hashes.len() as u64;
        if let Some(parent) = stored.parent {
            let known = self.known.get(&parent);
            self.left_out.orphans += if known.is_none() { count } else { 0 };
            return known.map(|known| known.end.clone());
        }
        let Ok(adapter) = &stored.adapter else {
            self.left_out.unnamed += count;
            return None;
        };
        let seed = match (self.salts, salt(stored)) {
            (Some(seed_of), Some(salt)) => seed_of(salt).filter(|_| adapter.is_none()),
            (_, salt) => Some(self.seed.scoped(adapter.as_deref(), salt)),
        };
        let Some(seed) = seed else {
            self.left_out.unnamed += count;
            return None;
        };
        Some(Place { before: Before::Seed(seed), tail: Box::default() })
    }

    /// Remembers that a block is on a tier, and says where its chain has come to.
    fn store(
        &mut self,
        hash: EngineHash,
        parent: Option<EngineHash>,
        tokens: &[TokenId],
        (tier, place): (Tier, Place),
    ) -> Place {
        if let Some(known) = self.known.get_mut(&hash) {
            known.holds[tier as usize] = known.holds[tier as usize].saturating_add(1);
            return known.end.clone();
        }
        let (names, end) = grow(place, tokens, self.block_tokens);
        for name in &names {
            self.cover(parent, *name, tokens.len());
        }
        let mut holds = [0; TIERS];
        holds[tier as usize] = 1;
        self.known.insert(hash, Known { parent, end: end.clone(), names, covers: Vec::new(), holds });
        end
    }

    /// Tells the engine's blocks before one that `name` has tokens of theirs, too.
    fn cover(&mut self, mut parent: Option<EngineHash>, name: BlockHash, theirs: usize) {
        for _ in 1..self.block_tokens / theirs {
            let Some(known) = parent.and_then(|hash| self.known.get_mut(&hash)) else { return };
            known.covers.push(name);
            parent = known.parent;
        }
    }

    /// Puts on the chain what is whole on its tier with this block, and was not before.
    fn announce(
        &mut self,
        hash: &EngineHash,
        (before, theirs): (Before, usize),
        chain: &mut Chain,
        out: &mut Vec<KvEvent>,
    ) {
        if !self.is_whole(hash, chain.tier, theirs) {
            return;
        }
        let Some(known) = self.known.get(hash) else { return };
        let mut parent = before.block();
        for name in &known.names {
            let on = &mut self.present.entry(*name).or_default()[chain.tier as usize];
            if !std::mem::replace(on, true) {
                chain.push(parent, *name, out);
            }
            parent = Some(*name);
        }
    }

    /// Whether all engine blocks that our last block before this one's end is made of are on the tier.
    fn is_whole(&self, hash: &EngineHash, tier: Tier, theirs: usize) -> bool {
        let mut next = Some(*hash);
        for _ in 0..(self.block_tokens / theirs).max(1) {
            let Some(known) = next.and_then(|hash| self.known.get(&hash)) else { return false };
            if known.holds[tier as usize] == 0 {
                return false;
            }
            next = known.parent;
        }
        true
    }

    fn removed(&mut self, removed: &RemovedBlocks, out: &mut Vec<KvEvent>) {
        let count = removed.hashes.len() as u64;
        if removed.group.is_some_and(|group| self.group.is_some_and(|read| read != group)) {
            self.left_out.groups += count;
            return;
        }
        let Some(tier) = tier(removed.medium.as_deref()) else {
            self.left_out.places += count;
            return;
        };
        let mut blocks = Vec::new();
        for hash in &removed.hashes {
            let Some(known) = self.known.get_mut(hash) else { continue };
            let holds = &mut known.holds[tier as usize];
            *holds = holds.saturating_sub(1);
            if *holds > 0 {
                continue;
            }
            for name in known.names.iter().chain(&known.covers) {
                blocks.extend(take_back(&mut self.present, *name, tier));
            }
            if known.holds == [0; TIERS] {
                self.known.remove(hash);
            }
        }
        if !blocks.is_empty() {
            out.push(match tier {
                Tier::Device => KvEvent::Removed { blocks },
                tier => KvEvent::RemovedBelow { tier, blocks },
            });
        }
    }
}

/// Takes a block off a tier; gives it back if it was there.
fn take_back(
    present: &mut HashMap<BlockHash, [bool; TIERS], HashKeyed>,
    name: BlockHash,
    tier: Tier,
) -> Option<BlockHash> {
    let on = present.get_mut(&name)?;
    let was = std::mem::replace(&mut on[tier as usize], false);
    if *on == [false; TIERS] {
        present.remove(&name);
    }
    was.then_some(name)
}

#[cfg(test)]
mod tests;
