//! A cluster of drivers on a virtual clock: packets with loss, cuts in one direction or both, frozen and dead nodes.

use std::collections::{BTreeSet, HashMap};

use super::super::*;

pub(super) const SECOND: Duration = Duration::from_secs(1);
/// What a kernel keeps for a process that does not read.
pub(super) const SOCKET_BUFFER: usize = 128;

pub(super) struct Node {
    pub(super) driver: Driver,
    pub(super) running: bool,
    pub(super) frozen: bool,
    /// Not running, and its host says nothing either.
    pub(super) unplugged: bool,
    pub(super) inbox: Vec<(SocketAddr, Vec<u8>)>,
    pub(super) outranked: Option<Outranked>,
    pub(super) rumours: Vec<Rumour>,
    pub(super) rivals: Vec<Identity>,
    pub(super) wake: Duration,
    pub(super) bytes: u64,
}

/// What is on its way.
pub(super) enum Event {
    Packet { from: SocketAddr, to: SocketAddr, payload: Vec<u8> },
    Exchange { asker: usize, with: Peer },
    Visit { asker: usize, whom: Peer, proof: Proof },
}

/// A network of nodes; node `i` is `n{i}` at 10.0.0.1, port 1000 + i, unless moved.
pub(super) struct Sim {
    pub(super) seed: u64,
    pub(super) rng: StdRng,
    pub(super) now: Duration,
    pub(super) loss: f64,
    /// Nothing passes between these and the others.
    pub(super) cut: BTreeSet<SocketAddr>,
    /// Nothing from these arrives anywhere.
    pub(super) mute: BTreeSet<SocketAddr>,
    /// Nothing arrives at these.
    pub(super) deaf: BTreeSet<SocketAddr>,
    pub(super) nodes: Vec<Node>,
    pub(super) at: HashMap<SocketAddr, usize>,
    pub(super) events: BTreeMap<(Duration, u64), Event>,
    pub(super) wakes: BTreeSet<(Duration, usize)>,
    pub(super) sent: u64,
    pub(super) exchanged: u64,
}

pub(super) fn address(port: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1000 + u16::try_from(port).expect("port")))
}

pub(super) fn name(text: &str) -> NodeId {
    NodeId::new(text).expect("name")
}

impl Sim {
    pub(super) fn new(seed: u64, loss: f64) -> Self {
        Self {
            seed,
            rng: StdRng::seed_from_u64(seed),
            now: SECOND,
            loss,
            cut: BTreeSet::new(),
            mute: BTreeSet::new(),
            deaf: BTreeSet::new(),
            nodes: Vec::new(),
            at: HashMap::new(),
            events: BTreeMap::new(),
            wakes: BTreeSet::new(),
            sent: 0,
            exchanged: 0,
        }
    }

    /// `n` nodes that start within a second and know the first three as seeds.
    pub(super) fn cluster(seed: u64, loss: f64, n: usize) -> Self {
        let mut sim = Self::new(seed, loss);
        for node in 0..n {
            sim.start(&format!("n{node}"), node, 1, &[0, 1, 2]);
            let pause = sim.rng.random_range(0..1000 / n as u64 + 1);
            sim.run(Duration::from_millis(pause));
        }
        sim
    }

    /// The same, and they have found each other.
    pub(super) fn joined(seed: u64, loss: f64, n: usize) -> Self {
        let mut sim = Self::cluster(seed, loss, n);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.run(2 * SECOND);
        sim
    }

