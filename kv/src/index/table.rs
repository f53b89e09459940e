//! From a block's hash to its place: buckets of one cache line, in segments that split and merge one at a time.
//!
//! Called by the shard alone, which has one for each lane and one for the blocks where pieces begin: an event reads its own
//! lane's, which is small enough to stay near. A bucket has twelve entries of 8 bits of the hash and the place; whoever asks
//! compares the whole hash there. Extendible hashing: a directory by the first bits points to segments of 128 buckets,
//! so that growing and shrinking never touch more than one or two of them. An entry that does not fit goes to the next
//! bucket, and every bucket counts the entries that went past it, so there are no graves and a miss reads one line.
//! Bounds: 7 to 14 bytes an entry once there is more than one segment; a change costs one segment at most.

use starling_ids::BlockHash;

use super::prefetch::prefetch;

/// Entries of a bucket: what fits in 64 bytes.
const WAYS: usize = 12;
/// Buckets of a segment: the first one grows up to this, all others are made so.
const SEGMENT: usize = 128;
/// Buckets of an empty table.
const SMALLEST: usize = 8;
/// A segment splits when this many tenths of it are taken.
const FULL_10THS: usize = 8;
/// Two segments merge when both together would take at most this many tenths.
const MERGED_10THS: usize = 4;

/// 64 bits of a hash, spread: the first choose the segment, the last the bucket, those between are kept in the entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Print(u64);

impl Print {
    pub(super) fn of(hash: BlockHash) -> Self {
        // A widening product folded: every bit of the hash reaches every bit of the print, also when hashes are counted up.
        let (high, low) = ((hash.0 >> 64) as u64 ^ 0x9e37_79b9_7f4a_7c15, hash.0 as u64 ^ 0xd1b5_4a32_d192_ed03);
        let product = u128::from(high) * u128::from(low);
        Self((product >> 64) as u64 ^ product as u64)
    }

    /// What an entry keeps; never 0, which marks a free one.
    fn mark(self) -> u8 {
        ((self.0 >> 16) as u8).max(1)
    }

    fn bucket(self, mask: usize) -> usize {
        self.0 as u16 as usize & mask
    }
}

/// One cache line. Marks are the bytes of `marks[0]` and the lower half of `marks[1]`, compared all at once.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    marks: [u64; 2],
    places: [u32; WAYS],
}

/// The count of entries that went past, in `marks[1]`.
const PAST: u32 = 48;

impl Bucket {
    const EMPTY: Self = Self { marks: [0; 2], places: [0; WAYS] };

    /// The entries with this mark, as bits that [`way`] reads.
    #[inline]
    fn with(&self, mark: u8) -> u64 {
        let wanted = u64::from(mark) * 0x0101_0101_0101_0101;
        let (low, high) = (zero_bytes(self.marks[0] ^ wanted), zero_bytes(self.marks[1] ^ wanted));
        low >> 7 | (high & 0x8080_8080) >> 6
    }

    #[inline]
    fn set(&mut self, way: usize, mark: u8) {
        let shift = way % 8 * 8;
        let word = &mut self.marks[way / 8];
        *word = *word & !(0xff << shift) | u64::from(mark) << shift;
    }

    /// Entries that would be here or in an earlier bucket but lie in a later one; at its highest value it stays there.
    #[inline]
    fn past(&self) -> u64 {
        self.marks[1] >> PAST
    }

    fn pass(&mut self) {
        if self.past() < u64::from(u16::MAX) {
            self.marks[1] += 1 << PAST;
        }
    }

    fn unpass(&mut self) {
        // One that has reached its highest value has lost count.
        if (1..u64::from(u16::MAX)).contains(&self.past()) {
            self.marks[1] -= 1 << PAST;
        }
    }
}

/// 0x80 in each byte that is zero, nothing in the others.
#[inline]
fn zero_bytes(word: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    !(((word & LOW) + LOW) | word | LOW)
}

/// The entry that the lowest bit of [`Bucket::with`] stands for.
#[inline]
fn way(found: u64) -> usize {
    let bit = found.trailing_zeros() as usize;
    (bit % 8 * 8 + bit / 8) % WAYS
}

#[derive(Debug)]
struct Segment {
    /// A power of two of them.
    buckets: Box<[Bucket]>,
    len: u32,
    /// Entries at which it is full.
    most: u32,
    /// Bits of the print that all its entries share.
    depth: u32,
}

