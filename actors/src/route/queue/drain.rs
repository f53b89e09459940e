//! How fast a queue drains, measured while something waits: tokens per second, the last ones counting most.
//!
//! Called by [`super::Queue`]. While nothing waits the pace is that of arrivals and says nothing about the workers, so that
//! time is left out. Pure: time is an argument.

use std::time::Duration;

/// What happened this long ago counts a third.
const MEMORY_S: f64 = 10.0;

/// Time with somebody waiting before the pace is believed.
const BELIEVED_S: f64 = 1.0;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// Tokens, faded.
    tokens: f64,
    /// Seconds, faded in the same way.
    seconds: f64,
    /// Seconds in all.
    measured: f64,
    /// Since when, while somebody waits.
    since: Option<Duration>,
}

impl Drain {
    /// Somebody waits from now on.
    pub(super) fn resume(&mut self, now: Duration) {
        self.since.get_or_insert(now);
    }

    /// Nobody does.
    pub(super) fn pause(&mut self, now: Duration) {
        self.pass(now);
        self.since = None;
    }

    /// So many tokens were handed to a worker.
    pub(super) fn note(&mut self, tokens: u64, now: Duration) {
        self.pass(now);
        self.tokens += tokens as f64;
    }

    /// How long so many tokens take; zero while the pace is not known.
    pub(super) fn time_for(&self, tokens: u64) -> Duration {
        if self.measured < BELIEVED_S || self.tokens <= 0.0 {
            return Duration::ZERO;
        }
        let seconds = tokens as f64 * self.seconds / self.tokens;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    fn pass(&mut self, now: Duration) {
        let Some(since) = self.since.replace(now) else {
            self.since = None;
            return;
        };
        let passed = now.saturating_sub(since).as_secs_f64();
        let faded = (-passed / MEMORY_S).exp();
        self.tokens *= faded;
        // The fading of a time that passes evenly, in one step.
        self.seconds = self.seconds * faded + MEMORY_S * (1.0 - faded);
        self.measured += passed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn the_pace_is_that_of_the_time_in_which_somebody_waited() {
        let mut drain = Drain::default();
        assert_eq!(drain.time_for(1_000), Duration::ZERO);
        for busy in 0..40 {
            // Half of each second nothing waits.
            let begins = ms(busy * 1_000);
            drain.resume(begins);
            for step in 1..=5 {
                drain.note(100, begins + ms(step * 100));
            }
            drain.pause(begins + ms(500));
        }
        let second = drain.time_for(1_000).as_secs_f64();
        assert!((0.9..1.1).contains(&second), "{second}");
    }

    #[test]
    fn a_pace_that_changes_is_followed() {
        let mut drain = Drain::default();
        drain.resume(ms(0));
        (1..=200).for_each(|at| drain.note(1_000, ms(at * 100)));
        let fast = drain.time_for(10_000).as_secs_f64();
        (1..=400).for_each(|at| drain.note(100, ms(20_000 + at * 100)));
        let slow = drain.time_for(10_000).as_secs_f64();
        assert!((0.9..1.1).contains(&fast) && (7.0..11.0).contains(&slow), "{fast} then {slow}");
    }
}
