//! The index against a naive one, and the faults it must not have.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use starling_ids::NodeId;

use super::*;
use crate::{
    events::{EventBatch, EventCursor},
    hash::{HashSeed, block_hashes},
};

fn worker(index: u16) -> WorkerId {
    WorkerId { node: NodeId::new("w").expect("name"), index }
}

fn chain(id: u32, blocks: usize) -> Vec<BlockHash> {
    block_hashes(HashSeed(u128::from(id)), &vec![id; blocks * 4], 4)
}

fn stored(blocks: &[BlockHash]) -> KvEvent {
    KvEvent::Stored { parent: None, blocks: blocks.to_vec() }
}

fn apply(index: &PrefixIndex, events: &[KvEvent]) {
    for event in events {
        index.apply(&worker(0), LIFE, event).expect("known");
    }
}

const LIFE: Incarnation = Incarnation(3);

fn index_of(workers: u16) -> PrefixIndex {
    let index = PrefixIndex::new(IndexLimits::default());
    (0..workers).for_each(|w| index.add_worker(worker(w), LIFE).expect("added"));
    index
}

#[test]
fn idx_01_late_events_of_a_removed_worker_change_nothing() {
    let index = index_of(1);
    let blocks = chain(1, 3);
    index.apply(&worker(0), LIFE, &stored(&blocks)).expect("known");
    assert!(index.remove_worker(&worker(0)));
    assert!(!index.remove_worker(&worker(0)));
    assert!(index.matches(&blocks, 8).is_empty());
    assert_eq!(index.apply(&worker(0), LIFE, &stored(&blocks)), Err(IndexError::UnknownWorker(worker(0))));
    let next = Incarnation(4);
    index.add_worker(worker(0), next).expect("back");
    let stale = IndexError::StaleIncarnation { worker: worker(0), given: LIFE, current: next };
    assert_eq!(index.apply(&worker(0), LIFE, &stored(&blocks)), Err(stale.clone()));
    assert_eq!(index.add_worker(worker(0), LIFE), Err(stale));
    assert!(matches!(index.reset(&worker(0), Incarnation(5), &[]), Err(IndexError::NewIncarnation { .. })));
    assert_eq!((index.memberships(), index.matches(&blocks, 8).len()), (0, 0));
}

#[test]
fn idx_03_cleared_empties_and_a_lost_one_shows_in_the_digest() {
    let index = index_of(2);
    let blocks = chain(1, 3);
    for w in 0..2 {
        index.apply(&worker(w), LIFE, &stored(&blocks)).expect("known");
    }
    assert_eq!(index.apply(&worker(0), LIFE, &KvEvent::Cleared).expect("known").removed, 3);
    assert_eq!(index.depth(&worker(0), &blocks), 0);
    // Worker 1 cleared too, its event was lost: its heartbeat carries the digest of nothing.
    assert_ne!(index.digest(&worker(1)), SetDigest::default());
    index.reset(&worker(1), LIFE, &[]).expect("known");
    assert_eq!(index.digest(&worker(1)), SetDigest::default());
    assert!(index.matches(&blocks, 8).is_empty());
}

