//! Whole clusters of drivers on a virtual clock. Every failure names the seed that shows it.

use std::collections::BTreeSet;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
/// What a kernel keeps for a process that does not read.
const SOCKET_BUFFER: usize = 128;

struct Node {
    driver: Driver,
    running: bool,
    frozen: bool,
    inbox: Vec<(SocketAddr, Vec<u8>)>,
    outranked: Option<Outranked>,
    rumours: Vec<Rumour>,
}

/// A network of nodes; node `i` is `n{i}` at 10.0.0.1, port 1000 + i, unless moved.
struct Sim {
    seed: u64,
    rng: StdRng,
    now: Duration,
    loss: f64,
    cut: BTreeSet<SocketAddr>,
    nodes: Vec<Node>,
    flying: BTreeMap<(Duration, u64), (SocketAddr, SocketAddr, Vec<u8>)>,
    sent: u64,
}

fn address(port: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1000 + u16::try_from(port).expect("port")))
}

fn name(text: &str) -> NodeId {
    NodeId::new(text).expect("name")
}

impl Sim {
    fn new(seed: u64, loss: f64) -> Self {
        let rng = StdRng::seed_from_u64(seed);
        let (nodes, flying) = (Vec::new(), BTreeMap::new());
        Self { seed, rng, now: SECOND, loss, cut: BTreeSet::new(), nodes, flying, sent: 0 }
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

    fn start(&mut self, node: &str, port: usize, boot: u64, seeds: &[usize]) -> usize {
        let identity = Identity::new(name(node), address(port), Incarnation(boot));
        let mut driver = Driver::new(identity, self.rng.random(), self.now);
        driver.set_seeds(seeds.iter().map(|seed| address(*seed)).collect());
        let (inbox, rumours) = (Vec::new(), Vec::new());
        self.nodes.push(Node { driver, running: true, frozen: false, inbox, outranked: None, rumours });
        self.nodes.len() - 1
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(next) = self.next_event().filter(|next| *next <= end) {
            self.now = next;
            while let Some(entry) = self.flying.first_entry().filter(|entry| entry.key().0 <= next) {
                let (from, to, payload) = entry.remove();
                self.deliver(from, to, payload);
            }
            for node in 0..self.nodes.len() {
                let due = self.nodes[node].running && !self.nodes[node].frozen;
                if due && self.nodes[node].driver.next_tick() <= next {
                    self.nodes[node].driver.tick(next);
                    self.perform(node);
                }
            }
        }
        self.now = end;
        self.check_invariants();
    }

    fn next_event(&self) -> Option<Duration> {
        let ticks = self.nodes.iter().filter(|n| n.running && !n.frozen).map(|n| n.driver.next_tick());
        ticks.chain(self.flying.first_key_value().map(|((at, _), _)| *at)).min().map(|at| at.max(self.now))
    }

    fn deliver(&mut self, from: SocketAddr, to: SocketAddr, payload: Vec<u8>) {
        if self.cut.contains(&from) != self.cut.contains(&to) {
            return;
        }
        let listening = |node: &Node| node.running && node.driver.identity().address == to;
        let Some(node) = self.nodes.iter().position(listening) else { return };
        if self.nodes[node].frozen {
            if self.nodes[node].inbox.len() < SOCKET_BUFFER {
                self.nodes[node].inbox.push((from, payload));
            }
            return;
        }
        self.nodes[node].driver.receive(from, &payload, self.now).expect("well formed");
        self.perform(node);
    }

    fn perform(&mut self, node: usize) {
        let from = self.nodes[node].driver.identity().address;
        for effect in self.nodes[node].driver.take_effects() {
            match effect {
                Effect::Send { to, payload } => {
                    assert!(payload.len() <= sizing::PACKET_MAX + 1, "{} bytes", payload.len());
                    self.sent += 1;
                    if self.rng.random::<f64>() >= self.loss {
                        let latency = Duration::from_micros(self.rng.random_range(200..800));
                        self.flying.insert((self.now + latency, self.sent), (from, to, payload));
                    }
                }
                Effect::Outranked(why) => self.nodes[node].outranked = Some(why),
                Effect::Rumour(rumour) => self.nodes[node].rumours.push(rumour),
                Effect::MembersChanged | Effect::Exchange(_) | Effect::Verify(_) | Effect::NameClash(_) => {}
            }
        }
    }

    fn freeze(&mut self, node: usize) {
        self.nodes[node].frozen = true;
    }

    fn thaw(&mut self, node: usize) {
        self.nodes[node].frozen = false;
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
            let suspects = node.driver.outbox.timers.next();
            assert!(
                suspects.is_none() || !node.running || node.frozen || suspects >= Some(self.now),
                "seed {}",
                self.seed
            );
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
fn nodes_find_each_other_and_a_crash_is_known_within_five_seconds() {
    for (seed, n, loss) in [(1, 10, 0.0), (2, 10, 0.05), (3, 30, 0.0), (4, 50, 0.05)] {
        let mut sim = Sim::cluster(seed, loss, n);
        let joined = sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.run(5 * SECOND);
        assert!(sim.agreed(), "seed {seed}");
        sim.nodes[n / 2].running = false;
        let crashed = sim.until(6 * SECOND, "crash known", Sim::agreed);
        println!("seed {seed}: {n} nodes, loss {loss}: joined {joined:?}, crash known by all {crashed:?}");
    }
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
fn a_fifth_of_all_packets_lost_kills_nobody_for_long() {
    for seed in 61..63 {
        let mut sim = Sim::cluster(seed, 0.2, 20);
        sim.until(20 * SECOND, "joined", Sim::agreed);
        let (mut apart, mut longest) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..1200 {
            sim.run(SECOND / 10);
            apart = if sim.agreed() { Duration::ZERO } else { apart + SECOND / 10 };
            longest = longest.max(apart);
        }
        let rejoins: u32 = sim.nodes.iter().map(|node| node.driver.identity().generation).sum();
        println!("seed {seed}: longest disagreement {longest:?}, {rejoins} rejoins in 120 s of 20 nodes");
        assert!(longest < 10 * SECOND, "seed {seed}: {longest:?}");
        assert!(rejoins <= 20, "seed {seed}: {rejoins} rejoins");
    }
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
    let now = Identity { generation: 2, ..Identity::new(name("w"), address(9), Incarnation(5)) };
    driver.import(vec![Member::alive(now.clone())], SECOND);
    let others = [
        Identity::new(name("w"), address(9), Incarnation(4)),
        Identity::new(name("w"), address(8), Incarnation(5)),
        Identity { generation: 1, ..now.clone() },
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
        let renewed = Identity { generation, ..Identity::new(name("w"), address(9), Incarnation(1)) };
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

#[test]
fn a_joiner_that_is_given_the_list_knows_everybody_at_once() {
    let mut sim = Sim::cluster(91, 0.0, 40);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    let list = sim.nodes[0].driver.export();
    let (joiner, now) = (sim.start("late", 60, 1, &[0]), sim.now);
    sim.nodes[joiner].driver.import(list, now);
    assert_eq!(sim.nodes[joiner].driver.members().len(), 40);
    sim.until(3 * SECOND, "joiner known", Sim::agreed);
}
