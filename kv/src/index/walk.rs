//! A look-up: along the chain, with the set of lanes that have held every block so far.
//!
//! Called by the index under a shard's read lock. Exact: a lane's depth ends at the first block it lacks. The cost follows the
//! number of pieces that the chain lies in and a sixteenth of its blocks, not the number of workers.

use starling_ids::BlockHash;

use super::{
    blocks::Ahead,
    page::{PAGE, Page, SEGMENT, ones, split},
    place::Tier,
    shard::{LANES, Shard},
    table::Print,
};

/// A lane's share of a chain, in blocks; see [`super::Overlap`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) device: u32,
    pub(super) reach: u32,
    pub(super) host: u32,
    pub(super) disk: u32,
}

impl Shard {
    /// Calls back for each lane of `among` that holds the first block: shallow ones first.
    pub(super) fn walk(&self, chain: &[BlockHash], among: u64, mut found: impl FnMut(usize, Share)) {
        if self.lower > 0 {
            return self.walk_tiers(chain, among, found);
        }
        let mut fall = |lanes: u64, depth: usize| {
            let share = Share { device: depth as u32, reach: depth as u32, host: 0, disk: 0 };
            if depth > 0 {
                ones(lanes).for_each(|lane| found(lane, share));
            }
        };
        let mut alive = self.active & among;
        let depth = self.pieces(chain, |page, at, len, depth| {
            alive = fall_along(page, at..at + len, alive, |lanes, k| fall(lanes, depth + k));
            alive != 0
        });
        fall(alive, depth);
    }

    /// Calls back for each piece of the chain that lies together, (page, place in it, blocks, blocks before), until one says
    /// that it is enough or a block is not there; the blocks walked.
    fn pieces(&self, chain: &[BlockHash], mut piece: impl FnMut(&Page, usize, usize, usize) -> bool) -> usize {
        let (mut depth, mut place, mut ahead) = (0, None, Ahead::default());
        while depth < chain.len() {
            let hash = chain[depth];
            let Some(here) = place.take().or_else(|| self.blocks.head(Print::of(hash), hash)) else { break };
            let (number, at) = split(here);
            let page = self.blocks.pages.get(number);
            let next = depth + PAGE - at;
            if chain.len() >= next + PAGE {
                self.blocks.warm_pages(chain, next, &mut ahead);
            } else if chain.len() > next {
                // Mostly it goes on there.
                self.blocks.pages.get(page.next).warm_from(0);
            }
            let len = page.stretch(at, &chain[depth..]);
            page.touch(at, len);
            let more = piece(page, at, len, depth);
            depth += len;
            if !more {
                break;
            }
            if let Some(hash) = chain.get(depth) {
                place = self.blocks.next_of(page, number, at + len, *hash);
            }
        }
        depth
    }

    /// As [`Self::walk`], where lower tiers are in use.
    fn walk_tiers(&self, chain: &[BlockHash], among: u64, mut found: impl FnMut(usize, Share)) {
        let mut shares = [Share::default(); LANES];
        let (mut any, mut device) = (self.active & among, self.active & among);
        let depth = self.pieces(chain, |page, at, len, depth| {
            for k in 0..len {
                let here = page.device[at + k];
                let (host, disk) = (page.on(Tier::Host, at + k), page.on(Tier::Disk, at + k));
                ones(device & !here).for_each(|lane| shares[lane].device = (depth + k) as u32);
                device &= here;
                let left = any & !(here | host | disk);
                any &= here | host | disk;
                for lane in ones(left).filter(|_| depth + k > 0) {
                    found(lane, Share { reach: (depth + k) as u32, ..shares[lane] });
                }
                ones(any & !here & host).for_each(|lane| shares[lane].host += 1);
                ones(any & !here & !host).for_each(|lane| shares[lane].disk += 1);
            }
            any != 0
        });
        for lane in ones(any).filter(|_| depth > 0) {
            let device = if device >> lane & 1 == 1 { depth as u32 } else { shares[lane].device };
            found(lane, Share { device, reach: depth as u32, ..shares[lane] });
        }
    }
}

/// Lanes that hold all of these places; calls back for those that fall, with how many places they held.
fn fall_along(page: &Page, places: std::ops::Range<usize>, mut alive: u64, mut fall: impl FnMut(u64, usize)) -> u64 {
    let mut at = places.start;
    while at < places.end {
        if at.is_multiple_of(SEGMENT) && places.end - at >= SEGMENT && alive & !page.all[at / SEGMENT] == 0 {
            at += SEGMENT;
            continue;
        }
        let left = alive & !page.device[at];
        if left != 0 {
            fall(left, at - places.start);
            alive &= page.device[at];
            if alive == 0 {
                break;
            }
        }
        at += 1;
    }
    alive
}
