//! From a block's hash to its place: buckets of one cache line, in segments that split and merge one at a time.
//!
//! Called by the shard alone, which has one for each lane and one for the blocks where pieces begin: an event reads its own
//! lane's, which is small enough to stay near. A bucket has ten entries: 8 bits of the hash to look for, 8 that choose its segment, and the
//! place; whoever asks compares the whole hash there. Extendible hashing: a directory by the first bits points to segments of 32 buckets,
//! so that growing and shrinking never touch more than one or two of them, mostly without reading a hash. An entry that does not fit goes to the next
//! bucket, and every bucket counts the entries that went past it, so there are no graves and a miss reads one line.
//! Bounds: 10 to 23 bytes an entry once there is more than one segment; a change costs one segment at most, and a merge a look through the directory.

use starling_ids::BlockHash;

use super::prefetch::prefetch;

/// Entries of a bucket: what fits in 64 bytes.
const WAYS: usize = 10;
/// Buckets of a segment; a table of one segment may have fewer. A split goes through all of them while look-ups wait: some 5 µs.
const SEGMENT: usize = 32;
/// Buckets of an empty table.
const SMALLEST: usize = 8;
/// Entries of a segment's bucket, on the average, at which the segment splits: few buckets are full then.
const FULL: usize = 6;
/// The same for two segments together at which they merge.
const MERGED: usize = 4;
/// Entries of a segment below which it looks for another to merge with.
const SPARSE: usize = MERGED / 2 * SEGMENT;
/// Bits of the print that may choose the segment; beyond, entries go to the crowd.
const DEPTH_MAX: u32 = 22;

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

/// One cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    /// Marks of the entries, the first bits of their prints, then the two counts named below.
    bytes: [u8; 24],
    places: [u32; WAYS],
}

/// Where the first bits of the prints begin.
const FIRST: usize = WAYS;
/// Where the count of entries is that went past.
const PAST: usize = 2 * WAYS;
/// Where the set of entries is, bit by bit, that came from an earlier bucket; a free one is none of them.
const STRAYS: usize = PAST + 2;
/// Bits of a print that an entry keeps of its beginning.
const FIRST_BITS: u32 = 8;

impl Bucket {
    const EMPTY: Self = Self { bytes: [0; 24], places: [0; WAYS] };

    /// The entries with this mark, as bits that [`way`] reads.
    #[inline]
    fn with(&self, mark: u8) -> u32 {
        let (head, _) = self.bytes.split_first_chunk().unwrap_or((&[0; 16], &[]));
        same_bytes(head, mark) & ((1 << WAYS) - 1)
    }

    /// Its entries: where each is.
    fn taken(&self) -> impl Iterator<Item = usize> + use<> {
        let bytes = self.bytes;
        (0..WAYS).filter(move |way| bytes[*way] != 0)
    }

    /// What of an entry's print is known here, when it is at home in this bucket, the `at`th of its segment.
    fn print(&self, way: usize, at: usize) -> Option<Print> {
        let (mark, first) = (u64::from(self.bytes[way]), u64::from(self.bytes[FIRST + way]));
        let strayed = self.number(STRAYS) >> way & 1 == 1;
        (!strayed).then_some(Print(first << (64 - FIRST_BITS) | mark << 16 | at as u64))
    }

    #[inline]
    fn set(&mut self, way: usize, print: Print, place: u32, strayed: bool) {
        self.bytes[way] = print.mark();
        self.bytes[FIRST + way] = (print.0 >> (64 - FIRST_BITS)) as u8;
        self.places[way] = place;
        if strayed {
            self.set_number(STRAYS, self.number(STRAYS) | 1 << way);
        }
    }

    #[inline]
    fn clear(&mut self, way: usize) {
        self.bytes[way] = 0;
        let strays = self.number(STRAYS);
        if strays != 0 {
            self.set_number(STRAYS, strays & !(1 << way));
        }
    }

