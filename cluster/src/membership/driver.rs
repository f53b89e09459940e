//! Drives foca without a socket or a clock: packets and the time go in, packets and changes come out.
//!
//! Called by the gossip thread and, on a virtual clock, by the simulation; calls foca. Pure: `now` is the time
//! since some moment before the start, randomness is one seed. Bounds: the member list, one timer of each
//! kind and suspect, effects drained after each call.
//!
//! Around foca stand six habits of its own. It announces to the seeds and to down members for ever, also when
//! all members are down. It says goodbye to each member itself. It declares a suspect down only while the member is still suspect in the suspected
//! incarnation. After a pause of its own process it postpones all timers, so that a frozen node does not accuse
//! the others. It tells a node that speaks under a taken name who holds that name, and falls silent
//! when told so itself. And it leaves out what a seed's address could confuse: see [`super::message`].

mod announce;
mod check;
mod exchange;
mod goodbye;
mod names;

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::mpsc,
    time::Duration,
};

pub use exchange::EXCHANGE_MAX;
use foca::{Foca, Member, PostcardCodec, State, Timer};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use starling_ids::{Incarnation, NodeId};

use super::{
    Identity,
    message::{self, Opened, Rumour},
    rumours::RumourBook,
    runtime::Outbox,
    sizing,
};
use crate::security::Dropped;

/// The driver wants to be ticked at least this often; a longer silence is a pause of the process.
const TICK_MAX: Duration = Duration::from_millis(100);
const PAUSE_MIN: Duration = Duration::from_millis(2 * sizing::PROBE_PERIOD.as_millis() as u64);
const SCAN: Duration = Duration::from_millis(200);

/// A member other than this node, as gossip sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView {
    /// Who.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Where its gossip, links and sessions arrive.
    pub address: SocketAddr,
    /// Whether it failed a probe and has not refuted that yet.
    pub suspect: bool,
}

/// What the driver asks its owner to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Seal this payload and send it.
    Send {
        /// Where to.
        to: SocketAddr,
        /// What.
        payload: Vec<u8>,
    },
    /// [`Driver::members`] has changed.
    MembersChanged,
    /// A record elsewhere has a new version.
    Rumour(Rumour),
    /// The name is taken; the driver has fallen silent for good.
    Outranked(Outranked),
    /// Exchange all that is known with this member over TCP: [`Driver::exchange_open`] says how to begin.
    Exchange(Peer),
    /// Find out over TCP whether this member lives, and say so through [`Driver::verified`] within
    /// [`VERIFY_MAX`].
    Verify(Peer),
    /// Another living process claims this node's name and has lost to it. The process may be told of again.
    NameClash(Identity),
}

/// A member to be reached over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Who.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Where its links and sessions arrive.
    pub address: SocketAddr,
}

/// What a look over TCP has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The member answered as itself.
    Alive,
    /// The host answered that nobody listens there: the process is gone.
    Refused,
    /// No answer in time, which may be the network's fault.
    Silent,
}

/// Longest wait for the answer to [`Effect::Verify`]; a later one is taken for [`Proof::Silent`].
pub const VERIFY_MAX: Duration = Duration::from_millis(1500);

/// Why this node cannot be a member under its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outranked {
    /// Who holds the name, where that is known.
    pub holder: Option<Identity>,
    /// Whether the holder is down: then it was an earlier life of this node, whose counter is lost.
    pub down: bool,
}

/// SWIM for one node.
pub struct Driver {
    foca: Foca<Identity, PostcardCodec, StdRng, RumourBook>,
    outbox: Outbox,
    rumours: mpsc::Receiver<Rumour>,
    rng: StdRng,
    seeds: Vec<SocketAddr>,
    members: BTreeMap<NodeId, MemberView>,
    class: usize,
    now: Duration,
    next_seeds: Duration,
    next_down: Duration,
    next_scan: Duration,
    rejoins: VecDeque<Duration>,
    silent: bool,
    effects: Vec<Effect>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({:?}, {} members)", self.foca.identity(), self.members.len())
    }
}

