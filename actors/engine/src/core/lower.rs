//! The engine's side of the lower tiers: evicted blocks go down, fetched ones come up, each under the scheduler's word.
//!
//! Called by the engine at the turns of a step; calls the tiers, which never wait for a disk. The bytes of an evicted block
//! are copied between the plan that evicts it and the computation that overwrites them; those of a fetched block are
//! written to its slot only while a sequence waits for it, after its tokens and parent were compared.
//! Never: hands a block to two owners, waits beyond a deadline. Bounds: those of the tiers; one entry a ticket.

use std::{collections::HashMap, time::Duration};

use starling_ids::BlockHash;
use starling_kv::{
    events::KvEvent,
    index::Tier,
    tier::{
        Arrival, DiskError, Ticket, TierBlock, TierInventory, TierOptions, TierReader, TierShape, TierStats, Tiers,
        Worth,
    },
};

use super::CoreEngine;
use crate::{
    backend::Backend,
    scheduler::{Below, Fetch, Plan, Sequence},
};

/// Longest wait for blocks when there is nothing to compute.
pub(super) const ARRIVAL_WAIT: Duration = Duration::from_millis(5);

/// What lies below the device of one engine.
#[derive(Debug, Default)]
pub(super) struct Lower {
    tiers: Option<Tiers>,
    /// What came for each ticket so far.
    waiting: HashMap<Ticket, Vec<Fate>>,
}

/// What became of a block that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is still to come.
    Open,
    /// It is in its slot.
    Came(Tier),
    /// It will not come.
    Lost,
}

impl Below for Lower {
    fn worth(&mut self, chain: &[BlockHash]) -> Option<Worth> {
        self.tiers.as_ref()?.worth(chain)
    }
}

impl Lower {
    /// Counts the uses of a new sequence's blocks.
    pub(super) fn note(&self, sequence: Option<&Sequence>) {
        if let (Some(tiers), Some(sequence)) = (&self.tiers, sequence) {
            tiers.note(sequence.hashes());
        }
    }

    /// The tiers' clock; stands still without tiers.
    pub(super) fn now(&self) -> Duration {
        self.tiers.as_ref().map_or(Duration::ZERO, Tiers::now)
    }

    /// Asks for what a plan wants fetched.
    pub(super) fn begin(&mut self, fetches: &[Fetch]) {
        let Some(tiers) = &self.tiers else { return };
        for fetch in fetches {
            self.waiting.insert(fetch.ticket, vec![Fate::Open; fetch.chain.len()]);
            tiers.fetch(fetch.ticket, &fetch.chain);
        }
    }

    /// Learns from a step how long a prompt token takes. Steps that mostly decode say nothing about it.
    pub(super) fn computed(&self, plan: &Plan, began: Duration, takes: Duration) {
        let Some(tiers) = &self.tiers else { return };
        let all: usize = plan.items.iter().map(|item| item.count).sum();
        let prefill: usize = plan.items.iter().map(|item| item.count).filter(|count| *count > 1).sum();
        if 2 * prefill > all {
            let took = if takes.is_zero() { tiers.now().saturating_sub(began) } else { takes };
            tiers.computed(all, took);
        }
    }

    pub(super) fn clear(&self) {
        if let Some(tiers) = &self.tiers {
            tiers.clear();
        }
    }

    pub(super) fn inventory(&self) -> Vec<TierInventory> {
        self.tiers.as_ref().map(Tiers::inventory).unwrap_or_default()
    }

    pub(super) fn reader(&self) -> Option<TierReader> {
        self.tiers.as_ref().map(Tiers::reader)
    }

    pub(super) fn stats(&self) -> Option<TierStats> {
        self.tiers.as_ref().map(Tiers::stats)
    }

    /// Enters the fate of one block. True once it is known how many of the leading blocks come.
    fn enter(&mut self, ticket: Ticket, index: usize, fate: Fate) -> bool {
        let Some(blocks) = self.waiting.get_mut(&ticket) else { return false };
        if let Some(block) = blocks.get_mut(index) {
            *block = fate;
        }
        // Behind a block that does not come nothing is of use.
        blocks.iter().find(|block| !matches!(block, Fate::Came(_))).is_none_or(|block| *block == Fate::Lost)
    }

    /// Waits no more; how many of the leading blocks have come.
    fn forget(&mut self, ticket: Ticket, late: bool) -> usize {
        let blocks = self.waiting.remove(&ticket).unwrap_or_default();
        let tier = |block: &Fate| if let Fate::Came(tier) = block { Some(*tier) } else { None };
        let came: Vec<Tier> = blocks.iter().map_while(tier).collect();
        if let Some(tiers) = &self.tiers {
            tiers.forget(ticket, late, &came);
        }
        came.len()
    }
}

