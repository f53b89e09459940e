//! The pure directory: what is held, patches and deltas, and whole clusters of engines over a lossy network.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use starling_ids::{EndpointName, Incarnation, ModelId, NodeId};

use crate::{
    discovery::*,
    membership::{MemberView, Rumour, place},
};

const SECOND: Duration = Duration::from_secs(1);

pub(super) fn name(at: usize) -> NodeId {
    NodeId::new(&format!("n{at:04}")).expect("name")
}

pub(super) fn member(node: NodeId, incarnation: u64) -> MemberView {
    let address = SocketAddr::from(([10, 0, 0, 1], 7));
    MemberView { node, incarnation: Incarnation(incarnation), address, suspect: false }
}

pub(super) fn members(all: impl IntoIterator<Item = (NodeId, u64)>) -> BTreeMap<NodeId, MemberView> {
    all.into_iter().map(|(node, incarnation)| (node.clone(), member(node, incarnation))).collect()
}

pub(super) fn endpoint(at: usize) -> EndpointName {
    EndpointName::new(&format!("starling/worker-{at}/generate")).expect("name")
}

/// A worker as the product publishes it.
pub(super) fn worker(at: usize, lifecycle: Lifecycle) -> Instance {
    Instance {
        model: ModelId::new(&format!("org/model-{at:02}-instruct")).ok(),
        labels: [("engine", "embedded"), ("epoch", "1"), ("zone", "north")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        card: Some(crate::blobs::BlobDigest([at as u8; 32])),
        bundle: Some(crate::blobs::BlobDigest([at as u8 + 1; 32])),
        capacity: Some(16),
        layout: Some(0x0123_4567_89ab_cdef),
        ..Instance::new(endpoint(at), InstanceKind::Worker, lifecycle)
    }
}

pub(super) fn record(node: NodeId, incarnation: u64, version: u64, instances: usize) -> NodeRecord {
    let address = SocketAddr::from(([10, 0, 0, 1], 7));
    let mut record = NodeRecord::new(node, Incarnation(incarnation), address);
    record.version = version;
    record.software = "starling 0.1.0".into();
    record.roles = vec!["worker".into()];
    record.instances = (0..instances).map(|at| worker(at, Lifecycle::Serving)).collect();
    record.instances.sort_by(|one, two| one.endpoint.cmp(&two.endpoint));
    record.instances.iter_mut().for_each(|instance| instance.changed = version);
    record
}

fn core(others: &[(usize, u64)]) -> DirectoryCore {
    let mut core = DirectoryCore::new(Arc::new(record(NodeId::new("me").expect("name"), 1, 1, 0)));
    core.set_members(&members(others.iter().map(|(at, life)| (name(*at), *life))));
    core
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.nodes.iter().map(|view| view.record.node.as_str()).collect()
}

fn rumour(node: NodeId, incarnation: u64, version: u64, delta: Option<RecordDelta>) -> Rumour {
    let place = place(SocketAddr::from(([10, 0, 0, 1], 7)));
    Rumour { node, incarnation: Incarnation(incarnation), place, version, delta, teller: None }
}

#[test]
fn members_are_listed_sorted_before_and_after_their_record_came() {
    let mut core = core(&[(9, 1), (1, 1)]);
    assert_eq!(names(&core.snapshot()), ["me", "n0001", "n0009"]);
    assert_eq!(core.wanted().len(), 2);
    assert_eq!(core.offer(Patch::whole(&record(name(9), 1, 4, 2), 0)), Ok(true));
    assert_eq!(core.offer(Patch::whole(&record(name(9), 1, 4, 2), 0)), Ok(false));
    assert_eq!(core.snapshot().node(&name(9)).map(|view| view.record.version), Some(4));
    assert_eq!(core.hear(&rumour(name(9), 1, 5, None)), Heard::Wanted);
    assert!(core.wanted().contains(&name(9)));
    assert_eq!(core.offer(Patch::whole(&record(name(9), 1, 5, 2), 0)), Ok(true));
    assert!(!core.wanted().contains(&name(9)));
}

/// Two processes of one name met; gossip has settled on the one at the other address, in the same life.
#[test]
fn mem_07_a_record_belongs_to_a_process_and_not_to_a_name() {
    let mut core = core(&[(3, 1)]);
    let loser = record(name(3), 1, 9, 2);
    let elsewhere = SocketAddr::from(([10, 0, 0, 2], 7));
    let winner = NodeRecord { address: elsewhere, ..record(name(3), 1, 4, 1) };
    assert_eq!(core.offer(Patch::whole(&loser, 0)), Ok(true));
    assert_eq!(core.offer(Patch::whole(&winner, 0)), Err(Refused::Stale), "gossip knows the other one");
    let before = core.tally().root();
    let moved = MemberView { address: elsewhere, ..member(name(3), 1) };
    let turnover = core.set_members(&[(name(3), moved)].into());
    assert_eq!((turnover.new, turnover.over), (vec![name(3)], vec![(name(3), Incarnation(1))]));
    assert_eq!(core.snapshot().nodes[1].record.address, elsewhere, "dialled where it is");
    assert!(core.record(&name(3)).is_none() && core.wanted().contains(&name(3)));
    assert_eq!(core.hear(&rumour(name(3), 1, 10, None)), Heard::Nothing, "the other one's news");
    assert_eq!(core.offer(Patch::whole(&loser, 0)), Err(Refused::Stale));
    let told = Rumour { place: place(elsewhere), ..rumour(name(3), 1, 4, None) };
    assert_eq!(core.hear(&told), Heard::Wanted);
    assert_eq!(core.offer(Patch::whole(&winner, 0)), Ok(true), "although its version is lower");
    assert!(core.wanted().is_empty());
    assert_ne!(core.tally().root(), before);
    let same = NodeRecord { address: loser.address, ..winner.clone() };
    let mut other = core_of(&same);
    assert_ne!(other.tally().root(), core.tally().root(), "a comparison finds who holds the wrong one");
    other.set_members(&[(name(3), MemberView { address: elsewhere, ..member(name(3), 1) })].into());
    assert_eq!(other.offer(Patch::whole(&winner, 0)), Ok(true));
    assert_eq!(other.tally().root(), core.tally().root());
}

fn core_of(held: &NodeRecord) -> DirectoryCore {
    let mut core = core(&[(3, 1)]);
    core.offer(Patch::whole(held, 0)).expect("taken");
    core
}

#[test]
fn mem_09_the_record_of_a_dead_node_or_life_does_not_come_back() {
    let mut core = core(&[(3, 1)]);
    let whole = |life, version| Patch::whole(&record(name(3), life, version, 1), 0);
    assert_eq!(core.offer(whole(1, 9)), Ok(true));
    let turnover = core.set_members(&members([]));
    assert_eq!(turnover.over, [(name(3), Incarnation(1))]);
    assert_eq!(names(&core.snapshot()), ["me"]);
    assert_eq!(core.tally().len(), 1, "nothing of it is told to others");
    assert_eq!(core.offer(whole(1, 10)), Err(Refused::NotMember));
    core.set_members(&members([(name(3), 2)]));
    assert_eq!(core.offer(whole(1, 11)), Err(Refused::Stale));
    assert_eq!(core.snapshot().nodes[1].record.version, 0, "nothing of the earlier life is left");
    assert_eq!(core.hear(&rumour(name(3), 1, 99, None)), Heard::Nothing);
    assert_eq!(core.offer(whole(2, 1)), Ok(true));
    assert!(core.wanted().is_empty(), "a rumour about an earlier life wants nothing");
}

#[test]
fn mem_18_the_vital_part_comes_first_and_the_rest_is_wanted_until_it_came() {
    let mut core = core(&[(3, 1)]);
    let full = record(name(3), 1, 4, 3);
    assert_eq!(core.offer(Patch::vital(&full)), Ok(true));
    let held = core.record(&name(3)).expect("held").clone();
    assert!(held.partial && core.wanted().contains(&name(3)));
    let vital: Vec<_> = held.instances.iter().map(|i| (i.endpoint.clone(), i.lifecycle, i.model.clone())).collect();
    let expected: Vec<_> = full.instances.iter().map(|i| (i.endpoint.clone(), i.lifecycle, i.model.clone())).collect();
    assert_eq!(vital, expected);
    assert!(held.instances.iter().all(|instance| instance.card.is_none() && instance.labels.is_empty()));
    assert_eq!(core.offer(Patch::whole(&held, 0)), Ok(false), "who holds only a part passes on only a part");
    assert_eq!(core.offer(Patch::whole(&full, 0)), Ok(true));
    assert_eq!((core.record(&name(3)).map(|held| (**held).clone()), core.wanted().len()), (Some(full.clone()), 0));
    assert_eq!(core.offer(Patch::vital(&NodeRecord { version: 5, ..full })), Ok(false), "labels are not thrown away");
}

#[test]
fn an_older_version_and_a_foreign_hand_are_refused() {
    let mut core = core(&[(3, 1)]);
    let whole = |version| Patch::whole(&record(name(3), 1, version, 1), 0);
    assert_eq!(core.offer(whole(5)), Ok(true));
    assert_eq!(core.offer(whole(4)), Err(Refused::Stale));
    let me = NodeId::new("me").expect("name");
    assert_eq!(core.offer(Patch::whole(&record(me, 1, 99, 0), 0)), Err(Refused::Unacceptable));
    let mut huge = record(name(3), 1, 6, 1);
    huge.software = "x".repeat(RECORD_MAX);
    assert_eq!(core.offer(Patch::whole(&huge, 0)), Err(Refused::Unacceptable));
    assert_eq!(core.record(&name(3)).map(|held| held.version), Some(5));
}

#[test]
fn gossip_and_links_must_agree_in_one_incarnation() {
    let mut core = core(&[(3, 1)]);
    let state = |core: &DirectoryCore| core.snapshot().node(&name(3)).map(|view| view.state);
    assert!(core.set_reachable(&name(3), Incarnation(1), false));
    assert_eq!(state(&core), Some(NodeState::Unreachable));
    assert!(core.set_reachable(&name(3), Incarnation(1), true));
    assert_eq!(state(&core), Some(NodeState::Alive));
    // A link says that the process behind the name is a later one; gossip has not heard of it yet.
    core.set_reachable(&name(3), Incarnation(2), true);
    assert_eq!(state(&core), Some(NodeState::Unreachable));
    assert!(!core.set_reachable(&name(3), Incarnation(0), true), "news of an earlier life is no news");
    core.set_members(&members([(name(3), 2)]));
    assert_eq!(state(&core), Some(NodeState::Alive), "both agree again");
    let mut suspected = members([(name(3), 2)]);
    suspected.get_mut(&name(3)).expect("member").suspect = true;
    core.set_members(&suspected);
    assert_eq!(state(&core), Some(NodeState::Suspect));
    core.set_members(&members([(name(3), 3)]));
    assert_eq!(state(&core), Some(NodeState::Alive), "a new life starts reachable");
}

#[test]
fn a_lifecycle_change_travels_in_its_rumour() {
    let own = OwnRecord::new(record(name(3), 1, 1, 20));
    let mut core = core(&[(3, 1)]);
    assert_eq!(core.offer(Patch::whole(&own.get(), 0)), Ok(true));
    for lifecycle in [Lifecycle::Draining, Lifecycle::Drained] {
        own.update(|record| record.instances[4].lifecycle = lifecycle).expect("legal");
    }
    own.update(|record| drop(record.instances[5].labels.insert("epoch".into(), "2".into()))).expect("legal");
    let (now, delta) = own.news();
    let delta = delta.expect("small");
    assert_eq!((delta.since, delta.changes.len()), (1, 2), "three versions in one, the last of each value");
    let told = rumour(name(3), 1, now.version, Some(delta));
    let length = rmp_serde::to_vec(&told).expect("encodes").len();
    assert!(length < 100, "{length} bytes");
    assert_eq!(core.hear(&told), Heard::Applied);
    assert_eq!(core.hear(&told), Heard::Nothing);
    let held = core.record(&name(3)).expect("held");
    assert_eq!((held.version, held.instances[4].lifecycle), (4, Lifecycle::Drained));
    assert_eq!(held.instances[5].labels["epoch"], "2");
    assert!(core.wanted().is_empty());

    // A new instance is not small, and whoever missed the first versions cannot use a later delta.
    own.update(|record| record.instances.push(worker(30, Lifecycle::Warming))).expect("legal");
    assert_eq!(own.news().1, None);
    own.update(|record| record.instances[0].lifecycle = Lifecycle::Draining).expect("legal");
    let (now, delta) = own.news();
    assert_eq!(delta.as_ref().map(|delta| delta.since), Some(5));
    assert_eq!(core.hear(&rumour(name(3), 1, now.version, delta)), Heard::Wanted);
    let since = held_version(&core);
    let patch = Patch::whole(&now, since);
    assert!(patch.since == since && rmp_serde::to_vec(&patch).expect("encodes").len() < 700, "only what changed");
    assert_eq!(core.offer(patch), Ok(true));
    assert_eq!(without_versions(core.record(&name(3)).expect("held")), without_versions(&now));
}

fn held_version(core: &DirectoryCore) -> u64 {
    core.record(&name(3)).map_or(0, |record| record.version)
}

/// A delta notes the version of the rumour for each instance it changed; the node itself knows the exact one.
fn without_versions(record: &NodeRecord) -> NodeRecord {
    let mut record = record.clone();
    record.instances.iter_mut().for_each(|instance| instance.changed = 0);
    record
}

#[test]
fn each_change_raises_the_version_and_a_refused_one_changes_nothing() {
    let own = OwnRecord::new(record(name(1), 3, 0, 0));
    let changed = own.update(|record| {
        record.roles = vec!["worker".into(), "gateway".into()];
        record.version = 77;
        record.incarnation = Incarnation(9);
        record.instances =
            vec![worker(1, Lifecycle::Warming), worker(0, Lifecycle::Serving), worker(1, Lifecycle::Gone)];
    });
    let changed = changed.expect("fits");
    assert_eq!((changed.version, changed.incarnation), (2, Incarnation(3)));
    assert_eq!(changed.roles, ["gateway", "worker"]);
    assert_eq!(
        changed.instances.iter().map(|i| i.lifecycle).collect::<Vec<_>>(),
        [Lifecycle::Serving, Lifecycle::Warming]
    );
    let refused = [
        own.update(|record| record.software = "x".repeat(RECORD_MAX)),
        own.update(|record| drop(record.labels.insert("k".into(), "v".repeat(LABEL_MAX + 1)))),
        own.update(|record| record.instances[1].lifecycle = Lifecycle::Joining),
    ];
    assert!(matches!(refused[0], Err(PublishError::TooLarge { .. })));
    assert!(matches!(refused[1], Err(PublishError::Label(_))));
    assert!(matches!(&refused[2], Err(PublishError::IllegalStep { step, .. }) if step.from == Lifecycle::Warming));
    assert_eq!(own.get(), changed);
}

/// What a node may do to its record.
#[derive(Debug, Clone)]
enum Step {
    Add(usize),
    Withdraw(usize),
    Life(usize, u8),
    Label(usize, u8),
    NodeLabel(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..50usize).prop_map(Step::Add),
        (0..50usize).prop_map(Step::Withdraw),
        (0..50usize, 0..6u8).prop_map(|(at, life)| Step::Life(at, life)),
        (0..50usize, 0..9u8).prop_map(|(at, value)| Step::Label(at, value)),
        (0..9u8).prop_map(Step::NodeLabel),
    ]
}

