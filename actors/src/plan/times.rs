//! How long things took: counts in buckets that grow by a fifth, so that sums over routers and differences over time are exact
//! and a quantile is right to a tenth.
//!
//! Pure. Bounds: [`BUCKETS`] counts, from a quarter of a millisecond to half an hour.

use serde::{Deserialize, Serialize};

/// Buckets; the last one takes everything above.
pub const BUCKETS: usize = 92;

/// Upper edge of the first bucket, milliseconds.
const FIRST_MS: f64 = 0.25;

/// Buckets in which the time doubles.
const PER_DOUBLING: f64 = 4.0;

/// See the module. Counts from the shortest on; those that are missing are zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times(Vec<u64>);

impl Times {
    /// Counts one time, milliseconds; one that is not a number counts nowhere.
    pub fn add(&mut self, ms: f64) {
        if !ms.is_finite() || ms < 0.0 {
            return;
        }
        let place = ((ms / FIRST_MS).max(1.0).log2() * PER_DOUBLING).ceil();
        // Between 0 and a few hundred, so whole.
        let place = (place as usize).min(BUCKETS - 1);
        if self.0.len() <= place {
            self.0.resize(place + 1, 0);
        }
        self.0[place] += 1;
    }

    /// Adds all that another one counted.
    pub fn merge(&mut self, other: &Self) {
        if self.0.len() < other.0.len().min(BUCKETS) {
            self.0.resize(other.0.len().min(BUCKETS), 0);
        }
        for (own, more) in self.0.iter_mut().zip(&other.0) {
            *own = own.saturating_add(*more);
        }
    }

    /// What was counted since an earlier state of the same one.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let before = before.0.iter().copied().chain(std::iter::repeat(0));
        Self(self.0.iter().zip(before).map(|(now, before)| now.saturating_sub(before)).collect())
    }

    /// How many were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The time, milliseconds, below which the share `quantile` (0 to 1) of them lies; `None` when there is none.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<f64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = (count as f64 * quantile.clamp(0.0, 1.0)).ceil().max(1.0);
        let mut below = 0.0;
        let place = self.0.iter().position(|count| {
            below += *count as f64;
            below >= rank
        })?;
        // The middle of the bucket on its own scale.
        let middle = if place == 0 { 0.0 } else { place as f64 - 0.5 };
        Some(FIRST_MS * (middle / PER_DOUBLING).exp2())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_has_no_quantile_and_nonsense_counts_nowhere() {
        let mut times = Times::default();
        [f64::NAN, f64::INFINITY, -1.0].into_iter().for_each(|ms| times.add(ms));
        assert_eq!((times.count(), times.quantile(0.5)), (0, None));
        times.add(1e12);
        assert!(times.quantile(0.99).is_some_and(|ms| ms > 1e6));
    }

    proptest! {
        #[test]
        fn a_quantile_is_right_to_a_tenth(all in proptest::collection::vec(0.3f64..1e6, 1..200), quantile in 0.0f64..1.0) {
            let mut times = Times::default();
            all.iter().for_each(|ms| times.add(*ms));
            let mut sorted = all.clone();
            sorted.sort_by(f64::total_cmp);
            let rank = (sorted.len() as f64 * quantile).ceil().max(1.0) as usize;
            let (exact, told) = (sorted[rank - 1], times.quantile(quantile).expect("some"));
            prop_assert!(told / exact < 1.1 && exact / told < 1.1, "{told} for {exact}");
        }

        #[test]
        fn a_difference_and_a_sum_are_what_was_counted_between(
            first in proptest::collection::vec(0.0f64..1e5, 0..50),
            then in proptest::collection::vec(0.0f64..1e5, 0..50),
        ) {
            let (mut before, mut only) = (Times::default(), Times::default());
            first.iter().for_each(|ms| before.add(*ms));
            let mut after = before.clone();
            then.iter().for_each(|ms| { after.add(*ms); only.add(*ms); });
            let between = after.since(&before);
            prop_assert_eq!(between.count(), only.count());
            prop_assert_eq!(between.quantile(0.7), only.quantile(0.7));
            let mut sum = before.clone();
            sum.merge(&only);
            prop_assert_eq!(sum.count(), after.count());
            prop_assert_eq!(sum.quantile(0.3), after.quantile(0.3));
        }
    }
}
