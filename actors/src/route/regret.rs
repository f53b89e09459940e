//! How good decisions were, looked into for a share of them once more is known.
//!
//! Called by [`super::desk`]. Of every [`SHARE`]th decision the candidates are kept. Each candidate that was not chosen is judged
//! again from the first account that it gives *after* the decision: what it really had queued and running then, with the
//! rates known then, and what it would have brought from its slower tiers, as that was priced at the decision. When the answer has ended, three things are known:
//!
//! - the prediction's error: the real time to the first token less the predicted one;
//! - the *systematic* part of it, a running mean: the network, the first step, whatever no choice changes;
//! - the regret: the real time to the first token, less the systematic part, less the best that another candidate would have
//!   given by its own later account; never below 0.
//!
//! It is an estimate. A candidate's later account also holds what was sent there in between (at most one report's time), its
//! cached blocks are those that the index knew, and a candidate that gave no account in time does not count.
//! Bounds: [`OPEN_MAX`] decisions followed at one time.

use std::{collections::VecDeque, time::Duration};

use super::{desk::Ticket, fleet::Slot};

/// One decision of so many is looked into.
pub const SHARE: u64 = 16;
/// Decisions followed at one time.
const OPEN_MAX: usize = 64;
/// Weight of one decision in the running means.
const PACE: f64 = 0.05;

/// Running means over the decisions looked into, milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Regret {
    /// Decisions looked into.
    pub decisions: u64,
    /// How far off the predicted time to the first token was, in either direction.
    pub error_ms: f64,
    /// The real one less the predicted one.
    pub bias_ms: f64,
    /// How much faster another candidate would have been.
    pub regret_ms: f64,
}

/// What a candidate would have had to do for the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Work {
    /// Prompt tokens to compute.
    pub(super) computed_tokens: u32,
    /// Milliseconds to bring blocks from its slower tiers.
    pub(super) load_ms: f64,
}

#[derive(Debug, Clone, Copy)]
struct Other {
    slot: Slot,
    work: Work,
    /// Time to the first token by its first later account.
    later_ms: Option<f64>,
}

#[derive(Debug)]
struct Followed {
    ticket: Ticket,
    at: Duration,
    predicted_ms: f64,
    others: Vec<Other>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    open: VecDeque<Followed>,
    /// By slot: candidates of open decisions that have given no later account.
    awaited: Vec<u32>,
    mean: Regret,
}

impl Oracle {
    /// Follows a decision. `others` are the candidates that were not chosen, each with what it would have to do.
    pub(super) fn follow(
        &mut self,
        ticket: Ticket,
        at: Duration,
        predicted_ms: f64,
        others: impl Iterator<Item = (Slot, Work)>,
    ) {
        let room = if self.open.len() >= OPEN_MAX { self.open.pop_front() } else { None };
        if let Some(oldest) = &room {
            self.forget(&oldest.others);
        }
        let mut list = room.map_or_else(Vec::new, |oldest| oldest.others);
        list.clear();
        list.extend(others.map(|(slot, work)| Other { slot, work, later_ms: None }));
        for other in &list {
            if self.awaited.len() <= other.slot {
                self.awaited.resize(other.slot + 1, 0);
            }
            self.awaited[other.slot] += 1;
        }
        self.open.push_back(Followed { ticket, at, predicted_ms, others: list });
    }

    /// A worker gave its account at `now`; `judge` tells its time to the first token when it computes so many prompt tokens and loads none.
    pub(super) fn heard(&mut self, slot: Slot, now: Duration, judge: impl Fn(u32) -> f64) {
        if self.awaited.get(slot).is_none_or(|awaited| *awaited == 0) {
            return;
        }
        for followed in self.open.iter_mut().filter(|followed| followed.at < now) {
            for other in followed.others.iter_mut().filter(|other| other.slot == slot && other.later_ms.is_none()) {
                other.later_ms = Some(judge(other.work.computed_tokens) + other.work.load_ms);
                self.awaited[slot] -= 1;
            }
        }
    }

    /// A worker left: it is no alternative any more.
    pub(super) fn vacated(&mut self, slot: Slot) {
        for followed in &mut self.open {
            followed.others.retain(|other| other.slot != slot);
        }
        if let Some(awaited) = self.awaited.get_mut(slot) {
            *awaited = 0;
        }
    }

