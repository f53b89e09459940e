//! What can be done to a cluster: start, kill, stop, move, cut, slow down, ask to leave.
//!
//! Called by scenarios, the fuzzer and tests. Pure. Each deed disturbs the cluster: views get time to follow it.

use rand::RngExt;
use starling_cluster::membership::{Driver, Identity, Outranked};
use starling_ids::{Incarnation, NodeId};

use super::{World, address};
use crate::sim::{Micros, SECOND, node::Node, views::Life};

/// Whom a node asks when it starts.
const SEEDS: usize = 3;

impl World {
    /// Starts `nodes` of them within `time`, evenly; the first three are everybody's seeds.
    pub fn start_all(&mut self, nodes: usize, time: Micros) {
        let begin = self.now;
        for node in 0..nodes {
            self.start(node);
            let next = begin + time * (node as Micros + 1) / nodes as Micros;
            self.run(next - self.now);
        }
    }

    /// Starts node `nk` in slot `k`, or starts it again in its next life, at the address it had.
    pub fn start(&mut self, slot: usize) {
        let address = self.nodes.get(slot).map_or(slot, |node| node.address);
        self.start_at(slot, slot, address);
    }

    /// Starts a process in `slot` under the next life of name `n{name}`, at this address. A process that runs there is killed.
    pub fn start_at(&mut self, slot: usize, name: usize, at: usize) {
        let life = self.newest.get(name).copied().unwrap_or(0).saturating_add(1);
        self.start_as(slot, name, at, life);
    }

    /// The same in a life of choice: two processes can claim one name, or a counter be lost.
    pub fn start_as(&mut self, slot: usize, name: usize, at: usize, life: Life) {
        self.make_room(slot, name, at);
        self.kill(slot);
        let mut node = Node::new(name, life, at);
        node.side = self.nodes[slot].side;
        let identity = Identity::new(self.names[name].clone(), address(at), Incarnation(life.into()));
        let mut driver = Driver::new(identity, self.rng.random(), node.clock(self.now));
        driver.set_seeds((0..SEEDS).filter(|seed| *seed != at).map(address).collect());
        node.driver = Some(driver);
        self.nodes[slot] = node;
        self.newest[name] = self.newest[name].max(life);
        self.listeners[at] = Some(slot);
        self.views.open(slot, name, self.now);
        self.truth_changed(name);
        self.tell(slot, |_, _| ());
    }

    fn make_room(&mut self, slot: usize, name: usize, at: usize) {
        while self.names.len() <= name {
            match NodeId::new(&format!("n{}", self.names.len())) {
                Ok(node) => self.names.push(node),
                Err(_) => return,
            }
        }
        self.newest.resize(self.names.len(), 0);
        while self.nodes.len() <= slot {
            let slot = self.nodes.len();
            self.nodes.push(Node::new(slot, 0, slot));
        }
        self.listeners.resize(self.listeners.len().max(at + 1), None);
    }

    /// The process in `slot` ends, as by SIGKILL.
    pub fn kill(&mut self, slot: usize) {
        if self.nodes[slot].driver.is_some() {
            self.end(slot);
        }
    }

    pub(super) fn end(&mut self, slot: usize) {
        let node = &mut self.nodes[slot];
        node.driver = None;
        node.directory = None;
        node.frozen = false;
        node.inbox.clear();
        node.held.clear();
        node.tick_at = None;
        let (name, at) = (node.name, node.address);
        if self.listeners[at] == Some(slot) {
            self.listeners[at] = None;
        }
        self.views.close(slot);
        self.truth_changed(name);
    }

    /// Says goodbye and ends.
    pub fn leave(&mut self, slot: usize) {
        self.tell(slot, |driver, now| driver.leave(now));
        self.kill(slot);
    }

    /// Stops the process, as by SIGSTOP: its socket buffer fills up.
    pub fn freeze(&mut self, slot: usize) {
        self.nodes[slot].frozen = true;
        self.views.pause(slot);
        self.truth_changed(self.nodes[slot].name);
    }

    /// Lets it run on.
    pub fn thaw(&mut self, slot: usize) {
        self.nodes[slot].frozen = false;
        self.nodes[slot].tick_at = None;
        self.views.resume(slot, self.now);
        self.truth_changed(self.nodes[slot].name);
        for (from, payload) in std::mem::take(&mut self.nodes[slot].inbox) {
            self.hear(slot, from, &payload);
        }
        for call in std::mem::take(&mut self.nodes[slot].held) {
            self.call(call);
        }
        self.tell(slot, |_, _| ());
        self.direct_members(slot);
    }

