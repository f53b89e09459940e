//! Pages of 64 blocks: their hashes, who holds them on which tier, and which follows which.
//!
//! Called by the shard alone. Blocks are put down in the order in which they come, so a chain lies in one piece most of
//! the time; a page is given back when its last block has gone. A set of holders is one word: a shard has 64 lanes.
//! Bounds: 26 bytes a block in a full page; 16 more where a lower tier is in use.

use std::sync::atomic::{AtomicU64, Ordering};

use starling_ids::BlockHash;

use super::{place::Tier, prefetch::prefetch};

/// Blocks in a page.
pub(super) const PAGE: usize = 64;
/// Blocks that share one summary.
pub(super) const SEGMENT: usize = 16;
/// Pages kept for others to come: 100 KiB.
const SPARE: usize = 64;
/// Pages that memory is asked for together: 25 KiB.
const TOGETHER: usize = 16;
/// Bytes that the allocator should have at hand then, for these and for segments of tables.
const RESERVE: usize = 64 << 10;
/// No page, no place.
pub(super) const NONE: u32 = u32::MAX;

/// A place: page number and place in the page.
pub(super) type Place = u32;

/// (page, place in the page).
pub(super) fn split(place: Place) -> (u32, usize) {
    (place / PAGE as u32, place as usize % PAGE)
}

/// Who holds the blocks of a page below the device.
#[derive(Debug, Clone)]
pub(super) struct Lower {
    pub(super) host: [u64; PAGE],
    pub(super) disk: [u64; PAGE],
}

/// See the module. A set of places is a word, bit by bit.
#[derive(Debug)]
pub(super) struct Page {
    /// The hashes; of a place that is not live, the last one that was there.
    pub(super) hashes: [BlockHash; PAGE],
    /// Lanes that hold each block on their device.
    pub(super) device: [u64; PAGE],
    /// Lanes that hold all 16 blocks of a segment on their device. May lack a lane, never has one too many.
    pub(super) all: [u64; PAGE / SEGMENT],
    /// Places that hold the child of the place before them.
    pub(super) links: u64,
    /// Places in use.
    pub(super) live: u64,
    /// Places that a look-up went through lately.
    pub(super) touched: AtomicU64,
    /// Places given out so far, in order.
    pub(super) fill: u32,
    /// The page that was opened when this one was full; a hint.
    pub(super) next: u32,
    /// The one that was full when this one was opened; a hint.
    pub(super) last: u32,
    /// When it was opened, in pages opened before.
    pub(super) born: u32,
    pub(super) lower: Option<Box<Lower>>,
}

impl Page {
    const fn new(born: u32) -> Self {
        Self {
            hashes: [BlockHash(0); PAGE],
            device: [0; PAGE],
            all: [0; PAGE / SEGMENT],
            links: 0,
            live: 0,
            touched: AtomicU64::new(0),
            fill: 0,
            next: NONE,
            last: NONE,
            born,
            lower: None,
        }
    }

    /// Memory for pages to come.
    pub(super) fn some() -> Memory {
        // The allocator gets memory from the system a few kilobytes at a time, with a call for each: asked for all of it first, it
        // has that at hand. A compiler that sees no use of it would leave it out.
        drop(std::hint::black_box(Vec::<u8>::with_capacity(RESERVE)));
        (0..TOGETHER).map(|_| Box::new(Self::new(0))).collect()
    }

    /// As if it were new. The hashes stay: those of places that were not given out are not looked at.
    fn renew(&mut self, born: u32) {
        let hashes = self.hashes;
        *self = Self { hashes, ..Self::new(born) };
    }

    /// Fetches what a removal reads and writes of a page, before it goes through it.
    pub(super) fn warm(&self) {
        self.hashes.chunks(4).for_each(|line| prefetch(&line[0]));
        self.device.chunks(8).for_each(|line| prefetch(&line[0]));
        prefetch(&self.links);
    }

    /// Fetches what a look-up reads of a page from a place on.
    pub(super) fn warm_from(&self, at: usize) {
        self.device[at..].chunks(8).for_each(|line| prefetch(&line[0]));
        prefetch(&self.all);
        prefetch(&self.links);
        prefetch(&self.hashes[PAGE - 1]);
    }

    /// Fetches what a look-up reads of a page when those that have held all so far hold this page too.
    pub(super) fn warm_whole(&self) {
        prefetch(&self.all);
        prefetch(&self.links);
        prefetch(&self.next);
        prefetch(&self.hashes[PAGE - 1]);
    }

    /// True when this place is in use and holds this block.
    pub(super) fn holds(&self, at: usize, hash: BlockHash) -> bool {
        self.hashes[at] == hash && self.live >> at & 1 == 1
    }

