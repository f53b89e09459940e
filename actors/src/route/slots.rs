//! Which router node decides for a request.
//!
//! Called by the client. A model has one slot, or as many as [`super::spread`] says while it is hot; a slot's owner is the first
//! in rank by rendezvous hashing over the live router nodes, so that all clients with the same view ask the same shard, and a
//! node that comes or goes moves only its own slots. Every router node indexes all workers, so whoever is next in rank knows
//! all prefixes already: only the reservations of the one before are unknown to it, and the workers' own reports have them.
//! Never: a view of who is alive.

use std::hash::Hasher;

use starling_ids::{BlockHash, ModelId, NodeId};
use twox_hash::XxHash3_64;

/// The slot of a request: by its session, or by its prompt's first full block, so that a conversation stays in one shard and
/// prompts with a common start meet there.
#[must_use]
pub fn slot_of(session: Option<&str>, first: Option<BlockHash>, slots: u32) -> u32 {
    let slots = u128::from(slots.max(1));
    let key = match session {
        Some(session) => u128::from(XxHash3_64::oneshot(session.as_bytes())),
        None => first.map_or(0, |hash| hash.0),
    };
    // The remainder is below a u32.
    (key % slots) as u32
}

/// Router nodes in the order in which they own (model, slot): the owner, then who takes over.
#[must_use]
pub fn rank(model: &ModelId, slot: u32, mut nodes: Vec<NodeId>) -> Vec<NodeId> {
    nodes.sort_by_cached_key(|node| (std::cmp::Reverse(weight(model, slot, node)), node.clone()));
    nodes
}

fn weight(model: &ModelId, slot: u32, node: &NodeId) -> u64 {
    let mut hasher = XxHash3_64::with_seed(0);
    // A zero byte cannot stand in either name, so no two pairs run together.
    hasher.write(model.as_str().as_bytes());
    hasher.write_u8(0);
    hasher.write(&slot.to_le_bytes());
    hasher.write(node.as_str().as_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nodes(count: usize) -> Vec<NodeId> {
        (0..count).map(|at| NodeId::new(&format!("router-{at}")).expect("name")).collect()
    }

    #[test]
    fn every_node_owns_about_its_share() {
        let mut owned = std::collections::HashMap::new();
        for at in 0..1_000 {
            let model = ModelId::new(&format!("model-{at}")).expect("name");
            *owned.entry(rank(&model, 0, nodes(4))[0].clone()).or_insert(0) += 1;
        }
        assert_eq!(owned.len(), 4);
        assert!(owned.values().all(|count| (190..=310).contains(count)), "{owned:?}");
    }

    proptest! {
        #[test]
        fn a_node_that_leaves_moves_only_its_own_slots(slot in 0u32..64, gone in 0usize..5) {
            let model = ModelId::new("m").expect("name");
            let before = rank(&model, slot, nodes(5));
            let left: Vec<_> = nodes(5).into_iter().enumerate().filter(|(at, _)| *at != gone).map(|(_, n)| n).collect();
            let expected: Vec<_> = before.iter().filter(|node| **node != nodes(5)[gone]).cloned().collect();
            prop_assert_eq!(rank(&model, slot, left), expected);
        }

        #[test]
        fn order_of_the_list_does_not_matter(slot in 0u32..64) {
            let model = ModelId::new("m").expect("name");
            let mut reversed = nodes(5);
            reversed.reverse();
            prop_assert_eq!(rank(&model, slot, nodes(5)), rank(&model, slot, reversed));
        }

        #[test]
        fn a_slot_is_below_the_count(hash: u128, session in prop::option::of(".{0,9}"), slots in 0u32..8) {
            prop_assert!(slot_of(session.as_deref(), Some(BlockHash(hash)), slots) < slots.max(1));
        }

        #[test]
        fn a_split_moves_half_of_a_slot_and_nothing_between_others(hash: u128, slots in 0u32..6) {
            let slots = 1 << slots;
            let (before, after) = (slot_of(None, Some(BlockHash(hash)), slots), slot_of(None, Some(BlockHash(hash)), slots * 2));
            prop_assert!(after == before || after == before + slots);
        }
    }
}