fn take(own: &OwnRecord, step: &Step) {
    let at = |record: &NodeRecord, at: usize| record.instances.iter().position(|known| known.endpoint == endpoint(at));
    let outcome = own.update(|record| match step {
        Step::Add(which) if at(record, *which).is_none() => record.instances.push(worker(*which, Lifecycle::Joining)),
        Step::Add(_) => {}
        Step::Withdraw(which) => record.instances.retain(|known| known.endpoint != endpoint(*which)),
        Step::Life(which, life) => {
            if let Some(at) = at(record, *which) {
                record.instances[at].lifecycle = Lifecycle::try_from(*life).expect("a lifecycle");
            }
        }
        Step::Label(which, value) => {
            if let Some(at) = at(record, *which) {
                record.instances[at].labels.insert("l".into(), value.to_string());
            }
        }
        Step::NodeLabel(value) => drop(record.labels.insert("n".into(), value.to_string())),
    });
    assert!(matches!(outcome, Ok(_) | Err(PublishError::IllegalStep { .. })), "{outcome:?}");
}

proptest! {
    /// Deltas and differences, in any mix and with any losses, lead to the record itself; a relay passes on the same.
    #[test]
    fn any_mix_of_deltas_and_patches_leads_to_the_record(
        steps in proptest::collection::vec((step(), 0..5u8), 1..120),
    ) {
        let own = OwnRecord::new(record(name(3), 1, 1, 2));
        let (mut near, mut far) = (core(&[(3, 1)]), core(&[(3, 1)]));
        for (step, heard) in &steps {
            take(&own, step);
            let (now, delta) = own.news();
            let told = rumour(name(3), 1, now.version, delta);
            if *heard > 0 {
                near.hear(&told);
            }
            if *heard > 1 && near.wanted().contains(&name(3)) {
                let _stale_or_gap = near.offer(Patch::whole(&now, held_version(&near)));
            }
            if *heard > 2 && let Some(record) = near.record(&name(3)) {
                let _stale_or_gap = far.offer(Patch::whole(record, held_version(&far)));
            }
            if *heard > 3 {
                far.hear(&told);
            }
            for core in [&near, &far] {
                let held = core.record(&name(3)).filter(|held| held.version == now.version);
                if let Some(held) = held {
                    prop_assert_eq!(without_versions(held), without_versions(&now));
                }
            }
        }
        let now = own.get();
        for core in [&mut near, &mut far] {
            let _news = core.offer(Patch::whole(&now, held_version(core)));
            prop_assert_eq!(without_versions(core.record(&name(3)).expect("held")), without_versions(&now));
        }
    }
}

