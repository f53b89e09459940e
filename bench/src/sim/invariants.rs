//! What must hold at any moment, whatever is lost, frozen or cut, and what was seen of false deaths.
//!
//! Called by the world at each change and every 100 virtual milliseconds. Pure. Bounds: [`BROKEN_MAX`] breaches are kept.
//!
//! 1. A node never lists itself.
//! 2. No life is believed before it was started, nor an earlier one after a later one was known.
//! 3. No false death outlives its refutation: a view errs no longer than [`Invariants::patience`] after the last disturbance, and
//!    after the moment it began to err. This is also what "a heal converges" means.
//! 4. A datagram has at most 1,400 bytes; a node does not multiply what it receives.
//! 5. A tick leaves nothing due.

use std::collections::BTreeMap;

use super::{Micros, SECOND, seconds, views::Views};

/// Breaches kept; one is enough to fail.
const BROKEN_MAX: usize = 20;
/// False beliefs kept in words.
const LOG_MAX: usize = 200;

/// The breaches, and the false deaths.
#[derive(Debug)]
pub struct Invariants {
    /// How long a view may err once nothing disturbs the cluster.
    pub patience: Micros,
    broken: Vec<String>,
    log: Vec<String>,
    disturbed: Micros,
    /// Nodes that others believe dead without reason now, and since when.
    dead_wrongly: BTreeMap<usize, Micros>,
    deaths: u64,
    longest: Micros,
}

impl Default for Invariants {
    fn default() -> Self {
        let (broken, log, dead_wrongly) = (Vec::new(), Vec::new(), BTreeMap::new());
        Self { patience: 30 * SECOND, broken, log, disturbed: 0, dead_wrongly, deaths: 0, longest: 0 }
    }
}

impl Invariants {
    /// What was broken, in words.
    #[must_use]
    pub fn broken(&self) -> &[String] {
        &self.broken
    }

    /// Who took whom for dead without reason, in words.
    #[must_use]
    pub fn log(&self) -> &[String] {
        &self.log
    }

    /// Something was broken.
    pub fn breach(&mut self, now: Micros, what: impl FnOnce() -> String) {
        if self.broken.len() < BROKEN_MAX {
            self.broken.push(format!("at {:.3} s: {}", seconds(now), what()));
        }
    }

    /// Something happens to the cluster that views need time to follow.
    pub fn disturb(&mut self, now: Micros) {
        self.disturbed = now;
    }

    /// Looks for views that err for too long.
    pub(super) fn check(&mut self, views: &Views, now: Micros) {
        let Some(before) = now.checked_sub(self.patience).filter(|before| *before >= self.disturbed) else { return };
        if views.agreed() {
            return;
        }
        // Whoever errs still is heard of again after as long.
        self.disturbed = now;
        for slot in views.apart_since(before).take(3).collect::<Vec<_>>() {
            let error = views.first_error(slot);
            let patience = seconds(self.patience);
            self.breach(now, || match error {
                Some((name, listed, truth)) => format!(
                    "node {slot} has erred for over {patience} s: it lists n{name} in life {listed}, the truth is {truth} (0: down)"
                ),
                None => format!("node {slot} has erred for over {patience} s"),
            });
        }
    }

    /// A sound node was taken for dead by the sound one in `slot`.
    pub(super) fn dropped(&mut self, slot: usize, name: usize, now: Micros) {
        if self.log.len() < LOG_MAX {
            self.log.push(format!("at {:.3} s: node {slot} takes n{name} for dead", seconds(now)));
        }
        self.dead_wrongly.entry(name).or_insert_with(|| {
            self.deaths += 1;
            now
        });
    }

    /// Everybody who had dropped `name` has taken it back, or it is gone for good.
    pub(super) fn settled(&mut self, name: usize, now: Micros) {
        if let Some(since) = self.dead_wrongly.remove(&name) {
            self.longest = self.longest.max(now - since);
        }
    }

    /// Sound nodes taken for dead by at least one other: how many times.
    #[must_use]
    pub fn false_deaths(&self) -> u64 {
        self.deaths
    }

    /// How long the longest false death was believed by anybody, those not over yet included.
    #[must_use]
    pub fn longest_false_death(&self, now: Micros) -> Micros {
        self.dead_wrongly.values().map(|since| now - since).fold(self.longest, Micros::max)
    }

    /// Nodes believed dead without reason at this moment.
    #[must_use]
    pub fn dead_wrongly(&self) -> usize {
        self.dead_wrongly.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_false_death_counts_once_however_many_believe_it() {
        let mut invariants = Invariants::default();
        for now in [1, 2, 3] {
            invariants.dropped(0, 7, now * SECOND);
        }
        assert_eq!((invariants.false_deaths(), invariants.dead_wrongly()), (1, 1));
        assert_eq!(invariants.longest_false_death(4 * SECOND), 3 * SECOND);
        invariants.settled(7, 5 * SECOND);
        invariants.dropped(0, 7, 6 * SECOND);
        assert_eq!(invariants.false_deaths(), 2);
        assert_eq!(invariants.longest_false_death(7 * SECOND), 4 * SECOND);
    }

    #[test]
    fn a_view_may_err_for_a_while_only() {
        let mut views = Views::default();
        views.open(0, 0, 0);
        views.open(1, 1, 0);
        views.set_truth(0, 1, 0);
        views.set_truth(1, 1, 0);
        let mut invariants = Invariants { patience: SECOND, ..Invariants::default() };
        invariants.check(&views, SECOND / 2);
        assert!(invariants.broken().is_empty());
        invariants.disturb(SECOND);
        invariants.check(&views, 3 * SECOND / 2);
        assert!(invariants.broken().is_empty());
        invariants.check(&views, 2 * SECOND);
        assert!(invariants.broken()[0].contains("n1 in life 0"), "{:?}", invariants.broken());
    }
}