impl Segment {
    fn new(buckets: usize, depth: u32) -> Self {
        let most = (buckets * WAYS * FULL_10THS / 10) as u32;
        Self { buckets: vec![Bucket::EMPTY; buckets].into_boxed_slice(), len: 0, most, depth }
    }

    /// Puts an entry in that is not there. There is room.
    #[inline]
    fn put(&mut self, print: Print, place: u32) {
        let mask = self.buckets.len() - 1;
        let mut at = print.bucket(mask);
        self.len += 1;
        loop {
            let bucket = &mut self.buckets[at];
            let free = bucket.with(0);
            if free != 0 {
                bucket.set(way(free), print.mark());
                bucket.places[way(free)] = place;
                return;
            }
            bucket.pass();
            at = (at + 1) & mask;
        }
    }

    /// The entry that `is` accepts: (bucket, way).
    #[inline]
    fn find(&self, print: Print, is: impl Fn(u32) -> bool) -> Option<(usize, usize)> {
        let (mask, mark) = (self.buckets.len() - 1, print.mark());
        let mut at = print.bucket(mask);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            let mut found = bucket.with(mark);
            while found != 0 {
                if is(bucket.places[way(found)]) {
                    return Some((at, way(found)));
                }
                found &= found - 1;
            }
            if bucket.past() == 0 {
                return None;
            }
            at = (at + 1) & mask;
        }
        None
    }

    /// Takes an entry out; false when it is not there.
    fn cut(&mut self, print: Print, place: u32) -> bool {
        let Some((found, way)) = self.find(print, |other| other == place) else { return false };
        self.buckets[found].set(way, 0);
        self.len -= 1;
        let mask = self.buckets.len() - 1;
        let mut at = print.bucket(mask);
        while at != found {
            self.buckets[at].unpass();
            at = (at + 1) & mask;
        }
        true
    }

    fn places(&self) -> impl Iterator<Item = u32> {
        let taken = |bucket: &Bucket| {
            let bucket = *bucket;
            (0..WAYS).filter(move |way| bucket.marks[way / 8] >> (way % 8 * 8) as u32 & 0xff != 0).map(move |way| bucket.places[way])
        };
        self.buckets.iter().flat_map(taken)
    }

    /// All entries with their prints.
    fn prints(&self, hashes: &impl Hashes) -> Vec<(Print, u32)> {
        let mut entries = Vec::with_capacity(self.len as usize);
        entries.extend(self.places().map(|place| (Print::default(), place)));
        entries.iter().for_each(|(_, place)| hashes.warm(*place));
        entries.iter_mut().for_each(|(print, place)| *print = Print::of(hashes.hash(*place)));
        entries
    }
}

/// Where the whole hashes are.
pub(super) trait Hashes {
    /// The hash at a place.
    fn hash(&self, place: u32) -> BlockHash;
    /// Fetches it ahead of its use.
    fn warm(&self, place: u32);
}

/// See the module. Hashes are read from the places when a segment is split, doubled or merged.
#[derive(Debug)]
pub(super) struct Table {
    /// By the first `bits` bits of the print: which segment.
    directory: Vec<u32>,
    bits: u32,
    segments: Vec<Segment>,
    /// Segments that are no longer in use, each of no buckets.
    free: Vec<u32>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self { directory: vec![0], bits: 0, segments: vec![Segment::new(SMALLEST, 0)], free: Vec::new(), len: 0 }
    }
}

impl Table {
    #[inline]
    fn slot(&self, print: Print) -> usize {
        (print.0 >> 1 >> (63 - self.bits)) as usize
    }

    #[inline]
    fn segment_of(&self, print: Print) -> usize {
        self.directory[self.slot(print)] as usize
    }

    /// Fetches what a later look-up of this print reads first.
    #[inline]
    pub(super) fn warm(&self, print: Print) {
        let segment = &self.segments[self.segment_of(print)];
        prefetch(&segment.buckets[print.bucket(segment.buckets.len() - 1)]);
    }

    /// The place that `is` accepts among those with this print.
    #[inline]
    pub(super) fn probe(&self, print: Print, is: impl Fn(u32) -> bool) -> Option<u32> {
        let segment = &self.segments[self.segment_of(print)];
        segment.find(print, is).map(|(bucket, way)| segment.buckets[bucket].places[way])
    }

