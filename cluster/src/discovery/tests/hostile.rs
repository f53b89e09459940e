//! Whatever bytes come: no panic, no unbounded growth. Runs for `STARLING_FUZZ_SECONDS`, else for a moment.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use starling_ids::{Incarnation, NodeId};

use super::pure::{endpoint, members, name, record, worker};
use crate::{
    discovery::*,
    membership::{Rumour, place},
};

fn engine() -> DirectoryEngine {
    let own = record(NodeId::new("me").expect("name"), 1, 1, 1);
    let mut engine = DirectoryEngine::new(std::sync::Arc::new(own), 1, Duration::ZERO);
    engine.set_members(&members((0..8).map(|at| (name(at), 1))), Duration::ZERO);
    engine
}

/// Gives some bytes to everything that reads bytes of others.
fn feed(engine: &mut DirectoryEngine, bytes: &[u8], now: Duration) {
    if let Ok(patch) = rmp_serde::from_slice::<Patch>(bytes) {
        // As part of an answer to each question under way.
        let told = Told::Patches { served: u32::MAX, patches: vec![patch; 3] };
        (0..40).for_each(|ticket| engine.told(ticket, Some(told.clone()), now));
    }
    if let Ok(told) = rmp_serde::from_slice::<Told>(bytes) {
        (0..40).for_each(|ticket| engine.told(ticket, Some(told.clone()), now));
    }
    if let Ok(ask) = rmp_serde::from_slice::<Ask>(bytes)
        && ask.is_bounded()
    {
        let told = engine.answer(&name(3), &ask, now);
        assert!(told.is_bounded());
        let length = rmp_serde::to_vec(&told).expect("encodes").len();
        assert!(length <= RECORD_MAX.max(2 * PATCHES_BYTES_MAX), "{length} bytes");
    }
    if let Ok(rumour) = rmp_serde::from_slice::<Rumour>(bytes) {
        engine.hear(&rumour, now);
    }
    if let Ok(record) = rmp_serde::from_slice::<NodeRecord>(bytes) {
        let whole = Patch::whole(&record, record.version / 2);
        let _fits_or_not = whole.apply(&record);
    }
    let asks = engine.take_effects().iter().filter(|effect| matches!(effect, DirectoryEffect::Ask { .. })).count();
    assert!(asks < 200, "{asks} questions from one message");
    let core = engine.core();
    assert!(core.others() <= 8 && core.tally().len() <= 9, "nobody joins by word of mouth");
    for view in core.snapshot().nodes {
        let ordered = view.record.instances.windows(2).all(|pair| pair[0].endpoint < pair[1].endpoint);
        assert!(ordered, "{:?}", view.record);
        assert!(rmp_serde::to_vec(&*view.record).expect("encodes").len() <= RECORD_MAX);
    }
}

/// Well formed messages to start from.
fn corpus() -> Vec<Vec<u8>> {
    let full = record(name(3), 1, 9, 4);
    let newer = record(name(3), 1, 12, 2);
    let (incarnation, place) = (Incarnation(1), place(full.address));
    let entry = |at, version| Entry { node: name(at), stamp: Stamp { incarnation, place, version, whole: true } };
    let want = Want { node: NodeId::new("me").expect("name"), incarnation: Incarnation(1), since: 0 };
    let changes = vec![SmallChange::Lifecycle(endpoint_hash(&endpoint(1)), Lifecycle::Draining)];
    let rumour = Rumour {
        node: name(3),
        incarnation: Incarnation(1),
        place,
        version: 10,
        delta: Some(RecordDelta { since: 9, changes }),
        teller: None,
    };
    let bytes = |value: Result<Vec<u8>, rmp_serde::encode::Error>| value.expect("encodes");
    vec![
        bytes(rmp_serde::to_vec(&Patch::whole(&full, 0))),
        bytes(rmp_serde::to_vec(&Patch::vital(&full))),
        bytes(rmp_serde::to_vec(&Patch::whole(&newer, 9))),
        bytes(rmp_serde::to_vec(&full)),
        bytes(rmp_serde::to_vec(&rumour)),
        bytes(rmp_serde::to_vec(&Ask::Pull { vital: false, wants: vec![want; 3] })),
        bytes(rmp_serde::to_vec(&Ask::List((0..=255).collect(), Some(name(4))))),
        bytes(rmp_serde::to_vec(&Ask::Hint(vec![entry(2, 7), entry(99, 1)]))),
        bytes(rmp_serde::to_vec(&Told::Sums(vec![1; BUCKETS]))),
        bytes(rmp_serde::to_vec(&Told::Entries(vec![entry(1, 2), entry(6, u64::MAX)], true))),
        bytes(rmp_serde::to_vec(&Told::Patches { served: 2, patches: vec![Patch::whole(&full, 0)] })),
    ]
}

#[test]
fn fuzz_records_digests_and_questions_never_panic_nor_grow_without_bound() {
    let seconds = std::env::var_os("STARLING_FUZZ_SECONDS").and_then(|text| text.to_str()?.parse::<u64>().ok());
    let (end, seed) = (Instant::now() + Duration::from_secs(seconds.unwrap_or(1)), rand::random::<u64>());
    println!("seed {seed}");
    let (mut rng, corpus, mut rounds) = (StdRng::seed_from_u64(seed), corpus(), 0_u64);
    let mut engine = engine();
    while Instant::now() < end {
        rounds += 1;
        if rounds.is_multiple_of(500) {
            engine = self::engine();
        }
        let mut bytes = corpus[rng.random_range(0..corpus.len())].clone();
        for _ in 0..rng.random_range(0..6) {
            let at = rng.random_range(0..bytes.len().max(1));
            match rng.random_range(0..5) {
                0 if !bytes.is_empty() => drop(bytes.remove(at.min(bytes.len() - 1))),
                1 => bytes.insert(at.min(bytes.len()), rng.random()),
                2 => bytes.truncate(at),
                3 => {
                    let other = &corpus[rng.random_range(0..corpus.len())];
                    let from = rng.random_range(0..other.len());
                    let to = (from + rng.random_range(0..40)).min(other.len());
                    bytes.extend_from_slice(&other[from..to]);
                }
                _ => {
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = rng.random();
                    }
                }
            }
        }
        let now = Duration::from_millis(rounds);
        engine.tick(now);
        feed(&mut engine, &bytes, now);
    }
    println!("{rounds} messages");
}

proptest! {
    #[test]
    fn noise_is_refused_and_never_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
        feed(&mut engine(), &noise, Duration::ZERO);
    }
}

#[test]
fn what_is_over_a_bound_is_refused_unread() {
    let want = Want { node: name(1), incarnation: Incarnation(1), since: 0 };
    assert!(!Ask::Pull { vital: true, wants: vec![want; WANTS_MAX + 1] }.is_bounded());
    assert!(!Ask::List(vec![0; BUCKETS + 1], None).is_bounded());
    let stamp = Stamp { incarnation: Incarnation(1), place: 0, version: 1, whole: true };
    let entries = vec![Entry { node: name(1), stamp }; ENTRIES_MAX + 1];
    assert!(!Ask::Hint(entries.clone()).is_bounded() && !Told::Entries(entries, false).is_bounded());
    assert!(!Told::Sums(vec![0; 3]).is_bounded());
    // A patch with two parts for one endpoint, or with another count than it says, is no record.
    let mut twice = record(name(1), 1, 3, 1);
    twice.instances = vec![worker(0, Lifecycle::Serving), worker(0, Lifecycle::Draining)];
    assert_eq!(Patch::whole(&twice, 0).apply(&twice), Err(PatchError::Malformed));
}
