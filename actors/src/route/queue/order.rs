//! What goes first inside a tenant, and how that is kept true while requests wait.
//!
//! Called by [`super::Queue`] when a request comes and by [`super::turns`] before one is given away. What is cached changes while
//! requests wait: blocks of one that was given away are there for its siblings a moment later, others are evicted. So those in
//! front are looked at again before each turn, and of the rest a few more each time, in rotation. What the caches hold of one is
//! looked up at most once in [`SEEN_FOR`], so that thousands of turns a second do not look up the same prompts each time. Pure.
//! Bounds: [`FRONT`] and [`MORE`] looks a turn, and [`SEEN_MAX`] holders remembered of each that waits.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Claim, Place, Queue, QueueConfig, class_of};
use crate::route::desk::Hits;

/// Of those next in line, so many are looked at again before each turn.
pub const FRONT: usize = 8;
/// Of those behind them that could go before the first one, so many, in rotation.
pub const MORE: usize = 16;

/// How long what the caches hold of a waiting prompt counts as known: blocks come and go by whole steps of the engines, and news of
/// them travel as long.
pub(super) const SEEN_FOR: Duration = Duration::from_millis(20);
/// Holders up to which it is kept; 8 bytes each.
const SEEN_MAX: usize = 2_048;

/// What goes first inside a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// The earliest deadline, put off by [`QueueConfig::patience`] times the prefill that a request still needs at the best worker
    /// with room, at most by [`QueueConfig::passed_ms_max`] and a quarter of its time; then who came first. What is cached is used before it is evicted, and
    /// whoever is passed by others is so for a bounded time.
    #[default]
    Cached,
    /// The earliest deadline, then who came first.
    Deadline,
    /// The fewest prompt tokens to compute when it came, then who came first. Better medians, longer waits for long prompts.
    ShortestMiss,
}

impl QueueConfig {
    /// Of a request that waits since then; those with lower keys go first.
    pub(super) fn key(&self, claim: &Claim, since: Duration) -> u64 {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        match self.order {
            Order::Deadline => micros(claim.deadline),
            Order::ShortestMiss => claim.miss_tokens,
            Order::Cached => {
                // Nor so much that its time would be over.
                let left = self.limit(claim, since).saturating_sub(since) / 4;
                let put_off = claim.prefill.saturating_mul(self.patience).min(self.passed()).min(left);
                micros(claim.deadline.saturating_add(put_off))
            }
        }
    }

    /// When a request is taken out at the latest.
    pub(super) fn limit(&self, claim: &Claim, since: Duration) -> Duration {
        claim.deadline.min(since + Duration::from_millis(self.wait_ms_max))
    }

    fn passed(&self) -> Duration {
        Duration::from_millis(self.passed_ms_max)
    }
}

impl<T> Queue<T> {
    /// Whom to look at again before a turn that would be this one's: by what is cached now, another of its tenant may go before it.
    /// At most so many; a third of them in front. Empty when the order has nothing to do with that, or when its turn is for its age.
    pub(super) fn reconsidered(&mut self, turn: Place, most: usize) -> Vec<Place> {
        if self.config.order != Order::Cached {
            return Vec::new();
        }
        let Some(entry) = self.entries.get(&turn) else { return Vec::new() };
        let passed = u64::try_from(self.config.passed().as_micros()).unwrap_or(u64::MAX);
        let front = (most * FRONT / (FRONT + MORE)).max(1);
        let some = (front, most.saturating_sub(front));
        let lane = self.lanes.get_mut(&class_of(&entry.claim));
        lane.map(|lane| lane.looks(&entry.claim.tenant, turn, some, passed)).unwrap_or_default()
    }

    /// What the caches held of a waiting request's prompt, if that was looked up lately.
    pub(super) fn seen(&self, place: Place, now: Duration) -> Option<&Hits> {
        let (at, hits) = self.entries.get(&place)?.seen.as_ref()?;
        (now.saturating_sub(*at) < SEEN_FOR).then_some(hits)
    }

    /// It was looked up.
    pub(super) fn see(&mut self, place: Place, hits: Hits, now: Duration) {
        if let Some(entry) = self.entries.get_mut(&place) {
            entry.seen = Some((now, hits)).filter(|(_, hits)| hits.workers() <= SEEN_MAX);
        }
    }

    /// What a waiting request needs to compute was found out anew.
    pub(super) fn judge(&mut self, place: Place, prefill: Duration) {
        let Some(entry) = self.entries.get_mut(&place).filter(|entry| !entry.parked) else { return };
        entry.claim.prefill = prefill;
        let (before, key) = (entry.key, self.config.key(&entry.claim, entry.since));
        if key != before {
            entry.key = key;
            if let Some(lane) = self.lanes.get_mut(&class_of(&entry.claim)) {
                lane.rekey(&entry.claim, (before, key), place);
            }
        }
    }
}
