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
    assert!(peak < 40_000, "{peak}");
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
