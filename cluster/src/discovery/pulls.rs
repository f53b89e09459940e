//! Which records to pull now, and when to try the others again.
//!
//! Called by the Directory actor. Pure: the time is an argument. Bounds: [`PULLS_MAX`] pulls at one time, one for a node.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use starling_ids::NodeId;

/// Records pulled at one time.
pub(super) const PULLS_MAX: usize = 32;
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct Pull {
    running: bool,
    failures: u32,
    not_before: Option<Instant>,
}

/// Pulls that run, and those that failed and wait.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    nodes: BTreeMap<NodeId, Pull>,
}

impl Pulls {
    /// Of the `wanted` ones those to start now, and when the next of the others may be tried.
    pub(super) fn due(&self, wanted: BTreeSet<NodeId>, now: Instant) -> (Vec<NodeId>, Option<Instant>) {
        let mut free = PULLS_MAX - self.nodes.values().filter(|pull| pull.running).count().min(PULLS_MAX);
        let (mut due, mut next): (Vec<NodeId>, Option<Instant>) = (Vec::new(), None);
        for node in wanted {
            let pull = self.nodes.get(&node);
            if pull.is_some_and(|pull| pull.running) {
                continue;
            }
            match pull.and_then(|pull| pull.not_before).filter(|at| *at > now) {
                Some(at) => next = Some(next.map_or(at, |known| known.min(at))),
                // The rest is asked for when one of these is done.
                None if free == 0 => {}
                None => {
                    free -= 1;
                    due.push(node);
                }
            }
        }
        (due, next)
    }

    pub(super) fn started(&mut self, node: NodeId) {
        self.nodes.entry(node).or_default().running = true;
    }

    pub(super) fn done(&mut self, node: &NodeId) {
        self.nodes.remove(node);
    }

    /// Waits twice as long after each failure in a row.
    pub(super) fn failed(&mut self, node: NodeId, now: Instant) {
        let pull = self.nodes.entry(node).or_default();
        pull.running = false;
        pull.not_before = Some(now + RETRY_FIRST.saturating_mul(1 << pull.failures.min(8)).min(RETRY_MAX));
        pull.failures = pull.failures.saturating_add(1);
    }

    /// Forgets nodes that are no members any more; a pull that still runs is kept until it ends.
    pub(super) fn keep(&mut self, is_member: impl Fn(&NodeId) -> bool) {
        self.nodes.retain(|node, pull| pull.running || is_member(node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize) -> BTreeSet<NodeId> {
        (0..count).map(|at| NodeId::new(&format!("n{at}")).expect("name")).collect()
    }

    #[test]
    fn pulls_are_bounded_single_and_backed_off() {
        let (mut pulls, mut now) = (Pulls::default(), Instant::now());
        let (due, next) = pulls.due(nodes(100), now);
        assert_eq!((due.len(), next), (PULLS_MAX, None));
        due.into_iter().for_each(|node| pulls.started(node));
        assert!(pulls.due(nodes(100), now).0.is_empty(), "all places are taken");
        let one = NodeId::new("n0").expect("name");
        let mut waits = Vec::new();
        for _ in 0..10 {
            pulls.failed(one.clone(), now);
            let (due, next) = pulls.due([one.clone()].into(), now);
            assert!(due.is_empty());
            waits.push(next.expect("a time") - now);
            now = next.expect("a time");
            assert_eq!(pulls.due([one.clone()].into(), now).0, std::slice::from_ref(&one));
        }
        assert_eq!((waits[0], waits[1], waits[9]), (RETRY_FIRST, 2 * RETRY_FIRST, RETRY_MAX));
        pulls.keep(|_| false);
        assert_eq!(pulls.nodes.len(), PULLS_MAX - 1, "running ones stay");
        pulls.done(&NodeId::new("n1").expect("name"));
        assert_eq!(pulls.nodes.len(), PULLS_MAX - 2);
    }
}
