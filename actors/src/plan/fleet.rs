//! How far the workers that are there suffice for what is needed. Pure.
//!
//! Workers of the role both go where they are needed, in parts; without a worker of one side the others do its work.

use serde::{Deserialize, Serialize};

use super::window::WorkerSeen;
use crate::route::split::Role;

/// Workers of a model by role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fleet {
    /// Those that do both.
    pub both: u32,
    /// Those that compute prompts for others.
    pub prefill: u32,
    /// Those that answer and have prompts computed.
    pub decode: u32,
}

/// Workers that a load takes: the one side and the other. Real numbers, at least 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sides {
    /// For prompts.
    pub prefill: f64,
    /// For answers.
    pub decode: f64,
}

impl Sides {
    /// The smaller of each.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        Self { prefill: self.prefill.min(other.prefill), decode: self.decode.min(other.decode) }
    }

    /// The larger of each.
    #[must_use]
    pub fn most(self, other: Self) -> Self {
        Self { prefill: self.prefill.max(other.prefill), decode: self.decode.max(other.decode) }
    }
}

impl Fleet {
    /// Counts the workers that are sound.
    #[must_use]
    pub fn of(workers: &[WorkerSeen]) -> Self {
        workers.iter().filter(|worker| worker.sound).fold(Self::default(), |fleet, worker| fleet.with(worker.role))
    }

    /// Counts all workers, also those that are silent.
    #[must_use]
    pub fn of_all(workers: &[WorkerSeen]) -> Self {
        workers.iter().fold(Self::default(), |fleet, worker| fleet.with(worker.role))
    }

    /// All of them.
    #[must_use]
    pub fn total(self) -> u32 {
        self.both + self.prefill + self.decode
    }

    /// Those of a role.
    #[must_use]
    pub fn count(self, role: Role) -> u32 {
        match role {
            Role::Both => self.both,
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
        }
    }

    /// Whether a worker has a role of its own.
    #[must_use]
    pub fn has_specialists(self) -> bool {
        self.prefill + self.decode > 0
    }

    /// With one more.
    #[must_use]
    pub fn with(mut self, role: Role) -> Self {
        *self.place(role) += 1;
        self
    }

    /// With one fewer; `None` when there is none of that role.
    #[must_use]
    pub fn without(mut self, role: Role) -> Option<Self> {
        let place = self.place(role);
        *place = place.checked_sub(1)?;
        Some(self)
    }

    fn place(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Both => &mut self.both,
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
        }
    }

    /// Whether so many stay able to answer, and so many to compute prompts. Those of one role do both while there is nobody
    /// for the other side; a fleet is not meant to come to that by itself, so they do not count here.
    #[must_use]
    pub fn keeps(self, min: u32) -> bool {
        self.decode + self.both >= min && self.prefill + self.both >= min
    }

    /// Workers for prompts, for answers, and for either.
    fn sides(self) -> (f64, f64, f64) {
        let (prefill, decode, both) = (f64::from(self.prefill), f64::from(self.decode), f64::from(self.both));
        // Nobody for one side: the others do it as well.
        if self.prefill + self.both == 0 {
            (0.0, 0.0, decode)
        } else if self.decode + self.both == 0 {
            (0.0, 0.0, prefill)
        } else {
            (prefill, decode, both)
        }
    }

    /// Workers for prompts and for answers, with those for either shared out so that both sides are pressed alike.
    #[must_use]
    pub fn shares(self, need: Sides) -> Sides {
        let (prefill, decode, both) = self.sides();
        let sum = need.prefill + need.decode;
        let to_decode = if sum > 0.0 {
            ((need.decode * (prefill + both) - need.prefill * decode) / sum).clamp(0.0, both)
        } else {
            both / 2.0
        };
        Sides { prefill: prefill + both - to_decode, decode: decode + to_decode }
    }

    /// What is needed for each worker that is there, on the side that is pressed more: above 1 it does not suffice. Infinite
    /// when something is needed and nobody is there.
    #[must_use]
    pub fn pressure(self, need: Sides) -> f64 {
        let shares = self.shares(need);
        let of = |need: f64, there: f64| if need <= 0.0 { 0.0 } else { need / there };
        of(need.prefill, shares.prefill).max(of(need.decode, shares.decode))
    }

    /// Workers for prompts when answers get what they need at this pressure.
    #[must_use]
    pub fn left_for_prefill(self, decode: f64, pressure: f64) -> f64 {
        let (own, others, both) = self.sides();
        own + both - (decode / pressure - others).clamp(0.0, both)
    }

    /// Workers for answers when prompts get what they need at this pressure.
    #[must_use]
    pub fn left_for_decode(self, prefill: f64, pressure: f64) -> f64 {
        let (others, own, both) = self.sides();
        own + both - (prefill / pressure - others).clamp(0.0, both)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn need(prefill: f64, decode: f64) -> Sides {
        Sides { prefill, decode }
    }

    fn fleet(both: u32, prefill: u32, decode: u32) -> Fleet {
        Fleet { both, prefill, decode }
    }

    #[test]
    fn workers_for_both_go_where_they_are_needed() {
        assert!((fleet(2, 0, 0).pressure(need(1.5, 0.1)) - 0.8).abs() < 1e-9);
        assert!((fleet(1, 1, 1).pressure(need(1.5, 0.5)) - 0.75).abs() < 1e-9);
        assert!((fleet(1, 1, 1).pressure(need(4.0, 0.5)) - 2.0).abs() < 1e-9, "one of two sides has them all");
        assert!((fleet(0, 1, 3).pressure(need(1.5, 1.5)) - 1.5).abs() < 1e-9);
        assert!((fleet(0, 0, 2).pressure(need(0.5, 1.0)) - 0.75).abs() < 1e-9, "nobody else computes prompts");
        assert_eq!(fleet(0, 0, 0).pressure(need(0.0, 0.0)), 0.0);
        assert!(fleet(0, 0, 0).pressure(need(0.1, 0.0)).is_infinite());
    }

    proptest! {
        #[test]
        fn more_workers_press_less_and_more_work_presses_more(
            (both, prefill, decode) in (0u32..5, 0u32..5, 0u32..5), p in 0.0f64..9.0, d in 0.0f64..9.0,
        ) {
            let fleet = fleet(both, prefill, decode);
            if !fleet.keeps(1) {
                return Ok(());
            }
            let before = fleet.pressure(need(p, d));
            for role in [Role::Both, Role::Prefill, Role::Decode] {
                prop_assert!(fleet.with(role).pressure(need(p, d)) <= before + 1e-9);
            }
            prop_assert!(fleet.pressure(need(p + 0.5, d)) >= before - 1e-9);
            let shares = fleet.shares(need(p, d));
            prop_assert!((shares.prefill + shares.decode - f64::from(fleet.total())).abs() < 1e-9);
        }
    }
}