#[test]
fn idx_05_a_gap_costs_one_resync_and_numbers_stay_the_workers_own() {
    let events: Vec<KvEvent> =
        (0..10).map(|n| if n == 6 { KvEvent::Removed { blocks: chain(2, 1) } } else { stored(&chain(n, 2)) }).collect();
    let batch =
        |n: usize| EventBatch { worker: worker(0), incarnation: LIFE, seq: n as u64, events: vec![events[n].clone()] };
    let (index, truth) = (index_of(1), index_of(1));
    apply(&truth, &events);
    let mut cursor = EventCursor::new(LIFE);
    let mut resyncs = 0;
    // 4 is lost, 6 comes twice, 8 and 7 are swapped.
    for n in [0, 1, 2, 3, 5, 6, 6, 8, 7, 9] {
        let ready = cursor.accept(batch(n)).expect("its life");
        resyncs += usize::from(ready.resync);
        apply(&index, &ready.events);
    }
    assert_eq!((resyncs, cursor.next(), cursor.has_gap()), (1, 4, true));
    // The worker answers as of its event 8; what came after that is held.
    let then = index_of(1);
    apply(&then, &events[..8]);
    let inventory: Vec<_> = then.held(&worker(0), Cache::default(), None).into_iter().map(|h| (None, h)).collect();
    let ready = cursor.resynced(LIFE, 8).expect("its life").expect("news");
    index.reset(&worker(0), LIFE, &inventory).expect("known");
    apply(&index, &ready.events);
    assert_eq!((cursor.next(), cursor.has_gap(), ready.resync), (10, false, false));
    assert_eq!(index.digest(&worker(0)), truth.digest(&worker(0)));
    assert_eq!(cursor.resynced(LIFE, 8).expect("its life"), None, "an older inventory is not applied");
    assert!(cursor.accept(EventBatch { incarnation: Incarnation(2), ..batch(1) }).is_err());
}

#[test]
fn idx_06_memory_is_flat_over_joins_and_leaves() {
    let index = index_of(0);
    let mut peak = 0;
    for round in 0..400u64 {
        index.add_worker(worker(0), Incarnation(round)).expect("added");
        index.apply(&worker(0), Incarnation(round), &stored(&chain(round as u32, 100))).expect("known");
        peak = peak.max(index.memory_bytes());
        index.remove_worker(&worker(0));
    }
    assert_eq!((index.memberships(), index.workers()), (0, 0));
    assert!(peak < 60_000, "{peak}");
}

#[test]
fn idx_08_one_event_with_a_chain_matches_to_its_end() {
    let index = index_of(1);
    let blocks = chain(1, 3);
    index.apply(&worker(0), LIFE, &stored(&blocks)).expect("known");
    assert_eq!(index.matches(&blocks, 8)[0].depth, 3);
    // A hole in the middle cuts what hangs below, and healing it brings it back.
    index.apply(&worker(0), LIFE, &KvEvent::Removed { blocks: vec![blocks[1]] }).expect("known");
    assert_eq!(index.matches(&blocks, 8)[0].depth, 1);
    index.apply(&worker(0), LIFE, &stored(&blocks[1..2])).expect("known");
    assert_eq!(index.depth(&worker(0), &blocks), 3);
}

#[test]
fn idx_12_a_full_index_drops_the_oldest_and_keeps_what_is_used() {
    let limit = 2_000;
    let index = PrefixIndex::new(IndexLimits { memberships_max: limit, shards: 1 });
    index.add_worker(worker(0), LIFE).expect("added");
    index.add_worker(worker(1), LIFE).expect("added");
    let quiet = chain(1, 10);
    index.apply(&worker(1), LIFE, &stored(&quiet)).expect("known");
    let hot: Vec<Vec<BlockHash>> = (10..30).map(|id| chain(id, 5)).collect();
    apply(&index, &hot.iter().map(|blocks| stored(blocks)).collect::<Vec<_>>());
    for id in 0..40_000 {
        index.apply(&worker(0), LIFE, &stored(&chain(1_000 + id, 1))).expect("known");
        assert!(index.memberships() <= limit);
        assert_eq!(index.matches(&hot[id as usize % hot.len()], 1)[0].depth, 5, "hot at {id}");
    }
    assert_eq!(index.depth(&worker(0), &chain(1_000, 1)), 0, "the oldest left");
    assert_eq!(index.depth(&worker(0), &chain(40_999, 1)), 1, "the newest is there");
    assert_eq!(index.depth(&worker(1), &quiet), 10, "the small one pays nothing");
    assert!(index.memory_bytes() < 100 * limit + 50_000, "{}", index.memory_bytes());
}