    pub(super) fn start(&mut self, node: &str, port: usize, boot: u64, seeds: &[usize]) -> usize {
        let identity = Identity::new(name(node), address(port), Incarnation(boot));
        let mut driver = Driver::new(identity, self.rng.random(), self.now);
        driver.set_seeds(seeds.iter().map(|seed| address(*seed)).collect());
        let at = self.nodes.len();
        self.nodes.push(Node {
            driver,
            running: true,
            frozen: false,
            unplugged: false,
            inbox: Vec::new(),
            outranked: None,
            rumours: Vec::new(),
            rivals: Vec::new(),
            wake: self.now,
            bytes: 0,
        });
        self.wakes.insert((self.now, at));
        self.at.insert(address(port), at);
        at
    }

    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let event = self.events.first_key_value().map(|((at, _), _)| *at);
            let wake = self.wakes.first().map(|(at, _)| *at);
            let Some(next) = event.into_iter().chain(wake).min().filter(|next| *next <= end) else { break };
            self.now = next.max(self.now);
            if event == Some(next) {
                if let Some((_, event)) = self.events.pop_first() {
                    self.happen(event);
                }
            } else if let Some((_, node)) = self.wakes.pop_first()
                && self.awake(node)
            {
                self.nodes[node].driver.tick(self.now);
                self.perform(node);
            }
        }
        self.now = end;
        self.check_invariants();
    }

    pub(super) fn awake(&self, node: usize) -> bool {
        self.nodes[node].running && !self.nodes[node].frozen
    }

    pub(super) fn happen(&mut self, event: Event) {
        match event {
            Event::Packet { from, to, payload } => self.deliver(from, to, payload),
            Event::Exchange { asker, with } => self.exchange(asker, &with),
            Event::Visit { asker, whom, proof } if self.awake(asker) => {
                self.nodes[asker].driver.verified(&whom.node, whom.incarnation, proof, self.now);
                self.perform(asker);
            }
            Event::Visit { .. } => {}
        }
    }

    /// Whether packets pass in this direction.
    pub(super) fn passes(&self, from: SocketAddr, to: SocketAddr) -> bool {
        self.cut.contains(&from) == self.cut.contains(&to) && !self.mute.contains(&from) && !self.deaf.contains(&to)
    }

    pub(super) fn deliver(&mut self, from: SocketAddr, to: SocketAddr, payload: Vec<u8>) {
        if !self.passes(from, to) {
            return;
        }
        let Some(node) = self.at.get(&to).copied().filter(|node| self.nodes[*node].running) else { return };
        if self.nodes[node].frozen {
            if self.nodes[node].inbox.len() < SOCKET_BUFFER {
                self.nodes[node].inbox.push((from, payload));
            }
            return;
        }
        self.nodes[node].driver.receive(from, &payload, self.now).expect("well formed");
        self.perform(node);
    }

    /// What a connection from one to the other would show.
    pub(super) fn visit(&self, from: SocketAddr, whom: &Peer) -> Proof {
        if !self.passes(from, whom.address) || !self.passes(whom.address, from) {
            return Proof::Silent;
        }
        match self.at.get(&whom.address).map(|node| &self.nodes[*node]) {
            Some(node) if node.running && node.frozen => Proof::Silent,
            Some(node) if node.running && own(node).0 == whom.node => Proof::Alive,
            Some(node) if node.unplugged => Proof::Silent,
            _ => Proof::Refused,
        }
    }

    pub(super) fn exchange(&mut self, asker: usize, with: &Peer) {
        let from = self.nodes[asker].driver.identity().address();
        if self.visit(from, with) != Proof::Alive || !self.awake(asker) {
            self.nodes[asker].driver.exchange_failed(self.now);
            return self.perform(asker);
        }
        let asked = self.at[&with.address];
        let mut ask = Some(self.nodes[asker].driver.exchange_open());
        while let Some(question) = ask {
            let reply = self.nodes[asked].driver.exchange_serve(&question, self.now).expect("well formed");
            assert!(question.len().max(reply.len()) <= EXCHANGE_MAX);
            self.exchanged += (question.len() + reply.len()) as u64;
            ask = self.nodes[asker].driver.exchange_next(&reply, self.now).expect("well formed");
        }
        self.perform(asked);
        self.perform(asker);
    }

    pub(super) fn perform(&mut self, node: usize) {
        let from = self.nodes[node].driver.identity().address();
        for effect in self.nodes[node].driver.take_effects() {
            let latency = Duration::from_micros(self.rng.random_range(200..800));
            match effect {
                Effect::Send { to, payload } => {
                    assert!(payload.len() <= sizing::PACKET_MAX + 1, "{} bytes", payload.len());
                    self.nodes[node].bytes += payload.len() as u64;
                    if self.rng.random::<f64>() >= self.loss {
                        self.later(latency, Event::Packet { from, to, payload });
                    }
                }
                Effect::Outranked(why) => self.nodes[node].outranked = Some(why),
                Effect::Rumour(rumour) => self.nodes[node].rumours.push(rumour),
                Effect::NameClash(rival) => self.nodes[node].rivals.push(rival),
                Effect::Exchange(with) => self.later(4 * latency, Event::Exchange { asker: node, with }),
                Effect::Verify(whom, look) => {
                    let proof = self.visit(from, &whom);
                    if look == Look::Knock && proof != Proof::Refused {
                        continue;
                    }
                    let wait = if proof == Proof::Silent { VERIFY_MAX } else { 4 * latency };
                    self.later(wait, Event::Visit { asker: node, whom, proof });
                }
                Effect::MembersChanged(_) => {}
            }
        }
        let wake = self.nodes[node].driver.next_tick();
        self.wakes.remove(&(self.nodes[node].wake, node));
        self.nodes[node].wake = wake;
        self.wakes.insert((wake, node));
    }

    pub(super) fn later(&mut self, wait: Duration, event: Event) {
        self.sent += 1;
        self.events.insert((self.now + wait, self.sent), event);
    }

    pub(super) fn kill(&mut self, node: usize) {
        self.nodes[node].running = false;
    }

    pub(super) fn unplug(&mut self, node: usize) {
        self.nodes[node].running = false;
        self.nodes[node].unplugged = true;
    }

    pub(super) fn freeze(&mut self, node: usize) {
        self.nodes[node].frozen = true;
    }

    pub(super) fn thaw(&mut self, node: usize) {
        self.nodes[node].frozen = false;
        self.nodes[node].driver.tick(self.now);
        for (from, payload) in std::mem::take(&mut self.nodes[node].inbox) {
            self.nodes[node].driver.receive(from, &payload, self.now).expect("well formed");
        }
        self.perform(node);
    }

    /// Runs until `done`, and says how long that took.
    pub(super) fn until(&mut self, limit: Duration, what: &str, done: impl Fn(&Self) -> bool) -> Duration {
        let start = self.now;
        while !done(self) {
            let waited = self.now - start;
            assert!(waited < limit, "seed {}: {what} not within {limit:?}", self.seed);
            self.run(Duration::from_millis(50));
        }
        self.now - start
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (usize, &Node)> {
        self.nodes.iter().enumerate().filter(|(_, node)| node.running && !node.frozen && node.outranked.is_none())
    }

    /// Whether every live node lists every other live node in its current life, and nobody else.
    pub(super) fn agreed(&self) -> bool {
        let lives: BTreeMap<NodeId, Incarnation> = self.live().map(|(_, node)| own(node)).collect();
        self.live().all(|(_, node)| {
            let mut seen: BTreeMap<NodeId, Incarnation> =
                node.driver.members().values().map(|m| (m.node.clone(), m.incarnation)).collect();
            seen.extend([own(node)]);
            seen == lives
        })
    }

    /// What holds at any moment, whatever is lost, frozen or cut.
    pub(super) fn check_invariants(&self) {
        let mut newest: BTreeMap<NodeId, Incarnation> = BTreeMap::new();
        for (node, incarnation) in self.nodes.iter().map(own) {
            let entry = newest.entry(node).or_default();
            *entry = incarnation.max(*entry);
        }
        for node in &self.nodes {
            for member in node.driver.members().values() {
                assert_ne!(member.node, own(node).0, "seed {}: a node lists itself", self.seed);
                let known = newest.get(&member.node);
                assert!(known.is_some_and(|newest| member.incarnation <= *newest), "seed {}: {member:?}", self.seed);
            }
            let timer = node.driver.outbox.timers.next();
            assert!(timer.is_none() || !node.running || node.frozen || timer >= Some(self.now), "seed {}", self.seed);
        }
    }
}

pub(super) fn own(node: &Node) -> (NodeId, Incarnation) {
    let identity = node.driver.identity();
    (identity.node.clone().expect("named"), identity.incarnation)
}

pub(super) fn knows(node: &Node, other: &str) -> Option<Incarnation> {
    node.driver.members().get(&name(other)).map(|member| member.incarnation)
}
