//! When a worker counts as taken.
//!
//! Called by [`crate::route::fleet`] whenever something about a worker changed. Two bounds: while some worker is below the first one, requests go out at once; when none is, they
//! wait in the queue, where they are still ordered by right and bound to no worker. The second one is the worker's own: beyond
//! it it would refuse, or keep the request waiting for KV blocks. Both are judged by the worker's report and by what was given to
//! it since: live sequences pin blocks, prompts that wait or were sent will take theirs. Pure.

use serde::{Deserialize, Serialize};

use crate::route::fleet::{Fleet, Slot};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rooms {
    /// Sequences handed to a worker ahead of a free place in its batch, in percent of the batch; at least one. They keep it
    /// busy while the next one is on its way. No setting: a batch that is full has no use for more.
    pub ahead_percent: u32,
    /// Prompt tokens handed to a worker ahead, in steps of its engine; 0 for any number. A prompt of any length is
    /// given to a worker that is below. Fewer than two leave it idle between steps; what is more is bound to it before it is known
    /// what its cache will hold then.
    pub prefill_steps: u32,
    /// KV blocks promised to requests on a worker, in percent of its pool; 0 for any number. Above 100 some requests wait there
    /// for blocks of those before them, which keeps its pool full while the next one is on its way.
    pub kv_percent: u32,
}

/// What a request needs of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Need {
    /// Sequences.
    pub sequences: u32,
    /// KV blocks of its prompt that the worker lacks; 0 for one that leaves the wait for blocks to the worker.
    pub blocks: u64,
}

/// Why a worker is given nothing now, or a request waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeldBack {
    /// Others wait already.
    #[default]
    Turn,
    /// Batches are full, with those ahead.
    Batch,
    /// Enough prompts are queued to keep it busy.
    Prompts,
    /// The KV blocks are held or promised.
    Blocks,
    /// No worker with room may have the request.
    Elsewhere,
}

impl HeldBack {
    /// As receipts say it: what is waited for.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Turn => "its turn",
            Self::Batch => "a place in a batch",
            Self::Prompts => "queued prompts to be computed",
            Self::Blocks => "KV blocks",
            Self::Elsewhere => "a worker that may have it",
        }
    }
}

impl Default for Rooms {
    /// Three steps: the one under way, the next, and one that may turn out smaller than it looks. What is given later is given by
    /// what the caches hold then.
    fn default() -> Self {
        Self { ahead_percent: 25, prefill_steps: 3, kv_percent: 110 }
    }
}

impl Rooms {
    /// Whether a worker should be given one more request now, of however many answers.
    #[must_use]
    pub fn open(&self, fleet: &Fleet, slot: Slot, block_tokens: u32) -> bool {
        self.held_back(fleet, slot, block_tokens).is_none()
    }

    /// Why a worker should not be given one more request now.
    #[must_use]
    pub fn held_back(&self, fleet: &Fleet, slot: Slot, block_tokens: u32) -> Option<HeldBack> {
        let places = fleet.places[slot];
        if places.sequences == 0 {
            return None;
        }
        let ahead = (places.sequences.saturating_mul(self.ahead_percent) / 100).max(1).min(places.waiting);
        let tokens = u64::from(self.prefill_steps) * u64::from(places.step_tokens);
        if fleet.in_flight(slot) >= places.sequences.saturating_add(ahead) {
            Some(HeldBack::Batch)
        } else if tokens > 0 && fleet.queued_tokens(slot) >= tokens {
            Some(HeldBack::Prompts)
        } else if self.blocks_left(fleet, slot, block_tokens) == 0 {
            Some(HeldBack::Blocks)
        } else {
            None
        }
    }

    /// Whether a worker would take so much more. One that has nothing to do is asked in any case.
    #[must_use]
    pub fn fits(&self, fleet: &Fleet, slot: Slot, need: Need, block_tokens: u32) -> bool {
        let room = fleet.room(slot);
        // One that would take any number is asked in any case.
        if room == u32::MAX {
            return true;
        }
        room >= need.sequences && (need.blocks == 0 || need.blocks <= self.blocks_left(fleet, slot, block_tokens))
    }

    /// KV blocks that may still be promised on a worker. It keeps one in a hundred free itself.
    #[must_use]
    pub fn blocks_left(&self, fleet: &Fleet, slot: Slot, block_tokens: u32) -> u64 {
        let pool = u64::from(fleet.places[slot].blocks);
        if pool == 0 || self.kv_percent == 0 {
            return u64::MAX;
        }
        let queued = fleet.heard[slot].prefill_tokens.div_ceil(u64::from(block_tokens.max(1)));
        let most = (pool - pool / 100) * u64::from(self.kv_percent) / 100;
        most.saturating_sub(fleet.blocks(slot) + queued)
    }
}