#[test]
fn a_pair_takes_less_than_100_bytes_and_gives_them_back() {
    let index = index_of(3);
    let mut worst = 0;
    // Unshared blocks are the costliest; sizes right after the table has doubled are the worst.
    for id in 0..60_000u32 {
        index
            .apply(
                &worker((id % 3) as u16),
                LIFE,
                &stored(&[BlockHash(u128::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))]),
            )
            .expect("known");
        if id > 10_000 && (id % 1_000 == 0 || id.next_power_of_two() * 7 / 8 == id) {
            worst = worst.max(index.memory_bytes() / index.memberships());
        }
    }
    assert!(worst < 100, "{worst} bytes");
    for w in 0..3 {
        index.apply(&worker(w), LIFE, &KvEvent::Cleared).expect("known");
    }
    assert!(index.memory_bytes() < 100_000, "{}", index.memory_bytes());
}

#[test]
fn hundreds_of_workers_share_a_block() {
    let index = index_of(300);
    let blocks = chain(1, 4);
    for w in 0..300 {
        index.apply(&worker(w), LIFE, &stored(&blocks[..1 + usize::from(w) % 4])).expect("known");
    }
    let all = index.matches(&blocks, usize::MAX);
    assert_eq!(all.len(), 300);
    assert!(all.iter().all(|found| found.depth == 1 + usize::from(found.worker.index) % 4));
    assert_eq!(index.matches(&blocks, 2).iter().map(|m| m.worker.index).collect::<Vec<_>>(), [3, 7]);
    (0..298).for_each(|w| assert!(index.remove_worker(&worker(w))));
    assert_eq!(index.matches(&blocks, 9).iter().map(|m| m.depth).collect::<Vec<_>>(), [4, 3]);
}

#[derive(Debug, Clone)]
enum Op {
    Store(u16, usize, usize),
    Remove(u16, Vec<usize>),
    Clear(u16),
    Leave(u16),
    Join(u16),
    Reset(u16, Vec<usize>),
}

fn op() -> impl Strategy<Value = Op> {
    let w = 0u16..9;
    let some = prop::collection::vec(0usize..24, 0..8);
    prop_oneof![
        8 => (w.clone(), 0usize..24, 1usize..8).prop_map(|(w, at, n)| Op::Store(w, at, n)),
        4 => (w.clone(), some.clone()).prop_map(|(w, blocks)| Op::Remove(w, blocks)),
        1 => w.clone().prop_map(Op::Clear),
        1 => w.clone().prop_map(Op::Leave),
        2 => w.clone().prop_map(Op::Join),
        1 => (w, some).prop_map(|(w, blocks)| Op::Reset(w, blocks)),
    ]
}

