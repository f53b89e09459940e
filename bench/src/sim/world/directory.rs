//! The directories of the nodes: the product's engine beside each driver, asked and answered over virtual TCP.
//!
//! Called by the world and by scenarios. Pure. A node has one only where a scenario gives it one. What one directory asks
//! another travels like an exchange of states (see `tcp`).

use std::time::Duration;

use starling_cluster::{
    discovery::{Ask, DirectoryEffect, DirectoryEngine, NodeRecord, OwnRecord, Told},
    membership::{Peer, Rumour},
};
use starling_ids::NodeId;

use super::{
    Event, World,
    tcp::{Answer, Question},
};
use crate::sim::{Micros, SECOND};

/// How long a question of a directory may take.
const ASK_PATIENCE: Micros = 2 * SECOND;

/// What a node holds beside its driver.
pub(in crate::sim) struct Directory {
    engine: DirectoryEngine,
    own: OwnRecord,
    tick_at: Option<Micros>,
    pub(in crate::sim) published: u64,
}

impl World {
    /// The node in `slot` has a directory from now on; `describe` makes its first record.
    pub fn offer(&mut self, slot: usize, describe: impl FnOnce(&mut NodeRecord)) {
        let Some(driver) = self.nodes[slot].driver.as_ref() else { return };
        let identity = driver.identity().clone();
        let Some(node) = identity.node.clone() else { return };
        let mut record = NodeRecord::new(node, identity.incarnation, identity.address());
        record.version = 1;
        describe(&mut record);
        let own = OwnRecord::new(record);
        let seed = self.draw(usize::MAX) as u64;
        let engine = DirectoryEngine::new(own.get(), seed, self.nodes[slot].clock(self.now));
        self.nodes[slot].directory = Some(Box::new(Directory { engine, own, tick_at: None, published: 0 }));
        self.direct_members(slot);
    }

    /// Changes the record of the node in `slot`; the version that it has then.
    pub fn publish(&mut self, slot: usize, change: impl FnOnce(&mut NodeRecord)) -> u64 {
        let Some(directory) = self.nodes[slot].directory.as_ref() else { return 0 };
        let own = directory.own.clone();
        if let Err(error) = own.update(change) {
            self.invariants.breach(self.now, || format!("node {slot} cannot publish: {error}"));
        }
        let (record, delta) = own.news();
        let version = record.version;
        self.direct(slot, |engine, now| engine.set_own(record, delta, now));
        version
    }

    /// How many live nodes hold version `version` of the record of `name`, or a later one, whole.
    #[must_use]
    pub fn holders(&self, name: usize, version: u64) -> usize {
        let node = &self.names[name];
        let holds = |slot: usize| {
            let directory = self.nodes[slot].directory.as_ref();
            let record = directory.and_then(|directory| directory.engine.core().record(node));
            record.is_some_and(|record| record.version >= version && !record.partial)
        };
        self.live().filter(|slot| self.nodes[*slot].name == name || holds(*slot)).count()
    }

    /// Whether every live node holds every record, whole, in its newest version.
    #[must_use]
    pub fn records_agree(&self) -> bool {
        let mut roots = self.live().filter_map(|slot| self.nodes[slot].directory.as_ref());
        let Some(first) = roots.next().map(|directory| directory.engine.core()) else { return true };
        let all = self.live().count();
        let same = |directory: &Directory| directory.engine.core().tally().root() == first.tally().root();
        first.tally().len() == all && first.wanted().is_empty() && roots.all(|directory| same(directory))
    }

    pub(super) fn direct_members(&mut self, slot: usize) {
        let node = &self.nodes[slot];
        let (Some(driver), true) = (node.driver.as_ref(), node.directory.is_some()) else { return };
        let members = driver.members();
        self.direct(slot, |engine, now| engine.set_members(&members, now));
    }

    pub(super) fn direct_rumour(&mut self, slot: usize, rumour: &Rumour) {
        self.direct(slot, |engine, now| engine.hear(rumour, now));
    }

    pub(super) fn direct_tick(&mut self, slot: usize) {
        let Some(directory) = self.nodes[slot].directory.as_mut() else { return };
        if directory.tick_at != Some(self.now) {
            return;
        }
        directory.tick_at = None;
        self.direct(slot, |engine, now| engine.tick(now));
    }

    pub(super) fn direct_ask(&mut self, slot: usize, from: &NodeId, ask: &Ask) -> Option<Told> {
        let mut told = None;
        self.direct(slot, |engine, now| told = Some(engine.answer(from, ask, now)));
        told
    }

    pub(super) fn direct_told(&mut self, slot: usize, ticket: u64, told: Option<Told>) {
        self.direct(slot, |engine, now| engine.told(ticket, told, now));
    }

    fn direct(&mut self, slot: usize, tell: impl FnOnce(&mut DirectoryEngine, Duration)) {
        let node = &mut self.nodes[slot];
        let Some(mut directory) = node.directory.take() else { return };
        if node.frozen || node.driver.is_none() {
            node.directory = Some(directory);
            return;
        }
        tell(&mut directory.engine, node.clock(self.now));
        let effects = directory.engine.take_effects();
        let at = node.when(directory.engine.next_tick(), self.now).max(self.now + 1);
        if directory.tick_at.is_none_or(|queued| at < queued) {
            directory.tick_at = Some(at);
            self.queue.add(at, Event::DirectoryTick(slot));
        }
        directory.published +=
            effects.iter().filter(|effect| matches!(effect, DirectoryEffect::Publish(_))).count() as u64;
        self.nodes[slot].directory = Some(directory);
        for effect in effects {
            self.perform_directed(slot, effect);
        }
    }

    fn perform_directed(&mut self, slot: usize, effect: DirectoryEffect) {
        match effect {
            DirectoryEffect::Ask { ticket, to, ask } => self.ask_directory(slot, ticket, &to, ask),
            DirectoryEffect::Announce(version, delta) => {
                self.tell(slot, |driver, _| driver.announce_version(version, delta));
            }
            DirectoryEffect::Publish(_) | DirectoryEffect::Down(..) => {}
        }
    }

    fn ask_directory(&mut self, slot: usize, ticket: u64, to: &NodeId, ask: Ask) {
        let core = self.nodes[slot].directory.as_ref().map(|directory| directory.engine.core());
        let member = core.and_then(|core| core.member(to)).cloned();
        let Some(member) = member else {
            self.direct_told(slot, ticket, None);
            return;
        };
        let peer = Peer { node: member.node, incarnation: member.incarnation, address: member.address };
        let line = self.line(slot, peer, ASK_PATIENCE);
        self.connect(line, Question::Directory(ticket, ask));
    }
}

/// The answer to a directory's question, or that there is none.
pub(super) fn unanswered(ticket: u64) -> Answer {
    Answer::Directory(ticket, None)
}
