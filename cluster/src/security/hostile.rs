//! Gossip datagrams from an enemy: altered, forged, replayed, cut short, too long, or sealed by somebody who holds a key
//! and sends nonsense. No panic, no growth without bound. Runs for `STARLING_FUZZ_SECONDS`, else for a moment.

use std::{
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use starling_ids::{Incarnation, NodeId};

use super::*;
use crate::membership::{Driver, Effect, Identity};

const CLUSTER: &str = "fuzz";
/// Members that an enemy with a key can make up before the victim is begun anew.
const ROUNDS_OF_ONE_VICTIM: u64 = 2_000;

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

fn driver(name: &str, port: u16, seed: u64) -> Driver {
    let node = NodeId::new(name).expect("name");
    Driver::new(Identity::new(node, address(port), Incarnation(2)), seed, Duration::from_secs(1))
}

/// Payloads that a small cluster sends in its first seconds: announcements, feeds, probes, gossip, rumours, goodbyes.
fn corpus(seed: u64) -> Vec<Vec<u8>> {
    let mut drivers: Vec<Driver> = (0..4).map(|n| driver(&format!("n{n}"), 1 + n, seed + u64::from(n))).collect();
    drivers.iter_mut().skip(1).for_each(|driver| driver.set_seeds(vec![address(1)]));
    let (mut all, mut now) = (Vec::new(), Duration::from_secs(1));
    for step in 0..200u64 {
        now += Duration::from_millis(50);
        let mut sent = Vec::new();
        for (from, driver) in (1..).zip(&mut drivers) {
            driver.tick(now);
            if step == 100 {
                driver.announce_version(step, None);
            }
            for effect in driver.take_effects() {
                if let Effect::Send { to, payload } = effect {
                    sent.push((from, to, payload));
                }
            }
        }
        for (from, to, payload) in sent {
            let to = usize::from(to.port()) - 1;
            if let Some(driver) = drivers.get_mut(to) {
                assert_eq!(driver.receive(address(from), &payload, now), Ok(()));
            }
            all.push(payload);
        }
    }
    assert!(all.len() > 100 && drivers[0].members().len() == 3, "{} payloads", all.len());
    all
}

fn alter(bytes: &mut Vec<u8>, rng: &mut StdRng, other: &[u8]) {
    for _ in 0..rng.random_range(0..5) {
        let at = rng.random_range(0..=bytes.len());
        match rng.random_range(0..6) {
            0 if at < bytes.len() => drop(bytes.remove(at)),
            1 => bytes.insert(at, rng.random()),
            2 => bytes.truncate(at),
            3 => bytes.extend_from_slice(&other[..rng.random_range(0..=other.len())]),
            4 => bytes.resize(rng.random_range(0..2_000), rng.random()),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << rng.random_range(0..8);
                }
            }
        }
    }
}

/// A node under attack, and the enemy's tools: its own sealer under the key, and one under another key.
struct Scene {
    opener: Opener,
    victim: Driver,
    insider: Sealer,
    stranger: Sealer,
    heard: Vec<Vec<u8>>,
}

impl Scene {
    fn new(seed: u64) -> Self {
        let ring = KeyRing::from(ClusterKey::from_bytes([1; 32]));
        let ring = ring.add(ClusterKey::from_bytes([2; 32])).expect("added");
        let keys = ring.seal_keys();
        let strange = KeyRing::from(ClusterKey::from_bytes([3; 32])).seal_keys();
        let sender = |salt| SenderId::new(&NodeId::new("enemy").expect("name"), Incarnation(1), salt);
        Self {
            opener: Opener::new(keys.clone(), CLUSTER),
            victim: driver("n0", 1, seed),
            insider: Sealer::new(&keys[1], CLUSTER, sender(seed)),
            stranger: Sealer::new(&strange[0], CLUSTER, sender(seed)),
            heard: Vec::new(),
        }
    }