proptest! {
    /// Two chains with a common head, cut and healed in any way: always the naive answer.
    #[test]
    fn equals_a_naive_index(ops in prop::collection::vec(op(), 1..80)) {
        let trunk = chain(1, 12);
        let other = block_hashes(HashSeed(1), &[[1u32; 16].as_slice(), &[2; 32]].concat(), 4);
        prop_assert_eq!(&trunk[..4], &other[..4]);
        let all = [trunk.clone(), other.clone()].concat();
        let index = index_of(0);
        let mut naive: BTreeMap<u16, BTreeSet<BlockHash>> = BTreeMap::new();
        for op in ops {
            let pick = |blocks: &[usize]| blocks.iter().map(|at| all[*at]).collect::<Vec<_>>();
            let (w, event) = match op {
                // An event is one chain; it does not always say what it follows.
                Op::Store(w, at, n) => {
                    let end = (at + n).min(if at < 12 { 12 } else { 24 });
                    let parent = if n % 2 == 0 && at % 12 > 0 { Some(all[at - 1]) } else { None };
                    (w, KvEvent::Stored { parent, blocks: all[at..end].to_vec() })
                }
                Op::Remove(w, blocks) => (w, KvEvent::Removed { blocks: pick(&blocks) }),
                Op::Clear(w) => (w, KvEvent::Cleared),
                Op::Leave(w) => {
                    prop_assert_eq!(index.remove_worker(&worker(w)), naive.remove(&w).is_some());
                    continue;
                }
                Op::Join(w) => {
                    index.add_worker(worker(w), LIFE).expect("same life");
                    naive.entry(w).or_default();
                    continue;
                }
                Op::Reset(w, blocks) => {
                    let inventory: Vec<_> = pick(&blocks).into_iter().map(|hash| (None, hash)).collect();
                    prop_assert_eq!(index.reset(&worker(w), LIFE, &inventory).is_ok(), naive.contains_key(&w));
                    naive.entry(w).and_modify(|set| *set = pick(&blocks).into_iter().collect());
                    continue;
                }
            };
            prop_assert_eq!(index.apply(&worker(w), LIFE, &event).is_ok(), naive.contains_key(&w));
            index.check();
            let Some(set) = naive.get_mut(&w) else { continue };
            match event {
                KvEvent::Stored { blocks, .. } => set.extend(blocks),
                KvEvent::Removed { blocks } => set.retain(|hash| !blocks.contains(hash)),
                KvEvent::Cleared => set.clear(),
                other => panic!("{other:?} without a lower tier"),
            }
        }
        for chain in [&trunk, &other] {
            let mut wanted: Vec<(usize, u16)> = naive
                .iter()
                .map(|(w, set)| (chain.iter().take_while(|hash| set.contains(hash)).count(), *w))
                .filter(|(depth, _)| *depth > 0)
                .collect();
            wanted.sort_by_key(|(depth, w)| (std::cmp::Reverse(*depth), *w));
            let got: Vec<(usize, u16)> = index.matches(chain, 99).iter().map(|m| (m.depth, m.worker.index)).collect();
            prop_assert_eq!(got, wanted);
        }
        prop_assert_eq!(index.memberships(), naive.values().map(BTreeSet::len).sum::<usize>());
        for (w, set) in &naive {
            let mut digest = SetDigest::default();
            set.iter().for_each(|hash| digest.toggle(*hash));
            prop_assert_eq!((index.blocks(&worker(*w)), index.digest(&worker(*w))), (set.len(), digest));
        }
    }

    /// Batches lost, repeated and out of order, inventories taken when asked: the reader ends with the worker's own set.
    #[test]
    fn events_in_any_state_of_disorder_end_in_the_truth(
        steps in prop::collection::vec((0usize..24, any::<bool>()), 1..40),
        disorder in prop::collection::vec((0usize..40, 0u8..3), 0..20),
    ) {
        let all = chain(1, 24);
        let events: Vec<KvEvent> = steps
            .iter()
            .map(|(at, add)| if *add { stored(&all[*at..=*at]) } else { KvEvent::Removed { blocks: vec![all[*at]] } })
            .collect();
        let mut order: Vec<usize> = (0..events.len()).collect();
        for (at, kind) in disorder {
            let at = at % order.len().max(1);
            match kind {
                0 if order.len() > 1 => {
                    order.remove(at);
                }
                1 => order.insert(at, order[at]),
                _ => order.swap(at, 0),
            }
        }
        // The last one is never lost for ever: the heartbeat tells its number.
        order.push(events.len() - 1);
        let truth = index_of(1);
        apply(&truth, &events);
        let index = index_of(1);
        let mut cursor = EventCursor::new(LIFE);
        for n in order {
            let batch = EventBatch { worker: worker(0), incarnation: LIFE, seq: n as u64, events: vec![events[n].clone()] };
            let ready = cursor.accept(batch).expect("its life");
            apply(&index, &ready.events);
        }
        if cursor.has_gap() {
            let held = truth.held(&worker(0), Cache::default(), None);
            let inventory: Vec<_> = held.into_iter().map(|h| (None, h)).collect();
            let ready = cursor.resynced(LIFE, events.len() as u64).expect("its life").expect("news");
            index.reset(&worker(0), LIFE, &inventory).expect("known");
            prop_assert!(ready.events.is_empty() && !cursor.has_gap());
        }
        prop_assert_eq!(cursor.next(), events.len() as u64);
        prop_assert_eq!(index.digest(&worker(0)), truth.digest(&worker(0)));
    }
}

