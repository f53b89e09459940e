//! How a worker is chosen: filters leave some out, scorers add up what each would cost, a picker takes one.
//!
//! Called by [`super::desk`] for each request. To write a policy of your own, implement one of the three traits (a scorer
//! is one function: [`plain`] has the shortest) and compose it with those that are here. Pure: randomness is a
//! number in the question. Never: I/O, a clock, a lock.

mod affinity;
mod config;
mod cost;
mod dynamo;
mod filters;
mod params;
mod pickers;
mod plain;
mod shared;

use std::fmt::Debug;

pub use config::{Custom, Part, PolicyConfig, PolicyName};
pub use params::{Params, PolicyError, Table, Value};
use starling_ids::{BlockHash, RequestId};

pub use affinity::{PrefixHash, Session};
pub use cost::Cost;
pub(super) use cost::by_its_account;
pub use dynamo::{Dynamo, DynamoWeights};
pub use filters::{Adapted, Excluded, Needed, Pinned, Revised, Selected, Tainted, Topology};
use pickers::FEW;
pub use pickers::{Fairest, Lowest, Softmin, TwoDraws};
pub use plain::{AnyOf, Far, Fill, KvUse, LeastLoaded, Missing, Turns};

use super::{
    below::{Below, Load},
    desk::Ask,
    fleet::{Fleet, Slot},
};

/// All that one choice is made from.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The request.
    pub ask: &'a Ask<'a>,
    /// The workers.
    pub fleet: &'a Fleet,
    /// For each slot, leading blocks of the prompt in that worker's cache.
    pub hits: &'a [u32],
    /// For each slot, what follows those blocks on the worker's slower tiers; empty when nobody has any.
    pub below: &'a [Below],
    /// A number that differs from decision to decision and from shard to shard.
    pub draw: u64,
}

impl Question<'_> {
    /// Prompt tokens that a worker would have to compute.
    #[must_use]
    pub fn missed_tokens(&self, slot: Slot) -> u32 {
        let hit = self.hits[slot].saturating_mul(self.ask.block_tokens);
        // The last token is always computed, for what follows it.
        self.ask.prompt_tokens.saturating_sub(hit).max(1)
    }

    /// Those of them that it would not load instead.
    #[must_use]
    pub fn computed_tokens(&self, slot: Slot) -> u32 {
        let loaded = self.load(slot).blocks.saturating_mul(self.ask.block_tokens);
        self.missed_tokens(slot).saturating_sub(loaded).max(1)
    }

    /// What a worker would bring to its device from its slower tiers, because that is sooner than computing it.
    #[must_use]
    pub fn load(&self, slot: Slot) -> Load {
        let below = self.below.get(slot).copied().unwrap_or_default();
        let Some(rates) = self.fleet.heard[slot].tiers.filter(|_| below.any()) else { return Load::default() };
        let (hits, block) = (self.hits[slot], self.ask.block_tokens.max(1));
        // The last token is computed in any case.
        let most = (self.ask.prompt_tokens.saturating_sub(1) / block).saturating_sub(hits);
        below.after(hits).load(rates, f64::from(block) * self.fleet.columns.worker(slot).prefill, most)
    }
}

