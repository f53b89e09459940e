//! How many frames the writer of one link puts together before it writes. Pure arithmetic; the time is an argument.
//!
//! Called by [`super::io`] before and after each write. A frame on a link that has been quiet never waits. On a link
//! that carries much, writes that follow each other at once would cost more than the frames in them, so there a frame
//! waits while other tasks that can run now queue theirs; for the more of them, the more the link has carried just now.
//! No timer is set: a wait ends with the last of that many frames, or when no task is left to run.

use std::time::{Duration, Instant};

/// Less than this since the last write: the link is busy, and others that can run now will have more to write.
const BUSY: Duration = Duration::from_micros(30);
/// Frames are counted over at least this long: longer than the ticks of timers, which let many senders go at once.
const COUNTED: Duration = Duration::from_millis(4);
/// Up to so many frames a millisecond, half of what a core can write one by one, each is written by itself; at twice as
/// many eight are put together, at ten times as many a thousand.
const ALONE: f64 = 48.0;

/// What a writer remembers of its writes.
#[derive(Debug)]
pub(super) struct Pace {
    wrote: Instant,
    since: Instant,
    frames: usize,
    together: usize,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { wrote: now, since: now, frames: 0, together: 1 }
    }

    /// A write of so many frames has ended.
    pub(super) fn wrote(&mut self, now: Instant, frames: usize) {
        self.wrote = now;
        self.frames += frames;
        let counted = now.saturating_duration_since(self.since);
        if counted >= COUNTED {
            #[allow(clippy::cast_precision_loss)] // counts of a few milliseconds
            let carried = self.frames as f64 / (counted.as_secs_f64() * 1e3);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // not below zero; a cut-off bound is one
            let together = (carried / ALONE).powi(3).round() as usize;
            (self.since, self.frames, self.together) = (now, 0, together.max(1));
        }
    }

    /// How many frames are worth a write, when there is one now; 1 when it must not wait.
    pub(super) fn together(&self, now: Instant) -> usize {
        if now.saturating_duration_since(self.wrote) < BUSY { self.together } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second of `bursts` evenly spread writes of `frames` each.
    fn after(bursts: u32, frames: usize) -> (Pace, Instant) {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut now = start;
        for n in 1..=bursts {
            now = start + Duration::from_secs(1) * n / bursts;
            pace.wrote(now, frames);
        }
        (pace, now)
    }

    #[test]
    fn the_more_a_link_carries_the_more_is_put_together() {
        let together = [0, 1, 48, 96, 480].map(|frames| {
            let (pace, now) = after(1_000, frames);
            pace.together(now)
        });
        assert_eq!(together, [1, 1, 1, 8, 1_000]);
    }

    #[test]
    fn a_frame_on_a_quiet_link_never_waits() {
        let (mut pace, now) = after(1_000, 3_600);
        assert_eq!(pace.together(now + BUSY), 1);
        let later = now + Duration::from_secs(3_600);
        pace.wrote(later, 1);
        assert_eq!(pace.together(later), 1);
        assert_eq!(Pace::new(now).together(now), 1, "nothing was counted yet");
    }
}
