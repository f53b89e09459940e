//! Where an instance is in its life, and which steps it may take.
//!
//! Called by whoever publishes an instance. Pure: one table.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Where an instance is in its life. Only [`Lifecycle::Serving`] takes requests.
///
/// ```text
/// joining ─▶ warming ◀─▶ serving
///    └──────────┴───────────┴──▶ draining ─▶ drained         every one ─▶ gone
/// ```
///
/// `serving` goes back to `warming` when an engine is built again. Nothing comes back from `draining`, `drained` and
/// `gone`: whoever serves again does so as a new instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Lifecycle {
    /// The node is joining.
    Joining,
    /// Loading a model, say.
    Warming,
    /// Takes requests.
    Serving,
    /// Finishes what it has, takes nothing new.
    Draining,
    /// Has nothing left.
    Drained,
    /// About to disappear.
    Gone,
}

/// A step that no life has. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("an instance that is {from} cannot become {to}")]
pub struct IllegalStep {
    /// Where it is.
    pub from: Lifecycle,
    /// Where it was to go.
    pub to: Lifecycle,
}

impl Lifecycle {
    /// All of them, in the order of a life.
    pub const ALL: [Self; 6] = [Self::Joining, Self::Warming, Self::Serving, Self::Draining, Self::Drained, Self::Gone];

    /// Whether `next` may follow. Staying is no step and always allowed.
    #[must_use]
    pub const fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Joining, Self::Joining) | (Self::Gone, Self::Gone) => true,
            (Self::Gone, _) | (_, Self::Joining) => false,
            (_, Self::Gone) => true,
            (Self::Joining | Self::Warming | Self::Serving, Self::Warming | Self::Serving | Self::Draining) => true,
            (Self::Draining, Self::Draining | Self::Drained) | (Self::Drained, Self::Drained) => true,
            _ => false,
        }
    }

    /// Takes the step to `next`, or says why there is none.
    pub const fn advance(&mut self, next: Self) -> Result<(), IllegalStep> {
        if !self.may_become(next) {
            return Err(IllegalStep { from: *self, to: next });
        }
        *self = next;
        Ok(())
    }

    /// The word for tables, labels and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Warming => "warming",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Gone => "gone",
        }
    }
}

impl fmt::Display for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl From<Lifecycle> for u8 {
    fn from(lifecycle: Lifecycle) -> Self {
        lifecycle as Self
    }
}

impl TryFrom<u8> for Lifecycle {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, &'static str> {
        Self::ALL.get(usize::from(number)).copied().ok_or("no such lifecycle")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lif_01_a_life_goes_forward_and_only_an_engine_warms_again() {
        use Lifecycle::{Drained, Draining, Gone, Joining, Serving, Warming};
        let legal = [
            (Joining, vec![Joining, Warming, Serving, Draining, Gone]),
            (Warming, vec![Warming, Serving, Draining, Gone]),
            (Serving, vec![Warming, Serving, Draining, Gone]),
            (Draining, vec![Draining, Drained, Gone]),
            (Drained, vec![Drained, Gone]),
            (Gone, vec![Gone]),
        ];
        for (from, next) in legal {
            let found: Vec<_> = Lifecycle::ALL.into_iter().filter(|to| from.may_become(*to)).collect();
            assert_eq!(found, next, "{from}");
            assert_eq!(Lifecycle::try_from(u8::from(from)), Ok(from));
        }
        assert!(Lifecycle::try_from(6).is_err());
    }

    proptest! {
        /// Whatever is asked for, nobody serves again once it drains, and nobody leaves `gone`.
        #[test]
        fn no_walk_comes_back_from_draining(steps in proptest::collection::vec(0..6u8, 0..40)) {
            let (mut at, mut ending) = (Lifecycle::Joining, false);
            for step in steps {
                let next = Lifecycle::try_from(step).expect("within the table");
                let before = at;
                let outcome = at.advance(next);
                prop_assert_eq!(outcome.is_ok(), before.may_become(next));
                prop_assert!(outcome.is_ok() || at == before, "a refused step changes nothing");
                ending |= at >= Lifecycle::Draining;
                prop_assert!(!ending || at >= Lifecycle::Draining);
            }
        }
    }
}
