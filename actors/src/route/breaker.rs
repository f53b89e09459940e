//! Whether a worker that keeps failing is asked: closed, open, half open.
//!
//! One a worker and life, kept by the shard for all that ask it, and by a client for times without a shard. It opens after
//! [`FAULTS`] faults in a row: no link, refused as internal, broken or silent before the first token. While it is open the
//! worker is chosen only when there is no other. Then one request at a time tries; its first token closes it, a fault opens
//! it for twice as long. A refusal for want of room, a drain, a client's own fault or a client that left count for nothing.
//! Pure: time is an argument.

use std::time::Duration;

/// Faults in a row that open it.
pub const FAULTS: u32 = 3;
/// How long it is open the first time.
pub const OPEN_MIN: Duration = Duration::from_secs(1);
/// How long it is open at most.
pub const OPEN_MAX: Duration = Duration::from_secs(30);
/// A try that has not come back for this long is not waited for.
const TRY_MAX: Duration = Duration::from_secs(30);

/// Where a breaker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Requests go through.
    Closed,
    /// None does.
    Open,
    /// One may.
    HalfOpen,
}

impl State {
    /// A fixed word for tables and labels.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Breaker {
    faults: u32,
    /// Until when it is open, and for how long that was.
    open: Option<(Duration, Duration)>,
    /// When a try began.
    trying: Option<Duration>,
}

impl Breaker {
    /// Whether requests go through, now and until the next fault.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.open.is_none()
    }

    /// Where it is.
    #[must_use]
    pub fn state(&self, now: Duration) -> State {
        match self.open {
            None => State::Closed,
            Some((until, _)) if now < until => State::Open,
            Some(_) => State::HalfOpen,
        }
    }

    /// Whether one more request may go through.
    #[must_use]
    pub fn allows(&self, now: Duration) -> bool {
        match self.state(now) {
            State::Closed => true,
            State::Open => false,
            State::HalfOpen => self.trying.is_none_or(|since| now.saturating_sub(since) >= TRY_MAX),
        }
    }

    /// A request went there. True when it is the one that tries.
    pub fn sent(&mut self, now: Duration) -> bool {
        let tries = self.state(now) == State::HalfOpen && self.allows(now);
        if tries {
            self.trying = Some(now);
        }
        tries
    }

    /// A first token came. True when this closes it.
    pub fn worked(&mut self) -> bool {
        (self.faults, self.trying) = (0, None);
        self.open.take().is_some()
    }

    /// A fault of the worker's. True when this opens it.
    pub fn failed(&mut self, now: Duration) -> bool {
        self.faults = self.faults.saturating_add(1);
        let lasted = match self.open {
            // Requests that were on their way when it opened say nothing new.
            Some((until, _)) if now < until => return false,
            Some((_, lasted)) => (lasted * 2).min(OPEN_MAX),
            None if self.faults < FAULTS => return false,
            None => OPEN_MIN,
        };
        (self.open, self.trying) = (Some((now + lasted, lasted)), None);
        true
    }

    /// The one that tries ended without a verdict: its client left, or it was refused for a reason that counts for nothing.
    pub fn untried(&mut self) {
        self.trying = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::default();
        assert!(!breaker.failed(ms(0)) && !breaker.failed(ms(0)) && breaker.failed(ms(0)));
        breaker
    }

    #[test]
    fn it_opens_after_faults_in_a_row_and_one_tries_at_a_time() {
        let mut breaker = opened();
        assert_eq!(breaker.state(ms(999)), State::Open);
        assert!(!breaker.allows(ms(999)) && breaker.allows(ms(1_000)));
        assert!(breaker.sent(ms(1_000)), "it tries");
        assert!(!breaker.allows(ms(1_001)) && !breaker.sent(ms(1_001)), "one at a time");
        assert!(breaker.failed(ms(1_100)), "opens again");
        assert!(!breaker.allows(ms(3_099)) && breaker.allows(ms(3_100)), "for twice as long");
        assert!(breaker.sent(ms(3_100)));
        breaker.untried();
        assert!(breaker.allows(ms(3_101)) && breaker.sent(ms(3_101)));
        assert!(breaker.worked(), "closes");
        assert_eq!(breaker, Breaker::default());
    }

    #[test]
    fn a_success_between_faults_keeps_it_closed_and_late_faults_do_not_prolong_it() {
        let mut breaker = Breaker::default();
        for at in 0..20 {
            assert!(!breaker.failed(ms(at)) && !breaker.failed(ms(at)) && !breaker.worked());
        }
        let mut breaker = opened();
        (0..50).for_each(|at| assert!(!breaker.failed(ms(at))));
        assert!(breaker.allows(ms(1_000)));
    }

    #[test]
    fn a_try_that_never_comes_back_is_not_waited_for() {
        let mut breaker = opened();
        assert!(breaker.sent(ms(1_000)));
        assert!(!breaker.allows(ms(30_999)) && breaker.allows(ms(31_000)));
    }

    proptest! {
        /// However it fails, it lets somebody try again within the longest time, and at most one at a time before a success.
        #[test]
        fn it_never_stays_shut_and_never_floods(steps in proptest::collection::vec((0u8..4, 0u64..4_000), 0..100)) {
            let (mut breaker, mut now, mut trying) = (Breaker::default(), ms(0), None::<Duration>);
            for (what, passes) in steps {
                now += ms(passes);
                match what {
                    0 => {
                        breaker.failed(now);
                        if breaker.state(now) == State::Open { trying = None; }
                    }
                    1 => { breaker.worked(); trying = None; }
                    2 => { breaker.untried(); trying = None; }
                    _ if breaker.allows(now) && breaker.sent(now) => {
                        prop_assert!(trying.is_none_or(|since| now - since >= TRY_MAX));
                        trying = Some(now);
                    },
                    _ => {}
                }
                prop_assert!(breaker.allows(now + OPEN_MAX + TRY_MAX));
            }
        }
    }
}
