//! What a shard does a little of with every change: sweeps lanes that were given up, moves blocks out of nearly empty
//! pages, and evicts the oldest blocks when the index is full.
//!
//! Called by the shard. Bounds: a call's work is in proportion to the blocks of the change it goes with; at rest, pages
//! are at least 60 % full, but for the last few.

use super::{
    page::{PAGE, ones},
    place::Tier,
    shard::Shard,
    table::{Print, Table},
};

/// Below this many blocks in use, a page may be emptied into the open one.
const NEARLY_EMPTY: usize = PAGE * 6 / 10;
/// Pages that are swept at once when a lane is given up; more are left to upkeep.
const SMALL: u32 = 512;
/// Pages looked at in one call for one that is nearly empty.
const LOOKS: usize = 256;

/// What a shard wants between two changes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wants {
    /// [`Shard::tidy`] has something to do.
    pub(super) tidy: bool,
    /// There is none for the next page.
    pub(super) memory: bool,
}

impl Wants {
    /// Whether it wants anything.
    pub(super) fn any(self) -> bool {
        self.tidy || self.memory
    }
}

impl Shard {
    /// What is to be done before the next change.
    pub(super) fn wants(&self) -> Wants {
        let tidy = self.dying | self.queued != 0 || self.is_sparse();
        Wants { tidy, memory: self.blocks.pages.wants_memory() }
    }

    /// Upkeep after a change of this many blocks.
    pub(super) fn tidy(&mut self, changed: usize) {
        if self.dying | self.queued != 0 {
            self.sweep_some(8 + changed / 8);
        }
        if self.is_sparse() {
            self.compact(PAGE + changed);
        }
    }

    /// Less than 60 % of all places are in use, a few pages aside.
    fn is_sparse(&self) -> bool {
        let places = self.blocks.pages.count().saturating_sub(4) * PAGE;
        self.blocks.pages.blocks * 10 < places * 6
    }

    /// Moves about this many blocks.
    fn compact(&mut self, moves: usize) {
        let mut moved = 0;
        for _ in 0..LOOKS {
            if moved >= moves || !self.is_sparse() {
                break;
            }
            let number = self.clean;
            self.clean = if number + 1 < self.blocks.pages.numbers() { number + 1 } else { 0 };
            let live = self.blocks.pages.live_in(number);
            if live == 0 || live > NEARLY_EMPTY || number == self.blocks.pages.open {
                continue;
            }
            self.move_out(number);
            moved += live;
        }
    }

    /// Moves what is held in a page to the open one; the page is given back.
    fn move_out(&mut self, number: u32) {
        let (gone, held) = (self.dying | self.queued, self.held());
        let page = self.blocks.pages.get(number);
        let (live, links) = (page.live, page.links);
        let mut last: Option<(usize, u32)> = None;
        for at in ones(live) {
            let page = self.blocks.pages.get(number);
            let (holders, hash) = (page.holders(at) & held, page.hashes[at]);
            if holders == 0 {
                continue;
            }
            let before = last.filter(|(old, _)| *old + 1 == at && links >> at & 1 == 1).map(|(_, new)| new);
            let new = self.blocks.move_one(number, at, before, gone);
            let (print, old) = (Print::of(hash), number * PAGE as u32 + at as u32);
            ones(holders).for_each(|lane| self.lanes[lane].table.relocate(print, old, new));
            last = Some((at, new));
        }
        let moved = ones(live).filter(|at| self.blocks.pages.get(number).holders(*at) & held != 0);
        let moved = moved.fold(0u64, |moved, at| moved | 1 << at);
        self.blocks.pages.bury(number, moved);
        if live & !moved != 0 {
            self.blocks.bury(number, live & !moved);
        }
    }

    /// Sweeps this many pages.
    fn sweep_some(&mut self, pages: usize) {
        for _ in 0..pages {
            if self.sweep.is_empty() {
                ones(self.dying).for_each(|lane| self.lanes[lane].table = Table::default());
                self.dying = std::mem::take(&mut self.queued);
                if self.dying == 0 {
                    return;
                }
                self.sweep = 0..self.blocks.pages.numbers();
            }
            let Some(number) = self.sweep.next() else { return };
            let (gone, held) = (self.dying | self.queued, self.held());
            let empty = self.blocks.pages.get_mut(number).map_or(0, |page| page.take_lanes(gone, held));
            if empty != 0 {
                self.blocks.bury(number, empty);
            }
        }
        if self.sweep.is_empty() {
            ones(self.dying).for_each(|lane| self.lanes[lane].table = Table::default());
            self.dying = 0;
        }
    }