    #[inline]
    fn number(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    #[inline]
    fn set_number(&mut self, at: usize, number: u16) {
        [self.bytes[at], self.bytes[at + 1]] = number.to_le_bytes();
    }

    /// Entries that would be here or in an earlier bucket but lie in a later one; at its highest value it stays there.
    #[inline]
    fn past(&self) -> u16 {
        self.number(PAST)
    }

    fn pass(&mut self) {
        self.set_number(PAST, self.past().saturating_add(1));
    }

    /// Takes out the entries that came from an earlier bucket.
    fn expel(&mut self, out: &mut Strays) {
        let strays = self.number(STRAYS);
        for way in (0..WAYS).filter(|way| strays >> way & 1 == 1) {
            self.bytes[way] = 0;
            out.push(self.places[way]);
        }
        self.set_number(STRAYS, 0);
        self.set_number(PAST, 0);
    }

    /// Takes out the entries whose print has a certain one of its first bits set; a bucket of these alone. It has no strays.
    fn split_off(&mut self, depth: u32) -> Self {
        let mut off = *self;
        let shift = FIRST_BITS - 1 - depth;
        for way in 0..WAYS {
            let goes = (self.bytes[FIRST + way] >> shift & 1).wrapping_neg();
            off.bytes[way] &= goes;
            self.bytes[way] &= !goes;
        }
        off
    }

    /// How many entries it has.
    fn count(&self) -> u32 {
        WAYS as u32 - self.with(0).count_ones()
    }

    fn unpass(&mut self) {
        // One that has reached its highest value has lost count.
        if (1..u16::MAX).contains(&self.past()) {
            self.set_number(PAST, self.past() - 1);
        }
    }
}

/// A bit for each byte that is this one, the first byte's lowest.
#[inline]
#[allow(unused_unsafe, reason = "compilers differ in whether the target's own features need it")]
fn same_bytes(bytes: &[u8; 16], one: u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8};
        let all = u128::from_le_bytes(*bytes);
        let (high, low) = ((all >> 64) as i64, all as i64);
        // SAFETY: these instructions are part of every x86-64 processor, and they read no memory.
        let same = unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_set_epi64x(high, low), _mm_set1_epi8(one as i8))) };
        same as u32
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        bytes.iter().enumerate().fold(0, |found, (at, byte)| found | u32::from(*byte == one) << at)
    }
}

/// The entry that the lowest bit of [`Bucket::with`] stands for.
#[inline]
fn way(found: u32) -> usize {
    (found.trailing_zeros() as usize).min(WAYS - 1)
}

/// Where an entry is.
#[derive(Debug, Clone, Copy)]
struct Found {
    segment: usize,
    bucket: usize,
    way: usize,
}

#[derive(Debug)]
struct Segment {
    /// As many as the table's mask says: a power of two.
    buckets: Box<[Bucket]>,
    len: u32,
    /// Bits of the print that all its entries share.
    depth: u32,
}

impl Segment {
    fn new(buckets: usize, depth: u32) -> Self {
        Self { buckets: vec![Bucket::EMPTY; buckets].into_boxed_slice(), len: 0, depth }
    }
}

/// What was in a segment. No memory is asked for: look-ups wait.
struct Taken {
    prints: [Option<Print>; SEGMENT * WAYS],
    places: [u32; SEGMENT * WAYS],
    len: usize,
}

impl Taken {
    fn iter(&self) -> impl Iterator<Item = (Print, u32)> {
        self.prints[..self.len].iter().flatten().copied().zip(self.places[..self.len].iter().copied())
    }
}

/// Places of entries that wait to be put in again. No memory is asked for: look-ups wait.
struct Strays {
    places: [u32; SEGMENT * WAYS],
    len: usize,
}

impl Strays {
    const NONE: Self = Self { places: [0; SEGMENT * WAYS], len: 0 };

    fn push(&mut self, place: u32) {
        if let Some(free) = self.places.get_mut(self.len) {
            *free = place;
            self.len += 1;
        }
    }
}

/// Where the whole hashes are.
pub(super) trait Hashes {
    /// The hash at a place.
    fn hash(&self, place: u32) -> BlockHash;
    /// Fetches it ahead of its use.
    fn warm(&self, place: u32);
}

