//! Who was declared down lately, so that a caller hears "down" and not "never heard of".
//!
//! Written by the Directory actor, read by whoever opens streams. Bounds: [`KEPT_MAX`] names, each for [`KEPT_FOR`].

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use starling_ids::{Incarnation, NodeId};

const KEPT_MAX: usize = 1024;
const KEPT_FOR: Duration = Duration::from_secs(600);

/// Names of dead nodes and when their last known life ended, by this node's clock.
#[derive(Debug, Default)]
pub(super) struct DownBook {
    nodes: Mutex<BTreeMap<NodeId, (Incarnation, Instant)>>,
}

impl DownBook {
    pub(super) fn note(&self, node: NodeId, incarnation: Incarnation, now: Instant) {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes.len() >= KEPT_MAX {
            nodes.retain(|_, (_, at)| now - *at < KEPT_FOR);
        }
        if nodes.len() < KEPT_MAX {
            nodes.insert(node, (incarnation, now));
        }
    }

    pub(super) fn since(&self, node: &NodeId, now: Instant) -> Option<Duration> {
        let nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.get(node).map(|(_, at)| now.saturating_duration_since(*at)).filter(|since| *since < KEPT_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_down_are_remembered_for_a_while_and_within_bounds() {
        let (book, now) = (DownBook::default(), Instant::now());
        let name = |at: usize| NodeId::new(&format!("n{at}")).expect("name");
        (0..=KEPT_MAX).for_each(|at| book.note(name(at), Incarnation(1), now));
        let later = now + Duration::from_secs(3);
        assert_eq!(book.since(&name(0), later), Some(Duration::from_secs(3)));
        assert_eq!(book.since(&name(KEPT_MAX), later), None, "no room");
        assert_eq!(book.since(&name(0), now + KEPT_FOR), None);
        book.note(name(KEPT_MAX), Incarnation(1), now + KEPT_FOR);
        assert_eq!(book.since(&name(KEPT_MAX), now + KEPT_FOR), Some(Duration::ZERO), "the old made room");
    }
}
