//! The server's blocks as its events tell them, in our names. Pure.
//!
//! Called by the engine: for subscribers' inventories, for digests, and to guess how much of a prompt is cached.
//! Bounds: those of the adapter that makes the events.

use std::collections::{HashMap, HashSet};

use starling_ids::BlockHash;
use starling_kv::{events::KvEvent, index::Tier, tier::TierInventory};

type Parents = HashMap<BlockHash, Option<BlockHash>>;

/// Which blocks are where, each with the one before it.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    device: Parents,
    host: Parents,
    disk: Parents,
}

impl Inventory {
    fn on(&mut self, tier: Tier) -> &mut Parents {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
            Tier::Disk => &mut self.disk,
        }
    }

    /// Enters an event.
    pub(super) fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { parent, blocks } => store(&mut self.device, *parent, blocks),
            KvEvent::StoredBelow { tier, parent, blocks } => store(self.on(*tier), *parent, blocks),
            KvEvent::Removed { blocks } => remove(&mut self.device, blocks),
            KvEvent::RemovedBelow { tier, blocks } => remove(self.on(*tier), blocks),
            KvEvent::Cleared => self.device.clear(),
            KvEvent::ClearedBelow { tier } => self.on(*tier).clear(),
        }
    }

    /// Blocks on the device.
    pub(super) fn len(&self) -> usize {
        self.device.len()
    }

    /// Leading blocks of a chain that are on the device.
    pub(super) fn leading(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.device.contains_key(hash)).count()
    }

    /// All on the device, parents before children.
    pub(super) fn list(&self) -> Vec<(Option<BlockHash>, BlockHash)> {
        let (mut list, mut done) = (Vec::with_capacity(self.device.len()), HashSet::new());
        let mut path = Vec::new();
        for hash in self.device.keys() {
            let mut next = Some(*hash);
            while let Some(at) = next.filter(|at| self.device.contains_key(at) && done.insert(*at)) {
                path.push(at);
                next = self.device[&at];
            }
            list.extend(path.drain(..).rev().map(|at| (self.device[&at], at)));
        }
        list
    }

    /// All on the lower tiers, tier by tier, where there are any.
    pub(super) fn below(&self) -> Vec<TierInventory> {
        let tiers = [(Tier::Host, &self.host), (Tier::Disk, &self.disk)];
        let listed = |blocks: &Parents| blocks.iter().map(|(hash, parent)| (*parent, *hash)).collect();
        tiers
            .into_iter()
            .filter(|(_, blocks)| !blocks.is_empty())
            .map(|(tier, blocks)| (tier, listed(blocks)))
            .collect()
    }
}

fn store(on: &mut Parents, mut parent: Option<BlockHash>, blocks: &[BlockHash]) {
    for block in blocks {
        on.insert(*block, parent);
        parent = Some(*block);
    }
}

fn remove(on: &mut Parents, blocks: &[BlockHash]) {
    for block in blocks {
        on.remove(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(at: u128) -> BlockHash {
        // Spread as true hashes are.
        BlockHash(at.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    #[test]
    fn parents_come_before_children_and_orphans_are_kept() {
        let mut inventory = Inventory::default();
        let chain: Vec<BlockHash> = (1..40).map(hash).collect();
        inventory.apply(&KvEvent::Stored { parent: None, blocks: chain.clone() });
        inventory.apply(&KvEvent::Stored { parent: Some(chain[4]), blocks: vec![hash(100), hash(101)] });
        inventory.apply(&KvEvent::Removed { blocks: vec![chain[20]] });
        let list = inventory.list();
        assert_eq!((list.len(), inventory.len()), (40, 40));
        let place = |wanted: BlockHash| list.iter().position(|(_, hash)| *hash == wanted);
        for (at, (parent, _)) in list.iter().enumerate() {
            assert!(parent.and_then(place).is_none_or(|before| before < at));
        }
        assert_eq!((inventory.leading(&chain), inventory.leading(&[hash(7_777)])), (20, 0));
        inventory.apply(&KvEvent::Cleared);
        assert!(inventory.list().is_empty() && inventory.below().is_empty());
    }

    #[test]
    fn lower_tiers_are_apart() {
        let mut inventory = Inventory::default();
        inventory.apply(&KvEvent::StoredBelow { tier: Tier::Host, parent: None, blocks: vec![hash(1), hash(2)] });
        inventory.apply(&KvEvent::RemovedBelow { tier: Tier::Host, blocks: vec![hash(1)] });
        assert_eq!(inventory.below(), [(Tier::Host, vec![(Some(hash(1)), hash(2))])]);
        assert_eq!(inventory.len(), 0);
        inventory.apply(&KvEvent::ClearedBelow { tier: Tier::Host });
        assert!(inventory.below().is_empty());
    }
}
