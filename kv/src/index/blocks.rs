//! The blocks of a shard: each has one place in the pages, and those where a piece of a chain begins are found by hash.
//!
//! Called by the shard alone. A block is linked when it lies right after the block before it; every other block is a head.
//! A walk needs the heads alone: from a block it goes on to the one beside it or to a head. So most blocks are in no
//! table here; lanes find theirs in tables of their own.

use starling_ids::BlockHash;

use super::{
    page::{PAGE, Page, Pages, Place, ones, split},
    prefetch::prefetch,
    table::{Hashes, Print, Table},
};

/// Blocks that are worked on together, a microsecond or less; the table entries of the next ones are on their way to the cache
/// meanwhile: about as many as a processor waits for. A reader that waits gets in when these are done.
pub(super) const QUANTUM: usize = 16;

/// The prints of some blocks.
pub(super) type Prints = [Print; QUANTUM];

/// The prints of the first [`QUANTUM`] blocks, each shown to `warm`.
#[inline]
pub(super) fn prints(hashes: &[BlockHash], warm: impl Fn(Print)) -> Prints {
    let mut prints = [Print::default(); QUANTUM];
    for (print, hash) in prints.iter_mut().zip(hashes) {
        *print = Print::of(*hash);
        warm(*print);
    }
    prints
}

/// Pages that are on their way to the cache while a walk is at one: a page is read in a fifth of the time that it takes to come.
const PAGES_AHEAD: usize = 6;

/// How far along its chain a walk has asked for what it will read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ahead {
    buckets: usize,
    pages: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Live blocks that are not linked.
    heads: Table,
    pub(super) pages: Pages,
}

impl Blocks {
    /// Fetches what tells whether a block with this print is a head.
    #[inline]
    pub(super) fn warm(&self, print: Print) {
        self.heads.warm(print);
    }

    /// Where a head is.
    #[inline]
    pub(super) fn head(&self, print: Print, hash: BlockHash) -> Option<Place> {
        self.heads.probe(print, |place| self.pages.hash(place) == hash)
    }

    /// Fetches what a walk from this head reads of its page.
    pub(super) fn warm_piece(&self, hash: BlockHash, print: Print) {
        let Some(place) = self.head(print, hash) else { return };
        let (number, at) = split(place);
        self.pages.get(number).warm_from(at);
    }

    /// Fetches the pages that a walk likely comes to, when the next one begins at `from` in the chain and those after it follow
    /// whole: a block at a page's beginning is a head, so these are found without going from page to page. `ahead` remembers how far
    /// that has been done.
    #[inline]
    pub(super) fn warm_pages(&self, chain: &[BlockHash], from: usize, ahead: &mut Ahead) {
        if ahead.pages < from || !(ahead.pages - from).is_multiple_of(PAGE) {
            *ahead = Ahead { buckets: from, pages: from };
        }
        let within = |at: usize, pages: usize| at < chain.len().min(from + pages * PAGE);
        while within(ahead.buckets, 2 * PAGES_AHEAD) {
            self.heads.warm(Print::of(chain[ahead.buckets]));
            ahead.buckets += PAGE;
        }
        while within(ahead.pages, PAGES_AHEAD) {
            if let Some(place) = self.heads.guess(Print::of(chain[ahead.pages])) {
                self.pages.get(split(place).0).warm_whole();
            }
            ahead.pages += PAGE;
        }
    }

    /// Puts down new blocks that follow the last one put down, as many as are not heads and find room in its page: the
    /// first place and how many. The block before them is new too, so nobody has them unless they are heads.
    #[inline]
    pub(super) fn append_run(&mut self, before: Place, hashes: &[BlockHash], prints: &[Print]) -> usize {
        let (number, at) = split(before);
        let last = number == self.pages.open && self.pages.get(number).fill as usize == at + 1;
        let room = if last { PAGE - 1 - at } else { 0 };
        let lacks = |print: &&Print| self.heads.lacks(**print);
        let most = prints.iter().take(room.min(hashes.len())).take_while(lacks).count();
        self.pages.append_run(at + 1, &hashes[..most]);
        most
    }

    /// Where a lane's table has a live block.
    #[inline]
    pub(super) fn in_table(&self, table: &Table, print: Print, hash: BlockHash) -> Option<Place> {
        table.probe(print, |place| {
            let (number, at) = split(place);
            self.pages.get(number).holds(at, hash)
        })
    }

    /// Where a block is that lies beside `before`, the place of the block before it, or is a head; both live.
    #[inline]
    pub(super) fn child(&mut self, before: Option<Place>, hash: BlockHash, print: Print) -> Option<Place> {
        let Some(next) = before.and_then(|before| self.beside(before, hash)) else { return self.head(print, hash) };
        let (number, at) = split(next);
        let Some(page) = self.pages.get_mut(number).filter(|page| page.live >> at & 1 == 1) else {
            return self.head(print, hash);
        };
        if at > 0 && page.links >> at & 1 == 0 {
            page.links |= 1 << at;
            self.heads.remove(print, next, &self.pages);
        }
        Some(next)
    }

