//! The directory of one node without sockets and clock: members, rumours, questions and answers go in; questions, snapshots
//! and announcements come out.
//!
//! Called by the Directory actor and, on a virtual clock, by simulations. Pure: `now` is the time since some moment before
//! the start, randomness is one seed. Bounds: one record a member, [`PULLS_MAX`](super::PULLS_MAX) pulls and one comparison
//! at a time; effects are drained after each call.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use starling_ids::{Incarnation, Metric, NodeId};

use super::{
    DirectoryCore, Entry, Heard, NodeRecord, RecordDelta, Refused, Snapshot, Stamp,
    exchange::{self, Ask, ENTRIES_MAX, Told},
    pulls::Pulls,
};
use crate::membership::{MemberView, Rumour};

/// In a cluster of more than this many nodes snapshots are published at most every [`COALESCE`].
pub const COALESCE_FROM: usize = 256;
/// Time between two snapshots of a large cluster.
pub const COALESCE: Duration = Duration::from_millis(25);
/// A newcomer's own rumour, with somebody to ask, is on its way.
const RUMOUR_WAIT: Duration = Duration::from_millis(100);
/// Pages of one comparison: enough for 16 thousand records that all differ.
const PAGES_MAX: u32 = 64;
/// A comparison that does not go on is given up after this long.
const SYNC_MAX: Duration = Duration::from_secs(10);

/// What the engine asks its owner to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectoryEffect {
    /// Ask a node; [`DirectoryEngine::told`] takes the answer, or that there is none.
    Ask {
        /// Names the question.
        ticket: u64,
        /// Whom.
        to: NodeId,
        /// What.
        ask: Ask,
    },
    /// The directory has changed.
    Publish(Arc<Snapshot>),
    /// Spread the news of this node's record.
    Announce(u64, Option<RecordDelta>),
    /// A member is down or has left, and no new life of it is known.
    Down(NodeId, Incarnation),
}

#[derive(Debug)]
struct Sync {
    ticket: u64,
    peer: NodeId,
    since: Duration,
    buckets: Vec<u8>,
    after: Option<NodeId>,
    pages: u32,
}

/// The directory of one node.
#[derive(Debug)]
pub struct DirectoryEngine {
    core: DirectoryCore,
    pulls: Pulls,
    sync: Option<Sync>,
    next_sync: Duration,
    published: Option<Duration>,
    stale_snapshot: bool,
    now: Duration,
    ticket: u64,
    rng: StdRng,
    effects: Vec<DirectoryEffect>,
}

impl DirectoryEngine {
    /// A node that knows nobody yet.
    #[must_use]
    pub fn new(own: Arc<NodeRecord>, seed: u64, now: Duration) -> Self {
        Self {
            core: DirectoryCore::new(own),
            pulls: Pulls::default(),
            sync: None,
            next_sync: now,
            published: None,
            stale_snapshot: true,
            now,
            ticket: 0,
            rng: StdRng::seed_from_u64(seed),
            effects: Vec::new(),
        }
    }

    /// What is held.
    #[must_use]
    pub const fn core(&self) -> &DirectoryCore {
        &self.core
    }

    /// What is to be done since the last call.
    pub fn take_effects(&mut self) -> Vec<DirectoryEffect> {
        std::mem::take(&mut self.effects)
    }

    /// When [`DirectoryEngine::tick`] wants to be called next, at the latest.
    #[must_use]
    pub fn next_tick(&self) -> Duration {
        let publish = self.published.filter(|_| self.stale_snapshot).map(|at| at + COALESCE);
        let give_up = self.sync.as_ref().map(|sync| sync.since + SYNC_MAX);
        let due = [publish, give_up, self.pulls.next()].into_iter().flatten().min();
        due.map_or(self.next_sync, |due| due.min(self.next_sync)).max(self.now)
    }