/// A cluster of engines: every message takes time, and some are lost.
pub(super) struct Net {
    pub(super) engines: Vec<DirectoryEngine>,
    own: Vec<OwnRecord>,
    now: Duration,
    wires: BTreeMap<(Duration, u64), Wire>,
    sent: u64,
    ticks: Vec<Duration>,
    rng: StdRng,
    loss: f64,
    gossip: bool,
    pub(super) messages: usize,
    pub(super) bytes: usize,
    pub(super) largest: usize,
    /// When each node first held the vital part, and the whole, of everything.
    pub(super) served: BTreeMap<usize, usize>,
}

enum Wire {
    Ask(usize, usize, u64, Ask),
    Told(usize, u64, Option<Told>),
    Rumour(usize, Rumour),
}

impl Net {
    pub(super) fn new(nodes: usize, instances: usize, seed: u64, loss: f64) -> Self {
        let records = (0..nodes).map(|at| record(name(at), 1, 1, instances));
        let own: Vec<OwnRecord> = records.map(OwnRecord::new).collect();
        let engine = |(at, own): (usize, &OwnRecord)| DirectoryEngine::new(own.get(), seed + at as u64, Duration::ZERO);
        let engines = own.iter().enumerate().map(engine).collect();
        Self {
            engines,
            own,
            now: Duration::ZERO,
            wires: BTreeMap::new(),
            sent: 0,
            ticks: vec![Duration::ZERO; nodes],
            rng: StdRng::seed_from_u64(seed),
            loss,
            gossip: true,
            messages: 0,
            bytes: 0,
            largest: 0,
            served: BTreeMap::new(),
        }
    }

