//! Drives foca without a socket or a clock: packets and the time go in, packets and changes come out.
//!
//! Called by the gossip thread and, on a virtual clock, by the simulation; calls foca. Pure: `now` is the time
//! since some moment before the start, randomness is one seed. Bounds: the member list, one timer of each
//! kind and down member, the news that waits, [`check::CHECKS_MAX`] checks, effects drained after each call.
//!
//! foca probes, lists members, refutes and rejoins. Around it stand habits of the driver's own:
//!
//! - It judges each update first and shows foca only news (`learn`), because foca searches its list for each.
//! - It tells news itself, deaths before joins (`News`), and states as a whole over TCP (`exchange`).
//! - foca never suspects. The driver repeats an unanswered probe, then checks the member by all ways there are, and declares it
//!   down only if it could have heard it: see `check`.
//! - It announces to the seeds and to down members for ever, says goodbye to each member itself, tells a node that
//!   speaks under a taken name who holds that name, and falls silent when told so itself.
//! - After a pause of its own process it starts its timers and checks anew, so that a frozen node does not accuse the others.

mod announce;
mod check;
mod effects;
mod exchange;
mod goodbye;
mod hearsay;
mod learn;
mod lifeline;
mod names;
mod probe;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::SocketAddr,
    sync::mpsc,
    time::Duration,
};

pub use effects::{Effect, Look, MemberView, Outranked, Peer, Proof, VERIFY_MAX};
pub use exchange::EXCHANGE_MAX;
use foca::{Foca, Member, PostcardCodec, State, Timer};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use starling_ids::{Incarnation, NodeId};

use self::{check::Checks, exchange::Schedule, hearsay::Hearsay, lifeline::Lifeline, probe::Probe};
use super::{
    Identity,
    identity::{NameKey, place},
    index::Index,
    message::{self, Opened, Rumour},
    rumours::RumourBook,
    runtime::Outbox,
    sizing,
};
use crate::{discovery::RecordDelta, security::Dropped};

/// The driver wants to be ticked at least this often; a longer silence is a pause of the process.
const TICK_MAX: Duration = Duration::from_millis(100);
/// A gap of this length means that what others said meanwhile may be lost: nothing counts that was waited for.
const PAUSE_MIN: Duration = Duration::from_millis(2 * sizing::PROBE_PERIOD.as_millis() as u64);
/// A gap of this length is a stutter: what is waited for may take as much longer.
const LATE_MIN: Duration = Duration::from_millis(3 * TICK_MAX.as_millis() as u64);
/// A tick that comes this much too late means a busy machine, for a while.
const BUSY_MIN: Duration = Duration::from_millis(50);
const BUSY_KEPT: Duration = Duration::from_secs(1);

/// SWIM for one node.
pub struct Driver {
    foca: Foca<Identity, PostcardCodec, StdRng, RumourBook>,
    outbox: Outbox,
    rumours: mpsc::Receiver<Rumour>,
    rng: StdRng,
    seeds: Vec<SocketAddr>,
    index: Index,
    /// Members that this node took for down while it was cut off itself; nobody was told.
    unshared: BTreeSet<u64>,
    probe: Option<Probe>,
    checks: Checks,
    hearsay: Hearsay,
    /// Until then this node's timers count as late.
    late_until: Duration,
    lifeline: Lifeline,
    exchange: Schedule,
    class: usize,
    now: Duration,
    next_gossip: Duration,
    next_seeds: Duration,
    next_down: Duration,
    rejoins: VecDeque<Duration>,
    clash_told: Duration,
    silent: bool,
    effects: Vec<Effect>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({:?}, {} members)", self.foca.identity(), self.index.active())
    }
}

impl Driver {
    /// A node that knows nobody yet.
    #[must_use]
    pub fn new(identity: Identity, seed: u64, now: Duration) -> Self {
        let (told, rumours) = mpsc::channel();
        let mut rng = StdRng::seed_from_u64(seed);
        let inner = StdRng::seed_from_u64(rng.random());
        let class = sizing::class(1, 0);
        Self {
            foca: Foca::with_custom_broadcast(
                identity,
                sizing::config(class),
                inner,
                PostcardCodec,
                RumourBook::new(told),
            ),
            outbox: Outbox::default(),
            rumours,
            rng,
            seeds: Vec::new(),
            index: Index::default(),
            unshared: BTreeSet::new(),
            probe: None,
            checks: Checks::default(),
            hearsay: Hearsay::default(),
            late_until: Duration::ZERO,
            lifeline: Lifeline::default(),
            exchange: Schedule::default(),
            class,
            now,
            next_gossip: now,
            next_seeds: now,
            next_down: now + announce::ALONE,
            rejoins: VecDeque::new(),
            clash_told: Duration::ZERO,
            silent: false,
            effects: Vec::new(),
        }
    }

