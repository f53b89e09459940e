//! Whole clusters of drivers on a virtual clock. Every failure names the seed that shows it.

use std::collections::{BTreeSet, HashMap};

use super::*;

const SECOND: Duration = Duration::from_secs(1);
/// What a kernel keeps for a process that does not read.
const SOCKET_BUFFER: usize = 128;

struct Node {
    driver: Driver,
    running: bool,
    frozen: bool,
    /// Not running, and its host says nothing either.
    unplugged: bool,
    inbox: Vec<(SocketAddr, Vec<u8>)>,
    outranked: Option<Outranked>,
    rumours: Vec<Rumour>,
    rivals: Vec<Identity>,
    wake: Duration,
    bytes: u64,
}

/// What is on its way.
enum Event {
    Packet { from: SocketAddr, to: SocketAddr, payload: Vec<u8> },
    Exchange { asker: usize, with: Peer },
    Visit { asker: usize, whom: Peer, proof: Proof },
}

/// A network of nodes; node `i` is `n{i}` at 10.0.0.1, port 1000 + i, unless moved.
struct Sim {
    seed: u64,
    rng: StdRng,
    now: Duration,
    loss: f64,
    /// Nothing passes between these and the others.
    cut: BTreeSet<SocketAddr>,
    /// Nothing from these arrives anywhere.
    mute: BTreeSet<SocketAddr>,
    /// Nothing arrives at these.
    deaf: BTreeSet<SocketAddr>,
    nodes: Vec<Node>,
    at: HashMap<SocketAddr, usize>,
    events: BTreeMap<(Duration, u64), Event>,
    wakes: BTreeSet<(Duration, usize)>,
    sent: u64,
    exchanged: u64,
}

fn address(port: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1000 + u16::try_from(port).expect("port")))
}

fn name(text: &str) -> NodeId {
    NodeId::new(text).expect("name")
}