    /// Everybody is a member for everybody.
    pub(super) fn meet(&mut self) {
        let all = members((0..self.engines.len()).map(|at| (name(at), 1)));
        for at in 0..self.engines.len() {
            self.engines[at].set_members(&others(&all, at), self.now);
            self.perform(at);
        }
    }

    /// One node holds the record of another, wherever it has it from.
    pub(super) fn know(&mut self, at: usize, other: usize) {
        let (wanted, now) = (self.own[other].get(), self.now);
        let entry = Entry {
            node: name(other),
            stamp: Stamp {
                incarnation: Incarnation(1),
                place: place(wanted.address),
                version: wanted.version,
                whole: true,
            },
        };
        if self.engines[at].core().record(&name(other)).is_some() {
            return;
        }
        // Through the front door: a hint leads to a question, which is answered here and now.
        self.engines[at].answer(&name(other), &Ask::Hint(vec![entry]), now);
        for effect in self.engines[at].take_effects() {
            let DirectoryEffect::Ask { ticket, ask: Ask::Pull { wants, .. }, .. } = effect else { continue };
            let holds = |want: &Want| Patch::whole(&self.own[Self::index(&want.node)].get(), 0);
            let patches: Vec<Patch> = wants.iter().map(holds).collect();
            let served = u32::try_from(patches.len()).expect("few");
            self.engines[at].told(ticket, Some(Told::Patches { served, patches }), now);
        }
        self.ticks[at] = self.engines[at].next_tick();
    }