/// See the module. Hashes are read from the places when a segment is split or merged.
#[derive(Debug)]
pub(super) struct Table {
    /// By the first `bits` bits of the print: which segment.
    directory: Vec<u32>,
    bits: u32,
    /// Buckets of a segment, less one.
    mask: usize,
    segments: Vec<Segment>,
    /// Entries that more others agree with than chance allows: made-up hashes cost a search here, nothing else.
    crowd: Vec<(Print, u32)>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            directory: vec![0],
            bits: 0,
            mask: SMALLEST - 1,
            segments: vec![Segment::new(SMALLEST, 0)],
            crowd: Vec::new(),
            len: 0,
        }
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
        prefetch(self.home(print));
    }

    /// The bucket at which a print's entries begin.
    #[inline]
    fn home(&self, print: Print) -> &Bucket {
        &self.segments[self.segment_of(print)].buckets[print.bucket(self.mask)]
    }

    /// True when there is no entry like this; false says nothing.
    #[inline]
    pub(super) fn lacks(&self, print: Print) -> bool {
        let bucket = self.home(print);
        bucket.with(print.mark()) == 0 && bucket.past() == 0 && self.crowd.is_empty()
    }

    /// A place that may well be this print's: one that its first bucket has with the same mark. Nothing but that bucket is read.
    #[inline]
    pub(super) fn guess(&self, print: Print) -> Option<u32> {
        let bucket = self.home(print);
        let found = bucket.with(print.mark());
        (found != 0).then(|| bucket.places[way(found)])
    }

    /// The place that `is` accepts among those with this print.
    #[inline]
    pub(super) fn probe(&self, print: Print, is: impl Fn(u32) -> bool) -> Option<u32> {
        if let Some(found) = self.find(print, &is) {
            return Some(self.segments[found.segment].buckets[found.bucket].places[found.way]);
        }
        self.crowd.iter().find(|(other, place)| *other == print && is(*place)).map(|(_, place)| *place)
    }

    #[inline]
    fn find(&self, print: Print, is: impl Fn(u32) -> bool) -> Option<Found> {
        let segment = self.segment_of(print);
        let buckets = &self.segments[segment].buckets;
        let mut at = print.bucket(self.mask);
        for _ in 0..=self.mask {
            let bucket = &buckets[at];
            let mut found = bucket.with(print.mark());
            while found != 0 {
                let way = way(found);
                if is(bucket.places[way]) {
                    return Some(Found { segment, bucket: at, way });
                }
                found &= found - 1;
            }
            if bucket.past() == 0 {
                return None;
            }
            at = (at + 1) & self.mask;
        }
        None
    }

    /// Puts an entry in that is not there.
    #[inline]
    pub(super) fn insert(&mut self, print: Print, place: u32, hashes: &impl Hashes) {
        self.len += 1;
        let (at, mask) = (self.segment_of(print), self.mask);
        let segment = &mut self.segments[at];
        let bucket = &mut segment.buckets[print.bucket(mask)];
        let free = bucket.with(0);
        // Nearly always.
        if free != 0 && segment.len as usize <= FULL * mask {
            segment.len += 1;
            return bucket.set(way(free), print, place, false);
        }
        self.insert_crowded(print, place, hashes);
    }

    /// The same where the bucket or the segment is full.
    #[cold]
    fn insert_crowded(&mut self, print: Print, place: u32, hashes: &impl Hashes) {
        let mut segment = self.segment_of(print);
        while self.segments[segment].len as usize > FULL * self.mask {
            if !self.grow(segment, print, hashes) {
                self.crowd.push((print, place));
                return;
            }
            segment = self.segment_of(print);
        }
        self.put(segment, print, place);
    }

    /// Puts an entry into a segment that has room.
    #[inline]
    fn put(&mut self, segment: usize, print: Print, place: u32) {
        let segment = &mut self.segments[segment];
        segment.len += 1;
        let home = print.bucket(self.mask);
        let mut at = home;
        loop {
            let bucket = &mut segment.buckets[at];
            let free = bucket.with(0);
            if free != 0 {
                return bucket.set(way(free), print, place, at != home);
            }
            bucket.pass();
            at = (at + 1) & self.mask;
        }
    }

    /// Takes an entry out; one that is not there changes nothing.
    #[inline]
    pub(super) fn remove(&mut self, print: Print, place: u32, hashes: &impl Hashes) {
        let (at, mask) = (self.segment_of(print), self.mask);
        let segment = &mut self.segments[at];
        let bucket = &mut segment.buckets[print.bucket(mask)];
        let found = bucket.with(print.mark());
        let way = way(found);
        // Nearly always.
        if found != 0 && bucket.places[way] == place && segment.len as usize > SPARSE {
            bucket.clear(way);
            segment.len -= 1;
            self.len -= 1;
            return;
        }
        self.remove_sparse(print, place, hashes);
    }

    /// The same where the entry is somewhere else or few are left.
    #[cold]
    fn remove_sparse(&mut self, print: Print, place: u32, hashes: &impl Hashes) {
        let Some(found) = self.find(print, |other| other == place) else {
            let at = self.crowd.iter().position(|entry| *entry == (print, place));
            self.len -= usize::from(at.is_some());
            at.map(|at| self.crowd.swap_remove(at));
            return;
        };
        let Segment { buckets, len, depth } = &mut self.segments[found.segment];
        buckets[found.bucket].clear(found.way);
        let mut at = print.bucket(self.mask);
        while at != found.bucket {
            buckets[at].unpass();
            at = (at + 1) & self.mask;
        }
        self.len -= 1;
        *len -= 1;
        if *depth > 0 && (*len as usize) < SPARSE {
            self.merge(found.segment, print, hashes);
        } else if self.len == 0 {
            *self = Self::default();
        }
    }

    /// The block at `old` is at `new` now.
    pub(super) fn relocate(&mut self, print: Print, old: u32, new: u32) {
        if let Some(found) = self.find(print, |place| place == old) {
            self.segments[found.segment].buckets[found.bucket].places[found.way] = new;
        } else if let Some(entry) = self.crowd.iter_mut().find(|entry| **entry == (print, old)) {
            entry.1 = new;
        }
    }

    /// Makes a full segment two, or the only one larger; false when its entries agree in far more bits than chance allows.
    #[cold]
    fn grow(&mut self, segment: usize, print: Print, hashes: &impl Hashes) -> bool {
        if self.mask + 1 < SEGMENT {
            // The bucket of each takes one more bit.
            let entries = self.take(segment, false, hashes);
            self.mask = 2 * self.mask + 1;
            self.segments[segment] = Segment::new(self.mask + 1, 0);
            entries.iter().for_each(|(print, place)| self.put(segment, print, place));
            return true;
        }
        let depth = self.segments[segment].depth;
        if depth >= ((self.len / (FULL * SEGMENT) + 1).ilog2() + 4).min(DEPTH_MAX) {
            return false;
        }
        if depth == self.bits {
            self.directory = self.directory.iter().flat_map(|segment| [*segment, *segment]).collect();
            self.bits += 1;
        }
        let other = self.segments.len();
        self.segments.push(Segment::new(SEGMENT, depth + 1));
        let span = 1usize << (self.bits - depth);
        let begin = self.slot(print) & !(span - 1);
        self.directory[begin + span / 2..begin + span].fill(other as u32);
        if depth < FIRST_BITS {
            self.split(segment, other, hashes);
        } else {
            let entries = self.take(segment, false, hashes);
            self.segments[segment].depth = depth + 1;
            for (print, place) in entries.iter() {
                self.put(self.segment_of(print), print, place);
            }
        }
        true
    }

    /// Moves what the directory now gives to an empty segment there, bucket by bucket: where an entry is in its segment stays
    /// as it was, and the bit that decides is kept beside it. Only the few that are not in their own bucket are put in anew.
    fn split(&mut self, segment: usize, other: usize, hashes: &impl Hashes) {
        let depth = self.segments[segment].depth;
        let mut strays = Strays::NONE;
        let (before, after) = self.segments.split_at_mut(other);
        let (Some(from), Some(to)) = (before.get_mut(segment), after.first_mut()) else { return };
        for (bucket, off) in from.buckets.iter_mut().zip(&mut to.buckets) {
            if bucket.number(STRAYS) | bucket.past() != 0 {
                bucket.expel(&mut strays);
            }
            *off = bucket.split_off(depth);
            to.len += off.count();
        }
        from.len -= to.len + strays.len as u32;
        from.depth = depth + 1;
        let strays = &strays.places[..strays.len];
        strays.iter().for_each(|place| hashes.warm(*place));
        for place in strays {
            let print = Print::of(hashes.hash(*place));
            self.put(self.segment_of(print), print, *place);
        }
    }

    /// Empties a segment; its entries with their prints, of which no more bits are right than the first, the mark and the
    /// bucket where `known` says that these are enough.
    fn take(&mut self, segment: usize, known: bool, hashes: &impl Hashes) -> Taken {
        let Segment { buckets, len, .. } = &mut self.segments[segment];
        let mut taken = Taken { prints: [None; SEGMENT * WAYS], places: [0; SEGMENT * WAYS], len: 0 };
        for (at, bucket) in buckets.iter().enumerate() {
            for way in bucket.taken() {
                taken.prints[taken.len] = bucket.print(way, at).filter(|_| known);
                taken.places[taken.len] = bucket.places[way];
                taken.len += 1;
            }
        }
        let unknown = |at: &usize| taken.prints[*at].is_none();
        (0..taken.len).filter(unknown).for_each(|at| hashes.warm(taken.places[at]));
        for at in 0..taken.len {
            taken.prints[at].get_or_insert_with(|| Print::of(hashes.hash(taken.places[at])));
        }
        buckets.fill(Bucket::EMPTY);
        *len = 0;
        taken
    }

    /// Joins a segment with the one it was split from, when both are nearly empty. The last one takes the free place.
    #[cold]
    fn merge(&mut self, segment: usize, print: Print, hashes: &impl Hashes) {
        let depth = self.segments[segment].depth;
        let span = 1usize << (self.bits - depth);
        let begin = self.slot(print) & !(span - 1);
        let other = self.directory[begin ^ span] as usize;
        let together = (self.segments[segment].len + self.segments[other].len) as usize;
        if self.segments[other].depth != depth || together > MERGED * SEGMENT {
            return;
        }
        let entries = self.take(other, true, hashes);
        let both = begin & !(2 * span - 1);
        self.directory[both..both + 2 * span].fill(segment as u32);
        self.segments[segment].depth = depth - 1;
        entries.iter().for_each(|(print, place)| self.put(segment, print, place));
        self.drop_segment(other);
        self.halve();
    }

    /// The last segment moves to the place of an empty one.
    fn drop_segment(&mut self, empty: usize) {
        let last = self.segments.len() - 1;
        self.directory
            .iter_mut()
            .filter(|segment| **segment == last as u32)
            .for_each(|segment| *segment = empty as u32);
        self.segments.swap_remove(empty);
    }

    /// Gives back half of the directory while no segment needs all of its bits.
    fn halve(&mut self) {
        while self.bits > 0 && self.segments.len() * 4 <= self.directory.len() {
            if self.segments.iter().any(|segment| segment.depth == self.bits) {
                return;
            }
            self.directory = self.directory.iter().step_by(2).copied().collect();
            self.bits -= 1;
        }
    }

    /// The places of all entries.
    pub(super) fn places(&self) -> impl Iterator<Item = u32> {
        let buckets = self.segments.iter().flat_map(|segment| segment.buckets.iter());
        let taken = |bucket: &Bucket| {
            let places = bucket.places;
            bucket.taken().map(move |way| places[way])
        };
        buckets.flat_map(taken).chain(self.crowd.iter().map(|(_, place)| *place))
    }

    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes, from capacities.
    pub(super) fn heap_bytes(&self) -> usize {
        self.segments.len() * (self.mask + 1) * std::mem::size_of::<Bucket>()
            + self.directory.capacity() * 4
            + self.segments.capacity() * std::mem::size_of::<Segment>()
            + self.crowd.capacity() * std::mem::size_of::<(Print, u32)>()
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
        assert!(worst < 26, "{worst}");
        for place in 0..many {
            assert_eq!(table.probe(print(place), |found| found == place), Some(place));
        }
        for place in 0..many {
            table.remove(print(place), place, &Made(hash));
        }
        assert_eq!(table.len(), 0);
        assert!(table.heap_bytes() <= 3 * empty, "{} of {empty}", table.heap_bytes());
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
        assert!(table.directory.len() <= 256, "{}", table.directory.len());
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