    /// How many places from `at` on hold the chain's beginning; the one at `at` does.
    ///
    /// Hashes are chained, so within a linked stretch one equal hash proves all before it equal.
    pub(super) fn stretch(&self, at: usize, chain: &[BlockHash]) -> usize {
        let linked = if at + 1 < PAGE { (!(self.links >> (at + 1))).trailing_zeros() as usize } else { 0 };
        let most = (1 + linked).min(chain.len()).min(PAGE - at);
        if self.hashes[at + most - 1] == chain[most - 1] {
            return most;
        }
        // The first that differs lies in between.
        let (mut equal, mut differs) = (0, most - 1);
        while differs - equal > 1 {
            let middle = equal.midpoint(differs);
            if self.hashes[at + middle] == chain[middle] { equal = middle } else { differs = middle }
        }
        differs
    }

    /// Marks `len` places from `at` on as used by a look-up.
    pub(super) fn touch(&self, at: usize, len: usize) {
        let places = (u64::MAX >> (PAGE - len)) << at;
        if self.touched.load(Ordering::Relaxed) & places != places {
            self.touched.fetch_or(places, Ordering::Relaxed);
        }
    }

    /// Lanes that hold the block on any tier.
    pub(super) fn holders(&self, at: usize) -> u64 {
        self.device[at] | self.lower.as_ref().map_or(0, |lower| lower.host[at] | lower.disk[at])
    }

    /// The holders on one tier.
    pub(super) fn on(&self, tier: Tier, at: usize) -> u64 {
        match (tier, &self.lower) {
            (Tier::Device, _) => self.device[at],
            (Tier::Host, Some(lower)) => lower.host[at],
            (Tier::Disk, Some(lower)) => lower.disk[at],
            (_, None) => 0,
        }
    }

    /// Adds a holder; false when it was one.
    pub(super) fn add(&mut self, tier: Tier, at: usize, bit: u64) -> bool {
        let holders = match tier {
            Tier::Device => &mut self.device[at],
            Tier::Host => &mut self.lower_mut().host[at],
            Tier::Disk => &mut self.lower_mut().disk[at],
        };
        let added = *holders & bit == 0;
        *holders |= bit;
        added
    }

    /// Says who holds a block below the device.
    pub(super) fn set_lower(&mut self, at: usize, (host, disk): (u64, u64)) {
        let lower = self.lower_mut();
        (lower.host[at], lower.disk[at]) = (host, disk);
    }

    fn lower_mut(&mut self) -> &mut Lower {
        self.lower.get_or_insert_with(|| Box::new(Lower { host: [0; PAGE], disk: [0; PAGE] }))
    }

    /// Adds a holder on the device to `len` places from `at` on: those that it did not hold there, the first in the lowest bit.
    #[inline]
    pub(super) fn add_run(&mut self, at: usize, len: usize, bit: u64) -> u64 {
        let mut added = 0;
        for (k, holders) in self.device[at..at + len].iter_mut().enumerate() {
            added |= u64::from(*holders & bit == 0) << k;
            *holders |= bit;
        }
        added
    }

    /// Takes a holder out; false when it was none.
    pub(super) fn take(&mut self, tier: Tier, at: usize, bit: u64) -> bool {
        let holders = match (tier, &mut self.lower) {
            (Tier::Device, _) => {
                self.all[at / SEGMENT] &= !bit;
                &mut self.device[at]
            }
            (Tier::Host, Some(lower)) => &mut lower.host[at],
            (Tier::Disk, Some(lower)) => &mut lower.disk[at],
            (_, None) => return false,
        };
        let taken = *holders & bit != 0;
        *holders &= !bit;
        taken
    }

    /// How many of these blocks lie here side by side from `at` downwards, all in use; the first one does.
    #[inline]
    pub(super) fn run_down(&self, at: usize, hashes: &[BlockHash]) -> usize {
        let below = self.hashes[..=at].iter().rev().zip(hashes).take_while(|(here, hash)| here == hash);
        let used = (!(self.live << (PAGE - 1 - at))).leading_zeros() as usize;
        below.count().clamp(1, used.max(1))
    }

