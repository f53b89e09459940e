//! A cluster on a virtual clock: runs what is due, delivers packets, performs what drivers ask for.
//!
//! Called by scenarios, the fuzzer and tests; what they may do to the cluster is in `deeds`. Calls the drivers. Pure: one seed decides
//! everything. As in the product's gossip thread, a driver is ticked after everything that it is told.
//!
//! Node `k` is called `nk`, runs in slot `k` and listens at address `k`, unless a scenario starts it otherwise.

mod deeds;
mod directory;
mod members;
mod tcp;

use std::{net::SocketAddr, time::Duration};

use rand::{SeedableRng, rngs::StdRng};
use starling_cluster::{
    membership::{Driver, Effect},
    security::{DATAGRAM_MAX, SEAL_OVERHEAD},
};
use starling_ids::NodeId;

use super::{
    Delay, Invariants, MS, Micros, Network, Views,
    node::{Node, SOCKET_BUFFER},
    queue::Queue,
    seconds,
    views::Life,
};
pub(super) use directory::Directory;
pub(super) use tcp::Call;

/// How often invariants are looked at.
const CHECK_EVERY: Micros = 100 * MS;
/// Ticks in a row that may leave something due: one tick may start what is due at once.
const OVERDUE_MAX: u32 = 50;

/// What a run begins with.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// Share of the datagrams lost, 0 to 1.
    pub loss: f64,
    /// How long the others travel.
    pub delay: Delay,
    /// Whether a node that dies takes its machine along: then a connection to it is not refused but never answered.
    pub machines_die: bool,
}

enum Event {
    Tick(usize),
    DirectoryTick(usize),
    Packet { from: usize, to: usize, payload: Vec<u8> },
    Call(Call),
    Check,
}

/// The cluster.
pub struct World {
    /// What it began with.
    pub setup: Setup,
    /// Between the nodes.
    pub network: Network,
    /// Who lists whom.
    pub views: Views,
    /// What was broken, and the false deaths.
    pub invariants: Invariants,
    /// Events so far.
    pub events: u64,
    /// Full-state exchanges begun.
    pub exchanges: u64,
    /// Looks over TCP at members that did not answer.
    pub looks: u64,
    /// Times that a node was told of another one under its name.
    pub clashes: u64,
    now: Micros,
    rng: StdRng,
    queue: Queue<Event>,
    nodes: Vec<Node>,
    /// The slot that listens at each address.
    listeners: Vec<Option<usize>>,
    names: Vec<NodeId>,
    /// The latest life started of each name.
    newest: Vec<Life>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World({:?}, {} slots, {:.3} s)", self.setup, self.nodes.len(), seconds(self.now))
    }
}