    /// A node becomes a member and learns who the others are.
    pub(super) fn join(&mut self, at: usize) {
        let all = members((0..self.engines.len()).map(|at| (name(at), 1)));
        for node in 0..self.engines.len() {
            self.engines[node].set_members(&others(&all, node), self.now);
            self.perform(node);
        }
        assert_eq!(self.engines[at].core().others(), at);
    }

    fn index(node: &NodeId) -> usize {
        node.as_str().trim_start_matches('n').parse().expect("a number")
    }

    fn send(&mut self, wire: Wire, length: usize) {
        self.messages += 1;
        self.bytes += length;
        self.largest = self.largest.max(length);
        if self.rng.random_bool(self.loss) {
            // Sessions notice in the end: the asker is told that there is no answer.
            if let Wire::Ask(from, _, ticket, _) | Wire::Told(from, ticket, _) = wire {
                self.post(self.now + SECOND, Wire::Told(from, ticket, None));
            }
            return;
        }
        let delay = Duration::from_micros(self.rng.random_range(200..20_000));
        self.post(self.now + delay, wire);
    }

    fn post(&mut self, at: Duration, wire: Wire) {
        self.sent += 1;
        self.wires.insert((at, self.sent), wire);
    }

    fn perform(&mut self, at: usize) {
        for effect in self.engines[at].take_effects() {
            match effect {
                DirectoryEffect::Ask { ticket, to, ask } => {
                    assert!(ask.is_bounded());
                    let length = rmp_serde::to_vec(&ask).expect("encodes").len();
                    self.send(Wire::Ask(at, Self::index(&to), ticket, ask), length);
                }
                DirectoryEffect::Announce(version, delta) if self.gossip => {
                    let told = Rumour { teller: Some(name(at)), ..rumour(name(at), 1, version, delta) };
                    for to in 0..self.engines.len() {
                        self.send(Wire::Rumour(to, told.clone()), 0);
                    }
                }
                DirectoryEffect::Announce(..) | DirectoryEffect::Publish(_) | DirectoryEffect::Down(..) => {}
            }
        }
        self.ticks[at] = self.engines[at].next_tick();
    }

