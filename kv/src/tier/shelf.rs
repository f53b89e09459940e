//! Which blocks lie in which places of one tier, and which goes when another comes.
//!
//! Called by the tiers under their lock; it decides over numbers of places and touches no bytes.
//! Never: gives a place away that is being read or written. Bounds: `places_max` places.
//!
//! A place is free, being written, stored or, when its block was removed under a reader, doomed until the last reader
//! is done. Their sum is what was ever handed out: that is the conservation law, see [`Shelf::check`].

use std::collections::{BTreeSet, HashMap};

use starling_ids::BlockHash;

use super::sketch::Sketch;
use crate::hash::HashKeyed;

/// Number of a place, below the shelf's size.
pub(super) type Place = u32;

/// Leaves that are looked at for one that nobody reads.
const VICTIMS_MAX: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Writing,
    Stored,
    Doomed,
}

#[derive(Debug, Clone)]
struct Spot {
    state: State,
    hash: BlockHash,
    parent: Option<BlockHash>,
    /// The caller's own: a checksum.
    tag: u64,
    /// Logical time of the last use.
    used: u64,
    readers: u32,
}

/// What [`Shelf::take`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// Write it here.
    Free(Place),
    /// Write it here; this block was there and is gone.
    Instead(Place, BlockHash),
    /// What would have to go is in use more than this block, or in use right now.
    Refused,
}

/// A stored block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stored {
    /// Where.
    pub(super) place: Place,
    /// The block before it.
    pub(super) parent: Option<BlockHash>,
    /// As given to [`Shelf::stored`].
    pub(super) tag: u64,
}

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Shelf {
    places_max: u32,
    /// Grows to `places_max` as places are handed out.
    spots: Vec<Spot>,
    free: Vec<Place>,
    stored: HashMap<BlockHash, Place, HashKeyed>,
    /// Stored places, the longest unused first.
    order: BTreeSet<(u64, Place)>,
    writing: u32,
    doomed: u32,
    tick: u64,
}

impl Shelf {
    /// An empty shelf.
    #[must_use]
    pub(super) fn new(places_max: u32) -> Self {
        Self {
            places_max,
            spots: Vec::new(),
            free: Vec::new(),
            stored: HashMap::default(),
            order: BTreeSet::new(),
            writing: 0,
            doomed: 0,
            tick: 0,
        }
    }

    /// A shelf of blocks that lie in their places already, the longest unused first; each block and each place once.
    /// Places beyond the shelf's size are left out.
    #[must_use]
    pub(super) fn restored(places_max: u32, kept: &[(BlockHash, Stored)]) -> Self {
        let mut shelf = Self::new(places_max);
        let kept = || kept.iter().filter(|(_, kept)| kept.place < places_max);
        let places = kept().map(|(_, kept)| kept.place + 1).max().unwrap_or(0);
        let empty = Spot { state: State::Free, hash: BlockHash(0), parent: None, tag: 0, used: 0, readers: 0 };
        shelf.spots = vec![empty; places as usize];
        for (hash, kept) in kept() {
            shelf.tick += 1;
            let spot = &mut shelf.spots[kept.place as usize];
            if spot.state == State::Stored || shelf.stored.contains_key(hash) {
                continue;
            }
            let (parent, tag, used) = (kept.parent, kept.tag, shelf.tick);
            *spot = Spot { state: State::Stored, hash: *hash, parent, tag, used, readers: 0 };
            shelf.stored.insert(*hash, kept.place);
            shelf.order.insert((used, kept.place));
        }
        let free = |place: &Place| shelf.spots[*place as usize].state == State::Free;
        shelf.free = (0..places).rev().filter(free).collect();
        shelf
    }

    /// Places in all.
    #[must_use]
    pub(super) fn places_max(&self) -> u32 {
        self.places_max
    }

    /// Blocks stored.
    #[must_use]
    pub(super) fn len(&self) -> usize {
        self.stored.len()
    }

    /// A stored block.
    #[must_use]
    pub(super) fn get(&self, hash: BlockHash) -> Option<Stored> {
        let place = *self.stored.get(&hash)?;
        let spot = self.spots.get(place as usize)?;
        Some(Stored { place, parent: spot.parent, tag: spot.tag })
    }

