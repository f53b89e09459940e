//! When a dead child is started again, and when its supervisor gives up. Pure.
//!
//! Called by the supervisor with the times of failures; never reads a clock.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// How a supervisor restarts its children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Wait before the first restart of a child.
    pub backoff_min: Duration,
    /// Longest wait; each failure in a row doubles it up to here.
    pub backoff_max: Duration,
    /// A child that ran this long starts again from `backoff_min`.
    pub healthy_after: Duration,
    /// More failures than this within `window` fail the supervisor itself.
    pub failures_max: usize,
    /// The window of `failures_max`.
    pub window: Duration,
    /// How long a child may take to stop before it is killed.
    pub stop_max: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(10),
            healthy_after: Duration::from_secs(30),
            failures_max: 5,
            window: Duration::from_secs(30),
            stop_max: Duration::from_secs(5),
        }
    }
}

impl Policy {
    /// The wait before restart number `failures_in_row` (from 1) of one child.
    #[must_use]
    pub fn delay(&self, failures_in_row: u32) -> Duration {
        let doublings = failures_in_row.saturating_sub(1).min(20);
        self.backoff_min.saturating_mul(1 << doublings).min(self.backoff_max)
    }
}

/// The failures of all children of one supervisor that still count.
#[derive(Debug, Default)]
pub(crate) struct FailureLog {
    times: VecDeque<Instant>,
}

impl FailureLog {
    /// Notes a failure; true when there were too many within the window.
    pub(crate) fn record(&mut self, now: Instant, policy: &Policy) -> bool {
        while self.times.front().is_some_and(|first| now.saturating_duration_since(*first) > policy.window) {
            self.times.pop_front();
        }
        self.times.push_back(now);
        self.times.len() > policy.failures_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_its_limit() {
        let policy = Policy::default();
        let waits: Vec<u128> = (1..=9).map(|n| policy.delay(n).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(policy.delay(u32::MAX), policy.backoff_max);
    }

    #[test]
    fn only_failures_within_the_window_count() {
        let policy = Policy { failures_max: 2, window: Duration::from_secs(10), ..Policy::default() };
        let mut log = FailureLog::default();
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        assert!(!log.record(at(0), &policy));
        assert!(!log.record(at(1), &policy));
        assert!(log.record(at(2), &policy));
        assert!(!log.record(at(13), &policy));
    }
}
