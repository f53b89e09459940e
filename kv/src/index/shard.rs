//! One shard of the index: up to 64 lanes, each one rank of one life of one worker, and the blocks they hold.
//!
//! Called by the index, which holds its lock; every change of a (lane, block) pair goes through here, so that counts and
//! digests agree. Never: reads a clock, waits, or looks at another shard.
//! Bounds: a call costs its blocks, plus upkeep in proportion to them.

use starling_ids::BlockHash;

use super::{
    blocks::{Blocks, Prints, QUANTUM, prints},
    page::{PAGE, Place, SEGMENT, ones, split},
    place::Tier,
    table::{Print, Table},
};
use crate::hash::BucketDigests;

/// Blocks written in one section at most, when nobody waits for its end.
const SECTION: usize = 256;
/// Lanes of a shard: one bit each in a word.
pub(super) const LANES: usize = 64;

/// What a lane holds on one tier.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) blocks: usize,
    pub(super) digests: BucketDigests,
}

#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) ledgers: [Ledger; 3],
    /// Where the blocks are that it holds on any tier; after it was given up, until it has been swept, those it held.
    pub(super) table: Table,
}

/// See the module. A set of lanes is a word, bit by bit.
#[derive(Debug, Default)]
pub(super) struct Shard {
    pub(super) blocks: Blocks,
    pub(super) lanes: Vec<Lane>,
    /// Counts the uses of each lane; beside each other, for a look-up reads many.
    pub(super) generations: Vec<u32>,
    /// Lanes that look-ups see.
    pub(super) active: u64,
    /// Lanes that are being filled.
    pub(super) hidden: u64,
    /// Lanes that were given up and are being swept out of the pages.
    pub(super) dying: u64,
    /// Lanes that were given up since the sweep began: the next one is theirs.
    pub(super) queued: u64,
    /// Pages to sweep.
    pub(super) sweep: std::ops::Range<u32>,
    /// Page to look at next for one that is nearly empty.
    pub(super) clean: u32,
    /// Page to evict from next.
    pub(super) oldest: std::collections::VecDeque<(u32, u32)>,
    /// Pairs of all lanes on all tiers.
    pub(super) pairs: usize,
    /// Of these: not on the device.
    pub(super) lower: usize,
}

/// Where an event's blocks go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) lane: usize,
    pub(super) generation: u32,
    pub(super) tier: Tier,
}

/// What a section wrote.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    /// Of the blocks it was given, the first so many.
    pub(super) blocks: usize,
    /// Pairs that came or went by it.
    pub(super) pairs: usize,
}

/// The lane has another use by now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Retired;

impl Shard {
    /// Lanes whose pairs count.
    pub(super) fn held(&self) -> u64 {
        self.active | self.hidden
    }

    pub(super) fn lane(&self, lane: usize, generation: u32) -> Result<&Lane, Retired> {
        self.lanes.get(lane).filter(|_| self.generations[lane] == generation).ok_or(Retired)
    }

    /// Takes an unused lane, seen by look-ups or hidden; none when all are in use.
    pub(super) fn open_lane(&mut self, seen: bool) -> Option<(usize, u32)> {
        let free = |shard: &Self| !(shard.held() | shard.dying | shard.queued);
        if free(self) == 0 {
            self.sweep_all();
        }
        let lane = ones(free(self)).next()?;
        while self.lanes.len() <= lane {
            self.lanes.push(Lane::default());
            self.generations.push(0);
        }
        let set = if seen { &mut self.active } else { &mut self.hidden };
        *set |= 1 << lane;
        Some((lane, self.generations[lane]))
    }

    /// A hidden lane is seen from now on.
    pub(super) fn show(&mut self, lane: usize) {
        self.hidden &= !(1 << lane);
        self.active |= 1 << lane;
    }

