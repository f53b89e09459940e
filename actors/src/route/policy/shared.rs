//! Which leading blocks of a prompt many workers hold: what all ask for, as system prompts.
//!
//! Where a few hold such a prefix, everything that begins with it is drawn to them, and they stay the few. But one more
//! copy is computed once and serves all who come to that worker later, so the request that computes it should bear a
//! share only: a block that n workers hold counts as [`HOLDERS`]/n of itself. What one or two hold, a conversation,
//! counts in full. Nor does a further copy of what many hold take anything from later requests. Called by the cost. Pure. Bounds: [`LEVELS`] depths; tables as long as the deepest hit, at most
//! [`DEEPEST`] blocks.

use super::pickers::FEW;

/// Holders up to which a block counts in full.
const HOLDERS: f64 = 2.0;
/// Depths told apart; what is deeper than the last and not one of them counts as that deep.
const LEVELS: usize = 16;
/// Blocks after which deeper hits are not told apart.
const DEEPEST: u32 = 1 << 20;

/// The depths at which holders of a prompt end.
#[derive(Debug, Clone, Default)]
pub(super) struct Shared {
    /// Workers that hold just so much, by depth in blocks; all zero between prompts.
    counts: Vec<u32>,
    /// Depths that somebody holds, bit by bit; none between prompts.
    held: Vec<u64>,
    /// Of these, the ones told apart.
    told: Vec<u64>,
    /// Depth and the workers that hold so much or more, descending.
    levels: Vec<(u32, u32)>,
    /// What is spared at each depth before `deepest`; what lies behind that is of an earlier prompt.
    table: Vec<f64>,
    /// The last level's depth; 0 when nothing is spared.
    deepest: usize,
}

impl Shared {
    /// Looks at a prompt's hits, a worker each. Gone through by depth, not sorted: a decision among thousands spends its time here.
    /// `later` is the weight of what later requests lose by a held block that is computed again.
    pub(super) fn learn(&mut self, hits: &[u32], later: f64) {
        self.count(hits);
        self.level();
        self.tabulate(later);
    }

    fn count(&mut self, hits: &[u32]) {
        let Self { counts, held, told, .. } = self;
        let mut room = LEVELS;
        // Most hold nothing, and are passed over together.
        let some = hits.chunks(FEW).filter(|few| few.iter().fold(0, |any, hit| any | hit) > 0);
        for hit in some.flatten().filter(|hit| **hit > 0) {
            let at = (*hit).min(DEEPEST) as usize;
            if at >= counts.len() {
                held.resize(at / 64 + 1, 0);
                told.resize(at / 64 + 1, 0);
                counts.resize(held.len() * 64, 0);
            }
            if counts[at] == 0 {
                held[at / 64] |= 1 << (at % 64);
                told[at / 64] |= u64::from(room > 0) << (at % 64);
                room = room.saturating_sub(1);
            }
            counts[at] += 1;
        }
    }

    /// Who holds more holds all that is before it, so what is not told apart counts as a little less.
    fn level(&mut self) {
        let Self { counts, held, told, levels, .. } = self;
        levels.clear();
        let mut holders = 0;
        for (word, (held, told)) in held.iter_mut().zip(told).enumerate().rev() {
            while *held != 0 {
                let bit = 63 - held.leading_zeros() as usize;
                holders += std::mem::take(&mut counts[word * 64 + bit]);
                if *told >> bit & 1 == 1 {
                    levels.push(((word * 64 + bit) as u32, holders));
                }
                *held &= !(1 << bit);
            }
            *told = 0;
        }
    }

    /// Works out what is spared at each depth, so that a worker's is looked up, not searched for.
    fn tabulate(&mut self, later: f64) {
        let Self { levels, table, deepest, .. } = self;
        let mut spared = [0.0; LEVELS + 1];
        let (mut before, mut sum) = (0, 0.0);
        for (at, (depth, holders)) in levels.iter().rev().enumerate() {
            let holders = f64::from(*holders);
            let of_one = if holders > HOLDERS { 1.0 - HOLDERS / holders + later } else { 0.0 };
            sum += f64::from(*depth - before) * of_one;
            (before, spared[at + 1]) = (*depth, sum);
        }
        *deepest = if sum > 0.0 { before as usize } else { 0 };
        if *deepest > table.len() {
            table.resize(*deepest, 0.0);
        }
        let mut rest = &mut table[..*deepest];
        let mut before = 0;
        for ((depth, _), up_to) in levels.iter().rev().zip(spared).filter(|_| sum > 0.0) {
            let (level, deeper) = rest.split_at_mut((*depth - before) as usize);
            level.fill(sum - up_to);
            (rest, before) = (deeper, *depth);
        }
    }

