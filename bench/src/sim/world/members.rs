//! Follows the member lists of the drivers: what changed goes to the views, what must not be is a breach.
//!
//! Called by the world when a driver says that its list has changed. Pure.

use starling_ids::{Incarnation, NodeId};

use super::World;
use crate::sim::views::{Change, Life};

impl World {
    /// The number in the name `n…`.
    pub(super) fn name_of(&self, node: &NodeId) -> Option<usize> {
        let name: usize = node.as_str().strip_prefix('n')?.parse().ok()?;
        (name < self.names.len()).then_some(name)
    }

    /// The driver in `slot` has other news of these than before.
    pub(super) fn members_changed(&mut self, slot: usize, changed: &[NodeId]) {
        for node in changed {
            let Some(driver) = self.nodes[slot].driver.as_ref() else { return };
            let life = driver.knows(node).filter(|(_, down)| !down).map(|(life, _)| life);
            self.list(slot, node, life);
        }
    }

    /// Whether what was followed change by change is what the drivers list; what differs is a breach.
    pub fn compare(&mut self) {
        for slot in 0..self.nodes.len() {
            let Some(driver) = self.nodes[slot].driver.as_ref() else { continue };
            let members = driver.members();
            let same = |name: usize| {
                members
                    .get(&self.names[name])
                    .is_some_and(|member| member.incarnation.0 == u64::from(self.views.life(slot, name)))
            };
            if members.len() != self.views.listed(slot) || !self.views.names_listed(slot).all(same) {
                self.invariants.breach(self.now, || format!("node {slot} lists others than it said"));
            }
        }
    }

    /// `slot` lists `node` in this life from now on; `None`: not any more.
    fn list(&mut self, slot: usize, node: &NodeId, life: Option<Incarnation>) {
        let Some(name) = self.name_of(node) else {
            self.invariants.breach(self.now, || format!("node {slot} lists {node}, which never was"));
            return;
        };
        if name == self.nodes[slot].name {
            self.invariants.breach(self.now, || format!("node {slot} lists itself"));
            return;
        }
        let life = life.map_or(0, |life| Life::try_from(life.0).unwrap_or(Life::MAX));
        if life > self.newest[name] {
            self.invariants.breach(self.now, || format!("node {slot} lists life {life} of {node}, which never was"));
        }
        match self.views.set_listed(slot, name, life, self.now) {
            Change::Plain => self.settle(name),
            Change::Stale => {
                self.invariants
                    .breach(self.now, || format!("node {slot} lists {node} in life {life} after a later one"));
            }
            Change::Dropped => {
                let victim = self.nodes.iter().position(|node| node.name == name && node.live());
                if self.nodes[slot].sound && victim.is_some_and(|victim| self.nodes[victim].sound) {
                    self.invariants.dropped(slot, name, self.now);
                }
            }
        }
    }

    /// A false death is over when nobody believes it any more.
    pub(super) fn settle(&mut self, name: usize) {
        if self.views.dropped_by(name) == 0 {
            self.invariants.settled(name, self.now);
        }
    }
}