    /// This node's own record has changed; `delta` is how, where that is little.
    pub fn set_own(&mut self, own: Arc<NodeRecord>, delta: Option<RecordDelta>, now: Duration) {
        let version = own.version;
        if version == self.core.own().version {
            return;
        }
        self.core.set_own(own);
        self.effects.push(DirectoryEffect::Announce(version, delta));
        self.settle(now);
    }

    /// Takes over what gossip says about members.
    pub fn set_members(&mut self, members: &BTreeMap<NodeId, MemberView>, now: Duration) {
        let alone = self.core.others() == 0;
        let turnover = self.core.set_members(members);
        let wanted = self.core.wanted();
        self.pulls.keep(|node| wanted.contains(node));
        for (node, incarnation) in turnover.over {
            if !members.contains_key(&node) {
                self.effects.push(DirectoryEffect::Down(node, incarnation));
            }
        }
        let first = alone && !turnover.new.is_empty();
        if first {
            self.effects.push(DirectoryEffect::Announce(self.core.own().version, None));
            self.next_sync = now;
        }
        // In a small cluster and for a newcomer there is nobody to be spared.
        let wait = if first || self.core.others() <= 16 { Duration::ZERO } else { RUMOUR_WAIT };
        for node in turnover.new {
            let at = now + wait + self.jitter();
            self.pulls.want(&node, None, at);
        }
        self.settle(now);
    }

    /// Gossip brought news of a record.
    pub fn hear(&mut self, rumour: &Rumour, now: Duration) {
        if self.core.hear(rumour) == Heard::Wanted {
            let at = now + self.jitter();
            self.pulls.want(&rumour.node, rumour.teller.as_ref(), at);
        }
        self.settle(now);
    }

    /// What the link layer found out about one life of a node.
    pub fn set_reachable(&mut self, node: &NodeId, incarnation: Incarnation, reachable: bool, now: Duration) {
        self.core.set_reachable(node, incarnation, reachable);
        self.settle(now);
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Duration) {
        if self.sync.as_ref().is_some_and(|sync| sync.since + SYNC_MAX <= now) {
            self.sync = None;
        }
        if now >= self.next_sync {
            self.next_sync = now + sync_every(self.core.others()).mul_f64(self.rng.random_range(0.75..1.25));
            self.begin_sync(now);
        }
        self.settle(now);
    }

    /// Answers a question of another node.
    pub fn answer(&mut self, from: &NodeId, ask: &Ask, now: Duration) -> Told {
        if let Ask::Hint(entries) = ask {
            entries.iter().take(ENTRIES_MAX).for_each(|entry| self.learn(entry, from, now));
            self.settle(now);
        }
        exchange::answer(&self.core, ask)
    }

    /// A question has its answer; `None`: it was not to be had.
    pub fn told(&mut self, ticket: u64, told: Option<Told>, now: Duration) {
        let of_sync = self.sync.as_ref().is_some_and(|sync| sync.ticket == ticket);
        match told.filter(Told::is_bounded) {
            Some(told) if of_sync => self.compare(told, now),
            None if of_sync => self.sync = None,
            Some(Told::Patches { served, patches }) if self.pulls.asked(ticket).is_some() => {
                patches.into_iter().for_each(|patch| self.offer(patch));
                self.pulls.answered(&self.core, (ticket, served as usize), &mut self.rng, now);
                metrics::counter!(Metric::DirectoryPulls.name(), "outcome" => "answered").increment(1);
            }
            _ => {
                if self.pulls.failed(ticket, &mut self.rng, now) {
                    metrics::counter!(Metric::DirectoryPulls.name(), "outcome" => "failed").increment(1);
                }
            }
        }
        self.settle(now);
    }

    fn offer(&mut self, patch: super::Patch) {
        let node = patch.node.clone();
        match self.core.offer(patch) {
            Ok(_) if !self.core.wanted().contains(&node) => self.pulls.done(&node),
            Ok(_) => {}
            Err(Refused::Gap) => self.pulls.anew(&node),
            Err(Refused::Stale) => {
                metrics::counter!(Metric::StaleRefused.name(), "what" => "record").increment(1);
            }
            Err(refused) => tracing::debug!(%node, %refused, "a record was not taken"),
        }
    }