    /// The place beside one, when it holds this block or held it last.
    #[inline]
    fn beside(&self, before: Place, hash: BlockHash) -> Option<Place> {
        let (number, at) = split(before);
        let page = self.pages.get(number);
        if at + 1 < PAGE {
            return (at + 1 < page.fill as usize && page.hashes[at + 1] == hash).then_some(before + 1);
        }
        let next = self.pages.get(page.next);
        (next.fill > 0 && next.hashes[0] == hash).then(|| page.next * PAGE as u32)
    }

    /// Gives a block a place, its old one when it lay beside `before` and nothing has come there since.
    #[inline]
    pub(super) fn add(&mut self, before: Option<Place>, hash: BlockHash, print: Print) -> Place {
        let place = match before.and_then(|before| self.beside(before, hash)) {
            Some(place) => {
                self.pages.revive(place);
                place
            }
            None => self.pages.append(hash),
        };
        let (number, at) = split(place);
        let linked = at > 0 && before.is_some_and(|before| before + 1 == place);
        if linked && let Some(page) = self.pages.get_mut(number) {
            page.links |= 1 << at;
        } else {
            self.heads.insert(print, place, &self.pages);
        }
        place
    }

    /// Nobody holds these live places of a page any more: those after them become heads.
    pub(super) fn bury(&mut self, number: u32, places: u64) {
        if places == 0 {
            return;
        }
        let page = self.pages.get(number);
        let (hashes, linked) = (&page.hashes, page.links);
        let orphans = (places << 1) & linked & page.live & !places;
        for at in ones(places & !linked) {
            self.heads.remove(Print::of(hashes[at]), number * PAGE as u32 + at as u32, &self.pages);
        }
        for at in ones(orphans) {
            self.heads.insert(Print::of(hashes[at]), number * PAGE as u32 + at as u32, &self.pages);
        }
        self.pages.bury(number, places);
    }

    /// Moves a live block to the open page, right after `before` if it is to be linked; its new place.
    pub(super) fn move_one(&mut self, number: u32, at: usize, before: Option<Place>, gone: u64) -> Place {
        let (old, hash) = (number * PAGE as u32 + at as u32, self.pages.get(number).hashes[at]);
        let was_head = self.pages.get(number).links >> at & 1 == 0;
        let new = self.pages.append(hash);
        let (to, place) = split(new);
        let linked = place > 0 && before.is_some_and(|before| before + 1 == new);
        if linked && let Some(page) = self.pages.get_mut(to) {
            page.links |= 1 << place;
        }
        match (was_head, linked) {
            (true, false) => self.heads.relocate(Print::of(hash), old, new),
            (true, true) => self.heads.remove(Print::of(hash), old, &self.pages),
            (false, false) => self.heads.insert(Print::of(hash), new, &self.pages),
            (false, true) => {}
        }
        self.pages.copy_holders((number, at), (to, place), gone);
        new
    }

    /// The place beside the one that a walk has come to, when it holds this block.
    pub(super) fn next_of(&self, page: &Page, number: u32, at: usize, hash: BlockHash) -> Option<Place> {
        if at < PAGE {
            return page.holds(at, hash).then(|| number * PAGE as u32 + at as u32);
        }
        self.pages.get(page.next).holds(0, hash).then(|| page.next * PAGE as u32)
    }

    /// Bytes, from capacities.
    pub(super) fn heap_bytes(&self) -> usize {
        self.heads.heap_bytes() + self.pages.heap_bytes()
    }

    /// Whether places, links and heads agree, for tests.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut heads = 0;
        for number in 0..self.pages.numbers() {
            let page = self.pages.get(number);
            assert_eq!(page.links & (!page.live | !(page.live << 1)), 0, "links join live places");
            assert_eq!(page.live.count_ones() as usize, self.pages.live_in(number));
            for at in ones(page.live) {
                let place = number * PAGE as u32 + at as u32;
                let found = self.head(Print::of(page.hashes[at]), page.hashes[at]);
                let head = page.links >> at & 1 == 0;
                heads += usize::from(head);
                assert_eq!(found, head.then_some(place), "a block is a head or linked");
            }
            for (segment, all) in page.all.iter().enumerate() {
                let exact = page.device[segment * 16..][..16].iter().fold(u64::MAX, |all, one| all & one);
                assert_eq!(all & !exact, 0, "a summary has no lane too many");
            }
        }
        assert_eq!(heads, self.heads.len());
    }
}

impl Hashes for Pages {
    fn hash(&self, place: u32) -> BlockHash {
        Pages::hash(self, place)
    }

    fn warm(&self, place: u32) {
        let (number, at) = split(place);
        prefetch(&self.get(number).hashes[at]);
    }
}
