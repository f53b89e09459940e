//! Which step of a roll may be made now, from what the members have told. Pure.

use starling_ids::NodeId;
use thiserror::Error;

use super::view::{NodeRing, RingView};
use crate::security::{ClusterKey, KeyId, KeyRing, RingError};

/// One step of a roll.
#[derive(Debug, Clone)]
pub(super) enum Step {
    /// Accept one more key.
    Add(ClusterKey),
    /// Seal with this key.
    Use(KeyId),
    /// Accept this key no more.
    Remove(KeyId),
}

/// Why a step was not made. Nothing has changed anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RollError {
    /// The ring does not allow it.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A member would be shut out.
    #[error("{node} does not hold key {key} yet; `starling keys list` shows who does")]
    NotHeld {
        /// Who.
        node: NodeId,
        /// The key that would be used.
        key: KeyId,
    },
    /// A member still seals with it.
    #[error("{node} still seals with key {key}; `starling keys use` another one first")]
    StillUsed {
        /// Who.
        node: NodeId,
        /// The key that would be removed.
        key: KeyId,
    },
    /// A member may or may not be ready.
    #[error("{node} does not say what it holds ({reason}); it could be shut out")]
    Silent {
        /// Who.
        node: NodeId,
        /// What was seen instead of an answer.
        reason: String,
    },
    /// The task that changes the ring ended early.
    #[error("the change was not made: {0}")]
    Failed(String),
}

impl Step {
    pub(super) fn key(&self) -> KeyId {
        match self {
            Self::Add(key) => key.id(),
            Self::Use(key) | Self::Remove(key) => *key,
        }
    }

    /// Whether all others are ready for it.
    pub(super) fn check(&self, others: &[NodeRing]) -> Result<(), RollError> {
        let told = others.iter().map(|other| match (&other.after, &other.fault) {
            (Some(ring), _) => Ok((&other.node, ring)),
            (None, reason) => Err(RollError::Silent {
                node: other.node.clone(),
                reason: reason.clone().unwrap_or_else(|| "no answer".to_owned()),
            }),
        });
        match *self {
            // Who does not hold it yet is shut out by nothing; the table says who has not taken it.
            Self::Add(_) => Ok(()),
            Self::Use(key) => told.into_iter().try_for_each(|told| match told? {
                (_, ring) if ring.holds(key) => Ok(()),
                (node, _) => Err(RollError::NotHeld { node: node.clone(), key }),
            }),
            Self::Remove(key) => told.into_iter().try_for_each(|told| match told? {
                (node, ring) if ring.primary() == Some(key) => Err(RollError::StillUsed { node: node.clone(), key }),
                _ => Ok(()),
            }),
        }
    }

    /// The ring after it. `None`: it was made before, and is offered again to those that have missed it.
    pub(super) fn apply(&self, ring: &KeyRing, others: &[NodeRing]) -> Result<Option<KeyRing>, RingError> {
        let made = match self {
            Self::Add(key) => ring.add(key.clone()),
            Self::Use(key) => ring.promote(*key),
            Self::Remove(key) => ring.remove(*key),
        };
        let held_elsewhere = |key: KeyId| {
            let behind = |other: &NodeRing| other.after.as_ref().is_some_and(|ring| ring.holds(key));
            others.iter().any(behind)
        };
        match (made, self) {
            (Ok(next), _) => Ok(Some(next)),
            (Err(RingError::Known(_) | RingError::InUse(_)), _) => Ok(None),
            (Err(RingError::Unknown(key)), Self::Remove(_)) if held_elsewhere(key) => Ok(None),
            (Err(error), _) => Err(error),
        }
    }
}

