//! Which version of which record a node holds, in a form that two nodes compare in a few bytes.
//!
//! Called by the directory's core. Pure. Names fall into [`BUCKETS`] buckets by their hash; each bucket has the sum of
//! the hashes of its entries, so a change costs two additions and the order of changes does not matter. Bounds: one
//! entry for each record held.

use std::{collections::BTreeMap, ops::Bound};

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};
use twox_hash::XxHash3_64;

/// Buckets that names are spread over.
pub const BUCKETS: usize = 256;

/// How current a record is, in order: a later life beats every version, all of a version beats its vital part. Of two
/// processes of one name in one life neither is newer: gossip knows which of them counts, and the order is only the same
/// everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// In which life of its node.
    pub incarnation: Incarnation,
    /// At which address, as [`crate::membership::place`] numbers it.
    pub place: u32,
    /// The record's version.
    pub version: u64,
    /// Not only its vital part.
    pub whole: bool,
}

/// One record that somebody holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Whose.
    pub node: NodeId,
    /// How current.
    pub stamp: Stamp,
}

/// Sums over all records held.
#[derive(Debug, Clone)]
pub struct Tally {
    entries: Vec<BTreeMap<NodeId, Stamp>>,
    sums: Vec<u64>,
}

impl Default for Tally {
    fn default() -> Self {
        Self { entries: vec![BTreeMap::new(); BUCKETS], sums: vec![0; BUCKETS] }
    }
}

impl Tally {
    /// The bucket of a name.
    #[must_use]
    pub fn bucket(node: &NodeId) -> u8 {
        (XxHash3_64::oneshot(node.as_str().as_bytes()) & 0xff) as u8
    }

    /// A record is held in this state from now on; `None`: not any more.
    pub fn set(&mut self, node: &NodeId, stamp: Option<Stamp>) {
        let bucket = usize::from(Self::bucket(node));
        let before = match stamp {
            Some(stamp) => self.entries[bucket].insert(node.clone(), stamp),
            None => self.entries[bucket].remove(node),
        };
        let weight = |stamp: Option<Stamp>| stamp.map_or(0, |stamp| weight(node, stamp));
        self.sums[bucket] = self.sums[bucket].wrapping_sub(weight(before)).wrapping_add(weight(stamp));
    }

    /// One number for everything: equal on two nodes that hold the same.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.sums.iter().fold(0, |root, sum| root.wrapping_add(*sum))
    }

    /// The sum of each bucket.
    #[must_use]
    pub fn sums(&self) -> &[u64] {
        &self.sums
    }

    /// The buckets whose sums differ from the other side's.
    #[must_use]
    pub fn differing(&self, theirs: &[u64]) -> Vec<u8> {
        (0..=u8::MAX).filter(|at| theirs.get(usize::from(*at)) != self.sums.get(usize::from(*at))).collect()
    }

    /// The first `max` entries of these buckets, in order of (bucket as listed, name), from behind `after`; and whether
    /// there are more.
    #[must_use]
    pub fn entries(&self, buckets: &[u8], after: Option<&NodeId>, max: usize) -> (Vec<Entry>, bool) {
        let resume = after.map(|node| (Self::bucket(node), node));
        let begin = resume.and_then(|(bucket, _)| buckets.iter().position(|at| *at == bucket)).unwrap_or(0);
        let mut found = Vec::new();
        for bucket in &buckets[begin..] {
            let from = match resume {
                Some((at, node)) if at == *bucket => Bound::Excluded(node.clone()),
                _ => Bound::Unbounded,
            };
            for (node, stamp) in self.entries[usize::from(*bucket)].range((from, Bound::Unbounded)) {
                if found.len() == max {
                    return (found, true);
                }
                found.push(Entry { node: node.clone(), stamp: *stamp });
            }
        }
        (found, false)
    }

    /// Records held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.iter().map(BTreeMap::len).sum()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(BTreeMap::is_empty)
    }

    /// How current the record held is.
    #[must_use]
    pub fn stamp(&self, node: &NodeId) -> Option<Stamp> {
        self.entries[usize::from(Self::bucket(node))].get(node).copied()
    }
}

fn weight(node: &NodeId, stamp: Stamp) -> u64 {
    let mut bytes = Vec::with_capacity(NodeId::LEN_MAX + 21);
    bytes.extend_from_slice(&stamp.incarnation.0.to_le_bytes());
    bytes.extend_from_slice(&stamp.place.to_le_bytes());
    bytes.extend_from_slice(&stamp.version.to_le_bytes());
    bytes.push(u8::from(stamp.whole));
    bytes.extend_from_slice(node.as_str().as_bytes());
    XxHash3_64::oneshot(&bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(at: usize) -> NodeId {
        NodeId::new(&format!("n{at}")).expect("name")
    }

    fn stamp(version: u64) -> Stamp {
        Stamp { incarnation: Incarnation(1), place: 3, version, whole: version.is_multiple_of(2) }
    }

    proptest! {
        /// The same holdings give the same sums, whatever the order and detours in which they came.
        #[test]
        fn sums_depend_on_what_is_held_and_on_nothing_else(
            steps in proptest::collection::vec((0..40usize, proptest::option::of(0..9u64)), 0..200),
        ) {
            let mut walked = Tally::default();
            let mut held = BTreeMap::new();
            for (at, version) in steps {
                walked.set(&name(at), version.map(stamp));
                held.insert(at, version);
            }
            let mut direct = Tally::default();
            for (at, version) in held.iter().rev().filter(|(_, version)| version.is_some()) {
                direct.set(&name(*at), version.map(stamp));
            }
            prop_assert_eq!(walked.sums(), direct.sums());
            prop_assert_eq!(walked.root(), direct.root());
            prop_assert!(walked.differing(direct.sums()).is_empty());
            prop_assert_eq!(walked.len(), held.values().flatten().count());
        }

        /// Pages of any size list each entry once.
        #[test]
        fn pages_list_every_entry_once(count in 0..300usize, max in 1..50usize) {
            let mut tally = Tally::default();
            (0..count).for_each(|at| tally.set(&name(at), Some(stamp(at as u64))));
            let buckets: Vec<u8> = (0..=u8::MAX).collect();
            let (mut seen, mut after) = (std::collections::BTreeSet::new(), None);
            loop {
                let (page, more) = tally.entries(&buckets, after.as_ref(), max);
                prop_assert!(page.len() <= max && (!more || page.len() == max));
                after = page.last().map(|entry| entry.node.clone());
                for entry in page {
                    prop_assert!(seen.insert(entry.node));
                }
                if !more {
                    break;
                }
            }
            prop_assert_eq!(seen.len(), count);
        }
    }

    #[test]
    fn a_change_is_seen_in_its_bucket_alone() {
        let mut tally = Tally::default();
        (0..1000).for_each(|at| tally.set(&name(at), Some(stamp(1))));
        let before = tally.clone();
        tally.set(&name(7), Some(stamp(3)));
        assert_eq!(tally.differing(before.sums()), [Tally::bucket(&name(7))]);
        assert_ne!(tally.root(), before.root());
        assert_eq!(tally.differing(&[]).len(), BUCKETS, "a short list of sums differs everywhere");
    }
}