    fn deliver(&mut self, wire: Wire) {
        match wire {
            Wire::Ask(from, to, ticket, ask) => {
                let told = self.engines[to].answer(&name(from), &ask, self.now);
                assert!(told.is_bounded());
                let length = rmp_serde::to_vec(&told).expect("encodes").len();
                *self.served.entry(to).or_default() += length;
                self.perform(to);
                self.send(Wire::Told(from, ticket, Some(told)), length);
            }
            Wire::Told(to, ticket, told) => {
                self.engines[to].told(ticket, told, self.now);
                self.perform(to);
            }
            Wire::Rumour(to, rumour) => {
                self.engines[to].hear(&rumour, self.now);
                self.perform(to);
            }
        }
    }

    /// Runs until `done`, or for `limit`; how long it took.
    pub(super) fn until(&mut self, limit: Duration, what: &str, done: impl Fn(&Self) -> bool) -> Duration {
        let begin = self.now;
        loop {
            // Looking at all of it after each message would take longer than the message.
            for _ in 0..20 {
                self.step();
            }
            if done(self) {
                return self.now - begin;
            }
            assert!(self.now < begin + limit, "{what}: not within {limit:?}");
        }
    }

    fn step(&mut self) {
        let wire = self.wires.first_key_value().map(|((at, _), _)| *at);
        let tick = self.ticks.iter().min().copied().unwrap_or_default();
        self.now = wire.map_or(tick, |wire| wire.min(tick)).max(self.now);
        if wire.is_some_and(|wire| wire <= self.now) {
            if let Some((_, wire)) = self.wires.pop_first() {
                self.deliver(wire);
            }
            return;
        }
        for node in (0..self.engines.len()).filter(|node| self.ticks[*node] <= self.now).collect::<Vec<_>>() {
            self.engines[node].tick(self.now);
            self.perform(node);
        }
    }