impl World {
    /// An empty one, at time 0.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let mut queue = Queue::with_capacity(1 << 16);
        queue.add(CHECK_EVERY, Event::Check);
        Self {
            setup,
            network: Network::new(setup.loss, setup.delay),
            views: Views::default(),
            invariants: Invariants::default(),
            events: 0,
            exchanges: 0,
            looks: 0,
            clashes: 0,
            now: 0,
            rng: StdRng::seed_from_u64(setup.seed),
            queue,
            nodes: Vec::new(),
            listeners: Vec::new(),
            names: Vec::new(),
            newest: Vec::new(),
        }
    }

    /// Virtual time since the run began.
    #[must_use]
    pub fn now(&self) -> Micros {
        self.now
    }

    /// Runs for `time`.
    pub fn run(&mut self, time: Micros) {
        let end = self.now + time;
        while self.step(end) {}
        self.now = end;
    }

    /// Runs until `done`, at most for `limit`, and says how long that took. `done` is looked at after each event.
    pub fn until(&mut self, limit: Micros, mut done: impl FnMut(&Self) -> bool) -> Option<Micros> {
        let start = self.now;
        while !done(self) {
            if !self.step(start + limit) {
                self.now = start + limit;
                return None;
            }
        }
        Some(self.now - start)
    }

    fn step(&mut self, end: Micros) -> bool {
        let Some((at, event)) = self.queue.pop_by(end) else { return false };
        self.now = at;
        self.events += 1;
        match event {
            Event::Tick(slot) => self.tick(slot),
            Event::DirectoryTick(slot) => self.direct_tick(slot),
            Event::Packet { from, to, payload } => self.deliver(from, to, payload),
            Event::Call(call) => self.call(call),
            Event::Check => self.check(),
        }
        true
    }

    fn check(&mut self) {
        if !self.network.whole() || self.nodes.iter().any(|node| !node.sound) {
            self.invariants.disturb(self.now);
        }
        self.invariants.check(&self.views, self.now);
        self.queue.add(self.now + CHECK_EVERY, Event::Check);
    }

    fn tick(&mut self, slot: usize) {
        let node = &mut self.nodes[slot];
        // A tick that was moved is still in the queue.
        if node.tick_at != Some(self.now) {
            return;
        }
        node.tick_at = None;
        let due = node.driver.as_ref().is_some_and(|driver| node.when(driver.next_tick(), self.now) <= self.now);
        if due && !node.frozen {
            self.tell(slot, |_, _| ());
        } else {
            self.schedule(slot);
        }
    }

    fn deliver(&mut self, from: usize, to: usize, payload: Vec<u8>) {
        let Some(slot) = self.listener(to) else { return };
        let node = &mut self.nodes[slot];
        if node.frozen {
            if node.inbox.len() < SOCKET_BUFFER {
                node.inbox.push((from, payload));
            }
            return;
        }
        let at = node.on_grid(self.now);
        if at > self.now {
            self.queue.add(at, Event::Packet { from, to, payload });
            return;
        }
        self.hear(slot, from, &payload);
    }

    fn hear(&mut self, slot: usize, from: usize, payload: &[u8]) {
        self.nodes[slot].traffic.receive(self.now);
        let mut refused = None;
        self.tell(slot, |driver, now| refused = driver.receive(address(from), payload, now).err());
        if let Some(dropped) = refused {
            self.invariants.breach(self.now, || format!("node {slot} cannot read a packet of another: {dropped:?}"));
        }
    }

    /// Tells the driver something, ticks it and performs what it asks for.
    fn tell(&mut self, slot: usize, tell: impl FnOnce(&mut Driver, Duration)) {
        let Some(mut driver) = self.nodes[slot].driver.take() else { return };
        let now = self.nodes[slot].clock(self.now);
        tell(&mut driver, now);
        driver.tick(now);
        let effects = driver.take_effects();
        self.nodes[slot].driver = Some(driver);
        self.perform(slot, effects);
        self.schedule(slot);
    }

    fn perform(&mut self, slot: usize, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, payload } => self.send(slot, to, payload),
                Effect::MembersChanged(changed) => {
                    self.members_changed(slot, &changed);
                    self.direct_members(slot);
                }
                Effect::Exchange(peer) => self.open_exchange(slot, peer),
                Effect::Verify(peer, look) => self.verify(slot, peer, look),
                Effect::NameClash(_) => self.clashes += 1,
                Effect::Rumour(rumour) => {
                    if let Some(name) = self.name_of(&rumour.node) {
                        let heard = self.nodes[slot].heard.entry(name).or_default();
                        *heard = rumour.version.max(*heard);
                    }
                    self.direct_rumour(slot, &rumour);
                }
                Effect::Outranked(why) => {
                    self.nodes[slot].outranked = Some(why);
                    self.end(slot);
                    return;
                }
            }
        }
    }

    fn send(&mut self, slot: usize, to: SocketAddr, payload: Vec<u8>) {
        let bytes = payload.len() + SEAL_OVERHEAD;
        if bytes > DATAGRAM_MAX {
            self.invariants.breach(self.now, || format!("node {slot} sends {bytes} bytes at once"));
        }
        let node = &mut self.nodes[slot];
        if !node.traffic.send(bytes, self.now) {
            self.invariants.breach(self.now, || format!("node {slot} sends many more packets than it receives"));
        }
        let (from, side) = (node.address, node.side);
        let Some(to) = index(to) else { return };
        let other = self.listener(to).map_or(0, |slot| self.nodes[slot].side);
        if let Some(travel) = self.network.datagram(side, other, &mut self.rng) {
            self.queue.add(self.now + travel, Event::Packet { from, to, payload });
        }
    }

    /// Sees to it that the driver's next tick is in the queue.
    fn schedule(&mut self, slot: usize) {
        let node = &mut self.nodes[slot];
        let Some(driver) = node.driver.as_ref().filter(|_| !node.frozen) else { return };
        let mut at = node.when(driver.next_tick(), self.now);
        if at > self.now {
            node.overdue = 0;
        } else {
            at = node.on_grid(self.now + 1);
            node.overdue += 1;
            if node.overdue == OVERDUE_MAX {
                self.invariants.breach(self.now, || format!("node {slot} leaves something due at each tick"));
            }
        }
        // A tick that comes too early is moved when it comes.
        if node.tick_at.is_none_or(|queued| at < queued) {
            node.tick_at = Some(at);
            self.queue.add(at, Event::Tick(slot));
        }
    }

    fn listener(&self, address: usize) -> Option<usize> {
        self.listeners.get(address).copied().flatten()
    }
}

/// The address with this number.
fn address(index: usize) -> SocketAddr {
    let bytes = u32::try_from(index).unwrap_or(0).to_be_bytes();
    SocketAddr::from(([10, bytes[1], bytes[2], bytes[3]], 7946))
}

/// The number of an address.
fn index(address: SocketAddr) -> Option<usize> {
    let SocketAddr::V4(address) = address else { return None };
    let [_, a, b, c] = address.ip().octets();
    Some(u32::from_be_bytes([0, a, b, c]) as usize)
}