    /// Whether nothing is shared by many.
    pub(super) fn is_empty(&self) -> bool {
        self.deepest == 0
    }

    /// Blocks that a worker with so many would have to compute, but not to pay for.
    #[inline]
    pub(super) fn spared(&self, hit: u32) -> f64 {
        self.table[..self.deepest].get(hit as usize).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(hits: &[u32]) -> Shared {
        let mut shared = Shared::default();
        shared.learn(hits, 0.0);
        shared
    }

    #[test]
    fn a_further_copy_of_what_many_hold_takes_nothing_from_later_requests() {
        let mut shared = Shared::default();
        shared.learn(&[0, 32, 32, 32, 96], 2.0);
        assert!((shared.spared(0) - 32.0 * (0.5 + 2.0)).abs() < 1e-9, "{shared:?}");
        shared.learn(&[0, 96, 32], 2.0);
        assert_eq!(shared.spared(0), 0.0, "a conversation's");
    }

    #[test]
    fn what_one_or_two_hold_counts_in_full() {
        for hits in [&[0, 0, 0][..], &[0, 40, 0], &[40, 40, 0], &[40, 8, 0]] {
            assert!(hits.iter().all(|hit| of(hits).spared(*hit) == 0.0), "{hits:?}");
        }
    }

    #[test]
    fn what_many_hold_counts_by_a_share_of_it() {
        // Eight hold 32 blocks, one of them 32 more.
        let shared = of(&[0, 32, 32, 32, 32, 32, 32, 32, 64]);
        assert!((shared.spared(0) - 32.0 * 0.75).abs() < 1e-9, "{shared:?}");
        assert_eq!((shared.spared(32), shared.spared(64)), (0.0, 0.0));
    }

    /// The same, worker by worker and with a search for each.
    fn plain(hits: &[u32]) -> Vec<(u32, f64)> {
        let mut levels: Vec<(u32, f64)> = Vec::new();
        for hit in hits.iter().copied().filter(|hit| *hit > 0) {
            let at = levels.partition_point(|(depth, _)| *depth < hit);
            if levels.get(at).is_some_and(|(depth, _)| *depth == hit) {
                levels[at].1 += 1.0;
            } else if levels.len() < LEVELS {
                levels.insert(at, (hit, 1.0));
            } else if let Some((_, holders)) = at.checked_sub(1).and_then(|less| levels.get_mut(less)) {
                *holders += 1.0;
            }
        }
        let holders: Vec<f64> = (0..levels.len()).map(|at| levels[at..].iter().map(|(_, n)| n).sum()).collect();
        let (mut before, mut spared) = (0, 0.0);
        for ((depth, level), holders) in levels.iter_mut().zip(holders) {
            spared += f64::from(*depth - before) * (1.0 - (HOLDERS / holders).min(1.0));
            (before, *level) = (*depth, spared);
        }
        levels
    }

    proptest! {
        #[test]
        fn equals_the_plain_way(prompts in prop::collection::vec(prop::collection::vec(0u32..40, 0..60), 1..4)) {
            let mut shared = Shared::default();
            for hits in prompts {
                shared.learn(&hits, 0.0);
                let levels = plain(&hits);
                let all = levels.last().map_or(0.0, |(_, all)| *all);
                for hit in 0..50 {
                    let at = levels.partition_point(|(depth, _)| *depth <= hit);
                    let up_to = at.checked_sub(1).map_or(0.0, |at| levels[at].1);
                    prop_assert_eq!(shared.spared(hit).to_bits(), (all - up_to).to_bits());
                }
            }
        }
    }

    #[test]
    fn many_depths_stay_within_bounds() {
        let hits: Vec<u32> = (0..1_000).collect();
        let shared = of(&hits);
        assert!(shared.levels.len() <= LEVELS);
        for (less, more) in hits.iter().zip(&hits[1..]) {
            let (a, b) = (shared.spared(*less), shared.spared(*more));
            assert!(a.is_finite() && a >= b && b >= 0.0, "{less} {a} {b}");
        }
    }
}