impl<B: Backend> CoreEngine<B> {
    /// Opens the tiers. A disk that cannot be used leaves those above it.
    pub(super) fn open_lower(&mut self, options: &TierOptions) -> Result<(), DiskError> {
        let card = &self.capabilities.card;
        let shape = TierShape {
            block_bytes: self.backend.block_bytes(),
            block_tokens: card.block_tokens as usize,
            layout_digest: self.capabilities.layout_digest,
            seed: card.hash_seed,
        };
        // A backend without memory for blocks has nothing to keep.
        if shape.block_bytes == 0 || self.capabilities.limits.kv_blocks == 0 {
            return Ok(());
        }
        let (opened, result) = match Tiers::open(options, shape) {
            Ok(tiers) => (tiers, Ok(())),
            Err(error) => {
                let host = TierOptions { host_bytes: options.host_bytes, disk: None };
                (Tiers::open(&host, shape).ok().flatten(), Err(error))
            }
        };
        if opened.is_some() {
            self.scheduler.pool_mut().note_evicted();
        }
        self.lower = Lower { tiers: opened, waiting: HashMap::new() };
        result
    }

    /// Forgets what was evicted and not handed down at once: its slot may have another owner's bytes by now, and a block lost
    /// to the cache is better than a wrong one in it.
    pub(super) fn drop_overwritten(&mut self) {
        drop(self.scheduler.pool_mut().take_evicted());
    }

    /// Hands down what was evicted since the last call, before its slots are written. Whoever else makes room in the pool
    /// calls this before anything is written there.
    pub(super) fn spill(&mut self) {
        let Some(tiers) = &self.lower.tiers else { return };
        for evicted in self.scheduler.pool_mut().take_evicted() {
            if tiers.wants(evicted.hash) {
                let (hash, parent, tokens) = (evicted.hash, evicted.parent, evicted.tokens);
                let bytes = self.backend.read_block(evicted.slot).into();
                tiers.offer(TierBlock { hash, parent, tokens, bytes });
            }
        }
    }

    /// Takes what has come from below, waiting up to `wait` for the first; gives up what is overdue or not waited for.
    pub(super) fn take_arrivals(&mut self, wait: Duration) {
        for ticket in self.scheduler.take_abandoned() {
            self.lower.forget(ticket, false);
        }
        let Some(tiers) = &self.lower.tiers else { return };
        for arrival in tiers.arrived(wait) {
            let (ticket, index) = (arrival.ticket, arrival.index);
            let fate = if self.land(&arrival) { Fate::Came(arrival.tier) } else { Fate::Lost };
            if self.lower.enter(ticket, index, fate) {
                let blocks = self.lower.forget(ticket, false);
                self.scheduler.fetched(ticket, blocks);
            }
        }
        for ticket in self.scheduler.overdue(self.lower.now()) {
            let blocks = self.lower.forget(ticket, true);
            tracing::debug!(blocks, "blocks of a lower tier are late; the rest is computed");
            self.scheduler.fetched(ticket, blocks);
        }
    }

    /// Writes a block to its slot. False when it did not come, is not the one that was asked for, or nobody waits for it.
    fn land(&mut self, arrival: &Arrival) -> bool {
        let Some(block) = &arrival.block else { return false };
        let Some(awaited) = self.scheduler.awaited(arrival.ticket, arrival.index) else { return false };
        if block.parent != awaited.parent || *block.tokens != *awaited.tokens {
            return false;
        }
        let began = self.lower.now();
        let written = self.backend.write_block(awaited.slot, &block.bytes).is_ok();
        if let Some(tiers) = self.lower.tiers.as_ref().filter(|_| written) {
            tiers.copied(arrival.tier, tiers.now().saturating_sub(began));
        }
        written
    }

    /// What changed on every tier.
    pub(super) fn news(&mut self) -> Vec<KvEvent> {
        let mut events = self.scheduler.pool_mut().take_events();
        if let Some(tiers) = &self.lower.tiers {
            events.extend(tiers.take_events());
        }
        events
    }

    /// Writes what the device and the host hold to disk, beginnings of chains first, as far as time and disk allow.
    pub(super) fn close_lower(&mut self, limit: Duration) {
        let Some(tiers) = self.lower.tiers.take() else { return };
        let until = tiers.now() + limit;
        let room = tiers.stats().disk.blocks_max as usize;
        let pool = self.scheduler.pool();
        for (parent, hash) in pool.inventory().into_iter().take(room) {
            let block = || {
                let slot = pool.known(hash)?;
                let (_, tokens) = pool.content(slot)?;
                let bytes = self.backend.read_block(slot).into();
                Some(TierBlock { hash, parent, tokens: tokens.into(), bytes })
            };
            if !tiers.offer_within(hash, until, block) {
                break;
            }
        }
        let left = until.saturating_sub(tiers.now());
        tiers.close(left);
    }
}

#[cfg(test)]
mod tests;