    /// This node as gossip names it now; the generation may have risen.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.foca.identity()
    }

    /// All members except this node, by name; down ones are not among them. Made for each call.
    #[must_use]
    pub fn members(&self) -> BTreeMap<NodeId, MemberView> {
        self.foca.iter_members().filter_map(view).collect()
    }

    /// How many members there are beside this node. In constant time.
    #[must_use]
    pub fn member_count(&self) -> usize {
        self.index.active()
    }

    /// A number that two drivers share when they know the same members in the same lives, themselves included. In
    /// constant time.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.index.fingerprint(self.foca.identity())
    }

    /// What this driver knows of a name: the life, and whether that is down. In constant time.
    #[must_use]
    pub fn knows(&self, node: &NodeId) -> Option<(Incarnation, bool)> {
        let own = self.foca.identity();
        if own.node.as_ref() == Some(node) {
            return Some((own.incarnation, false));
        }
        self.index.get(NameKey::of(node).number()).map(|known| (known.incarnation(), !known.is_active()))
    }

    /// What is to be done since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// When [`Driver::tick`] wants to be called next, at the latest.
    #[must_use]
    pub fn next_tick(&self) -> Duration {
        let mut next = self.now + TICK_MAX;
        let gossip = self.has_news().then_some(self.next_gossip);
        let due = [self.outbox.timers.next(), gossip, self.next_probe_step(), self.checks.next(), self.exchange.next()];
        let due = due.into_iter().chain([self.hearsay.next()]);
        for at in due.flatten() {
            next = next.min(at);
        }
        next
    }

    /// Replaces the addresses to announce to; the next tick announces if nobody is known.
    pub fn set_seeds(&mut self, seeds: Vec<SocketAddr>) {
        self.seeds = seeds;
        if self.index.active() == 0 {
            self.next_seeds = self.now;
        }
    }

    /// Fires what is due.
    pub fn tick(&mut self, now: Duration) {
        self.observe(now);
        self.watch_probe();
        while let Some(timer) = self.outbox.timers.pop_due(now) {
            match &timer {
                Timer::ProbeRandomMember(_) => self.conclude_probe(),
                Timer::RemoveDown(id) => self.forget(id),
                _ => {}
            }
            let outcome = self.foca.handle_timer(timer, &mut self.outbox);
            Self::note("timer", outcome);
            self.adopt_probe();
        }
        self.run_checks();
        self.run_hearsay();
        self.announce_when_due();
        self.exchange_when_due();
        self.gossip_when_due();
        self.settle();
    }

    /// Takes an opened datagram that came from `from`.
    pub fn receive(&mut self, from: SocketAddr, payload: &[u8], now: Duration) -> Result<(), Dropped> {
        self.observe(now);
        match message::open(payload)? {
            Opened::Word(word) => self.hear(from, word),
            Opened::Swim { header, updates, head, tail } => {
                if self.name_is_clear(from, &header.src, &updates) {
                    self.take_in(&header, updates);
                    let shown = message::without_updates(head, tail, &header.message);
                    let outcome = self.foca.handle_data(&shown, &mut self.outbox);
                    Self::note("packet", outcome);
                }
            }
        }
        self.settle();
        Ok(())
    }

    /// Spreads the news that this node's record has a new version, and how it differs where that is little.
    pub fn announce_version(&mut self, version: u64, delta: Option<RecordDelta>) {
        let own = self.foca.identity();
        let Some(node) = own.node.clone() else { return };
        let (incarnation, place) = (own.incarnation, place(own.address()));
        let rumour = Rumour { node, incarnation, place, version, delta, teller: None };
        match rmp_serde::to_vec(&rumour) {
            Ok(bytes) => Self::note("rumour", self.foca.add_broadcast(&bytes).map(|_news| ())),
            Err(error) => tracing::error!(%error, "a rumour does not encode"),
        }
        // What this node says itself is no news to it.
        while self.rumours.try_recv().is_ok() {}
        // The first three hear it now and not at the next round of gossip.
        let outcome = self.foca.broadcast(&mut self.outbox);
        Self::note("rumour", outcome);
        self.settle();
    }

    /// All that is known about members, down ones included, for a node that joins.
    #[must_use]
    pub fn export(&self) -> Vec<Member<Identity>> {
        let known = self.foca.iter_membership_state().filter(|member| !self.unshared.contains(&member.id().key()));
        known.cloned().chain([self.own_member()]).collect()
    }

    fn own_member(&self) -> Member<Identity> {
        Member::new(self.foca.identity().clone(), self.outbox.own_swim, State::Alive)
    }

    /// Takes note of the time, and of a pause since the last time.
    fn observe(&mut self, now: Duration) {
        let gone = now.saturating_sub(self.now);
        self.now = self.now.max(now);
        self.outbox.now = self.now;
        if gone >= TICK_MAX + BUSY_MIN {
            self.late_until = self.now + BUSY_KEPT;
        }
        if gone < LATE_MIN {
            return;
        }
        self.hearsay.postpone(gone);
        if gone < PAUSE_MIN {
            self.lifeline.stutter();
            self.checks.postpone(gone);
            return;
        }
        tracing::warn!(paused_ms = gone.as_millis(), "gossip was paused; its timers are postponed by as much");
        self.outbox.timers.postpone(gone);
        self.probe = None;
        self.restart_checks();
        self.next_seeds = self.now;
        self.next_down = self.now;
        let outcome = self.foca.gossip(&mut self.outbox);
        Self::note("gossip after a pause", outcome);
    }

    /// Whether this node's own timers ran late a moment ago.
    fn is_late(&self) -> bool {
        self.now < self.late_until
    }

    fn has_news(&self) -> bool {
        self.outbox.news.len() > 0 || self.foca.updates_backlog() > 0 || self.foca.custom_broadcast_backlog() > 0
    }

    /// Sends what is news to three members drawn at random.
    fn gossip_when_due(&mut self) {
        if self.now >= self.next_gossip && self.has_news() {
            self.next_gossip = self.now + sizing::settings(self.class).gossip;
            let outcome = self.foca.gossip(&mut self.outbox);
            Self::note("gossip", outcome);
        }
    }

    /// Turns what foca has said during a call into effects.
    fn settle(&mut self) {
        if std::mem::take(&mut self.outbox.rejoined) {
            self.rejoined();
        }
        self.adopt_probe();
        for suspect in std::mem::take(&mut self.outbox.suspects) {
            self.begin_check(suspect, self.now);
        }
        if std::mem::take(&mut self.outbox.members_changed) {
            self.resize();
            let changed = std::mem::take(&mut self.outbox.changed);
            self.effects.push(Effect::MembersChanged(changed));
        }
        for rumour in self.rumours.try_iter() {
            self.effects.push(Effect::Rumour(rumour));
        }
        let sends = std::mem::take(&mut self.outbox.sends);
        if !self.silent {
            self.effects.extend(sends.into_iter().map(|(to, payload)| Effect::Send { to, payload }));
        }
    }

    fn resize(&mut self) {
        self.exchange.members_are(self.index.active(), self.now);
        let class = sizing::class(self.index.active() + 1, self.class);
        if class != self.class {
            self.class = class;
            Self::note("sizing", self.foca.set_config(sizing::config(class)));
        }
    }

    /// foca refuses what makes no sense to it, late packets above all. That is its job, and nobody's fault.
    fn note(what: &str, outcome: Result<(), foca::Error>) {
        if let Err(error) = outcome {
            tracing::debug!(%error, what, "gossip refused");
        }
    }
}

fn view(member: &Member<Identity>) -> Option<(NodeId, MemberView)> {
    let id = member.id();
    let node = id.node.clone()?;
    let (incarnation, address) = (id.incarnation, id.address());
    let suspect = member.state() == State::Suspect;
    Some((node.clone(), MemberView { node, incarnation, address, suspect }))
}

#[cfg(test)]
mod tests;
