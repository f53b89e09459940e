//! Memberships: one (worker, block) pair in, one out, and the bound on their number.
//!
//! Called by the index alone; every change of a pair goes through here, so that counts and digests agree.

use std::collections::HashSet;

use starling_ids::BlockHash;

use super::{PrefixIndex, holders::Slot};
use crate::hash::HashKeyed;

impl PrefixIndex {
    pub(super) fn insert(&mut self, slot: Slot, hash: BlockHash) -> bool {
        let Some(worker) = self.slots[usize::from(slot)].as_mut() else { return false };
        if !self.holders.entry(hash).or_default().insert(slot) {
            return false;
        }
        worker.blocks += 1;
        worker.digest.toggle(hash);
        worker.order.push(hash);
        self.memberships += 1;
        true
    }

    pub(super) fn remove(&mut self, slot: Slot, hash: BlockHash) -> bool {
        let Some(worker) = self.slots[usize::from(slot)].as_mut() else { return false };
        let Some(holders) = self.holders.get_mut(&hash) else { return false };
        if !holders.remove(slot) {
            return false;
        }
        if holders.is_empty() {
            self.holders.remove(&hash);
        }
        worker.blocks -= 1;
        worker.digest.toggle(hash);
        self.memberships -= 1;
        true
    }

    /// Takes everything from a worker; how many pairs that were.
    pub(super) fn clear(&mut self, slot: Slot) -> usize {
        let Some(worker) = self.slots[usize::from(slot)].as_mut() else { return 0 };
        let order = std::mem::take(&mut worker.order);
        let removed = order.iter().filter(|hash| self.remove(slot, *hash)).count();
        self.give_memory_back();
        removed
    }

    pub(super) fn enforce_limit(&mut self) -> usize {
        let mut evicted = 0;
        while self.memberships > self.limits.memberships_max {
            let largest =
                self.slots.iter().enumerate().filter_map(|(slot, worker)| Some((worker.as_ref()?.blocks, slot)));
            let Some((_, slot)) = largest.max() else { break };
            if !self.evict_oldest(slot as Slot) {
                break;
            }
            evicted += 1;
        }
        evicted
    }

    /// The oldest block goes, unless a match went through it since it was last looked at: then it counts as new.
    fn evict_oldest(&mut self, slot: Slot) -> bool {
        let Some(worker) = self.slots[usize::from(slot)].as_mut() else { return false };
        let mut chances = worker.order.len();
        while let Some(hash) = worker.order.pop() {
            let Some(holders) = self.holders.get(&hash).filter(|holders| holders.contains(slot)) else { continue };
            if chances > 0 && holders.take_touched() {
                chances -= 1;
                worker.order.push(hash);
                continue;
            }
            return self.remove(slot, hash);
        }
        false
    }

    /// After removals: entries of the order that are gone, and memory.
    pub(super) fn tidy(&mut self, slot: Slot) {
        if let Some(worker) = self.slots[usize::from(slot)].as_mut()
            && worker.order_is_stale()
        {
            let order = std::mem::take(&mut worker.order);
            let mut seen: HashSet<BlockHash, HashKeyed> = HashSet::default();
            for hash in order.iter() {
                let held = self.holders.get(&hash).is_some_and(|holders| holders.contains(slot));
                if held && seen.insert(hash) {
                    worker.order.push(hash);
                }
            }
        }
        self.give_memory_back();
    }

    /// The map doubles when it is full, also when it is full of graves. Below half of what it could hold, it is made
    /// smaller; a little below, so that one block more or less does not move it back and forth.
    pub(super) fn give_memory_back(&mut self) {
        if self.holders.capacity() > 1024 && self.holders.len() < self.holders.capacity() * 12 / 25 {
            self.holders.shrink_to_fit();
        }
    }
}