    pub(super) fn agreed(&self) -> bool {
        let root = self.engines[0].core().tally().root();
        self.engines.iter().all(|engine| engine.core().tally().root() == root && engine.core().wanted().is_empty())
    }
}

fn others(all: &BTreeMap<NodeId, MemberView>, at: usize) -> BTreeMap<NodeId, MemberView> {
    let mut others = all.clone();
    others.remove(&name(at));
    others
}

#[test]
fn directories_agree_whatever_is_lost_and_in_whatever_order_it_comes() {
    for (seed, loss) in [(1, 0.0), (2, 0.2), (3, 0.5)] {
        let mut net = Net::new(30, 3, seed, loss);
        net.meet();
        net.until(120 * SECOND, "first records", Net::agreed);
        for round in 0..20 {
            let at = net.rng.random_range(0..30);
            let own = net.own[at].clone();
            let step = match round % 3 {
                0 => Step::Add(10 + round),
                1 => Step::Withdraw(round),
                _ => Step::Label(0, round as u8),
            };
            take(&own, &step);
            let (now, (record, delta)) = (net.now, own.news());
            net.engines[at].set_own(record, delta, now);
            net.perform(at);
        }
        let took = net.until(240 * SECOND, "changes", |net| {
            net.agreed()
                && net.own.iter().enumerate().all(|(at, own)| {
                    let held = net.engines[(at + 1) % 30].core().record(&name(at));
                    held.is_some_and(|held| held.version == own.get().version)
                })
        });
        println!("seed {seed}, loss {loss}: agreed after {took:?} of the changes");
        for (at, own) in net.own.iter().enumerate() {
            for engine in &net.engines {
                let held = engine.core().record(&name(at)).expect("held");
                assert_eq!(without_versions(held), without_versions(&own.get()), "seed {seed}");
            }
        }
    }
}

#[test]
fn without_any_gossip_of_versions_the_comparison_of_sums_finds_every_change() {
    let mut net = Net::new(20, 1, 7, 0.1);
    net.gossip = false;
    net.meet();
    net.until(120 * SECOND, "first records", Net::agreed);
    for at in [3, 11] {
        let own = net.own[at].clone();
        take(&own, &Step::Add(9));
        let now = net.now;
        net.engines[at].set_own(own.get(), None, now);
        net.perform(at);
    }
    let holds = |net: &Net| {
        net.engines
            .iter()
            .all(|e| [3, 11].iter().all(|at| e.core().record(&name(*at)).is_some_and(|held| held.version == 2)))
    };
    let took = net.until(60 * SECOND, "two changes by comparison alone", |net| holds(net) && net.agreed());
    println!("two changes among 20 nodes found by comparison alone within {took:?}");
}

#[test]
fn a_change_in_a_large_cluster_is_not_pulled_from_its_node_by_everybody() {
    let mut net = Net::new(100, 1, 5, 0.0);
    net.meet();
    net.until(120 * SECOND, "first records", Net::agreed);
    net.served.clear();
    let own = net.own[0].clone();
    take(&own, &Step::Add(9));
    let (now, (record, _)) = (net.now, own.news());
    net.gossip = false;
    net.engines[0].set_own(record.clone(), None, now);
    net.perform(0);
    // Rumours as gossip spreads them: each node hears from one that heard before.
    for to in 1..100_usize {
        let teller = Some(name((to - 1) / 3));
        let told = Rumour { teller, ..rumour(name(0), 1, record.version, None) };
        net.post(now + Duration::from_millis(200 * (1 + u64::from(to.ilog(3)))), Wire::Rumour(to, told));
    }
    net.until(60 * SECOND, "one change", Net::agreed);
    let asked: BTreeSet<usize> = net.served.keys().copied().collect();
    println!("one record pulled by 99 from {} different nodes", asked.len());
    assert!(asked.len() > 15, "{asked:?}");
}
