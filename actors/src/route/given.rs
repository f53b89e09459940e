//! How much work each worker was given of late, so that among equals the one with the least is next.
//!
//! Written by [`super::fleet`] with every reservation, read by the picker of the default policy. Load tells what a worker has to
//! do now; this is what it was given over the last [`FADES`], which evens out the luck of long conversations and of who holds
//! what. Pure: the time is an argument. Bounds: one number a worker.

use std::time::Duration;

use super::{fleet::Slot, rates::Rates};

/// Work given so long ago counts 1/e of what it was.
const FADES: Duration = Duration::from_secs(60);
/// A token of an answer counts as at most so many prompt tokens.
const DECODE_MAX: f64 = 100.0;
/// Numbers are brought back to size when fresh work weighs so much.
const WEIGHT_MAX: f64 = 1e9;

/// Prompt tokens to compute, and those of the answer by what they take beside them. No time: before its rates are known every
/// worker would seem to have been given a hundred times as much.
pub(super) fn work(rates: Rates, prompt: u64, answer: f64) -> f64 {
    let ratio = rates.decode_ms_per_sequence / rates.prefill_ms_per_token.max(1e-9);
    // Prompts stay far below 2^52.
    prompt as f64 + answer * ratio.min(DECODE_MAX)
}

/// See the module. Sums are kept as if nothing faded and fresh work weighed ever more: who has less is the same, and
/// a worker that is given nothing needs no touch.
#[derive(Debug, Default)]
pub(super) struct Given {
    sums: Vec<f64>,
    /// Of all of them.
    total: f64,
    /// When fresh work weighed 1.
    epoch: Duration,
}

impl Given {
    /// One worker more; it begins with what others were given on average, or all would go to it first.
    pub(super) fn widen(&mut self) {
        let mean = self.mean();
        self.sums.push(mean);
        self.total += mean;
    }

    /// Another worker has this place.
    pub(super) fn wipe(&mut self, slot: Slot) {
        let mean = self.mean();
        self.total += mean - self.sums[slot];
        self.sums[slot] = mean;
    }

    /// A worker that was out of use is as if it had been given as much as any other.
    pub(super) fn level(&mut self, slot: Slot) {
        let most = self.sums.iter().copied().fold(0.0, f64::max);
        self.total += most - self.sums[slot];
        self.sums[slot] = most;
    }

    /// A worker was given so much.
    pub(super) fn add(&mut self, slot: Slot, work: f64, now: Duration) {
        let weight = (now.saturating_sub(self.epoch).as_secs_f64() / FADES.as_secs_f64()).exp();
        if weight > WEIGHT_MAX {
            self.sums.iter_mut().for_each(|sum| *sum /= weight);
            self.total = self.sums.iter().sum();
            self.epoch = now;
            return self.add(slot, work, now);
        }
        self.sums[slot] += work * weight;
        self.total += work * weight;
    }

    /// Lower for a worker that was given less.
    pub(super) fn rank(&self, slot: Slot) -> u64 {
        // Numbers that are not negative are in the order of their bits.
        self.sums[slot].max(0.0).to_bits()
    }

    fn mean(&self) -> f64 {
        if self.sums.is_empty() { 0.0 } else { (self.total / self.sums.len() as f64).max(0.0) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(workers: usize) -> Given {
        let mut given = Given::default();
        (0..workers).for_each(|_| given.widen());
        given
    }

    fn least(given: &Given) -> Slot {
        (0..given.sums.len()).min_by_key(|slot| given.rank(*slot)).expect("some")
    }

    #[test]
    fn bal_work_long_ago_counts_less_than_work_just_given() {
        let mut given = of(2);
        given.add(0, 3_000.0, Duration::ZERO);
        given.add(1, 1_000.0, FADES / 2);
        assert_eq!(least(&given), 1);
        given.add(1, 1_000.0, FADES * 3);
        assert_eq!(least(&given), 0, "{given:?}");
    }

    #[test]
    fn bal_a_newcomer_begins_as_one_of_many() {
        let mut given = of(3);
        for (slot, work) in [(0, 100.0), (1, 200.0), (2, 600.0)] {
            given.add(slot, work, Duration::from_secs(1));
        }
        given.widen();
        assert_eq!(least(&given), 0, "it is not the next until it is its turn: {given:?}");
        assert!(given.rank(3) > given.rank(1) && given.rank(3) < given.rank(2), "{given:?}");
        given.wipe(2);
        assert!(given.rank(2) < given.rank(3) + 1 && least(&given) == 0, "{given:?}");
    }

    #[test]
    fn bal_a_worker_that_was_cut_off_is_owed_nothing() {
        let mut given = of(3);
        for (slot, work) in [(0, 900.0), (1, 600.0)] {
            given.add(slot, work, Duration::from_secs(1));
        }
        given.level(2);
        assert_eq!(given.rank(2), given.rank(0));
        assert_eq!(least(&given), 1);
    }

    #[test]
    fn an_answer_counts_by_what_it_takes() {
        let rates = Rates { prefill_ms_per_token: 0.02, decode_ms_per_sequence: 0.1, step_ms: 6.0 };
        assert!((work(rates, 100, 10.0) - 150.0).abs() < 1e-9);
        let free = Rates { prefill_ms_per_token: 0.0, ..rates };
        assert!((work(free, 100, 10.0) - 1_100.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn sums_stay_numbers_and_the_least_is_the_least(
            steps in proptest::collection::vec((0usize..4, 0.0f64..1e6, 0u64..2_000), 1..60),
        ) {
            let (mut given, mut now) = (of(4), Duration::ZERO);
            let mut all: Vec<(usize, f64, Duration)> = Vec::new();
            for (slot, work, pause) in steps {
                now += Duration::from_secs(pause);
                given.add(slot, work, now);
                all.push((slot, work, now));
            }
            prop_assert!(given.sums.iter().all(|sum| sum.is_finite() && *sum >= 0.0));
            let mut faded = [0.0f64; 4];
            for (slot, work, at) in all {
                faded[slot] += work * (-(now - at).as_secs_f64() / FADES.as_secs_f64()).exp();
            }
            let fewest = faded.iter().copied().fold(f64::INFINITY, f64::min);
            prop_assert!(faded[least(&given)] <= fewest * (1.0 + 1e-6) + 1e-6, "{faded:?} {given:?}");
        }
    }
}
