//! How long the writer of one link lets frames wait for company. Pure arithmetic; the time is an argument.
//!
//! Called by [`super::io`] before and after each write. A frame on a link that has been quiet never waits. On a link
//! that carries much, writes that follow each other at once would cost more than the frames in them, so there a frame
//! waits while other tasks that can run now queue theirs; the more the link has carried just now, the longer. No timer
//! is set: a wait is cut short by the frame that comes after its end, or when no task is left to run.

use std::time::{Duration, Instant};

/// Less than this since the last write: the link is busy, and others that can run now will have more to write.
const BUSY: Duration = Duration::from_micros(30);
/// Frames are counted over at least this long.
const COUNTED: Duration = Duration::from_millis(1);
/// For each frame of the last [`COUNTED`]. 50 tokens a millisecond wait 5 us at most; 5,000 wait half a millisecond,
/// which is what it takes to fill a write.
const FOR_EACH: Duration = Duration::from_nanos(100);

/// What a writer remembers of its writes.
#[derive(Debug)]
pub(super) struct Pace {
    wrote: Instant,
    since: Instant,
    frames: u32,
    wait: Duration,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { wrote: now, since: now, frames: 0, wait: Duration::ZERO }
    }

    /// A write of so many frames has ended.
    pub(super) fn wrote(&mut self, now: Instant, frames: usize) {
        self.wrote = now;
        self.frames = self.frames.saturating_add(u32::try_from(frames).unwrap_or(u32::MAX));
        let counted = now.saturating_duration_since(self.since);
        if counted >= COUNTED {
            self.wait = FOR_EACH.mul_f64(f64::from(self.frames) * COUNTED.as_secs_f64() / counted.as_secs_f64());
            (self.since, self.frames) = (now, 0);
        }
    }

    /// Until when a frame that has come now may wait; none when it must not.
    pub(super) fn wait_until(&self, now: Instant) -> Option<Instant> {
        let busy = now.saturating_duration_since(self.wrote) < BUSY;
        (busy && !self.wait.is_zero()).then(|| now + self.wait)
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
    fn the_more_a_link_carries_the_longer_a_frame_waits() {
        let waits = [1, 50, 3_500].map(|frames| {
            let (pace, now) = after(1_000, frames);
            pace.wait_until(now).map(|until| until - now)
        });
        assert_eq!(waits, [100, 5_000, 350_000].map(|ns| Some(Duration::from_nanos(ns))));
    }

    #[test]
    fn a_frame_on_a_quiet_link_never_waits() {
        let (pace, now) = after(1_000, 50);
        assert_eq!(pace.wait_until(now + BUSY), None);
        let mut pace = Pace::new(now);
        pace.wrote(now, 1);
        assert_eq!(pace.wait_until(now), None, "nothing was counted yet");
        let (mut pace, now) = after(1_000, 5_000);
        let later = now + Duration::from_secs(3_600);
        pace.wrote(later, 1);
        assert!(pace.wait_until(later).is_none_or(|until| until - later < Duration::from_micros(1)));
    }
}