    /// What one datagram does to a node.
    fn receive(&mut self, datagram: &[u8], now: Duration) -> Result<(), Dropped> {
        let payload = self.opener.open(datagram)?;
        self.victim.receive(address(9), &payload, now)
    }

    fn round(&mut self, rng: &mut StdRng, corpus: &[Vec<u8>], now: Duration) -> Vec<u8> {
        let pick = |rng: &mut StdRng| corpus[rng.random_range(0..corpus.len())].clone();
        let mut payload = pick(rng);
        let other = pick(rng);
        let mut datagram = match rng.random_range(0..4) {
            // Whoever holds a key can say anything.
            0 => {
                alter(&mut payload, rng, &other);
                payload.truncate(DATAGRAM_MAX - SEAL_OVERHEAD);
                self.insider.seal(&payload).expect("within the limit")
            }
            1 => self.stranger.seal(&payload).expect("within the limit"),
            2 if !self.heard.is_empty() => self.heard[rng.random_range(0..self.heard.len())].clone(),
            _ => self.insider.seal(&payload).expect("within the limit"),
        };
        if rng.random_bool(0.3) {
            alter(&mut datagram, rng, &other);
        } else if self.heard.len() < 64 {
            self.heard.push(datagram.clone());
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let first = self.receive(&datagram, now);
            let again = self.receive(&datagram, now);
            self.victim.tick(now);
            (first, again)
        }));
        let (_, again) = outcome.unwrap_or_else(|_| panic!("the input that did it: {datagram:?}"));
        assert!(again.is_err(), "one datagram is taken at most once: {datagram:?}");
        datagram
    }
}

#[test]
fn fuzz_gossip_datagrams_are_dropped_or_taken_once_and_never_a_panic() {
    let seconds = std::env::var_os("STARLING_FUZZ_SECONDS").and_then(|text| text.to_str()?.parse::<u64>().ok());
    let (end, seed) = (Instant::now() + Duration::from_secs(seconds.unwrap_or(1)), rand::random::<u64>() >> 1);
    println!("seed {seed}");
    let (mut rng, corpus) = (StdRng::seed_from_u64(seed), corpus(seed));
    let (mut scene, mut rounds) = (Scene::new(seed), 0_u64);
    while Instant::now() < end {
        rounds += 1;
        if rounds.is_multiple_of(ROUNDS_OF_ONE_VICTIM) {
            scene = Scene::new(seed.wrapping_add(rounds));
        }
        scene.round(&mut rng, &corpus, Duration::from_secs(1) + Duration::from_millis(rounds));
        let sent = scene.victim.take_effects().into_iter().filter_map(|effect| match effect {
            Effect::Send { payload, .. } => Some(payload.len()),
            _ => None,
        });
        let (packets, longest) = sent.fold((0, 0), |(packets, longest), length| (packets + 1, longest.max(length)));
        assert!(packets <= 200, "one datagram made {packets}, seed {seed}, round {rounds}");
        assert!(longest + SEAL_OVERHEAD <= DATAGRAM_MAX, "an answer of {longest} bytes, seed {seed}, round {rounds}");
    }
    println!("{rounds} datagrams");
}

#[test]
fn every_reason_to_drop_has_its_own_label() {
    let mut scene = Scene::new(1);
    let good = scene.insider.seal(b"\x07nonsense").expect("seals");
    let mut forged = good.clone();
    *forged.last_mut().expect("bytes") ^= 1;
    let mut versioned = good.clone();
    versioned[0] = 9;
    let strange = scene.stranger.seal(b"x").expect("seals");
    let now = Duration::from_secs(1);
    let told: Vec<&str> = [&forged[..], &versioned, &strange, &good[..10], &[0; DATAGRAM_MAX + 1], &good, &good]
        .iter()
        .map(|datagram| scene.receive(datagram, now).expect_err("dropped").label())
        .collect();
    let labels = ["forged", "version", "unknown_key", "short", "oversized", "malformed", "replayed"];
    assert_eq!(told, labels);
}
