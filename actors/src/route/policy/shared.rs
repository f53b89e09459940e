//! Which leading blocks of a prompt many workers hold: what all ask for, as system prompts.
//!
//! Where a few hold such a prefix, everything that begins with it is drawn to them, and they stay the few. But one more
//! copy is computed once and serves all who come to that worker later, so the request that computes it should bear a
//! share only: a block that n workers hold counts as [`HOLDERS`]/n of itself. What one or two hold, a conversation,
//! counts in full. Called by the cost. Pure. Bounds: [`LEVELS`] depths.

/// Holders up to which a block counts in full.
const HOLDERS: f64 = 2.0;
/// Depths told apart; what is deeper than the last and not one of them counts as that deep.
const LEVELS: usize = 16;

/// The depths at which holders of a prompt end, ascending.
#[derive(Debug, Clone, Default)]
pub(super) struct Shared {
    /// Depth in blocks; at first the workers that hold just so much, then the blocks up to there that need not be paid for.
    levels: Vec<(u32, f64)>,
}

impl Shared {
    /// Looks at a prompt's hits, a worker each.
    pub(super) fn learn(&mut self, hits: &[u32]) {
        let levels = &mut self.levels;
        levels.clear();
        for hit in hits.iter().copied().filter(|hit| *hit > 0) {
            let at = levels.partition_point(|(depth, _)| *depth < hit);
            if levels.get(at).is_some_and(|(depth, _)| *depth == hit) {
                levels[at].1 += 1.0;
            } else if levels.len() < LEVELS {
                levels.insert(at, (hit, 1.0));
            } else if let Some((_, holders)) = at.checked_sub(1).and_then(|less| levels.get_mut(less)) {
                // As if it held a little less.
                *holders += 1.0;
            }
        }
        // Who holds more holds all that is before it.
        let mut holders = 0.0;
        for (_, level) in levels.iter_mut().rev() {
            holders += *level;
            *level = holders;
        }
        let (mut before, mut spared) = (0, 0.0);
        for (depth, level) in levels.iter_mut() {
            spared += f64::from(*depth - before) * (1.0 - (HOLDERS / *level).min(1.0));
            (before, *level) = (*depth, spared);
        }
        if spared <= 0.0 {
            levels.clear();
        }
    }

    /// Whether nothing is shared by many.
    pub(super) fn is_empty(&self) -> bool {
        self.levels.is_empty()
    }

    /// Blocks that a worker with so many would have to compute, but not to pay for.
    pub(super) fn spared(&self, hit: u32) -> f64 {
        let up_to = |hit: u32| {
            let at = self.levels.partition_point(|(depth, _)| *depth <= hit);
            at.checked_sub(1).map_or(0.0, |at| self.levels[at].1)
        };
        self.levels.last().map_or(0.0, |(_, all)| all - up_to(hit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hits: &[u32]) -> Shared {
        let mut shared = Shared::default();
        shared.learn(hits);
        shared
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