/// Leaves workers out.
pub trait Filter: Debug + Send {
    /// One word for receipts.
    fn name(&self) -> &'static str;
    /// Called before the workers are gone through; false when the filter keeps them all.
    fn prepare(&mut self, _question: &Question<'_>) -> bool {
        true
    }
    /// Whether a worker may have this request.
    fn keeps(&self, question: &Question<'_>, slot: Slot) -> bool;
    /// What remains when this filter would leave nobody: nobody (false), or everybody it was given: a preference.
    fn yields(&self) -> bool {
        false
    }
}

/// Says what a request would cost on a worker. Lower is better; scorers of one policy should share a unit.
pub trait Scorer: Debug + Send {
    /// One word for receipts.
    fn name(&self) -> &'static str;
    /// What it would cost.
    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64;
    /// Adds `weight` times the cost of every slot to `costs`; by default slot by slot.
    fn add(&self, question: &Question<'_>, weight: f64, costs: &mut [f64]) {
        for (slot, cost) in costs.iter_mut().enumerate() {
            *cost += weight * self.cost(question, slot);
        }
    }
    /// The cost by its parts, for receipts; by default the whole under its name.
    fn terms(&self, question: &Question<'_>, slot: Slot, told: &mut dyn FnMut(&'static str, f64)) {
        told(self.name(), self.cost(question, slot));
    }
    /// Called before the costs of one request are asked for.
    fn prepare(&mut self, _question: &Question<'_>) {}
    /// A request was given to a worker.
    fn reserved(&mut self, _ask: &Ask<'_>, _slot: Slot, _hit_blocks: u32) {}
    /// Its first token came back: its prompt is computed.
    fn prefilled(&mut self, _request: RequestId, _slot: Slot) {}
    /// It ended there.
    fn released(&mut self, _request: RequestId, _slot: Slot) {}
    /// A worker left, or began a new life.
    fn vacated(&mut self, _slot: Slot) {}
}

/// Takes one of those that are left.
pub trait Picker: Debug + Send {
    /// The slot, and how many were as good. `costs[i]` belongs to `slots[i]`; there is at least one.
    fn pick(&mut self, question: &Question<'_>, slots: &[Slot], costs: &[f64]) -> (Slot, usize);
}

/// Filters, scorers with weights, a picker.
#[derive(Debug)]
pub struct Policy {
    /// What it is called in receipts and metrics.
    pub name: &'static str,
    /// All must keep a worker.
    pub filters: Vec<Box<dyn Filter>>,
    /// Costs are added up, each times its weight.
    pub scorers: Vec<(f64, Box<dyn Scorer>)>,
    /// Decides.
    pub picker: Box<dyn Picker>,
}

/// A choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The worker.
    pub slot: Slot,
    /// Its cost.
    pub cost: f64,
    /// How many were as good.
    pub near_equals: usize,
}

/// Room for one choice, kept between choices so that none allocates.
#[derive(Debug, Default)]
pub struct Scratch {
    costs: Vec<f64>,
    slots: Vec<Slot>,
    left: Vec<f64>,
}

impl Scratch {
    /// Puts the cheapest of the last choice into `best` with their costs, cheapest first.
    pub fn cheapest(&self, count: usize, best: &mut Vec<(Slot, f64)>) {
        best.clear();
        if count == 0 {
            return;
        }
        for (slots, costs) in self.slots.chunks(FEW).zip(self.left.chunks(FEW)) {
            // Hardly any is better than those found so far: most are passed over together.
            let worst = best.get(count - 1).map_or(f64::INFINITY, |(_, worst)| *worst);
            if best.len() == count && costs.iter().filter(|cost| **cost < worst || cost.is_nan()).count() == 0 {
                continue;
            }
            for (slot, cost) in slots.iter().zip(costs) {
                if best.len() == count && best.last().is_some_and(|(_, worst)| cost >= worst) {
                    continue;
                }
                let at = best.partition_point(|(_, better)| better <= cost);
                best.insert(at, (*slot, *cost));
                best.truncate(count);
            }
        }
    }
}

impl Policy {
    /// Of these parts.
    #[must_use]
    pub fn new(
        name: &'static str,
        filters: Vec<Box<dyn Filter>>,
        scorers: Vec<(f64, Box<dyn Scorer>)>,
        picker: Box<dyn Picker>,
    ) -> Self {
        Self { name, filters, scorers, picker }
    }

    /// Takes the slots out that a filter which does not yield leaves out.
    pub fn allow(&mut self, question: &Question<'_>, slots: &mut Vec<Slot>) {
        for filter in self.filters.iter_mut().filter(|filter| !filter.yields()) {
            if filter.prepare(question) {
                slots.retain(|slot| filter.keeps(question, *slot));
            }
        }
    }

    /// Chooses among slots that [`Self::allow`] left, by the filters that yield, the scorers and the picker. `None` when there
    /// is none.
    pub fn choose(&mut self, question: &Question<'_>, allowed: &[Slot], scratch: &mut Scratch) -> Option<Choice> {
        let Scratch { costs, slots, left } = scratch;
        slots.clear();
        slots.extend_from_slice(allowed);
        for filter in self.filters.iter_mut().filter(|filter| filter.yields()) {
            if filter.prepare(question) && slots.iter().any(|slot| filter.keeps(question, *slot)) {
                slots.retain(|slot| filter.keeps(question, *slot));
            }
        }
        if slots.is_empty() {
            return None;
        }
        costs.clear();
        costs.resize(question.fleet.width(), 0.0);
        for (weight, scorer) in &mut self.scorers {
            scorer.prepare(question);
            scorer.add(question, *weight, costs);
        }
        left.clear();
        if slots.len() == costs.len() && slots.iter().enumerate().filter(|(at, slot)| at != *slot).count() == 0 {
            // All of them, in their order.
            left.extend_from_slice(costs);
        } else {
            left.extend(slots.iter().map(|slot| costs[*slot]));
        }
        let (slot, near_equals) = self.picker.pick(question, slots, left);
        Some(Choice { slot, cost: costs[slot], near_equals })
    }

    /// The cost of one slot by its terms, weighted.
    pub fn explain(&self, question: &Question<'_>, slot: Slot, told: &mut dyn FnMut(&'static str, f64)) {
        for (weight, scorer) in &self.scorers {
            scorer.terms(question, slot, &mut |name, cost| told(name, weight * cost));
        }
    }

    pub(super) fn reserved(&mut self, ask: &Ask<'_>, slot: Slot, hit_blocks: u32) {
        self.scorers.iter_mut().for_each(|(_, scorer)| scorer.reserved(ask, slot, hit_blocks));
    }

    pub(super) fn prefilled(&mut self, request: RequestId, slot: Slot) {
        self.scorers.iter_mut().for_each(|(_, scorer)| scorer.prefilled(request, slot));
    }

    pub(super) fn released(&mut self, request: RequestId, slot: Slot) {
        self.scorers.iter_mut().for_each(|(_, scorer)| scorer.released(request, slot));
    }

    pub(super) fn vacated(&mut self, slot: Slot) {
        self.scorers.iter_mut().for_each(|(_, scorer)| scorer.vacated(slot));
    }
}

/// A well mixed number of two others; the same everywhere, so that every node ranks alike.
#[must_use]
pub(super) fn mix(a: u64, b: u64) -> u64 {
    // The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The chain's first block as a number; prompts that begin alike have the same.
pub(super) fn first_block(hashes: &[BlockHash], blocks: usize) -> Option<u64> {
    let at = blocks.min(hashes.len()).checked_sub(1)?;
    hashes.get(at).map(|hash| (hash.0 >> 64) as u64 ^ hash.0 as u64)
}

#[cfg(test)]
mod tests;