    /// The answer has ended; its regret when the decision was followed and some other candidate gave its account.
    pub(super) fn ended(&mut self, ticket: Ticket, ttft_ms: f64) -> Option<f64> {
        let at = self.open.iter().position(|followed| followed.ticket == ticket)?;
        let followed = self.open.remove(at)?;
        self.forget(&followed.others);
        let error = ttft_ms - followed.predicted_ms;
        let mean = &mut self.mean;
        // The first ones count by their number, so that the mean does not begin at nothing.
        mean.decisions += 1;
        let pace = PACE.max(1.0 / mean.decisions as f64);
        mean.bias_ms += (error - mean.bias_ms) * pace;
        mean.error_ms += (error.abs() - mean.error_ms) * pace;
        let best = followed.others.iter().filter_map(|other| other.later_ms).min_by(f64::total_cmp)?;
        let regret = (ttft_ms - mean.bias_ms - best).max(0.0);
        mean.regret_ms += (regret - mean.regret_ms) * pace;
        Some(regret)
    }

    /// The running means.
    pub(super) fn mean(&self) -> Regret {
        self.mean
    }

    fn forget(&mut self, others: &[Other]) {
        for other in others.iter().filter(|other| other.later_ms.is_none()) {
            if let Some(awaited) = self.awaited.get_mut(other.slot) {
                *awaited = awaited.saturating_sub(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const fn computes(computed_tokens: u32) -> Work {
        Work { computed_tokens, load_ms: 0.0 }
    }

    #[test]
    fn what_another_would_have_loaded_takes_its_time() {
        for (load_ms, expected) in [(0.0, 15.0), (6.0, 9.0), (100.0, 0.0)] {
            let mut oracle = Oracle::default();
            oracle.follow(Ticket(1), ms(1), 25.0, [(1, Work { computed_tokens: 10, load_ms })].into_iter());
            oracle.heard(1, ms(2), f64::from);
            assert_eq!(oracle.ended(Ticket(1), 25.0), Some(expected), "{load_ms} ms to load");
        }
    }

    #[test]
    fn regret_is_what_another_would_have_saved_by_its_later_account() {
        let mut oracle = Oracle::default();
        // Predictions are 5 ms short whatever is chosen: no choice would change that.
        for at in 0..200 {
            let ticket = Ticket(at);
            oracle.follow(ticket, ms(at * 10), 20.0, [(1, computes(100))].into_iter());
            oracle.heard(1, ms(at * 10), |_| 0.0);
            oracle.heard(1, ms(at * 10 + 1), |missed| f64::from(missed) * 0.5);
            oracle.heard(1, ms(at * 10 + 2), |_| 0.0);
            assert_eq!(oracle.ended(ticket, 25.0), Some(0.0), "only the first later account counts");
        }
        assert!((oracle.mean().bias_ms - 5.0).abs() < 1e-6 && (oracle.mean().error_ms - 5.0).abs() < 1e-6);
        let ticket = Ticket(300);
        oracle.follow(ticket, ms(5_000), 20.0, [(0, computes(7)), (1, computes(10)), (2, computes(10))].into_iter());
        oracle.heard(1, ms(5_001), f64::from);
        oracle.heard(2, ms(5_001), |_| 15.0);
        let regret = oracle.ended(ticket, 25.0).expect("two gave their account");
        assert!((regret - 10.0).abs() < 1e-6, "{regret}");
        assert!(oracle.mean().regret_ms > 0.0 && oracle.mean().decisions == 201);
    }

    #[test]
    fn what_is_followed_is_bounded_and_given_back() {
        let mut oracle = Oracle::default();
        for at in 0..1_000 {
            oracle.follow(Ticket(at), ms(at), 1.0, (0..4).map(|slot| (slot, computes(1))));
        }
        assert_eq!((oracle.open.len(), oracle.awaited.as_slice()), (OPEN_MAX, [64; 4].as_slice()));
        assert_eq!(oracle.ended(Ticket(3), 1.0), None, "forgotten");
        oracle.vacated(3);
        for at in 0..1_000 {
            assert_eq!(oracle.ended(Ticket(at), 1.0), None, "nobody gave an account");
        }
        assert_eq!((oracle.open.len(), oracle.awaited.as_slice()), (0, [0; 4].as_slice()));
    }
}