    /// Gives a lane up and all it holds; how many pairs that were. Costs nothing in proportion to them here: upkeep sweeps.
    pub(super) fn retire(&mut self, lane: usize) -> usize {
        let Some(found) = self.lanes.get_mut(lane) else { return 0 };
        self.generations[lane] = self.generations[lane].wrapping_add(1);
        let table = std::mem::take(&mut found.table);
        let gone = std::mem::replace(found, Lane { table, ..Lane::default() });
        let of = |tier: Tier| gone.ledgers[tier as usize].blocks;
        let (device, lower) = (of(Tier::Device), of(Tier::Host) + of(Tier::Disk));
        self.pairs -= device + lower;
        self.lower -= lower;
        self.active &= !(1 << lane);
        self.hidden &= !(1 << lane);
        if self.pairs == 0 {
            self.forget_all();
        } else if device + lower > 0 {
            self.queued |= 1 << lane;
            self.sweep_if_small();
        }
        device + lower
    }

    /// A lane holds a chain after `parent`: as much of it as one section writes. `wanted` says whether others wait for its end.
    pub(super) fn store(
        &mut self,
        target: Target,
        parent: Option<BlockHash>,
        chain: &[BlockHash],
        wanted: impl Fn() -> bool,
    ) -> Result<Written, Retired> {
        self.lane(target.lane, target.generation)?;
        let mut before = parent.and_then(|hash| self.find(target.lane, hash));
        let written = self.section(
            chain,
            wanted,
            |shard, some| {
                let table = &shard.lanes[target.lane].table;
                prints(some, |print| {
                    table.warm(print);
                    shard.blocks.warm(print);
                })
            },
            |shard, some, prints| shard.store_some(target, &mut before, some, prints),
        );
        self.lanes[target.lane].ledgers[target.tier as usize].blocks += written.pairs;
        self.pairs += written.pairs;
        if target.tier != Tier::Device {
            self.lower += written.pairs;
        }
        Ok(written)
    }

    /// Writes blocks, some at a time, until all are written, others wait, or the shard wants something first. `ready` fetches
    /// what `write` reads of some: the next ones are on their way while these are written, and when others have their turn.
    #[inline]
    fn section(
        &mut self,
        blocks: &[BlockHash],
        wanted: impl Fn() -> bool,
        ready: impl Fn(&Self, &[BlockHash]) -> Prints,
        mut write: impl FnMut(&mut Self, &[BlockHash], &[Print]) -> usize,
    ) -> Written {
        let quantum = |from: usize| &blocks[from..blocks.len().min(from + QUANTUM)];
        let mut written = Written { blocks: 0, pairs: 0 };
        let mut prints = [ready(self, quantum(0)), Prints::default()];
        for turn in (0..2).cycle() {
            let some = quantum(written.blocks);
            prints[1 - turn] = ready(self, quantum(written.blocks + some.len()));
            written.pairs += write(self, some, &prints[turn][..some.len()]);
            written.blocks += some.len();
            if written.blocks == blocks.len() || written.blocks >= SECTION || wanted() || self.wants().any() {
                break;
            }
        }
        written
    }

    fn store_some(
        &mut self,
        target: Target,
        before: &mut Option<Place>,
        chain: &[BlockHash],
        prints: &[Print],
    ) -> usize {
        let (mut added, mut at) = (0, 0);
        while at < chain.len() {
            let (hash, print) = (chain[at], prints[at]);
            let known = self.known(*before, hash, print);
            let place = known.unwrap_or_else(|| self.blocks.add(*before, hash, print));
            added += self.join(target, place, &chain[at..=at], &prints[at..]);
            *before = Some(place);
            at += 1;
            if known.is_none() {
                let run = self.blocks.append_run(place, &chain[at..], &prints[at..]);
                added += self.join(target, place + 1, &chain[at..at + run], &prints[at..]);
                *before = Some(place + run as u32);
                at += run;
            }
        }
        added
    }

