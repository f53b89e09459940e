//! Which records to pull now, from whom, and when to try the others again.
//!
//! Called by [`super::DirectoryEngine`]. Pure: time and draws are arguments. Bounds: [`PULLS_MAX`] questions at one time, one
//! wish for each member.
//!
//! A record is pulled from the node that told of its new version: it stood one step nearer to the source, so the load
//! of a change spreads as its rumour does. Without one a member drawn at random is asked, and every second try goes to the
//! node itself. Records of which nothing is held come first, and where many are missing only their vital parts.

use std::{collections::BTreeMap, time::Duration};

use rand::{RngExt, rngs::StdRng};
use starling_ids::NodeId;

use super::{
    DirectoryCore,
    exchange::{Ask, WANTS_MAX, Want},
};

/// Questions for records at one time.
pub const PULLS_MAX: usize = 8;
/// From this many missing records on, their vital parts are pulled first.
pub(super) const VITAL_FROM: usize = 8;
/// In a cluster of at most this many others each node is asked for its own record: nobody is overrun.
const DIRECT_MAX: usize = 16;
/// A question without any outcome is given up after this long.
const ANSWER_MAX: Duration = Duration::from_secs(5);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct Wish {
    teller: Option<NodeId>,
    not_before: Duration,
    failures: u32,
    running: bool,
    /// A difference did not fit: take all of it.
    anew: bool,
}

#[derive(Debug)]
struct Running {
    peer: NodeId,
    vital: bool,
    nodes: Vec<NodeId>,
    since: Duration,
}

/// Records wished for, and the questions under way.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    wishes: BTreeMap<NodeId, Wish>,
    running: BTreeMap<u64, Running>,
}

impl Pulls {
    /// A record is wanted from `at` on; `teller` has it.
    pub(super) fn want(&mut self, node: &NodeId, teller: Option<&NodeId>, at: Duration) {
        let known = self.wishes.contains_key(node);
        let wish = self.wishes.entry(node.clone()).or_default();
        wish.not_before = if known { wish.not_before.min(at) } else { at };
        if teller.is_some() {
            wish.teller = teller.cloned();
            wish.failures = 0;
        }
    }

    /// A patch did not fit what is held.
    pub(super) fn anew(&mut self, node: &NodeId) {
        if let Some(wish) = self.wishes.get_mut(node) {
            wish.anew = true;
        }
    }

    /// Forgets wishes that have come true or have become pointless.
    pub(super) fn keep(&mut self, wanted: impl Fn(&NodeId) -> bool) {
        self.wishes.retain(|node, _| wanted(node));
    }

    /// It has come true, or has become pointless.
    pub(super) fn done(&mut self, node: &NodeId) {
        self.wishes.remove(node);
    }

    /// When [`Pulls::plan`] has something to do next; `None` while the questions under way have to end first.
    pub(super) fn next(&self) -> Option<Duration> {
        let give_up = self.running.values().map(|running| running.since + ANSWER_MAX).min();
        if self.running.len() >= PULLS_MAX {
            return give_up;
        }
        let due = self.wishes.values().filter(|wish| !wish.running).map(|wish| wish.not_before).min();
        due.into_iter().chain(give_up).min()
    }

