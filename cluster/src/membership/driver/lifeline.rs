//! Whether this node itself is well: who has answered it, whom it has heard, how often its probes failed of late.
//!
//! Called by the driver. Pure. After Lifeguard: who is not well gives others more time and accuses nobody aloud.
//! Bounds: two names each, a few deaths.

use std::{collections::VecDeque, time::Duration};

/// Who has had no answer for this long is not connected, as far as it knows: four probes.
pub(super) const CONNECTED: Duration = Duration::from_secs(2);
/// Deaths are remembered this long, to look for more of them.
const DEATHS_KEPT: Duration = Duration::from_secs(3);
/// Trouble counts up to this, and then doubles the time that others are given.
const TROUBLE_MAX: u32 = 4;

/// The last two different names with times.
#[derive(Debug, Default)]
struct LastTwo([Option<(u64, Duration)>; 2]);

impl LastTwo {
    fn note(&mut self, key: u64, now: Duration) {
        if self.0[0].is_some_and(|(last, _)| last != key) {
            self.0[1] = self.0[0];
        }
        self.0[0] = Some((key, now));
    }

    fn other_than(&self, key: u64) -> Option<Duration> {
        self.0.iter().flatten().find(|(last, _)| *last != key).map(|(_, at)| *at)
    }
}

/// How this node is.
#[derive(Debug, Default)]
pub(super) struct Lifeline {
    answers: LastTwo,
    heard: LastTwo,
    failed_in_a_row: u32,
    stutters: u32,
    deaths: VecDeque<Duration>,
}

impl Lifeline {
    /// A member has answered this node: both ways work.
    pub(super) fn answer(&mut self, key: u64, now: Duration) {
        self.answers.note(key, now);
    }

    /// A member was heard: one way works.
    pub(super) fn hear(&mut self, key: u64, now: Duration) {
        self.heard.note(key, now);
    }

    pub(super) fn probe_succeeded(&mut self) {
        self.failed_in_a_row = 0;
        self.stutters = self.stutters.saturating_sub(1);
    }

    pub(super) fn probe_failed(&mut self) {
        self.failed_in_a_row = self.failed_in_a_row.saturating_add(1);
    }

    /// A timer of this node was late.
    pub(super) fn stutter(&mut self) {
        self.stutters = (self.stutters + 1).min(TROUBLE_MAX);
    }

    pub(super) fn death(&mut self, now: Duration) {
        self.deaths.push_back(now);
        while self.deaths.front().is_some_and(|at| now.saturating_sub(*at) > DEATHS_KEPT) {
            self.deaths.pop_front();
        }
    }

    /// Deaths that this node has found of late.
    pub(super) fn deaths(&self, now: Duration) -> usize {
        self.deaths.iter().filter(|at| now.saturating_sub(**at) <= DEATHS_KEPT).count()
    }

    pub(super) fn is_connected(&self, now: Duration) -> bool {
        self.answers.0[0].is_some_and(|(_, at)| now.saturating_sub(at) <= CONNECTED)
    }

    /// When a member other than this one last answered.
    pub(super) fn answered_beside(&self, key: u64) -> Option<Duration> {
        self.answers.other_than(key)
    }

    /// When a member other than this one was last heard.
    pub(super) fn heard_beside(&self, key: u64) -> Option<Duration> {
        self.heard.other_than(key)
    }

    /// The time that others are given, stretched by up to two. One failed probe is the other's fault, not ours.
    pub(super) fn stretched(&self, time: Duration) -> Duration {
        let trouble = (self.failed_in_a_row.saturating_sub(1) + self.stutters).min(TROUBLE_MAX);
        time + time * trouble / TROUBLE_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn who_is_not_well_gives_more_time_and_who_is_well_again_less() {
        let mut lifeline = Lifeline::default();
        lifeline.probe_failed();
        assert_eq!(lifeline.stretched(SECOND), SECOND);
        (0..9).for_each(|_| lifeline.probe_failed());
        assert_eq!(lifeline.stretched(SECOND), 2 * SECOND);
        lifeline.probe_succeeded();
        lifeline.stutter();
        assert_eq!(lifeline.stretched(SECOND), SECOND * 5 / 4);
    }

    #[test]
    fn an_answer_of_the_accused_proves_nothing_about_the_accuser() {
        let mut lifeline = Lifeline::default();
        lifeline.answer(1, SECOND);
        assert_eq!((lifeline.answered_beside(1), lifeline.answered_beside(2)), (None, Some(SECOND)));
        lifeline.answer(2, 2 * SECOND);
        lifeline.answer(2, 3 * SECOND);
        assert_eq!((lifeline.answered_beside(1), lifeline.answered_beside(2)), (Some(3 * SECOND), Some(SECOND)));
    }
}