    /// Where a block is that follows the one at `before`, or an unknown one.
    #[inline]
    fn known(&mut self, before: Option<Place>, hash: BlockHash, print: Print) -> Option<Place> {
        let known = self.blocks.child(before, hash, print);
        // Linked, it would lie beside the block before it: look farther only when that one is not known.
        if known.is_some() || before.is_some() {
            return known;
        }
        linked(&self.blocks, &self.lanes, self.held() | self.dying | self.queued, hash, print)
    }

    /// The lane holds blocks that lie side by side from `place` on. The pairs that are new. `prints` begin with theirs.
    #[inline]
    fn join(&mut self, target: Target, place: Place, hashes: &[BlockHash], prints: &[Print]) -> usize {
        let Target { lane, tier, .. } = target;
        let bit = 1 << lane;
        let Lane { ledgers, table, .. } = &mut self.lanes[lane];
        let digests = &mut ledgers[tier as usize].digests;
        let (number, at) = split(place);
        let Some(page) = self.blocks.pages.get_mut(number).filter(|_| !hashes.is_empty()) else { return 0 };
        let (fresh, added) = if tier == Tier::Device && page.lower.is_none() {
            let added = page.add_run(at, hashes.len(), bit);
            (added, added)
        } else {
            let (mut fresh, mut added) = (0u64, 0u64);
            for k in 0..hashes.len() {
                fresh |= u64::from(page.holders(at + k) & bit == 0) << k;
                added |= u64::from(page.add(tier, at + k, bit)) << k;
            }
            (fresh, added)
        };
        (at / SEGMENT..=(at + hashes.len() - 1) / SEGMENT).for_each(|segment| page.sum(segment));
        ones(added).for_each(|k| digests.toggle(hashes[k]));
        ones(fresh).for_each(|k| table.insert(prints[k], place + k as u32, &self.blocks.pages));
        added.count_ones() as usize
    }

    /// Where a block is that the lane likely holds.
    fn find(&self, lane: usize, hash: BlockHash) -> Option<Place> {
        let print = Print::of(hash);
        let own = self.blocks.in_table(&self.lanes[lane].table, print, hash);
        let others = self.held() | self.dying | self.queued;
        own.or_else(|| self.blocks.head(print, hash)).or_else(|| linked(&self.blocks, &self.lanes, others, hash, print))
    }

    /// A lane holds these blocks no longer: as many of them as one section takes out. See [`Self::store`].
    pub(super) fn remove(
        &mut self,
        target: Target,
        hashes: &[BlockHash],
        wanted: impl Fn() -> bool,
    ) -> Result<Written, Retired> {
        self.lane(target.lane, target.generation)?;
        let (mut last, mut empty) = (None, (0, 0));
        let written = self.section(
            hashes,
            wanted,
            |shard, some| prints(some, |print| shard.lanes[target.lane].table.warm(print)),
            |shard, some, prints| shard.remove_some(target, (some, prints), &mut last, &mut empty),
        );
        self.blocks.bury(empty.0, empty.1);
        self.lanes[target.lane].ledgers[target.tier as usize].blocks -= written.pairs;
        self.pairs -= written.pairs;
        if target.tier != Tier::Device {
            self.lower -= written.pairs;
        }
        Ok(written)
    }

    /// `empty`: places of one page that nobody holds any more; they are buried together, when another page is come to.
    fn remove_some(
        &mut self,
        target: Target,
        (hashes, prints): (&[BlockHash], &[Print]),
        last: &mut Option<Place>,
        empty: &mut (u32, u64),
    ) -> usize {
        let Target { lane, tier, .. } = target;
        let (bit, held) = (1 << lane, self.held());
        let Self { blocks, lanes, .. } = self;
        let Lane { ledgers, table, .. } = &mut lanes[lane];
        let digests = &mut ledgers[tier as usize].digests;
        let (mut removed, mut k) = (0, 0);
        while k < hashes.len() {
            let (hash, print) = (hashes[k], prints[k]);
            let near = last.and_then(|last| beside(blocks, last, hash));
            let Some(place) = near.or_else(|| blocks.in_table(table, print, hash)) else {
                k += 1;
                continue;
            };
            let (number, at) = split(place);
            if last.is_none_or(|last| split(last).0 != number) {
                let page = blocks.pages.get(number);
                page.warm();
                // Mostly it goes on there: the tail of a chain leaves first.
                blocks.pages.get(page.last).warm();
                blocks.bury(empty.0, empty.1);
                *empty = (number, 0);
            }
            let Some(page) = blocks.pages.get_mut(number) else { return removed };
            let run = page.run_down(at, &hashes[k..]);
            *last = Some(place + 1 - run as u32);
            let (taken, gone, unheld) = page.take_tier(tier, (at + 1 - run, run), bit, held);
            empty.1 |= unheld;
            removed += taken.count_ones() as usize;
            ones(taken).for_each(|here| digests.toggle(hashes[k + at - here]));
            for here in ones(gone) {
                table.remove(prints[k + at - here], number * PAGE as u32 + here as u32, &blocks.pages);
            }
            k += run;
        }
        removed
    }