    /// The questions to ask now, each with its number.
    pub(super) fn plan(
        &mut self,
        core: &DirectoryCore,
        ticket: &mut u64,
        rng: &mut StdRng,
        now: Duration,
    ) -> Vec<(u64, NodeId, Ask)> {
        let late = self.running.iter().filter(|(_, running)| running.since + ANSWER_MAX <= now);
        for ticket in late.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
            self.failed(ticket, rng, now);
        }
        let mut free = PULLS_MAX.saturating_sub(self.running.len());
        if free == 0 {
            return Vec::new();
        }
        let due = |(_, wish): &(&NodeId, &Wish)| !wish.running && wish.not_before <= now;
        let due = self.wishes.iter().filter(due).map(|(node, _)| node.clone());
        let (missing, held): (Vec<NodeId>, Vec<NodeId>) = due.partition(|node| core.record(node).is_none());
        let vital = missing.len() > VITAL_FROM;
        let mut groups: Vec<(NodeId, bool, Vec<NodeId>)> = Vec::new();
        let mut helper = None;
        for (node, vital) in missing.into_iter().map(|node| (node, vital)).chain(held.into_iter().map(|n| (n, false))) {
            let Some(peer) = self.source(&node, core, &mut helper, rng) else { continue };
            let room = |(at, kind, nodes): &&mut (NodeId, bool, Vec<NodeId>)| {
                *at == peer && *kind == vital && nodes.len() < WANTS_MAX
            };
            match groups.iter_mut().find(room) {
                Some((.., nodes)) => nodes.push(node),
                None if free == 0 => continue,
                None => {
                    free -= 1;
                    groups.push((peer, vital, vec![node]));
                }
            }
            if groups.last().is_some_and(|(.., nodes)| nodes.len() == WANTS_MAX) {
                helper = None;
            }
        }
        groups.into_iter().map(|group| self.start(core, group, ticket, now)).collect()
    }

    fn start(
        &mut self,
        core: &DirectoryCore,
        (peer, vital, nodes): (NodeId, bool, Vec<NodeId>),
        ticket: &mut u64,
        now: Duration,
    ) -> (u64, NodeId, Ask) {
        let mut wants = Vec::with_capacity(nodes.len());
        for node in &nodes {
            let Some((member, wish)) = core.member(node).zip(self.wishes.get_mut(node)) else { continue };
            wish.running = true;
            let held = core.record(node).filter(|record| !record.partial && !wish.anew);
            let since = held.map_or(0, |record| record.version);
            wants.push(Want { node: node.clone(), incarnation: member.incarnation, since });
        }
        *ticket += 1;
        self.running.insert(*ticket, Running { peer: peer.clone(), vital, nodes, since: now });
        (*ticket, peer, Ask::Pull { vital, wants })
    }

    fn source(
        &self,
        node: &NodeId,
        core: &DirectoryCore,
        helper: &mut Option<NodeId>,
        rng: &mut StdRng,
    ) -> Option<NodeId> {
        let wish = self.wishes.get(node)?;
        let member = |peer: &&NodeId| core.member(peer).is_some_and(|member| !member.suspect);
        if let Some(teller) = wish.teller.as_ref().filter(member) {
            return Some(teller.clone());
        }
        if core.others() <= DIRECT_MAX || wish.failures % 2 == 1 {
            return Some(node.clone());
        }
        if helper.is_none() {
            *helper = core.peer(rng.random_range(0..usize::MAX)).cloned();
        }
        Some(helper.as_ref().unwrap_or(node).clone())
    }

    /// The question has its answer: the peer looked at the first `served` of the wants. Call it once the patches were offered.
    pub(super) fn answered(
        &mut self,
        core: &DirectoryCore,
        (ticket, served): (u64, usize),
        rng: &mut StdRng,
        now: Duration,
    ) {
        let Some(running) = self.running.remove(&ticket) else { return };
        for (at, node) in running.nodes.iter().enumerate() {
            if !core.wanted().contains(node) {
                self.wishes.remove(node);
                continue;
            }
            let Some(wish) = self.wishes.get_mut(node) else { continue };
            wish.running = false;
            let came = running.vital && core.record(node).is_some();
            if came || (at >= served && served > 0) {
                // The rest follows, or there was no room for it: at once.
                wish.not_before = now;
            } else {
                wish.fail(rng, now);
            }
        }
    }

    /// There is no answer. Whether the question was one of these.
    pub(super) fn failed(&mut self, ticket: u64, rng: &mut StdRng, now: Duration) -> bool {
        let Some(running) = self.running.remove(&ticket) else { return false };
        for node in &running.nodes {
            if let Some(wish) = self.wishes.get_mut(node) {
                wish.running = false;
                wish.fail(rng, now);
            }
        }
        true
    }

    /// Who was asked.
    pub(super) fn asked(&self, ticket: u64) -> Option<&NodeId> {
        self.running.get(&ticket).map(|running| &running.peer)
    }
}

impl Wish {
    /// Somebody else next time, and later after each failure in a row.
    fn fail(&mut self, rng: &mut StdRng, now: Duration) {
        let wait = RETRY_FIRST.saturating_mul(1 << self.failures.min(8)).min(RETRY_MAX);
        self.teller = None;
        self.failures = self.failures.saturating_add(1);
        self.not_before = now + wait.mul_f64(rng.random_range(0.5..1.0));
    }
}