/// A member's row after it was offered `wanted`.
pub(super) fn outcome(
    node: NodeId,
    wanted: &RingView,
    (before, after): (RingView, RingView),
    not_kept: Option<String>,
) -> NodeRing {
    let other = (after != *wanted).then(|| {
        let how = if after.outranks(wanted) { "another change was made at the same time" } else { "it was not taken" };
        format!("{how}: run the verb again")
    });
    let not_kept = not_kept.map(|reason| format!("in force, but not kept for its next start: {reason}"));
    NodeRing { node, before: Some(before), after: Some(after), fault: other.or(not_kept) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> ClusterKey {
        ClusterKey::from_bytes([n; 32])
    }

    fn holds(name: &str, ring: &KeyRing) -> NodeRing {
        let view = RingView::from(ring);
        NodeRing { node: NodeId::new(name).unwrap(), before: Some(view.clone()), after: Some(view), fault: None }
    }

    #[test]
    fn a_step_waits_for_every_member() {
        let first = KeyRing::from(key(1));
        let added = first.add(key(2)).unwrap();
        let used = added.promote(key(2).id()).unwrap();
        let silent = NodeRing::silent(NodeId::new("c").unwrap(), "frozen".into());
        let (one, two) = (key(1).id(), key(2).id());
        assert!(Step::Add(key(2)).check(&[holds("b", &first), silent.clone()]).is_ok());
        let not_held = RollError::NotHeld { node: NodeId::new("b").unwrap(), key: two };
        assert_eq!(Step::Use(two).check(&[holds("a", &added), holds("b", &first)]), Err(not_held));
        assert_eq!(Step::Use(two).check(&[holds("a", &added), holds("b", &used)]), Ok(()));
        let still = RollError::StillUsed { node: NodeId::new("b").unwrap(), key: one };
        assert_eq!(Step::Remove(one).check(&[holds("a", &used), holds("b", &added)]), Err(still));
        assert_eq!(Step::Remove(one).check(&[holds("a", &used), holds("b", &used)]), Ok(()));
        for step in [Step::Use(two), Step::Remove(one)] {
            let refused = step.check(&[holds("a", &used), silent.clone()]).unwrap_err();
            assert!(matches!(refused, RollError::Silent { .. }) && refused.to_string().contains("frozen"), "{refused}");
        }
    }

    #[test]
    fn a_step_made_before_is_offered_again_and_a_slip_is_an_error() {
        let first = KeyRing::from(key(1));
        let used = first.add(key(2)).unwrap().promote(key(2).id()).unwrap();
        let removed = used.remove(key(1).id()).unwrap();
        let again =
            |step: Step, ring: &KeyRing, others: &[NodeRing]| step.apply(ring, others).map(|ring| ring.is_none());
        assert_eq!(again(Step::Add(key(2)), &used, &[]), Ok(true));
        assert_eq!(again(Step::Use(key(2).id()), &used, &[]), Ok(true));
        let behind = [holds("b", &used)];
        assert_eq!(again(Step::Remove(key(1).id()), &removed, &behind), Ok(true));
        assert_eq!(again(Step::Remove(key(1).id()), &removed, &[]), Err(RingError::Unknown(key(1).id())));
        assert_eq!(again(Step::Use(key(9).id()), &used, &behind), Err(RingError::Unknown(key(9).id())));
        assert_eq!(again(Step::Remove(key(2).id()), &used, &[]), Err(RingError::Primary(key(2).id())));
        assert_eq!(again(Step::Remove(key(1).id()), &used, &[]), Ok(false));
    }

    #[test]
    fn a_row_says_what_is_wrong() {
        let first = KeyRing::from(key(1));
        let wanted = RingView::from(&first.add(key(2)).unwrap());
        let node = || NodeId::new("b").unwrap();
        let row = |after: &RingView, not_kept: Option<&str>| {
            outcome(node(), &wanted, (RingView::from(&first), after.clone()), not_kept.map(str::to_owned)).fault
        };
        assert_eq!(row(&wanted, None), None);
        assert!(row(&wanted, Some("disk full")).is_some_and(|fault| fault.contains("disk full")));
        assert!(row(&RingView::from(&first), None).is_some_and(|fault| fault.contains("again")));
        let later = RingView { version: 9, ..wanted.clone() };
        assert!(row(&later, None).is_some_and(|fault| fault.contains("at the same time")));
    }
}
