//! Whether a running request should go on at another worker, because its own has become much slower than the others.
//!
//! Called by [`super::desk`] now and then with what every worker takes for its next step. A worker is left only when it has
//! been slower than the best place by [`GAIN`] for [`HOLD`], and until it is slower by less than [`ENOUGH`]; one request at a
//! time, one each [`EVERY`]. Below that gain nothing moves. Pure. Never: chooses a worker without room, or one that waits itself.

use std::time::Duration;

use super::fleet::Slot;

/// A step there, with one sequence more, must be shorter by this factor than a step here.
pub const GAIN: f64 = 2.0;
/// Once requests leave, they do until this factor is left.
pub const ENOUGH: f64 = 1.3;
/// And shorter by so many milliseconds: below it nobody feels it.
pub const GAIN_MS: f64 = 5.0;
/// How long it must have been so: a long prompt passes.
pub const HOLD: Duration = Duration::from_secs(3);
/// Between two requests that are asked to leave.
pub const EVERY: Duration = Duration::from_millis(500);

/// How long steps take at one worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Who.
    pub slot: Slot,
    /// Its next step, milliseconds.
    pub step_ms: f64,
    /// The same with one sequence more.
    pub more_ms: f64,
    /// Sequences in its batch.
    pub running: u32,
    /// Sequences that wait for a place there.
    pub waiting: u32,
    /// It may be given a running request.
    pub takes: bool,
}

/// One request of `from` should go on at `to`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shift {
    /// The slow one.
    pub from: Slot,
    /// The best place.
    pub to: Slot,
    /// A step of `from`, milliseconds.
    pub from_ms: f64,
    /// A step of `to` with that request, milliseconds.
    pub to_ms: f64,
}

/// What was seen so far.
#[derive(Debug, Default)]
pub struct Balance {
    /// Since when a worker is too slow; by slot.
    since: Vec<Option<Duration>>,
    last: Option<Duration>,
}

impl Balance {
    /// Looks at all workers; whom a request should leave now, if anyone.
    pub fn look(&mut self, paces: &[Pace], now: Duration) -> Option<Shift> {
        let width = paces.iter().map(|pace| pace.slot + 1).max().unwrap_or(0);
        self.since.resize(width, None);
        let mut worst: Option<Shift> = None;
        for pace in paces {
            let shift = best(paces, pace).filter(|shift| self.slow(pace, shift));
            let since = &mut self.since[pace.slot];
            let Some(shift) = shift else {
                *since = None;
                continue;
            };
            let held = now.saturating_sub(*since.get_or_insert(now)) >= HOLD;
            if held && worst.is_none_or(|known| shift.from_ms > known.from_ms) {
                worst = Some(shift);
            }
        }
        if self.last.is_some_and(|last| now.saturating_sub(last) < EVERY) {
            return None;
        }
        self.last = worst.map_or(self.last, |_| Some(now));
        worst
    }

    fn slow(&self, pace: &Pace, shift: &Shift) -> bool {
        let gain = if self.since[pace.slot].is_some() { ENOUGH } else { GAIN };
        let queue = pace.waiting > 0;
        pace.running > 1 && (queue || (shift.from_ms >= shift.to_ms * gain && shift.from_ms - shift.to_ms >= GAIN_MS))
    }
}

/// The place where one of its requests would go on best.
fn best(paces: &[Pace], of: &Pace) -> Option<Shift> {
    let others = paces.iter().filter(|other| other.slot != of.slot && other.takes && other.waiting == 0);
    let to = others.min_by(|a, b| a.more_ms.total_cmp(&b.more_ms))?;
    Some(Shift { from: of.slot, to: to.slot, from_ms: of.step_ms, to_ms: to.more_ms })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pace(slot: Slot, running: u32) -> Pace {
        let step = |running: u32| 8.0 + 4.0 * f64::from(running);
        Pace { slot, step_ms: step(running), more_ms: step(running + 1), running, waiting: 0, takes: running < 16 }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_slow_worker_is_left_after_a_while_one_request_at_a_time_until_it_is_not_much_slower() {
        let (mut balance, mut running) = (Balance::default(), [12u32, 1]);
        let mut moves = Vec::new();
        for tick in 0..100u64 {
            let paces = [pace(0, running[0]), pace(1, running[1])];
            if let Some(shift) = balance.look(&paces, at(tick * 100)) {
                assert_eq!((shift.from, shift.to), (0, 1));
                running = [running[0] - 1, running[1] + 1];
                moves.push(tick * 100);
            }
        }
        assert_eq!(running, [8, 5], "a step of 40 ms beside one of 32");
        assert!(moves[0] >= 3_000, "{moves:?}");
        assert!(moves.windows(2).all(|pair| pair[1] - pair[0] >= 500), "{moves:?}");
    }

    #[test]
    fn below_the_gain_and_for_a_moment_nothing_moves() {
        let mut balance = Balance::default();
        for tick in 0..100u64 {
            assert_eq!(balance.look(&[pace(0, 7), pace(1, 3)], at(tick * 100)), None, "36 ms beside 24");
        }
        for tick in 100..200u64 {
            // A long prompt comes and goes.
            let busy = Pace { step_ms: if tick % 20 < 10 { 400.0 } else { 16.0 }, ..pace(0, 2) };
            assert_eq!(balance.look(&[busy, pace(1, 1)], at(tick * 100)), None);
        }
    }

    #[test]
    fn who_waits_for_a_place_is_let_in_and_a_full_worker_gets_nothing() {
        let queue = Pace { waiting: 3, ..pace(0, 16) };
        let mut balance = Balance::default();
        let slow = Pace { step_ms: 60.0, more_ms: 64.0, ..pace(1, 4) };
        let seen: Vec<_> = (0..40u64).filter_map(|tick| balance.look(&[queue, slow], at(tick * 100))).collect();
        assert!(!seen.is_empty(), "its steps are no shorter there, but others wait here");
        let mut balance = Balance::default();
        let full = pace(1, 16);
        assert!((0..40u64).all(|tick| balance.look(&[queue, full], at(tick * 100)).is_none()));
    }

    proptest! {
        /// Whatever is seen: nobody is left for a worker without room or for himself, and not more often than may be.
        #[test]
        fn a_shift_has_a_place_and_keeps_to_the_budget(
            seen in proptest::collection::vec((1u64..400, proptest::collection::vec((0u32..20, 0u32..3), 1..6)), 1..80),
        ) {
            let (mut balance, mut now, mut last) = (Balance::default(), 0, None);
            for (after, workers) in seen {
                now += after;
                let paces: Vec<Pace> = workers
                    .iter()
                    .enumerate()
                    .map(|(slot, (running, waiting))| Pace { waiting: *waiting, ..pace(slot, *running) })
                    .collect();
                let Some(shift) = balance.look(&paces, at(now)) else { continue };
                let to = paces[shift.to];
                prop_assert!(shift.from != shift.to && to.takes && to.waiting == 0 && paces[shift.from].running > 1);
                prop_assert!(last.is_none_or(|last| now - last >= 500));
                last = Some(now);
            }
        }
    }
}