    /// Puts an entry in that is not there.
    #[inline]
    pub(super) fn insert(&mut self, print: Print, place: u32, hashes: &impl Hashes) {
        let mut at = self.segment_of(print);
        while self.segments[at].len >= self.segments[at].most {
            self.grow(print, hashes);
            at = self.segment_of(print);
        }
        self.segments[at].put(print, place);
        self.len += 1;
    }

    /// Takes an entry out; one that is not there changes nothing.
    #[inline]
    pub(super) fn remove(&mut self, print: Print, place: u32, hashes: &impl Hashes) {
        let at = self.segment_of(print);
        let segment = &mut self.segments[at];
        if !segment.cut(print, place) {
            return;
        }
        self.len -= 1;
        if segment.depth > 0 && segment.len as usize * 20 < SEGMENT * WAYS * MERGED_10THS {
            self.merge(print, hashes);
        } else if self.len == 0 {
            *self = Self::default();
        }
    }

    /// The block at `old` is at `new` now.
    pub(super) fn relocate(&mut self, print: Print, old: u32, new: u32) {
        let at = self.segment_of(print);
        let segment = &mut self.segments[at];
        if let Some((bucket, way)) = segment.find(print, |place| place == old) {
            segment.buckets[bucket].places[way] = new;
        }
    }

    /// Splits the print's segment in two. One whose entries agree in far more bits than chance allows is doubled instead:
    /// made-up hashes cost their own segment, not the directory.
    #[cold]
    fn grow(&mut self, print: Print, hashes: &impl Hashes) {
        let at = self.segment_of(print);
        let depth = self.segments[at].depth;
        let deepest = (self.len / (SEGMENT * WAYS) + 1).ilog2() + 4;
        let buckets = self.segments[at].buckets.len();
        if buckets < SEGMENT || depth >= deepest.min(22) {
            let old = std::mem::replace(&mut self.segments[at], Segment::new(buckets * 2, depth));
            old.prints(hashes).into_iter().for_each(|(print, place)| self.segments[at].put(print, place));
            return;
        }
        if depth == self.bits {
            self.directory = self.directory.iter().flat_map(|segment| [*segment, *segment]).collect();
            self.bits += 1;
        }
        let old = std::mem::replace(&mut self.segments[at], Segment::new(buckets, depth + 1));
        let other = self.add(Segment::new(buckets, depth + 1));
        // The first bit in which the two differ.
        let bit = 63 - depth;
        for (print, place) in old.prints(hashes) {
            let side = if print.0 >> bit & 1 == 1 { other } else { at };
            self.segments[side].put(print, place);
        }
        let span = 1usize << (self.bits - depth);
        let begin = self.slot(print) & !(span - 1);
        self.directory[begin + span / 2..begin + span].fill(other as u32);
    }

    fn add(&mut self, segment: Segment) -> usize {
        if let Some(at) = self.free.pop() {
            self.segments[at as usize] = segment;
            return at as usize;
        }
        self.segments.push(segment);
        self.segments.len() - 1
    }

    /// Joins the print's segment with the one it was split from, when both are nearly empty.
    #[cold]
    fn merge(&mut self, print: Print, hashes: &impl Hashes) {
        let at = self.segment_of(print);
        let depth = self.segments[at].depth;
        let span = 1usize << (self.bits - depth);
        let begin = self.slot(print) & !(span - 1);
        let other = self.directory[begin ^ span] as usize;
        let together = (self.segments[at].len + self.segments[other].len) as usize;
        if self.segments[other].depth != depth || together * 10 > SEGMENT * WAYS * MERGED_10THS {
            return;
        }
        let first = std::mem::replace(&mut self.segments[at], Segment::new(SEGMENT, depth - 1));
        let second = std::mem::replace(&mut self.segments[other], Segment::new(0, u32::MAX));
        self.free.push(other as u32);
        for (print, place) in first.prints(hashes).into_iter().chain(second.prints(hashes)) {
            self.segments[at].put(print, place);
        }
        let begin = begin & !(2 * span - 1);
        self.directory[begin..begin + 2 * span].fill(at as u32);
        self.halve();
    }

