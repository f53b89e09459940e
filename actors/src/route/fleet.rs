//! What a shard knows of the workers of one model, in columns: one entry a worker in each.
//!
//! Written by [`super::desk`] from the directory, from load reports and from its own reservations; read by policies, which
//! run down a column instead of gathering a row from many maps: thousands of workers are scored in microseconds.
//! Never: decides, reads a clock. Bounds: one entry per worker; the slot of one that left is given to the next.

use std::{collections::HashMap, time::Duration};

use starling_ids::{Incarnation, WorkerId};

use super::{
    rates::Rates,
    split::{KvLink, Role},
};

/// A worker's place in the columns.
pub type Slot = usize;

/// Whether a worker may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Standing {
    /// Nobody has this slot.
    #[default]
    Vacant,
    /// Takes requests.
    Sound,
    /// Suspect, silent or broken off: chosen only when there is no other.
    Doubtful,
    /// Takes nothing new.
    Draining,
}

/// Bounds of a worker's engine, as its card in the directory says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Places {
    /// Sequences in its batch.
    pub sequences: u32,
    /// Sequences that may wait behind them.
    pub waiting: u32,
    /// Tokens in one step.
    pub step_tokens: u32,
    /// KV blocks in its pool.
    pub blocks: u32,
    /// What it is for.
    pub role: Role,
}

/// A worker's own account, as policies need it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Heard {
    /// When it came, on the shard's clock.
    pub at: Duration,
    /// Sequences in its batch.
    pub running: u32,
    /// Sequences queued.
    pub waiting: u32,
    /// Prompt tokens not computed yet.
    pub prefill_tokens: u64,
    /// KV blocks held by live sequences.
    pub blocks_pinned: u32,
    /// Requests that it has taken since it began: those of them that run or wait are in this account.
    pub admitted: u64,
    /// Learned rates; `None` before it has computed enough to know.
    pub rates: Option<Rates>,
    /// How fast blocks come to it.
    pub link: KvLink,
}

/// One entry a worker in each column. Indexed by [`Slot`]; all have [`Fleet::width`] entries.
#[derive(Debug, Default)]
pub struct Fleet {
    /// May it be chosen?
    pub standing: Vec<Standing>,
    /// Its bounds.
    pub places: Vec<Places>,
    /// Its last account; zeros before the first one.
    pub heard: Vec<Heard>,
    /// Whether there was one.
    pub reported: Vec<bool>,
    /// The rates to judge it by: its own, near-equal ones levelled; the fleet's mean while it has none.
    pub rates: Vec<Rates>,
    /// Requests that this shard gave it and that have not ended.
    pub requests: Vec<u32>,
    /// Their sequences.
    pub sequences: Vec<u32>,
    /// Sequences of them that its account does not cover yet.
    pub unreported: Vec<u32>,
    /// Uncached prompt tokens of those.
    pub unreported_tokens: Vec<u64>,
    /// KV blocks that those will take.
    pub unreported_blocks: Vec<u64>,
    /// When it was last chosen, counted in decisions; 0 for never.
    pub chosen: Vec<u64>,
    /// It failed a request lately and is avoided until then.
    pub cooling: Vec<Duration>,
    lives: Vec<Option<(WorkerId, Incarnation)>>,
    slots: HashMap<WorkerId, Slot>,
    vacant: Vec<Slot>,
}

impl Fleet {
    /// Slots in use or vacant: the length of every column.
    #[must_use]
    pub fn width(&self) -> usize {
        self.standing.len()
    }

    /// Workers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The slot of a worker.
    #[must_use]
    pub fn slot(&self, worker: &WorkerId) -> Option<Slot> {
        self.slots.get(worker).copied()
    }

    /// Who has a slot, in which life.
    #[must_use]
    pub fn life(&self, slot: Slot) -> Option<&(WorkerId, Incarnation)> {
        self.lives.get(slot).and_then(Option::as_ref)
    }

    /// Every worker with its slot, in no order.
    pub fn workers(&self) -> impl Iterator<Item = (&WorkerId, Slot)> {
        self.slots.iter().map(|(worker, slot)| (worker, *slot))
    }

    /// Sequences on a worker: those in its account and those it has not told of yet.
    #[must_use]
    pub fn in_flight(&self, slot: Slot) -> u32 {
        let heard = &self.heard[slot];
        // After a restart of the shard the book is short; a worker that reports late is short itself.
        (heard.running + heard.waiting + self.unreported[slot]).max(self.sequences[slot])
    }

    /// Prompt tokens that wait on a worker.
    #[must_use]
    pub fn queued_tokens(&self, slot: Slot) -> u64 {
        self.heard[slot].prefill_tokens + self.unreported_tokens[slot]
    }

    /// KV blocks taken on a worker, or promised there.
    #[must_use]
    pub fn blocks(&self, slot: Slot) -> u64 {
        u64::from(self.heard[slot].blocks_pinned) + self.unreported_blocks[slot]
    }

    /// Gives a worker a slot, or a new life its old one. The columns start as nothing is known.
    pub(super) fn seat(&mut self, worker: &WorkerId, incarnation: Incarnation, places: Places) -> Slot {
        let slot = self.slots.get(worker).copied().or_else(|| self.vacant.pop()).unwrap_or_else(|| self.widen());
        let same = self.lives[slot].as_ref().is_some_and(|(w, life)| w == worker && *life == incarnation);
        if !same {
            self.wipe(slot);
            self.rates[slot] = self.common();
            self.lives[slot] = Some((worker.clone(), incarnation));
            self.slots.insert(worker.clone(), slot);
        }
        self.places[slot] = places;
        slot
    }

    /// Takes a worker out.
    pub(super) fn vacate(&mut self, worker: &WorkerId) -> Option<Slot> {
        let slot = self.slots.remove(worker)?;
        self.wipe(slot);
        self.vacant.push(slot);
        Some(slot)
    }

    /// Takes a worker's account.
    pub(super) fn hear(&mut self, slot: Slot, heard: Heard) {
        let learned = heard.rates != self.heard[slot].rates;
        self.heard[slot] = heard;
        self.reported[slot] = true;
        if learned {
            self.level();
        }
    }

    fn widen(&mut self) -> Slot {
        self.standing.push(Standing::Vacant);
        self.places.push(Places::default());
        self.heard.push(Heard::default());
        self.reported.push(false);
        self.rates.push(Rates::default());
        self.requests.push(0);
        self.sequences.push(0);
        self.unreported.push(0);
        self.unreported_tokens.push(0);
        self.unreported_blocks.push(0);
        self.chosen.push(0);
        self.cooling.push(Duration::ZERO);
        self.lives.push(None);
        self.lives.len() - 1
    }

    fn wipe(&mut self, slot: Slot) {
        self.standing[slot] = Standing::Vacant;
        self.places[slot] = Places::default();
        self.heard[slot] = Heard::default();
        self.reported[slot] = false;
        self.requests[slot] = 0;
        self.sequences[slot] = 0;
        self.unreported[slot] = 0;
        self.unreported_tokens[slot] = 0;
        self.unreported_blocks[slot] = 0;
        self.chosen[slot] = 0;
        self.cooling[slot] = Duration::ZERO;
        self.lives[slot] = None;
    }

    fn common(&self) -> Rates {
        let seated = self.slots.values();
        Rates::common(seated.filter_map(|slot| self.heard[*slot].rates))
    }

    /// Equal machines learn slightly different rates: they are judged by their mean.
    fn level(&mut self) {
        let common = self.common();
        for slot in self.slots.values() {
            self.rates[*slot] = self.heard[*slot].rates.map_or(common, |own| own.near(common));
        }
    }
}