    pub(super) fn sweep_if_small(&mut self) {
        if self.blocks.pages.numbers() <= SMALL {
            self.sweep_all();
        }
    }

    /// Sweeps until no lane waits for it.
    pub(super) fn sweep_all(&mut self) {
        while self.dying | self.queued != 0 {
            self.sweep_some(SMALL as usize);
        }
        while self.is_sparse() {
            self.compact(usize::MAX);
        }
    }

    /// Nobody holds anything.
    pub(super) fn forget_all(&mut self) {
        self.blocks = super::blocks::Blocks::default();
        self.lanes.iter_mut().for_each(|lane| lane.table = Table::default());
        (self.dying, self.queued, self.clean, self.sweep) = (0, 0, 0, 0..0);
        self.oldest.clear();
    }

    /// Takes about `pairs` of a lane's oldest blocks away, those last that a look-up went through since this last came by;
    /// in a page, the deepest first. How many went.
    pub(super) fn evict(&mut self, lane: usize, pairs: usize) -> usize {
        if self.oldest.len() > 2 * self.blocks.pages.count() || self.oldest.is_empty() {
            self.list_pages();
        }
        let mut evicted = 0;
        // Twice round at most: the first time round clears the marks of use.
        for _ in 0..self.oldest.len() + 2 * (self.blocks.pages.count() + 1) {
            if evicted >= pairs {
                break;
            }
            let Some((number, born)) = self.oldest.pop_front() else {
                self.list_pages();
                continue;
            };
            if self.blocks.pages.get(number).born != born {
                continue;
            }
            evicted += self.evict_from(number, lane, pairs - evicted);
            if evicted >= pairs {
                self.oldest.push_front((number, born));
            }
        }
        self.pairs -= evicted;
        self.tidy(evicted);
        evicted
    }

    /// The pages that exist, oldest first.
    fn list_pages(&mut self) {
        let pages = &self.blocks.pages;
        let mut all: Vec<(u32, u32)> = (0..pages.numbers())
            .filter(|number| pages.live_in(*number) > 0)
            .map(|number| (number, pages.get(number).born))
            .collect();
        all.sort_unstable_by_key(|(_, born)| *born);
        self.oldest = all.into();
    }

    fn evict_from(&mut self, number: u32, lane: usize, most: usize) -> usize {
        let (bit, held) = (1 << lane, self.held());
        let Some(page) = self.blocks.pages.get_mut(number) else { return 0 };
        let used = *page.touched.get_mut();
        let (mut evicted, mut left, mut empty, mut seen) = (0, 0u64, 0u64, 0u64);
        for at in (0..PAGE).rev() {
            if evicted >= most {
                break;
            }
            if page.holders(at) & bit == 0 {
                continue;
            }
            if used >> at & 1 == 1 {
                seen |= 1 << at;
                continue;
            }
            for tier in Tier::ALL {
                if page.take(tier, at, bit) {
                    let ledger = &mut self.lanes[lane].ledgers[tier as usize];
                    ledger.blocks -= 1;
                    ledger.digests.toggle(page.hashes[at]);
                    self.lower -= usize::from(tier != Tier::Device);
                    evicted += 1;
                }
            }
            left |= 1 << at;
            empty |= u64::from(page.holders(at) & held == 0) << at;
        }
        // Marks are cleared as the page is left behind, not while it is the next one to evict from.
        if evicted < most {
            *page.touched.get_mut() &= !seen;
        }
        let page = self.blocks.pages.get(number);
        for at in ones(left) {
            let place = number * PAGE as u32 + at as u32;
            self.lanes[lane].table.remove(Print::of(page.hashes[at]), place, &self.blocks.pages);
        }
        if empty != 0 {
            self.blocks.bury(number, empty);
        }
        evicted
    }

    /// The lane with most pairs, and how many.
    pub(super) fn largest(&self) -> Option<(usize, usize)> {
        let blocks = |lane: usize| self.lanes[lane].ledgers.iter().map(|ledger| ledger.blocks).sum::<usize>();
        ones(self.held()).map(|lane| (blocks(lane), lane)).max().map(|(blocks, lane)| (lane, blocks))
    }
}