impl Driver {
    /// A node that knows nobody yet.
    #[must_use]
    pub fn new(identity: Identity, seed: u64, now: Duration) -> Self {
        let (told, rumours) = mpsc::channel();
        let mut rng = StdRng::seed_from_u64(seed);
        let inner = StdRng::seed_from_u64(rng.random());
        let class = sizing::class(1);
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
            members: BTreeMap::new(),
            class,
            now,
            next_seeds: now,
            next_down: now + announce::ALONE,
            next_scan: now,
            rejoins: VecDeque::new(),
            silent: false,
            effects: Vec::new(),
        }
    }

    /// This node as gossip names it now; the generation may have risen.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.foca.identity()
    }

    /// All members except this node, by name; down ones are not among them.
    #[must_use]
    pub fn members(&self) -> BTreeMap<NodeId, MemberView> {
        self.members.clone()
    }

    /// How many members there are beside this node.
    #[must_use]
    pub fn member_count(&self) -> usize {
        self.members.len()
    }

    /// A number that two drivers share when they know the same members in the same lives, themselves included.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let own = self.foca.identity();
        let others = self.members.values().map(|member| (&member.node, member.incarnation));
        let all = others.chain(own.node.as_ref().map(|node| (node, own.incarnation)));
        all.fold(0, |sum, (node, incarnation)| {
            let hash = twox_hash::XxHash3_64::oneshot_with_seed(incarnation.0, node.as_str().as_bytes());
            sum.wrapping_add(hash)
        })
    }

    /// What this driver knows of a name: the life, and whether that is down. In constant time.
    #[must_use]
    pub fn knows(&self, node: &NodeId) -> Option<(Incarnation, bool)> {
        self.holder(node).map(|(identity, down)| (identity.incarnation, down))
    }

    /// What is to be done since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// When [`Driver::tick`] wants to be called next, at the latest.
    #[must_use]
    pub fn next_tick(&self) -> Duration {
        let latest = self.now + TICK_MAX;
        self.outbox.timers.next().map_or(latest, |at| at.min(latest))
    }

    /// Replaces the addresses to announce to; the next tick announces if nobody is known.
    pub fn set_seeds(&mut self, seeds: Vec<SocketAddr>) {
        self.seeds = seeds;
        if self.members.is_empty() {
            self.next_seeds = self.now;
        }
    }

    /// Fires what is due.
    pub fn tick(&mut self, now: Duration) {
        self.observe(now);
        while let Some(timer) = self.outbox.timers.pop_due(now) {
            if self.may_fire(&timer) {
                let outcome = self.foca.handle_timer(timer, &mut self.outbox);
                Self::note("timer", outcome);
            }
        }
        self.announce_when_due();
        self.settle();
    }

    /// Takes an opened datagram that came from `from`.
    pub fn receive(&mut self, from: SocketAddr, payload: &[u8], now: Duration) -> Result<(), Dropped> {
        self.observe(now);
        match message::open(payload)? {
            Opened::Word(word) => self.hear(from, word),
            Opened::Swim { packet, header, updates } => {
                if self.name_is_clear(from, &header.src, &updates) {
                    let outcome = self.foca.handle_data(packet, &mut self.outbox);
                    Self::note("packet", outcome);
                }
            }
        }
        self.settle();
        Ok(())
    }

    /// Spreads the news that this node's record has a new version.
    pub fn announce_version(&mut self, version: u64) {
        let Identity { node: Some(node), incarnation, .. } = self.foca.identity().clone() else { return };
        let rumour = Rumour { node, incarnation, version };
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
        let own = Member::alive(self.foca.identity().clone());
        self.foca.iter_membership_state().cloned().chain([own]).collect()
    }

    /// Learns what another node has exported. It is not passed on: the others know it already.
    pub fn import(&mut self, known: Vec<Member<Identity>>, now: Duration) {
        self.observe(now);
        let own = self.foca.identity().clone();
        let others = known.into_iter().filter(|member| member.id().node.is_some() && member.id().node != own.node);
        let outcome = self.foca.apply_many(others, false, &mut self.outbox);
        Self::note("import", outcome);
        self.settle();
    }

    /// Takes note of the time, and of a pause since the last time.
    fn observe(&mut self, now: Duration) {
        let gone = now.saturating_sub(self.now);
        self.now = self.now.max(now);
        self.outbox.now = self.now;
        if gone < PAUSE_MIN {
            return;
        }
        tracing::warn!(paused_ms = gone.as_millis(), "gossip was paused; its timers are postponed by as much");
        self.outbox.timers.postpone(gone);
        self.next_seeds = self.now;
        self.next_down = self.now;
        let outcome = self.foca.gossip(&mut self.outbox);
        Self::note("gossip after a pause", outcome);
    }

    /// foca would tell a member that has refuted in time that it is down, and that member would rejoin for nothing.
    fn may_fire(&self, timer: &Timer<Identity>) -> bool {
        let Timer::ChangeSuspectToDown { member_id, incarnation, .. } = timer else { return true };
        self.foca.iter_membership_state().any(|member| {
            member.id() == member_id && member.incarnation() == *incarnation && member.state() == State::Suspect
        })
    }

    /// Turns what foca has said during a call into effects.
    fn settle(&mut self) {
        if self.outbox.rejoined {
            self.outbox.rejoined = false;
            self.rejoined();
        }
        if self.outbox.members_changed || self.now >= self.next_scan {
            self.outbox.members_changed = false;
            self.next_scan = self.now + SCAN;
            self.refresh_members();
        }
        for rumour in self.rumours.try_iter() {
            self.effects.push(Effect::Rumour(rumour));
        }
        let sends = std::mem::take(&mut self.outbox.sends);
        if !self.silent {
            self.effects.extend(sends.into_iter().map(|(to, payload)| Effect::Send { to, payload }));
        }
    }

    fn refresh_members(&mut self) {
        let now: BTreeMap<NodeId, MemberView> = self.foca.iter_members().filter_map(view).collect();
        let class = sizing::class(now.len() + 1);
        if class != self.class {
            self.class = class;
            Self::note("sizing", self.foca.set_config(sizing::config(class)));
        }
        if now != self.members {
            self.members = now;
            self.effects.push(Effect::MembersChanged);
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
    let Identity { node, address, incarnation, .. } = member.id().clone();
    let node = node?;
    let suspect = member.state() == State::Suspect;
    Some((node.clone(), MemberView { node, incarnation, address, suspect }))
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