    /// Takes a holder out of `len` places from `at` on: the places where it was one on this tier, those of them where it is none
    /// on any now, and those that nobody of `held` holds any more.
    #[inline]
    pub(super) fn take_tier(&mut self, tier: Tier, (at, len): (usize, usize), bit: u64, held: u64) -> (u64, u64, u64) {
        if tier != Tier::Device || self.lower.is_some() {
            return self.take_each(tier, (at, len), bit, held);
        }
        let (mut taken, mut empty) = (0, 0);
        for (k, holders) in self.device[at..at + len].iter_mut().enumerate() {
            taken |= u64::from(*holders & bit != 0) << (at + k);
            *holders &= !bit;
            empty |= u64::from(*holders & held == 0) << (at + k);
        }
        (at / SEGMENT..=(at + len - 1) / SEGMENT).for_each(|segment| self.all[segment] &= !bit);
        (taken, taken, empty & taken)
    }

    fn take_each(&mut self, tier: Tier, (at, len): (usize, usize), bit: u64, held: u64) -> (u64, u64, u64) {
        let (mut taken, mut gone, mut empty) = (0, 0, 0);
        for at in at..at + len {
            if !self.take(tier, at, bit) {
                continue;
            }
            let holders = self.holders(at);
            taken |= 1 << at;
            gone |= u64::from(holders & bit == 0) << at;
            empty |= u64::from(holders & held == 0) << at;
        }
        (taken, gone, empty)
    }

    /// Takes lanes out of the whole page; the places that nobody in `held` holds any more.
    pub(super) fn take_lanes(&mut self, lanes: u64, held: u64) -> u64 {
        let mut empty = 0;
        let mut any = 0;
        for (at, holders) in self.device.iter_mut().enumerate() {
            any |= *holders;
            *holders &= !lanes;
            empty |= u64::from(*holders & held == 0) << at;
        }
        self.all.iter_mut().for_each(|all| *all &= !lanes);
        if let Some(lower) = &mut self.lower {
            for (at, (host, disk)) in lower.host.iter_mut().zip(&mut lower.disk).enumerate() {
                any |= *host | *disk;
                *host &= !lanes;
                *disk &= !lanes;
                if (*host | *disk) & held != 0 {
                    empty &= !(1 << at);
                }
            }
        }
        if any & lanes == 0 { 0 } else { empty & self.live }
    }

    /// Brings a segment's summary up to date.
    pub(super) fn sum(&mut self, segment: usize) {
        let holders = &self.device[segment * SEGMENT..(segment + 1) * SEGMENT];
        self.all[segment] = holders.iter().fold(u64::MAX, |all, holders| all & holders);
    }

    /// A place is out of use. Its hash stays, so that the block finds its old place when it comes back soon.
    pub(super) fn bury(&mut self, at: usize) {
        self.live &= !(1 << at);
        self.links &= !(1 << at);
        if at + 1 < PAGE {
            self.links &= !(1 << (at + 1));
        }
        self.device[at] = 0;
        if let Some(lower) = &mut self.lower {
            (lower.host[at], lower.disk[at]) = (0, 0);
        }
        *self.touched.get_mut() &= !(1 << at);
    }
}

/// Memory for pages: each box becomes one.
pub(super) type Memory = Vec<Box<Page>>;

/// What a page that was given back looks like.
static GONE: Page = Page::new(0);

/// All pages of a shard.
#[derive(Debug)]
pub(super) struct Pages {
    pages: Vec<Option<Box<Page>>>,
    /// Live places of each page.
    live: Vec<u8>,
    free: Vec<u32>,
    /// Memory for pages to come, mostly of pages that were given back: to ask for it takes as long as a section.
    spare: Memory,
    /// The page that new blocks go to.
    pub(super) open: u32,
    /// Places in use.
    pub(super) blocks: usize,
    opened: u32,
}

impl Default for Pages {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            live: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            open: NONE,
            blocks: 0,
            opened: 0,
        }
    }
}

impl Pages {
    /// A page; one of nothing when it was given back.
    pub(super) fn get(&self, page: u32) -> &Page {
        self.pages.get(page as usize).and_then(Option::as_deref).unwrap_or(&GONE)
    }

    /// A page; none when it was given back.
    pub(super) fn get_mut(&mut self, page: u32) -> Option<&mut Page> {
        self.pages.get_mut(page as usize)?.as_deref_mut()
    }

    /// The hash at a place.
    pub(super) fn hash(&self, place: Place) -> BlockHash {
        let (page, at) = split(place);
        self.get(page).hashes[at]
    }

    /// Puts a block down, of nobody yet and linked to none.
    pub(super) fn append(&mut self, hash: BlockHash) -> Place {
        if self.open == NONE || self.get(self.open).fill as usize == PAGE {
            self.open_page();
        }
        let open = self.open;
        let Some(page) = self.get_mut(open) else { return NONE };
        let at = page.fill as usize;
        page.fill += 1;
        page.hashes[at] = hash;
        page.live |= 1 << at;
        self.live[open as usize] += 1;
        self.blocks += 1;
        open * PAGE as u32 + at as u32
    }