    /// Sets the clock of a node forward, or back.
    pub fn jump(&mut self, slot: usize, by: i64) {
        self.nodes[slot].clock += by;
        self.nodes[slot].tick_at = None;
        self.schedule(slot);
        self.invariants.disturb(self.now);
    }

    /// From now on the node gets the processor at multiples of `grid` only; 0: at once.
    pub fn slow_down(&mut self, slot: usize, grid: Micros) {
        self.nodes[slot].grid = grid;
        self.invariants.disturb(self.now);
    }

    /// Puts a node into a group of the network.
    pub fn move_to(&mut self, slot: usize, side: usize) {
        self.nodes[slot].side = side;
    }

    /// From now on it is no fault to take this node for dead, nor one of its own to take others for dead.
    pub fn excuse(&mut self, slot: usize) {
        self.nodes[slot].sound = false;
    }

    /// From now on it is.
    pub fn trust(&mut self, slot: usize) {
        self.nodes[slot].sound = true;
        self.invariants.disturb(self.now);
    }

    /// The record of a node has a new version.
    pub fn announce(&mut self, slot: usize, version: u64) {
        self.tell(slot, |driver, _| driver.announce_version(version, None));
    }

    /// How many live nodes have heard of this version of the record of `name`.
    #[must_use]
    pub fn heard(&self, name: usize, version: u64) -> usize {
        let live = self.nodes.iter().filter(|node| node.live());
        live.filter(|node| node.heard.get(&name).is_some_and(|heard| *heard >= version)).count()
    }

    /// Slots that run and answer.
    pub fn live(&self) -> impl Iterator<Item = usize> + '_ {
        self.nodes.iter().enumerate().filter(|(_, node)| node.live()).map(|(slot, _)| slot)
    }

    /// Whether the process in `slot` runs and answers.
    #[must_use]
    pub fn is_live(&self, slot: usize) -> bool {
        self.nodes.get(slot).is_some_and(Node::live)
    }

    /// Whether it is stopped.
    #[must_use]
    pub fn is_frozen(&self, slot: usize) -> bool {
        self.nodes.get(slot).is_some_and(|node| node.frozen)
    }

    /// Why the process in `slot` fell silent, if it did.
    #[must_use]
    pub fn outranked(&self, slot: usize) -> Option<&Outranked> {
        self.nodes[slot].outranked.as_ref()
    }

    /// How often live nodes came back under a new generation because others thought them dead.
    #[must_use]
    pub fn rejoins(&self) -> u64 {
        let drivers = self.nodes.iter().filter_map(|node| node.driver.as_ref());
        drivers.map(|driver| u64::from(driver.identity().generation)).sum()
    }

    /// A number below `bound`, drawn from the seed.
    pub fn draw(&mut self, bound: usize) -> usize {
        self.rng.random_range(0..bound.max(1))
    }

    /// Sent so far, for [`World::rates`].
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark { at: self.now, sent: self.nodes.iter().map(|node| (node.traffic.sent, node.traffic.tcp)).collect() }
    }

    /// What live nodes have sent since `mark`, in bytes a second.
    #[must_use]
    pub fn rates(&self, mark: &Mark) -> Rates {
        let time = (self.now - mark.at).max(1) as f64 / SECOND as f64;
        let mut rates = Rates::default();
        for slot in self.live() {
            let (traffic, (sent, tcp)) = (&self.nodes[slot].traffic, mark.sent.get(slot).copied().unwrap_or_default());
            // A restart begins to count anew.
            let udp = traffic.sent.saturating_sub(sent) as f64 / time;
            rates.udp += udp;
            rates.udp_most = rates.udp_most.max(udp);
            rates.tcp += traffic.tcp.saturating_sub(tcp) as f64 / time;
            rates.peak = rates.peak.max(traffic.peak as f64);
        }
        let live = self.live().count().max(1) as f64;
        Rates { udp: rates.udp / live, tcp: rates.tcp / live, ..rates }
    }

    /// Who, in truth, lives under `name` now, and what that means for all.
    fn truth_changed(&mut self, name: usize) {
        let lives = self.nodes.iter().filter(|node| node.name == name && node.live()).map(|node| node.life);
        self.views.set_truth(name, lives.max().unwrap_or(0), self.now);
        self.settle(name);
        self.invariants.disturb(self.now);
    }
}

/// What was sent up to some moment.
#[derive(Debug)]
pub struct Mark {
    at: Micros,
    sent: Vec<(u64, u64)>,
}

/// Bytes a second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rates {
    /// Datagrams of a node, seal included, on average.
    pub udp: f64,
    /// The same of the node that sends most.
    pub udp_most: f64,
    /// TCP exchanges of a node, on average.
    pub tcp: f64,
    /// Most bytes of datagrams that one node has sent within one second since the run began.
    pub peak: f64,
}