fn life(index: &PrefixIndex, w: u16, cache: Cache, event: &KvEvent) -> Applied {
    index.apply_in(&worker(w), LIFE, cache, event).expect("known")
}

#[test]
fn tiers_and_ranks_are_counted_apart() {
    let index = index_of(2);
    let blocks = chain(1, 10);
    let at = |rank, tier| Cache { rank, tier };
    let stored = |range: std::ops::Range<usize>| KvEvent::Stored {
        parent: range.start.checked_sub(1).map(|before| blocks[before]),
        blocks: blocks[range].to_vec(),
    };
    life(&index, 0, at(0, Tier::Device), &stored(0..4));
    life(&index, 0, at(0, Tier::Host), &stored(2..7));
    life(&index, 0, at(0, Tier::Disk), &stored(7..9));
    life(&index, 0, at(3, Tier::Device), &stored(0..2));
    life(&index, 1, at(0, Tier::Host), &stored(0..5));
    let seen = |found: &Match| (found.worker.index, found.rank, found.depth, found.reach, found.host, found.disk);
    let all = |index: &PrefixIndex| index.matches(&blocks, 9).iter().map(seen).collect::<Vec<_>>();
    assert_eq!(all(&index), [(0, 0, 4, 9, 3, 2), (0, 3, 2, 2, 0, 0), (1, 0, 0, 5, 5, 0)]);
    assert_eq!(index.memberships(), 4 + 5 + 2 + 2 + 5);
    // A block that leaves the device and stays on the host is reached still.
    life(&index, 0, at(0, Tier::Device), &KvEvent::Removed { blocks: blocks[2..4].to_vec() });
    assert_eq!(all(&index)[0], (0, 0, 2, 9, 5, 2));
    life(&index, 0, at(0, Tier::Host), &KvEvent::Cleared);
    assert_eq!(all(&index)[0], (0, 0, 2, 2, 0, 0));
    assert_eq!(index.held(&worker(0), at(0, Tier::Disk), None), blocks[7..9]);
    index.check();
    assert!(index.remove_worker(&worker(0)));
    assert_eq!(all(&index), [(1, 0, 0, 5, 5, 0)]);
    index.check();
}

#[test]
fn idx_03_digests_name_the_bucket_that_differs_and_only_it_is_repaired() {
    let (index, truth) = (index_of(1), index_of(1));
    let blocks = chain(1, 300);
    for one in [&index, &truth] {
        life(one, 0, Cache::default(), &stored(&blocks));
    }
    // The index missed one removal and one store.
    life(&truth, 0, Cache::default(), &KvEvent::Removed { blocks: vec![blocks[17]] });
    life(&truth, 0, Cache::default(), &stored(&chain(2, 1)));
    let (ours, theirs) = (index.digests(&worker(0), Cache::default()), truth.digests(&worker(0), Cache::default()));
    let buckets: Vec<usize> = ours.differing(&theirs).collect();
    assert!((1..=2).contains(&buckets.len()), "{buckets:?}");
    for bucket in buckets {
        let right = truth.held(&worker(0), Cache::default(), Some(bucket));
        let changed =
            index.repair(&worker(0), LIFE, Cache::default(), Bucket { bucket, blocks: &right }).expect("known");
        assert!(changed.added + changed.removed <= 2);
    }
    assert_eq!(index.digests(&worker(0), Cache::default()), theirs);
    assert_eq!(index.depth(&worker(0), &blocks), 17);
    index.check();
}