    fn begin_sync(&mut self, now: Duration) {
        if self.sync.is_some() {
            return;
        }
        let draw = self.rng.random_range(0..usize::MAX);
        let Some(peer) = self.core.peer(draw).cloned() else { return };
        let ask = Ask::Root(self.core.tally().root());
        let ticket = self.ask(peer.clone(), ask);
        self.sync = Some(Sync { ticket, peer, since: now, buckets: Vec::new(), after: None, pages: 0 });
    }

    /// The next step of the comparison under way.
    fn compare(&mut self, told: Told, now: Duration) {
        let Some(mut sync) = self.sync.take() else { return };
        let go_on = match told {
            Told::Sums(sums) if sync.pages == 0 => {
                sync.buckets = self.core.tally().differing(&sums);
                !sync.buckets.is_empty()
            }
            Told::Entries(entries, more) if sync.pages > 0 => {
                let page = (entries.as_slice(), more);
                let (newer, lacking) = exchange::compare(self.core.tally(), &sync.buckets, sync.after.as_ref(), page);
                newer.iter().for_each(|entry| self.learn(entry, &sync.peer, now));
                for hint in lacking.chunks(ENTRIES_MAX) {
                    self.ask(sync.peer.clone(), Ask::Hint(hint.to_vec()));
                }
                sync.after = entries.last().map(|entry| entry.node.clone());
                more && sync.after.is_some()
            }
            _ => false,
        };
        sync.pages += 1;
        if go_on && sync.pages <= PAGES_MAX {
            sync.ticket = self.ask(sync.peer.clone(), Ask::List(sync.buckets.clone(), sync.after.clone()));
            sync.since = now;
            self.sync = Some(sync);
        }
    }

    /// Another node holds this.
    fn learn(&mut self, entry: &Entry, holder: &NodeId, now: Duration) {
        let Stamp { incarnation, place, version, .. } = entry.stamp;
        let rumour = Rumour { node: entry.node.clone(), incarnation, place, version, delta: None, teller: None };
        let lives = self.core.is_process(&rumour);
        self.core.hear(&rumour);
        let useful = entry.stamp.whole || self.core.record(&entry.node).is_none();
        if lives && useful && self.core.wanted().contains(&entry.node) {
            self.pulls.want(&entry.node, Some(holder), now);
        }
    }

    fn ask(&mut self, to: NodeId, ask: Ask) -> u64 {
        self.ticket += 1;
        self.effects.push(DirectoryEffect::Ask { ticket: self.ticket, to, ask });
        self.ticket
    }

    /// Starts the pulls that are due and publishes what has changed.
    fn settle(&mut self, now: Duration) {
        self.now = self.now.max(now);
        for (ticket, to, ask) in self.pulls.plan(&self.core, &mut self.ticket, &mut self.rng, self.now) {
            self.effects.push(DirectoryEffect::Ask { ticket, to, ask });
        }
        self.stale_snapshot |= self.core.take_changed();
        let calm = self.published.is_none_or(|at| self.now >= at + COALESCE);
        if self.stale_snapshot && (calm || self.core.others() < COALESCE_FROM) {
            self.stale_snapshot = false;
            self.published = Some(self.now);
            self.effects.push(DirectoryEffect::Publish(Arc::new(self.core.snapshot())));
        }
    }

    /// The larger the cluster, the wider the askers of one record are spread: 1 ms among five, 2 s among ten thousand.
    fn jitter(&mut self) -> Duration {
        let widest = Duration::from_micros(200 * self.core.others() as u64).min(Duration::from_secs(2));
        widest.mul_f64(self.rng.random_range(0.0..1.0))
    }
}

/// Period of the comparisons of a node that knows this many others.
#[must_use]
pub fn sync_every(others: usize) -> Duration {
    Duration::from_secs(match others {
        0..=64 => 2,
        65..=1024 => 4,
        _ => 8,
    })
}
