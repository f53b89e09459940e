//! What a shard knows of the workers of one model, in columns: one entry a worker in each.
//!
//! Written by [`super::desk`] from the directory, from load reports and from its own reservations; read by policies, which
//! run down a column instead of gathering a row from many maps: thousands of workers are scored in microseconds.
//! Never: decides, reads a clock. Bounds: one entry per worker; the slot of one that left is given to the next.

use std::{collections::HashMap, hash::Hasher, sync::Arc, time::Duration};

use starling_ids::{Incarnation, WorkerId};
use twox_hash::XxHash3_64;

use super::{
    below::TierRates,
    columns::Columns,
    given::{Given, work},
    policy::mix,
    queue::rooms::Rooms,
    rates::{Learned, Rates},
    split::{KvLink, Role},
    wishes::{Labels, TAINT},
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
    /// How fast they come from its own slower tiers; `None` when it has none, or does not say.
    pub tiers: Option<TierRates>,
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
    /// Work that each was given of late.
    given: Given,
    /// It failed a request lately and is avoided until then.
    pub cooling: Vec<Duration>,
    /// What the columns above amount to, for whoever runs down all of them.
    pub(super) columns: Columns,
    /// When a worker counts as taken, and tokens per block.
    rooms: Option<(Rooms, u32)>,
    /// When the last of those that cool may be chosen again.
    cooled: Duration,
    /// Workers with a role of their own.
    specialists: usize,
    /// Workers whose blocks can be reached by others.
    reachable: usize,
    /// Accounts with new rates since the rates were levelled.
    unlevelled: usize,
    /// Every worker's learned rates, as a sum.
    learned: Learned,
    /// Which of the sets of labels it has; 0 is the empty one.
    label_sets: Vec<u32>,
    sets: Vec<Arc<Labels>>,
    set_of: HashMap<Arc<Labels>, u32>,
    tainted: bool,
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
        self.columns.in_flight[slot]
    }

    /// Sequences that a worker would still take. One that has nothing to do is asked in any case.
    #[must_use]
    pub fn room(&self, slot: Slot) -> u32 {
        self.columns.room[slot]
    }

    /// Whether every slot's worker is sound and none cools.
    pub(super) fn all_sound(&self, now: Duration) -> bool {
        now >= self.cooled && self.standing.iter().filter(|standing| **standing != Standing::Sound).count() == 0
    }

    /// Sequences on all workers.
    #[must_use]
    pub fn in_flight_total(&self) -> u64 {
        self.columns.in_flight_total
    }

    /// A number for a worker that is the same on every node.
    #[must_use]
    pub fn key(&self, slot: Slot) -> u64 {
        self.columns.keys[slot]
    }

    /// Whether some worker has a role of its own.
    #[must_use]
    pub fn has_specialists(&self) -> bool {
        self.specialists > 0
    }

    /// Whether some worker's blocks can be reached by others.
    pub(super) fn has_reachable(&self) -> bool {
        self.reachable > 0
    }

    /// Whether a worker cools at `now`.
    #[must_use]
    pub fn cools(&self, slot: Slot, now: Duration) -> bool {
        now < self.cooled && now < self.cooling[slot]
    }

    /// Avoids a worker until then.
    pub(super) fn cool(&mut self, slot: Slot, until: Duration) {
        self.cooling[slot] = until;
        self.cooled = self.cooled.max(until);
    }

    /// Works a worker's columns out anew, after one of them changed.
    pub(super) fn refresh(&mut self, slot: Slot) {
        let heard = &self.heard[slot];
        // After a restart of the shard the book is short; a worker that reports late is short itself.
        let in_flight = (heard.running + heard.waiting + self.unreported[slot]).max(self.sequences[slot]);
        let (queued, taken) = (self.queued_tokens(slot), self.blocks(slot));
        self.columns.refresh(slot, self.rates[slot], self.places[slot], (in_flight, queued, taken));
        let (left, open) = self.rooms.map_or((u64::MAX, true), |(rooms, block_tokens)| {
            (rooms.blocks_left(self, slot, block_tokens), rooms.open(self, slot, block_tokens))
        });
        self.columns.note_room(slot, left, open);
    }

    /// When a worker counts as taken, and tokens per block of the model; nothing is held back without.
    pub(super) fn rooms(&self) -> Option<(Rooms, u32)> {
        self.rooms
    }

    /// Holds requests back from workers that are taken by these bounds.
    pub(super) fn hold_back(&mut self, rooms: Rooms, block_tokens: u32) {
        if self.rooms != Some((rooms, block_tokens)) {
            self.rooms = Some((rooms, block_tokens));
            (0..self.width()).for_each(|slot| self.refresh(slot));
        }
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

    /// Lower for a worker that was given less work of late; among equals, for one chosen longer ago.
    #[must_use]
    pub fn given(&self, slot: Slot) -> (u64, u64) {
        (self.given.rank(slot), self.chosen[slot])
    }

    /// Counts work given: uncached prompt tokens and those of the answer.
    pub(super) fn give(&mut self, slot: Slot, prompt: u64, answer: f64, now: Duration) {
        self.given.add(slot, work(self.rates[slot], prompt, answer), now);
    }

    /// A worker that was out of use counts as given as much as any other.
    pub(super) fn rejoin(&mut self, slot: Slot) {
        self.given.level(slot);
    }

    /// Labels of a worker: its node's and its instance's.
    #[must_use]
    pub fn labels(&self, slot: Slot) -> Option<&Labels> {
        self.sets.get(self.label_set(slot)).map(|set| &**set)
    }

    /// The number of a worker's set of labels: many workers share one.
    #[must_use]
    pub fn label_set(&self, slot: Slot) -> usize {
        self.label_sets.get(slot).map_or(usize::MAX, |set| *set as usize)
    }

    /// The sets of labels, in the order of their numbers. Some may belong to no worker any more.
    pub fn label_sets(&self) -> impl Iterator<Item = &Labels> {
        self.sets.iter().map(|set| &**set)
    }

    /// Whether some set of labels holds a taint.
    #[must_use]
    pub fn tainted(&self) -> bool {
        self.tainted
    }

    /// Gives a worker its labels.
    pub(super) fn set_labels(&mut self, slot: Slot, labels: &Arc<Labels>) {
        if self.sets.len() > 2 * self.width() + 16 {
            self.forget_labels();
        }
        self.label_sets[slot] = self.number_of(labels);
    }

    fn number_of(&mut self, labels: &Arc<Labels>) -> u32 {
        if let Some(known) = self.set_of.get(labels) {
            return *known;
        }
        let number = u32::try_from(self.sets.len()).unwrap_or(u32::MAX);
        self.tainted |= labels.keys().any(|key| key.starts_with(TAINT));
        self.sets.push(labels.clone());
        self.set_of.insert(labels.clone(), number);
        number
    }

    /// Drops sets of labels that no worker has any more.
    fn forget_labels(&mut self) {
        let sets = std::mem::take(&mut self.sets);
        self.set_of.clear();
        self.tainted = false;
        // The empty one stays the first.
        self.number_of(&Arc::default());
        for slot in 0..self.label_sets.len() {
            if let Some(set) = sets.get(self.label_set(slot)) {
                self.label_sets[slot] = self.number_of(set);
            }
        }
    }

    /// Gives a worker a slot, or a new life its old one. The columns start as nothing is known.
    pub(super) fn seat(&mut self, worker: &WorkerId, incarnation: Incarnation, places: Places) -> Slot {
        let slot = self.slots.get(worker).copied().or_else(|| self.vacant.pop()).unwrap_or_else(|| self.widen());
        let same = self.lives[slot].as_ref().is_some_and(|(w, life)| w == worker && *life == incarnation);
        if !same {
            self.wipe(slot);
            self.rates[slot] = self.learned.mean();
            self.columns.keys[slot] = worker_key(worker);
            self.lives[slot] = Some((worker.clone(), incarnation));
            self.slots.insert(worker.clone(), slot);
        }
        self.specialists += usize::from(places.role != Role::Both);
        self.specialists -= usize::from(self.places[slot].role != Role::Both);
        self.places[slot] = places;
        self.refresh(slot);
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
        let before = self.heard[slot].rates;
        self.reachable -= usize::from(self.heard[slot].link.block_bytes > 0);
        self.reachable += usize::from(heard.link.block_bytes > 0);
        self.heard[slot] = heard;
        self.reported[slot] = true;
        if heard.rates != before {
            self.learned.replace(before, heard.rates);
            self.unlevelled += 1;
            // The mean hardly moves by one of many, so all are levelled once for as many accounts as there are workers that
            // know their rates. The first of them counts at once: beside the prior it would look far faster than its equals.
            if self.unlevelled >= self.learned.count() {
                self.level();
            }
            self.level_one(slot);
        }
        self.refresh(slot);
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
        self.given.widen();
        self.cooling.push(Duration::ZERO);
        // Without labels of its own until it is given some.
        let none = self.number_of(&Arc::default());
        self.label_sets.push(none);
        self.columns.widen();
        self.lives.push(None);
        self.lives.len() - 1
    }

    fn wipe(&mut self, slot: Slot) {
        self.learned.replace(self.heard[slot].rates, None);
        self.standing[slot] = Standing::Vacant;
        self.specialists -= usize::from(self.places[slot].role != Role::Both);
        self.places[slot] = Places::default();
        self.reachable -= usize::from(self.heard[slot].link.block_bytes > 0);
        self.heard[slot] = Heard::default();
        self.reported[slot] = false;
        self.requests[slot] = 0;
        self.sequences[slot] = 0;
        self.unreported[slot] = 0;
        self.unreported_tokens[slot] = 0;
        self.unreported_blocks[slot] = 0;
        self.chosen[slot] = 0;
        self.given.wipe(slot);
        self.cooling[slot] = Duration::ZERO;
        self.label_sets[slot] = 0;
        self.lives[slot] = None;
        self.refresh(slot);
    }

    /// Equal machines learn slightly different rates: they are judged by their mean.
    fn level(&mut self) {
        self.unlevelled = 0;
        // Anew: a sum that is only added to and taken from drifts.
        self.learned = Learned::default();
        for slot in 0..self.width() {
            self.learned.replace(None, self.heard[slot].rates);
        }
        for slot in 0..self.width() {
            self.level_one(slot);
            self.refresh(slot);
        }
    }

    fn level_one(&mut self, slot: Slot) {
        let mean = self.learned.mean();
        self.rates[slot] = self.heard[slot].rates.map_or(mean, |own| own.near(mean));
    }
}

/// The same number for a worker on every node, whatever its slot there.
fn worker_key(WorkerId { node, index }: &WorkerId) -> u64 {
    let mut hasher = XxHash3_64::with_seed(1);
    hasher.write(node.as_str().as_bytes());
    mix(hasher.finish(), u64::from(*index))
}