    /// Every stored block, the longest unused first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockHash, Stored)> + '_ {
        self.order.iter().filter_map(|(_, place)| {
            let spot = self.spots.get(*place as usize)?;
            Some((spot.hash, Stored { place: *place, parent: spot.parent, tag: spot.tag }))
        })
    }

    /// A use: it goes last. The caller touches a chain from its end, so that a leaf leaves before the block it follows.
    pub(super) fn touch(&mut self, hash: BlockHash) {
        let Some(place) = self.stored.get(&hash).copied() else { return };
        self.tick += 1;
        let tick = self.tick;
        if let Some(spot) = self.spots.get_mut(place as usize) {
            self.order.remove(&(spot.used, place));
            spot.used = tick;
            self.order.insert((tick, place));
        }
    }

    /// A place to write a block that is not here. The place of the longest unused one when none is free, unless that is
    /// asked for more often: then it stays, as if just used, and this block is refused.
    pub(super) fn take(&mut self, hash: BlockHash, sketch: &Sketch) -> Taken {
        if self.stored.contains_key(&hash) {
            return Taken::Refused;
        }
        if let Some(place) = self.free_place(hash) {
            return Taken::Free(place);
        }
        let unread = |(_, place): &&(u64, Place)| self.spots.get(*place as usize).is_some_and(|spot| spot.readers == 0);
        let Some((_, place)) = self.order.iter().take(VICTIMS_MAX).find(unread).copied() else { return Taken::Refused };
        let victim = self.spots[place as usize].hash;
        if sketch.count(victim) > sketch.count(hash) {
            self.touch(victim);
            return Taken::Refused;
        }
        self.remove(victim);
        match self.free_place(hash) {
            Some(place) => Taken::Instead(place, victim),
            None => Taken::Refused,
        }
    }

    fn free_place(&mut self, hash: BlockHash) -> Option<Place> {
        let fresh = Spot { state: State::Writing, hash, parent: None, tag: 0, used: 0, readers: 0 };
        let place = match self.free.pop() {
            Some(place) => {
                self.spots[place as usize] = fresh;
                place
            }
            None if (self.spots.len() as u64) < u64::from(self.places_max) => {
                self.spots.push(fresh);
                (self.spots.len() - 1) as Place
            }
            None => return None,
        };
        self.writing += 1;
        Some(place)
    }

    /// It is written. False, and the place free again, when the block is stored elsewhere by now.
    pub(super) fn stored(&mut self, place: Place, parent: Option<BlockHash>, tag: u64) -> bool {
        let Some(spot) = self.spots.get_mut(place as usize).filter(|spot| spot.state == State::Writing) else {
            return false;
        };
        if self.stored.contains_key(&spot.hash) {
            self.abandon(place);
            return false;
        }
        self.tick += 1;
        self.writing -= 1;
        (spot.state, spot.parent, spot.tag, spot.used) = (State::Stored, parent, tag, self.tick);
        self.stored.insert(spot.hash, place);
        self.order.insert((spot.used, place));
        true
    }

    /// It could not be written.
    pub(super) fn abandon(&mut self, place: Place) {
        if let Some(spot) = self.spots.get_mut(place as usize).filter(|spot| spot.state == State::Writing) {
            spot.state = State::Free;
            self.writing -= 1;
            self.free.push(place);
        }
    }

    /// Forgets a block. Its place is free once nobody reads it.
    pub(super) fn remove(&mut self, hash: BlockHash) -> bool {
        let Some(place) = self.stored.remove(&hash) else { return false };
        let spot = &mut self.spots[place as usize];
        self.order.remove(&(spot.used, place));
        if spot.readers == 0 {
            spot.state = State::Free;
            self.free.push(place);
        } else {
            spot.state = State::Doomed;
            self.doomed += 1;
        }
        true
    }

    /// A reader more.
    pub(super) fn pin(&mut self, hash: BlockHash) -> Option<Stored> {
        let stored = self.get(hash)?;
        self.spots[stored.place as usize].readers += 1;
        Some(stored)
    }

    /// A reader less.
    pub(super) fn unpin(&mut self, place: Place) {
        let Some(spot) = self.spots.get_mut(place as usize).filter(|spot| spot.readers > 0) else { return };
        spot.readers -= 1;
        if spot.readers == 0 && spot.state == State::Doomed {
            spot.state = State::Free;
            self.doomed -= 1;
            self.free.push(place);
        }
    }

    /// Places that are being written or waited for by readers; 0 at rest.
    #[must_use]
    pub(super) fn busy(&self) -> u32 {
        self.writing + self.doomed + self.spots.iter().filter(|spot| spot.readers > 0).count() as u32
    }

    /// Recounts everything and compares. For tests and debug assertions.
    pub(super) fn check(&self) -> Result<(), String> {
        let count = |state| self.spots.iter().filter(|spot| spot.state == state).count();
        let pairs = [
            ("free", count(State::Free), self.free.len()),
            ("writing", count(State::Writing), self.writing as usize),
            ("stored", count(State::Stored), self.stored.len()),
            ("in order", self.order.len(), self.stored.len()),
            ("doomed", count(State::Doomed), self.doomed as usize),
        ];
        for (what, is, should) in pairs {
            if is != should {
                return Err(format!("{what}: {is}, should be {should}"));
            }
        }
        if self.spots.len() > self.places_max as usize {
            return Err(format!("{} places of {}", self.spots.len(), self.places_max));
        }
        let wrong = |(hash, place): &(&BlockHash, &Place)| self.spots[**place as usize].hash != **hash;
        if self.stored.iter().any(|pair| wrong(&pair)) {
            return Err("a block is listed at another one's place".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(n: u64) -> BlockHash {
        BlockHash(u128::from(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) * 0x1_0000_0001_0000_0001)
    }

    fn put(shelf: &mut Shelf, n: u64, sketch: &Sketch) -> Taken {
        let taken = shelf.take(block(n), sketch);
        if let Taken::Free(place) | Taken::Instead(place, _) = taken {
            assert!(shelf.stored(place, None, n));
        }
        taken
    }

    #[test]
    fn the_longest_unused_goes_unless_it_is_asked_for_more() {
        let mut sketch = Sketch::new(4);
        let mut shelf = Shelf::new(2);
        put(&mut shelf, 1, &sketch);
        put(&mut shelf, 2, &sketch);
        shelf.touch(block(1));
        assert!(matches!(put(&mut shelf, 3, &sketch), Taken::Instead(_, gone) if gone == block(2)));
        (0..4).for_each(|_| sketch.note(block(1)));
        assert_eq!(put(&mut shelf, 4, &sketch), Taken::Refused);
        assert!(matches!(put(&mut shelf, 5, &sketch), Taken::Instead(_, gone) if gone == block(3)), "1 went last");
        shelf.check().expect("whole");
    }

    #[test]
    fn a_place_that_is_read_is_not_written() {
        let sketch = Sketch::new(4);
        let mut shelf = Shelf::new(1);
        put(&mut shelf, 1, &sketch);
        let read = shelf.pin(block(1)).expect("stored");
        assert_eq!(put(&mut shelf, 2, &sketch), Taken::Refused);
        assert!(shelf.remove(block(1)));
        assert_eq!(put(&mut shelf, 2, &sketch), Taken::Refused, "doomed, not free");
        shelf.check().expect("whole");
        shelf.unpin(read.place);
        assert_eq!(put(&mut shelf, 2, &sketch), Taken::Free(read.place));
        assert_eq!(shelf.busy(), 0);
    }

    #[test]
    fn a_shelf_is_restored_place_by_place() {
        let sketch = Sketch::new(4);
        let kept = |place, tag| Stored { place, parent: None, tag };
        let mut shelf = Shelf::restored(
            4,
            &[(block(3), kept(2, 3)), (block(2), kept(1, 4)), (block(9), kept(4, 9)), (block(4), kept(2, 5))],
        );
        shelf.check().expect("whole");
        assert_eq!(shelf.get(block(4)), None, "its place is taken");
        assert_eq!(shelf.get(block(2)), Some(kept(1, 4)));
        assert_eq!(shelf.len(), 2);
        put(&mut shelf, 5, &sketch);
        put(&mut shelf, 6, &sketch);
        assert!(matches!(put(&mut shelf, 7, &sketch), Taken::Instead(2, gone) if gone == block(3)));
    }

    proptest! {
        /// Any order of use: no place has two owners, and what a plain map says is what the shelf says.
        #[test]
        fn nothing_is_lost_in_any_order(
            places in 1u32..6,
            steps in prop::collection::vec((0u64..12, 0u8..7), 1..120),
        ) {
            let mut sketch = Sketch::new(4);
            let mut shelf = Shelf::new(places);
            let mut model = std::collections::HashMap::new();
            let (mut writing, mut read): (Vec<(Place, u64)>, Vec<Place>) = (Vec::new(), Vec::new());
            for (n, kind) in steps {
                match kind {
                    0 | 1 => match shelf.take(block(n), &sketch) {
                        Taken::Free(place) => writing.push((place, n)),
                        Taken::Instead(place, gone) => {
                            prop_assert!(model.remove(&gone).is_some());
                            writing.push((place, n));
                        }
                        Taken::Refused => {}
                    },
                    2 => if let Some((place, n)) = writing.pop() {
                        if shelf.stored(place, None, n) {
                            prop_assert!(model.insert(block(n), n).is_none());
                        } else {
                            prop_assert!(model.contains_key(&block(n)));
                        }
                    },
                    3 => if let Some((place, _)) = writing.pop() { shelf.abandon(place) },
                    4 => prop_assert_eq!(shelf.remove(block(n)), model.remove(&block(n)).is_some()),
                    5 => read.extend(shelf.pin(block(n)).map(|stored| stored.place)),
                    _ => {
                        read.pop().into_iter().for_each(|place| shelf.unpin(place));
                        sketch.note(block(n));
                        shelf.touch(block(n));
                    }
                }
                shelf.check().map_err(TestCaseError::fail)?;
                prop_assert_eq!(shelf.len(), model.len());
                let mut owned: Vec<Place> = writing.iter().map(|(place, _)| *place).chain(shelf.iter().map(|(_, s)| s.place)).collect();
                owned.sort_unstable();
                let all = owned.len();
                owned.dedup();
                prop_assert_eq!(owned.len(), all, "two owners of one place");
            }
        }
    }
}