    /// Gives back half of the directory while no segment needs all of its bits. Looked at only now and then, for it reads them all.
    fn halve(&mut self) {
        let used = self.segments.len() - self.free.len();
        while self.bits > 0 && used * 4 <= self.directory.len() {
            let needed = |segment: &Segment| segment.depth != u32::MAX && segment.depth == self.bits;
            if self.segments.iter().any(needed) {
                return;
            }
            self.directory = self.directory.iter().step_by(2).copied().collect();
            self.bits -= 1;
        }
        if used == 1 && self.free.len() > 8 && self.bits == 0 {
            let last = self.segments.swap_remove(self.directory[0] as usize);
            (self.segments, self.free, self.directory) = (vec![last], Vec::new(), vec![0]);
        }
    }

    /// The places of all entries.
    pub(super) fn places(&self) -> impl Iterator<Item = u32> {
        self.segments.iter().flat_map(Segment::places)
    }

    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes, from capacities.
    pub(super) fn heap_bytes(&self) -> usize {
        let buckets: usize = self.segments.iter().map(|segment| segment.buckets.len()).sum();
        let lists = (self.directory.capacity() + self.free.capacity()) * 4;
        buckets * std::mem::size_of::<Bucket>() + lists + self.segments.capacity() * std::mem::size_of::<Segment>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn hash(place: u32) -> BlockHash {
        BlockHash(u128::from(place) << 64)
    }

    fn print(place: u32) -> Print {
        Print::of(hash(place))
    }

    /// Hashes made of places.
    struct Made(fn(u32) -> BlockHash);

    impl Hashes for Made {
        fn hash(&self, place: u32) -> BlockHash {
            (self.0)(place)
        }

        fn warm(&self, _place: u32) {}
    }

    #[test]
    fn grows_and_gives_everything_back() {
        let mut table = Table::default();
        let empty = table.heap_bytes();
        let many = 200_000u32;
        let mut worst = 0;
        for place in 0..many {
            table.insert(print(place), place, &Made(hash));
            if place > 20_000 && place % 1_000 == 0 {
                worst = worst.max(table.heap_bytes() / place as usize);
            }
        }
        assert!(worst < 18, "{worst}");
        for place in 0..many {
            assert_eq!(table.probe(print(place), |found| found == place), Some(place));
        }
        for place in 0..many {
            table.remove(print(place), place, &Made(hash));
        }
        assert_eq!(table.len(), 0);
        assert!(table.heap_bytes() <= 2 * empty, "{} of {empty}", table.heap_bytes());
    }

    #[test]
    fn hashes_made_to_collide_cost_their_segment_and_stay_exact() {
        let mut table = Table::default();
        // One print for all: the worst there is.
        let same = Made(|_| BlockHash(7));
        let print = Print::of(BlockHash(7));
        for place in 0..3_000 {
            table.insert(print, place, &same);
        }
        assert!(table.directory.len() <= 64, "{}", table.directory.len());
        assert_eq!(table.probe(print, |found| found == 2_999), Some(2_999));
        (0..3_000).for_each(|place| table.remove(print, place, &same));
        assert_eq!(table.len(), 0);
        assert!(table.probe(print, |_| true).is_none());
    }

    proptest! {
        #[test]
        fn equals_a_map(ops in prop::collection::vec((0u32..3_000, any::<bool>()), 1..6_000)) {
            let mut table = Table::default();
            // A key lies at its own number, or 10,000 farther once it was moved.
            let mut model: HashMap<u32, u32> = HashMap::new();
            let of = Made(|place| hash(place % 10_000));
            for (key, add) in ops {
                match (model.get(&key).copied(), add) {
                    (None, true) => {
                        table.insert(print(key), key, &of);
                        model.insert(key, key);
                    }
                    (Some(place), true) => {
                        let moved = (place + 10_000) % 20_000;
                        table.relocate(print(key), place, moved);
                        model.insert(key, moved);
                    }
                    (Some(place), false) => {
                        table.remove(print(key), place, &of);
                        model.remove(&key);
                    }
                    (None, false) => {}
                }
            }
            prop_assert_eq!(table.len(), model.len());
            for key in 0..3_000u32 {
                let found = table.probe(print(key), |place| place % 10_000 == key);
                prop_assert_eq!(found, model.get(&key).copied());
            }
        }
    }
}