    /// The blocks a lane holds on a tier, of one bucket or of all, as they lie.
    pub(super) fn list(&self, target: Target, bucket: Option<usize>) -> Result<Vec<BlockHash>, Retired> {
        let lane = self.lane(target.lane, target.generation)?;
        let mut places: Vec<Place> = lane.table.places().collect();
        places.sort_unstable();
        let of = |place: Place| {
            let (number, at) = split(place);
            let page = self.blocks.pages.get(number);
            (page.on(target.tier, at) >> target.lane & 1 == 1).then(|| page.hashes[at])
        };
        let wanted = |hash: &BlockHash| bucket.is_none_or(|bucket| BucketDigests::bucket(*hash) == bucket);
        Ok(places.into_iter().filter_map(of).filter(wanted).collect())
    }
}

#[cfg(test)]
impl Shard {
    /// Whether pages, heads, lanes and counts agree.
    pub(super) fn check(&self) {
        self.blocks.check();
        let mut pairs = [[0; 3]; LANES];
        let mut held = [0; LANES];
        for number in 0..self.blocks.pages.numbers() {
            let page = self.blocks.pages.get(number);
            for at in ones(page.live) {
                let (place, hash) = (number * PAGE as u32 + at as u32, page.hashes[at]);
                for lane in ones(page.holders(at) & self.held()) {
                    let found = self.blocks.in_table(&self.lanes[lane].table, Print::of(hash), hash);
                    assert_eq!(found, Some(place), "a lane finds what it holds");
                    held[lane] += 1;
                    for tier in Tier::ALL {
                        pairs[lane][tier as usize] += (page.on(tier, at) >> lane & 1) as usize;
                    }
                }
            }
        }
        for lane in ones(self.held()) {
            assert_eq!(self.lanes[lane].table.len(), held[lane], "a lane finds nothing else");
            let counts = self.lanes[lane].ledgers.each_ref().map(|ledger| ledger.blocks);
            assert_eq!(counts, pairs[lane], "counts are those of the pages");
        }
        assert_eq!(self.pairs, pairs.iter().flatten().sum::<usize>());
        assert_eq!(self.lower, pairs.iter().map(|tiers| tiers[1] + tiers[2]).sum::<usize>());
    }
}

/// Where a linked block is: some lane holds it.
#[cold]
fn linked(blocks: &Blocks, lanes: &[Lane], among: u64, hash: BlockHash, print: Print) -> Option<Place> {
    let tables = ones(among).map(|lane| &lanes[lane].table);
    tables.filter(|table| table.len() > 0).find_map(|table| blocks.in_table(table, print, hash))
}

/// The place beside `last` that holds this block: removals come in runs, mostly backwards.
#[inline]
fn beside(blocks: &Blocks, last: Place, hash: BlockHash) -> Option<Place> {
    let (number, at) = split(last);
    let page = blocks.pages.get(number);
    if at > 0 && page.holds(at - 1, hash) {
        return Some(last - 1);
    }
    (at + 1 < PAGE && page.holds(at + 1, hash)).then_some(last + 1)
}