/// Many workers, pages moved and swept on the way: still the naive answer, and memory follows what is held.
#[test]
fn churn_stays_exact_and_gives_memory_back() {
    let index = PrefixIndex::new(IndexLimits { memberships_max: 1_000_000, shards: 2 });
    let mut naive: Vec<Vec<(u32, usize)>> = vec![Vec::new(); 70];
    let mut random = 7u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    (0..70).for_each(|w| index.add_worker(worker(w), LIFE).expect("added"));
    for round in 0..3_000 {
        let w = next(70) as u16;
        let held = &mut naive[usize::from(w)];
        match next(10) {
            0..6 => {
                let (id, blocks) = (next(400) as u32, 1 + next(90) as usize);
                held.retain(|(other, old)| *other != id || *old > blocks);
                if !held.iter().any(|(other, _)| *other == id) {
                    held.push((id, blocks));
                }
                life(&index, w, Cache::default(), &stored(&chain(id, blocks)));
            }
            6..9 if !held.is_empty() => {
                let at = next(held.len() as u64) as usize;
                let (id, blocks) = held[at];
                let keep = next(blocks as u64) as usize;
                let mut gone = chain(id, blocks).split_off(keep);
                if round % 2 == 0 {
                    gone.reverse();
                }
                life(&index, w, Cache::default(), &KvEvent::Removed { blocks: gone });
                held[at].1 = keep;
                held.retain(|(_, blocks)| *blocks > 0);
            }
            _ if round % 7 == 0 => {
                held.clear();
                index.remove_worker(&worker(w));
                index.add_worker(worker(w), LIFE).expect("back");
            }
            _ => {}
        }
        if round % 500 == 499 {
            index.check();
        }
    }
    for id in 0..400 {
        let blocks = chain(id, 90);
        let depth =
            |held: &Vec<(u32, usize)>| held.iter().find(|(other, _)| *other == id).map_or(0, |(_, blocks)| *blocks);
        let mut wanted: Vec<(u16, usize)> =
            naive.iter().enumerate().map(|(w, held)| (w as u16, depth(held))).filter(|(_, depth)| *depth > 0).collect();
        let mut got: Vec<(u16, usize)> = index.matches(&blocks, 99).iter().map(|m| (m.worker.index, m.depth)).collect();
        wanted.sort_unstable();
        got.sort_unstable();
        assert_eq!(got, wanted, "chain {id}");
    }
    let full = index.memory_bytes();
    (1..70).for_each(|w| assert!(index.remove_worker(&worker(w))));
    for _ in 0..100 {
        index.tidy();
    }
    index.check();
    assert!(index.memory_bytes() < full / 4, "{} of {full}", index.memory_bytes());
}

/// Readers beside writers see, for each worker, a depth that it had at some moment: chains here only ever have whole quarters.
#[test]
fn readers_beside_writers_see_only_what_was() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let index = PrefixIndex::new(IndexLimits { memberships_max: 1_000_000, shards: 2 });
    (0..8).for_each(|w| index.add_worker(worker(w), LIFE).expect("added"));
    // Short enough for one section of writing, so that an event is seen whole or not at all.
    let chains: Vec<Vec<BlockHash>> = (0..40).map(|id| chain(id, 16)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2u16)
            .map(|half| {
                let (index, chains) = (&index, &chains);
                scope.spawn(move || {
                    for round in 0..400usize {
                        let w = half + 2 * (round % 4) as u16;
                        let blocks = &chains[round % chains.len()];
                        life(index, w, Cache::default(), &stored(blocks));
                        let keep = 4 * (round % 4);
                        let gone: Vec<BlockHash> = blocks[keep..].iter().rev().copied().collect();
                        life(index, w, Cache::default(), &KvEvent::Removed { blocks: gone });
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let mut overlaps = Vec::new();
            let mut looks = 0usize;
            while !done.load(Ordering::Relaxed) || looks < 100 {
                for blocks in &chains {
                    index.overlaps(blocks, &mut overlaps);
                    assert!(overlaps.len() <= 8);
                    assert!(overlaps.iter().all(|found| found.device % 4 == 0 && found.device > 0), "{overlaps:?}");
                    looks += 1;
                }
            }
        });
        writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
        done.store(true, Ordering::Relaxed);
        reader.join().expect("a reader");
    });
    index.check();
}