impl Sim {
    fn new(seed: u64, loss: f64) -> Self {
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
    fn cluster(seed: u64, loss: f64, n: usize) -> Self {
        let mut sim = Self::new(seed, loss);
        for node in 0..n {
            sim.start(&format!("n{node}"), node, 1, &[0, 1, 2]);
            let pause = sim.rng.random_range(0..1000 / n as u64 + 1);
            sim.run(Duration::from_millis(pause));
        }
        sim
    }

    /// The same, and they have found each other.
    fn joined(seed: u64, loss: f64, n: usize) -> Self {
        let mut sim = Self::cluster(seed, loss, n);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.run(2 * SECOND);
        sim
    }

    fn start(&mut self, node: &str, port: usize, boot: u64, seeds: &[usize]) -> usize {
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

    fn run(&mut self, time: Duration) {
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

    fn awake(&self, node: usize) -> bool {
        self.nodes[node].running && !self.nodes[node].frozen
    }

    fn happen(&mut self, event: Event) {
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
    fn passes(&self, from: SocketAddr, to: SocketAddr) -> bool {
        self.cut.contains(&from) == self.cut.contains(&to) && !self.mute.contains(&from) && !self.deaf.contains(&to)
    }

    fn deliver(&mut self, from: SocketAddr, to: SocketAddr, payload: Vec<u8>) {
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
    fn visit(&self, from: SocketAddr, whom: &Peer) -> Proof {
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

    fn exchange(&mut self, asker: usize, with: &Peer) {
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

    fn perform(&mut self, node: usize) {
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
                Effect::Verify(whom) => {
                    let proof = self.visit(from, &whom);
                    let wait = if proof == Proof::Silent { VERIFY_MAX } else { 4 * latency };
                    self.later(wait, Event::Visit { asker: node, whom, proof });
                }
                Effect::MembersChanged => {}
            }
        }
        let wake = self.nodes[node].driver.next_tick();
        self.wakes.remove(&(self.nodes[node].wake, node));
        self.nodes[node].wake = wake;
        self.wakes.insert((wake, node));
    }

    fn later(&mut self, wait: Duration, event: Event) {
        self.sent += 1;
        self.events.insert((self.now + wait, self.sent), event);
    }

    fn kill(&mut self, node: usize) {
        self.nodes[node].running = false;
    }

    fn unplug(&mut self, node: usize) {
        self.nodes[node].running = false;
        self.nodes[node].unplugged = true;
    }

    fn freeze(&mut self, node: usize) {
        self.nodes[node].frozen = true;
    }

    fn thaw(&mut self, node: usize) {
        self.nodes[node].frozen = false;
        self.nodes[node].driver.tick(self.now);
        for (from, payload) in std::mem::take(&mut self.nodes[node].inbox) {
            self.nodes[node].driver.receive(from, &payload, self.now).expect("well formed");
        }
        self.perform(node);
    }

    /// Runs until `done`, and says how long that took.
    fn until(&mut self, limit: Duration, what: &str, done: impl Fn(&Self) -> bool) -> Duration {
        let start = self.now;
        while !done(self) {
            let waited = self.now - start;
            assert!(waited < limit, "seed {}: {what} not within {limit:?}", self.seed);
            self.run(Duration::from_millis(50));
        }
        self.now - start
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Node)> {
        self.nodes.iter().enumerate().filter(|(_, node)| node.running && !node.frozen && node.outranked.is_none())
    }

    /// Whether every live node lists every other live node in its current life, and nobody else.
    fn agreed(&self) -> bool {
        let lives: BTreeMap<NodeId, Incarnation> = self.live().map(|(_, node)| own(node)).collect();
        self.live().all(|(_, node)| {
            let mut seen: BTreeMap<NodeId, Incarnation> =
                node.driver.members().values().map(|m| (m.node.clone(), m.incarnation)).collect();
            seen.extend([own(node)]);
            seen == lives
        })
    }

    /// What holds at any moment, whatever is lost, frozen or cut.
    fn check_invariants(&self) {
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

fn own(node: &Node) -> (NodeId, Incarnation) {
    let identity = node.driver.identity();
    (identity.node.clone().expect("named"), identity.incarnation)
}

fn knows(node: &Node, other: &str) -> Option<Incarnation> {
    node.driver.members().get(&name(other)).map(|member| member.incarnation)
}

#[test]
fn a_frozen_node_is_back_within_five_seconds_everywhere() {
    for (seed, n) in [(11, 10), (12, 30)] {
        let mut sim = Sim::cluster(seed, 0.0, n);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.freeze(4);
        sim.until(6 * SECOND, "freeze known", Sim::agreed);
        sim.run(24 * SECOND);
        sim.thaw(4);
        let back = sim.until(5 * SECOND, "thawed node back", Sim::agreed);
        sim.run(10 * SECOND);
        assert!(sim.agreed(), "seed {seed}: nobody was accused by the thawed node");
        println!("seed {seed}: {n} nodes: back after {back:?}");
    }
}

#[test]
fn mem_01_an_isolated_node_finds_back_with_and_without_seeds() {
    for (seed, isolated) in [(21, 2), (22, 0), (23, 5)] {
        let mut sim = Sim::new(seed, 0.0);
        sim.start("n0", 0, 1, &[]);
        for node in 1..6 {
            sim.start(&format!("n{node}"), node, 1, &[0]);
        }
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.cut.insert(address(isolated));
        sim.run(60 * SECOND);
        assert!(sim.nodes[isolated].driver.members().is_empty(), "mem_03, seed {seed}: it knows it is alone");
        sim.cut.clear();
        let healed = sim.until(30 * SECOND, "healed", Sim::agreed);
        println!("seed {seed}: node {isolated} back after {healed:?}");
        assert!(sim.nodes.iter().all(|node| node.outranked.is_none()), "seed {seed}");
    }
}

#[test]
fn two_halves_become_one_cluster_again() {
    let mut sim = Sim::cluster(25, 0.02, 12);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.cut.extend((0..6).map(address));
    sim.run(40 * SECOND);
    sim.cut.clear();
    let healed = sim.until(30 * SECOND, "healed", Sim::agreed);
    println!("seed 25: halves merged after {healed:?}");
}

#[test]
fn seeds_may_start_in_any_order_and_later_than_the_others() {
    for seed in 31..34 {
        let mut sim = Sim::new(seed, 0.0);
        for node in [3, 4, 5] {
            sim.start(&format!("n{node}"), node, 1, &[0, 1]);
        }
        sim.run(20 * SECOND);
        for node in [1, 0] {
            sim.start(&format!("n{node}"), node, 1, &[0, 1]);
        }
        sim.until(5 * SECOND, "joined", Sim::agreed);
    }
}

#[test]
fn mem_05_a_restart_on_another_port_replaces_the_earlier_life() {
    for seed in 41..44 {
        let mut sim = Sim::cluster(seed, 0.0, 8);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.nodes[5].running = false;
        sim.run(Duration::from_millis(300));
        sim.start("n5", 25, 2, &[0, 1]);
        let replaced = sim.until(3 * SECOND, "restart known", Sim::agreed);
        println!("seed {seed}: new life known after {replaced:?}");
        sim.run(20 * SECOND);
        assert!(sim.agreed(), "seed {seed}: news about the earlier life does not hurt the new one");
    }
}

#[test]
fn mem_06_an_address_under_a_new_name_leaves_one_entry() {
    let mut sim = Sim::cluster(45, 0.0, 6);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.nodes[5].running = false;
    sim.start("renamed", 5, 1, &[0]);
    sim.until(6 * SECOND, "old name down", Sim::agreed);
    assert_eq!(knows(&sim.nodes[0], "n5"), None);
    assert_eq!(knows(&sim.nodes[0], "renamed"), Some(Incarnation(1)));
}

#[test]
fn mem_07_of_two_nodes_with_one_name_one_is_told_and_the_rest_is_unharmed() {
    for (seed, boots) in [(51, (1, 1)), (52, (3, 1)), (53, (1, 3))] {
        let mut sim = Sim::cluster(seed, 0.0, 6);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        let one = sim.start("w", 20, boots.0, &[0]);
        let two = sim.start("w", 21, boots.1, &[1]);
        sim.until(10 * SECOND, "one is told", |sim| {
            sim.nodes[one].outranked.is_some() != sim.nodes[two].outranked.is_some() && sim.agreed()
        });
        sim.run(20 * SECOND);
        assert!(sim.agreed(), "seed {seed}");
        let loser = if boots.0 <= boots.1 { one } else { two };
        let told = sim.nodes[loser].outranked.clone().expect("told");
        assert!(!told.down && told.holder.is_some(), "seed {seed}: {told:?}");
    }
}

#[test]
fn a_node_that_lost_its_counter_is_told_that_its_name_was_held_later() {
    let mut sim = Sim::cluster(55, 0.0, 4);
    sim.start("w", 20, 7, &[0]);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.nodes[4].running = false;
    sim.until(6 * SECOND, "down", Sim::agreed);
    let again = sim.start("w", 20, 1, &[0]);
    sim.until(5 * SECOND, "told", |sim| sim.nodes[again].outranked.is_some());
    let told = sim.nodes[again].outranked.clone().expect("told");
    assert!(told.down && told.holder.is_some_and(|holder| holder.incarnation == Incarnation(7)));
}

#[test]
fn a_goodbye_is_heard_at_once_and_a_new_life_is_welcome() {
    let mut sim = Sim::cluster(71, 0.0, 8);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    let now = sim.now;
    sim.nodes[3].driver.leave(now);
    sim.perform(3);
    sim.nodes[3].running = false;
    let known = sim.until(SECOND, "goodbye known", Sim::agreed);
    println!("goodbye known after {known:?}");
    sim.start("n3", 3, 2, &[0]);
    sim.until(3 * SECOND, "mem_16: back", Sim::agreed);
}

#[test]
fn mem_09_a_goodbye_is_heard_by_all_although_most_members_have_just_died() {
    for seed in 73..76 {
        let mut sim = Sim::cluster(seed, 0.0, 30);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        for dead in 3..29 {
            sim.nodes[dead].running = false;
        }
        let now = sim.now;
        sim.nodes[29].driver.leave(now);
        sim.perform(29);
        sim.nodes[29].running = false;
        let unknown = |sim: &Sim| (0..3).all(|node| knows(&sim.nodes[node], "n29").is_none());
        sim.until(SECOND / 2, "goodbye known", unknown);
    }
}

#[test]
fn a_goodbye_of_an_earlier_life_or_under_another_address_changes_nothing() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    let now = Identity::new(name("w"), address(9), Incarnation(5)).in_generation(2);
    driver.import(vec![Member::alive(now.clone())], SECOND);
    let others = [
        Identity::new(name("w"), address(9), Incarnation(4)),
        Identity::new(name("w"), address(8), Incarnation(5)),
        now.clone().in_generation(1),
        Identity::new(name("stranger"), address(7), Incarnation(1)),
    ];
    for other in others {
        let word = message::word(&message::Word::Leaving(other)).expect("encodes");
        driver.receive(address(9), &word, SECOND).expect("well formed");
        assert_eq!(driver.members().len(), 1);
    }
    let word = message::word(&message::Word::Leaving(now)).expect("encodes");
    driver.receive(address(9), &word, SECOND).expect("well formed");
    assert!(driver.members().is_empty());
}

#[test]
fn a_stranger_at_the_address_of_a_seed_is_found_in_seconds() {
    for seed in 35..38 {
        let mut sim = Sim::new(seed, 0.0);
        for node in [0, 3, 4, 5] {
            sim.start(&format!("n{node}"), node, 1, &[0]);
        }
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.nodes[0].running = false;
        sim.run(20 * SECOND);
        sim.start("successor", 0, 1, &[]);
        let found = sim.until(6 * SECOND, "found", Sim::agreed);
        println!("seed {seed}: found after {found:?}");
    }
}

#[test]
fn mem_11_late_news_of_an_earlier_life_revives_nobody() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    let life = |boot| Identity::new(name("w"), address(9), Incarnation(boot));
    let told = [Member::alive(life(1)), Member::down(life(1)), Member::down(life(10)), Member::alive(life(2))];
    for news in told {
        driver.import(vec![news], SECOND);
    }
    assert!(driver.members().is_empty());
    assert_eq!(driver.holder(&name("w")), Some((life(10), true)));
}

#[test]
fn mem_12_a_hundred_renewals_leave_one_entry() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    for generation in 0..100 {
        let renewed = Identity::new(name("w"), address(9), Incarnation(1)).in_generation(generation);
        driver.import(vec![Member::alive(renewed.clone()), Member::down(renewed)], SECOND);
    }
    assert_eq!(driver.export().len(), 2, "the member and the node itself");
}

#[test]
fn rumours_reach_everybody_within_a_second_or_two() {
    let mut sim = Sim::cluster(81, 0.0, 20);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.nodes[7].driver.announce_version(42);
    let everybody = |sim: &Sim| {
        let told = |node: &Node| node.rumours.iter().any(|rumour| rumour.version == 42);
        sim.live().all(|(at, node)| at == 7 || told(node))
    };
    let spread = sim.until(2 * SECOND, "rumour spread", everybody);
    println!("rumour known to 20 nodes after {spread:?}");
}

fn generations(sim: &Sim) -> u32 {
    sim.nodes.iter().map(|node| node.driver.identity().generation).sum()
}

/// Payload, seal, UDP and IP headers of one node in a second, on average.
fn traffic(sim: &mut Sim, time: Duration) -> f64 {
    let (packets, bytes) = (sim.sent, sim.nodes.iter().map(|node| node.bytes).sum::<u64>());
    sim.run(time);
    let bytes = sim.nodes.iter().map(|node| node.bytes).sum::<u64>() - bytes;
    let overhead = (crate::security::SEAL_OVERHEAD as u64 + 28) * (sim.sent - packets);
    (bytes + overhead) as f64 / time.as_secs_f64() / sim.nodes.len() as f64
}

#[test]
fn a_join_is_known_everywhere_within_a_second_in_small_clusters() {
    for (seed, n) in [(1, 3), (2, 10), (3, 10)] {
        let mut sim = Sim::joined(seed, 0.0, n - 1);
        sim.start("late", 90, 1, &[0]);
        let known = sim.until(SECOND, "join known", Sim::agreed);
        println!("seed {seed}: {n} nodes: join known after {known:?}");
    }
}

#[test]
fn a_killed_node_is_down_everywhere_in_time_and_so_is_one_without_power() {
    for (seed, n, loss, limit) in [(4, 3, 0.0, 4), (5, 10, 0.0, 4), (6, 10, 0.05, 4), (7, 50, 0.0, 5), (8, 50, 0.2, 6)]
    {
        let mut sim = Sim::joined(seed, loss, n);
        sim.kill(n - 1);
        let killed = sim.until(limit * SECOND, "kill known", Sim::agreed);
        sim.run(5 * SECOND);
        sim.unplug(n - 2);
        let unplugged = sim.until(limit * SECOND, "loss of power known", Sim::agreed);
        println!("seed {seed}: {n} nodes, loss {loss}: killed {killed:?}, unplugged {unplugged:?}");
        assert_eq!(generations(&sim), 0, "seed {seed}");
    }
}

#[test]
fn a_hundred_nodes_find_each_other_and_a_death_at_a_fifth_of_all_packets_lost() {
    let mut sim = Sim::cluster(9, 0.2, 100);
    let joined = sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.run(5 * SECOND);
    sim.unplug(50);
    let known = sim.until(6 * SECOND, "death known", Sim::agreed);
    println!("seed 9: joined {joined:?}, death known {known:?}");
    assert_eq!(generations(&sim), 0);
}

#[test]
fn a_broken_link_makes_a_kill_known_in_a_second() {
    for (seed, n) in [(10, 5), (11, 10)] {
        let mut sim = Sim::joined(seed, 0.0, n);
        sim.kill(0);
        let now = sim.now;
        sim.nodes[1].driver.suspect_hint(&name("n0"), Incarnation(1), now);
        sim.perform(1);
        let known = sim.until(SECOND, "kill known", Sim::agreed);
        println!("seed {seed}: {n} nodes: known after {known:?}");
        // A hint about a node that is well does it no harm, nor one about an earlier life.
        for incarnation in [1, 7] {
            let now = sim.now;
            sim.nodes[1].driver.suspect_hint(&name("n2"), Incarnation(incarnation), now);
            sim.perform(1);
        }
        sim.run(5 * SECOND);
        assert!(sim.agreed() && generations(&sim) == 0);
    }
}

#[test]
fn half_of_a_cluster_and_nearly_all_of_one_may_die_at_once() {
    for (seed, n, dead, limit) in [(12, 16, 8, 8), (13, 30, 27, 12)] {
        for power in [true, false] {
            let mut sim = Sim::joined(seed, 0.0, n);
            for node in n - dead..n {
                if power { sim.kill(node) } else { sim.unplug(node) }
            }
            let known = sim.until(limit * SECOND, "deaths known", Sim::agreed);
            println!("seed {seed}: {dead} of {n} dead, power {power}: known after {known:?}");
            assert_eq!(generations(&sim), 0, "seed {seed}: the survivors never doubted each other aloud");
        }
    }
}

/// None of the others is ever declared down, by anybody, and none has to rejoin.
#[test]
fn one_way_cuts_of_one_node_in_ten_hurt_no_other() {
    for (seed, mute) in [(14, true), (15, false)] {
        let mut sim = Sim::joined(seed, 0.0, 10);
        if mute {
            sim.mute.insert(address(4))
        } else {
            sim.deaf.insert(address(4))
        };
        let others: Vec<usize> = (0..10).filter(|node| *node != 4).collect();
        for _ in 0..300 {
            sim.run(SECOND);
            for one in &others {
                for other in others.iter().filter(|other| *other != one) {
                    assert!(knows(&sim.nodes[*one], &format!("n{other}")).is_some(), "seed {seed}: {one} lost {other}");
                }
                assert_eq!(sim.nodes[*one].driver.identity().generation, 0, "seed {seed}: {one} had to rejoin");
            }
        }
        let generation = sim.nodes[4].driver.identity().generation;
        assert!(generation <= 2, "seed {seed}: {generation} rejoins of the one that is cut");
        assert!(others.iter().all(|one| knows(&sim.nodes[*one], "n4").is_none()), "seed {seed}");
        sim.mute.clear();
        sim.deaf.clear();
        let healed = sim.until(10 * SECOND, "healed", Sim::agreed);
        sim.run(5 * SECOND);
        assert!(sim.agreed() && others.iter().all(|one| sim.nodes[*one].driver.identity().generation == 0));
        println!("seed {seed}, mute {mute}: healed after {healed:?}");
    }
}

#[test]
fn a_frozen_node_accuses_nobody_and_keeps_its_table() {
    for seed in [16, 17] {
        let mut sim = Sim::joined(seed, 0.0, 10);
        sim.freeze(4);
        sim.run(60 * SECOND);
        assert_eq!(sim.nodes[4].driver.member_count(), 9);
        sim.thaw(4);
        let back = sim.until(5 * SECOND, "back", Sim::agreed);
        for _ in 0..40 {
            sim.run(SECOND / 2);
            assert!(sim.agreed(), "seed {seed}");
        }
        let own = sim.nodes[4].driver.identity().generation;
        assert_eq!(generations(&sim), own, "seed {seed}: nobody else had to rejoin");
        println!("seed {seed}: back after {back:?}");
    }
}

#[test]
fn a_standstill_of_a_second_is_no_death() {
    let mut sim = Sim::joined(18, 0.0, 10);
    for node in [3, 5, 7] {
        sim.freeze(node);
        sim.run(Duration::from_millis(1200));
        sim.thaw(node);
        sim.run(2 * SECOND);
        assert!(sim.agreed());
    }
    assert_eq!(generations(&sim), 0);
}

#[test]
fn lost_packets_kill_nobody_and_fill_no_packets() {
    for (seed, n, loss, most) in
        [(61, 20, 0.0, 800.0), (62, 20, 0.05, 1000.0), (63, 20, 0.2, 1500.0), (64, 60, 0.2, 1500.0)]
    {
        let mut sim = Sim::cluster(seed, loss, n);
        sim.until(20 * SECOND, "joined", Sim::agreed);
        sim.run(20 * SECOND);
        let bytes = traffic(&mut sim, if n > 20 { 20 * SECOND } else { 60 * SECOND });
        println!("seed {seed}: {n} nodes, loss {loss}: {bytes:.0} bytes a second");
        assert!(bytes < most, "seed {seed}: {bytes} bytes a second");
        assert!(sim.agreed());
        assert_eq!(generations(&sim), 0, "seed {seed}: somebody was declared down");
    }
}

#[test]
fn both_are_told_of_a_clash_of_names() {
    for seed in [65, 66] {
        let mut sim = Sim::joined(seed, 0.0, 6);
        let first = sim.start("w", 20, 2, &[0]);
        sim.until(5 * SECOND, "joined", Sim::agreed);
        let second = sim.start("w", 21, 1, &[1]);
        sim.until(5 * SECOND, "both told", |sim| {
            let loser = &sim.nodes[second];
            loser.outranked.is_some() && sim.nodes[first].rivals.iter().any(|rival| rival == loser.driver.identity())
        });
        sim.run(5 * SECOND);
        assert!(sim.agreed() && sim.nodes[first].outranked.is_none());
    }
}

/// Two drivers that exchange states, and the bytes of it.
fn exchange(asker: &mut Driver, asked: &mut Driver) -> (usize, usize) {
    let (mut bytes, mut steps, mut ask) = (0, 0, Some(asker.exchange_open()));
    while let Some(question) = ask {
        let reply = asked.exchange_serve(&question, SECOND).expect("a question");
        assert!(question.len().max(reply.len()) <= EXCHANGE_MAX);
        bytes += question.len() + reply.len();
        steps += 1;
        ask = asker.exchange_next(&reply, SECOND).expect("a reply");
    }
    (bytes, steps)
}

fn driver(port: usize) -> Driver {
    Driver::new(Identity::new(name(&format!("n{port}")), address(port), Incarnation(1)), port as u64, SECOND)
}

fn crowd(from: usize, to: usize) -> Vec<Member<Identity>> {
    let id = |at| Identity::new(name(&format!("crowd-{at}")), address(at), Incarnation(1));
    (from..to).map(|at| Member::alive(id(at))).collect()
}

#[test]
fn an_exchange_tells_both_sides_what_only_one_knew_and_little_when_they_agree() {
    let (mut one, mut other) = (driver(1), driver(2));
    one.import(crowd(0, 300), SECOND);
    other.import(crowd(200, 500), SECOND);
    exchange(&mut one, &mut other);
    assert_eq!(one.fingerprint(), other.fingerprint());
    assert_eq!((one.member_count(), other.member_count()), (501, 501));
    let (bytes, steps) = exchange(&mut one, &mut other);
    assert!(bytes < 700 && steps == 1, "{bytes} bytes in {steps} steps for nothing");
    one.import(crowd(600, 601), SECOND);
    let (bytes, steps) = exchange(&mut one, &mut other);
    assert!(bytes < 2000 && steps <= 2, "{bytes} bytes in {steps} steps for one member");
    assert_eq!(one.fingerprint(), other.fingerprint());
}

#[test]
fn an_exchange_of_many_members_goes_in_pieces() {
    let (mut joiner, mut member) = (driver(1), driver(2));
    member.import(crowd(0, 5000), SECOND);
    let (bytes, steps) = exchange(&mut joiner, &mut member);
    assert!(steps >= 3, "{steps} steps");
    assert_eq!(joiner.fingerprint(), member.fingerprint());
    println!("5000 members in {steps} steps of {bytes} bytes");
}

/// mem_09, mem_11: who is down is told where it matters, and the memory of it ends.
#[test]
fn mem_09_an_exchange_ends_the_belief_in_a_dead_member_and_does_not_hand_its_memory_on() {
    let (mut knows, mut believes, mut fresh) = (driver(1), driver(2), driver(3));
    let dead = Identity::new(name("dead"), address(9), Incarnation(4));
    believes.import(vec![Member::alive(dead.clone())], SECOND);
    knows.import(vec![Member::down(dead.clone())], SECOND);
    exchange(&mut believes, &mut knows);
    assert_eq!(believes.knows(&name("dead")), Some((Incarnation(4), true)));
    for asked in [&mut knows, &mut believes] {
        exchange(&mut fresh, asked);
    }
    for other in [&mut knows, &mut believes] {
        exchange(other, &mut fresh);
    }
    assert!(!fresh.members().contains_key(&name("dead")));
    exchange(&mut fresh, &mut believes);
    let before = believes.export().len();
    exchange(&mut believes, &mut fresh);
    assert_eq!(believes.export().len(), before);
}

#[test]
fn a_joiner_exchanges_at_once_and_everybody_knows_it() {
    let mut sim = Sim::joined(91, 0.0, 40);
    let joiner = sim.start("late", 60, 1, &[0]);
    let knows_all = |sim: &Sim| sim.nodes[joiner].driver.member_count() == 40;
    let known = sim.until(SECOND / 2, "the joiner knows all", knows_all);
    let seen = sim.until(2 * SECOND, "joiner known", Sim::agreed);
    println!("the joiner knew all after {known:?} and was known after {seen:?}");
    assert!(sim.exchanged > 0);
}

#[test]
fn the_settings_follow_the_size_of_the_cluster() {
    let mut one = driver(1);
    let class = |driver: &Driver| driver.class;
    one.import(crowd(0, 60), SECOND);
    assert_eq!(class(&one), 1);
    let downs = |from, to| crowd(from, to).into_iter().map(|m| Member::down(m.id().clone())).collect();
    one.import(downs(0, 12), SECOND);
    assert_eq!((one.member_count(), class(&one)), (48, 1), "not at once");
    one.import(downs(12, 25), SECOND);
    assert_eq!(class(&one), 0);
}
