//! How many second tries there may be: a part of the requests and a few on top, so that an outage is not multiplied.
//!
//! Called by the client before each try after the first. A bucket: every request puts a part of a try in, time puts a few
//! more in, a try takes a whole one out. When most requests fail, their tries are at most that part of them, whatever
//! happens. Pure: time is an argument. Bounds: [`SAVED`] tries saved up.

use std::time::Duration;

/// Tries for each request.
pub const SHARE: f64 = 0.2;
/// Tries a second beside that, so that few requests may be retried too.
pub const FLOOR_PER_S: f64 = 5.0;
/// Tries saved up: what a quiet time leaves for a sudden loss.
pub const SAVED: f64 = 50.0;

/// See the module.
#[derive(Debug, Clone)]
pub struct Retries {
    left: f64,
    at: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self { left: SAVED, at: Duration::ZERO }
    }
}

impl Retries {
    /// A request begins.
    pub fn request(&mut self, now: Duration) {
        self.pass(now);
        self.left = (self.left + SHARE).min(SAVED);
    }

    /// Takes one try out; false when there is none.
    pub fn spend(&mut self, now: Duration) -> bool {
        self.pass(now);
        let enough = self.left >= 1.0;
        if enough {
            self.left -= 1.0;
        }
        enough
    }

    fn pass(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.left = (self.left + passed * FLOOR_PER_S).min(SAVED);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_outage_is_not_multiplied() {
        let mut retries = Retries::default();
        let (mut requests, mut tries) = (0u32, 0u32);
        // 1,000 requests a second for a minute, and each of them would try twice more.
        for at in 0..60_000u64 {
            retries.request(Duration::from_millis(at));
            requests += 1;
            tries += (0..2).filter(|_| retries.spend(Duration::from_millis(at))).count() as u32;
        }
        let most = SAVED + f64::from(requests) * SHARE + 60.0 * FLOOR_PER_S;
        assert!(f64::from(tries) <= most, "{tries} tries for {requests} requests");
        assert!(f64::from(tries) > most * 0.95, "the budget is there to be used: {tries}");
    }

    #[test]
    fn a_few_requests_may_be_retried_as_often_as_they_like() {
        let mut retries = Retries::default();
        for at in 0..1_000u64 {
            let now = Duration::from_secs(at);
            retries.request(now);
            assert!(retries.spend(now) && retries.spend(now));
        }
    }

    proptest! {
        #[test]
        fn tries_stay_within_the_bound(steps in proptest::collection::vec((any::<bool>(), 0u64..200), 0..400)) {
            let (mut retries, mut now) = (Retries::default(), Duration::ZERO);
            let (mut requests, mut tries) = (0.0, 0.0);
            for (request, passes) in steps {
                now += Duration::from_millis(passes);
                if request {
                    retries.request(now);
                    requests += 1.0;
                } else if retries.spend(now) {
                    tries += 1.0;
                }
                prop_assert!(tries <= SAVED + requests * SHARE + now.as_secs_f64() * FLOOR_PER_S + 1e-6);
            }
        }
    }
}