    /// Puts linked blocks down at the end of the open page, which ends at `at` and has room.
    #[inline]
    pub(super) fn append_run(&mut self, at: usize, hashes: &[BlockHash]) {
        let open = self.open;
        let Some(page) = self.get_mut(open).filter(|_| !hashes.is_empty()) else { return };
        page.hashes[at..at + hashes.len()].copy_from_slice(hashes);
        page.fill += hashes.len() as u32;
        let places = (u64::MAX >> (PAGE - hashes.len())) << at;
        page.live |= places;
        page.links |= places;
        self.live[open as usize] += hashes.len() as u8;
        self.blocks += hashes.len();
    }

    fn open_page(&mut self) {
        let mut page = self.spare.pop().unwrap_or_else(|| Box::new(Page::new(0)));
        page.renew(self.opened);
        self.opened = self.opened.wrapping_add(1);
        let number = match self.free.pop() {
            Some(number) => {
                self.pages[number as usize] = Some(page);
                number
            }
            None => {
                self.pages.push(Some(page));
                self.live.push(0);
                self.pages.len() as u32 - 1
            }
        };
        let last = std::mem::replace(&mut self.open, number);
        if let Some(page) = self.get_mut(number) {
            page.last = last;
        }
        match self.get_mut(last) {
            Some(page) if page.live == 0 => self.free_page(last),
            Some(page) => page.next = number,
            None => {}
        }
    }

    /// A block that was buried here is back.
    pub(super) fn revive(&mut self, place: Place) {
        let (page, at) = split(place);
        if let Some(found) = self.get_mut(page) {
            found.live |= 1 << at;
            self.live[page as usize] += 1;
            self.blocks += 1;
        }
    }

    /// Takes places out of use; a page without any is given back.
    pub(super) fn bury(&mut self, page: u32, places: u64) {
        let Some(found) = self.get_mut(page) else { return };
        ones(places).for_each(|at| found.bury(at));
        let empty = found.live == 0;
        let buried = places.count_ones();
        self.live[page as usize] -= buried as u8;
        self.blocks -= buried as usize;
        if empty && page != self.open {
            self.free_page(page);
        }
    }

    /// Gives a place the holders of another, without those in `gone`.
    pub(super) fn copy_holders(&mut self, (from, at): (u32, usize), (to, place): (u32, usize), gone: u64) {
        let page = self.get(from);
        let device = page.device[at] & !gone;
        let lower = page.lower.as_ref().map_or((0, 0), |lower| (lower.host[at] & !gone, lower.disk[at] & !gone));
        let touched = page.touched.load(Ordering::Relaxed) >> at & 1;
        let Some(page) = self.get_mut(to) else { return };
        page.device[place] = device;
        if lower != (0, 0) {
            page.set_lower(place, lower);
        }
        *page.touched.get_mut() |= touched << place;
        if place % SEGMENT == SEGMENT - 1 {
            page.sum(place / SEGMENT);
        }
    }

    /// Whether the next page would have to ask for memory.
    pub(super) fn wants_memory(&self) -> bool {
        self.spare.is_empty()
    }

    /// Takes memory for pages to come.
    pub(super) fn keep(&mut self, memory: Memory) {
        self.spare.extend(memory);
    }

    fn free_page(&mut self, page: u32) {
        let memory = self.pages[page as usize].take();
        self.spare.extend(memory.filter(|_| self.spare.len() < SPARE));
        self.free.push(page);
    }

    /// Page numbers go from 0 up to this.
    pub(super) fn numbers(&self) -> u32 {
        self.pages.len() as u32
    }

    /// Pages that exist.
    pub(super) fn count(&self) -> usize {
        self.pages.len() - self.free.len()
    }

    /// Live places of a page.
    pub(super) fn live_in(&self, page: u32) -> usize {
        self.live.get(page as usize).map_or(0, |live| usize::from(*live))
    }

    /// Bytes, from capacities.
    pub(super) fn heap_bytes(&self) -> usize {
        let lower = self.pages.iter().flatten().filter(|page| page.lower.is_some()).count();
        let pages =
            (self.count() + self.spare.len()) * std::mem::size_of::<Page>() + lower * std::mem::size_of::<Lower>();
        pages + self.pages.capacity() * 8 + self.live.capacity() + self.free.capacity() * 4
    }
}

/// The bits that are set, lowest first.
pub(super) fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = word.trailing_zeros() as usize;
        (word != 0).then(|| {
            word &= word - 1;
            at
        })
    })
}
