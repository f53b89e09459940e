//! The pool against a reckoning of its own, under every order of use.

use proptest::prelude::*;

use super::*;
use crate::hash::{HashSeed, block_hashes};

const BLOCK: usize = 4;

/// Runs one sequence through the pool as a scheduler would; `None` when blocks ran out.
fn run(pool: &mut BlockPool, tokens: &[TokenId]) -> Option<(usize, Vec<BlockSlot>)> {
    let hashes = block_hashes(HashSeed(1), tokens, BLOCK);
    let mut slots = pool.match_prefix(&hashes, tokens);
    let matched = slots.len();
    slots.iter().for_each(|slot| pool.pin(*slot));
    for (index, hash) in hashes.iter().enumerate().skip(matched) {
        let Some(slot) = pool.allocate() else {
            pool.release_all(&slots);
            return None;
        };
        let parent = index.checked_sub(1).map(|before| slots[before]);
        let key = BlockKey { hash: *hash, parent, tokens: &tokens[index * BLOCK..(index + 1) * BLOCK] };
        slots.push(match pool.fill(slot, key) {
            Filled::Shared(other) => other,
            Filled::Stored | Filled::Private => slot,
        });
    }
    Some((matched, slots))
}

#[test]
fn a_prefix_is_shared_and_counted_per_reader() {
    let mut pool = BlockPool::new(8, BLOCK);
    let tokens: Vec<TokenId> = (0..12).collect();
    let (cold, first) = run(&mut pool, &tokens).expect("room");
    let (warm, second) = run(&mut pool, &tokens).expect("room");
    assert_eq!((cold, warm), (0, 3));
    assert_eq!(first, second);
    assert_eq!(pool.state(first[0]), BlockState::Pinned(2));
    pool.release_all(&first);
    pool.release_all(&second);
    assert_eq!(pool.counts(), BlockCounts { free: 5, ready: 3, ..BlockCounts::default() });
    pool.check().expect("whole");
}

#[test]
fn one_chain_is_one_event_and_its_tail_leaves_first() {
    let mut pool = BlockPool::new(3, BLOCK);
    let tokens: Vec<TokenId> = (0..12).collect();
    let hashes = block_hashes(HashSeed(1), &tokens, BLOCK);
    let (_, slots) = run(&mut pool, &tokens).expect("room");
    pool.release_all(&slots);
    assert_eq!(pool.take_events(), [KvEvent::Stored { parent: None, blocks: hashes.clone() }]);
    let slot = pool.allocate().expect("evicts");
    assert_eq!(slot, slots[2]);
    assert_eq!(pool.take_events(), [KvEvent::Removed { blocks: vec![hashes[2]] }]);
    pool.release(slot);
    assert_eq!(pool.match_prefix(&hashes, &tokens).len(), 2);
    pool.clear();
    assert_eq!(pool.take_events(), [KvEvent::Cleared]);
    assert_eq!(pool.counts().free, 3);
}

#[test]
fn what_made_room_is_noted_with_its_content_when_asked_for() {
    let tokens: Vec<TokenId> = (0..8).collect();
    let hashes = block_hashes(HashSeed(1), &tokens, BLOCK);
    let mut pool = BlockPool::new(2, BLOCK);
    for noted in [false, true] {
        let (_, slots) = run(&mut pool, &tokens).expect("room");
        pool.release_all(&slots);
        let slot = pool.allocate().expect("evicts");
        let right = Evicted { slot, hash: hashes[1], parent: Some(hashes[0]), tokens: tokens[4..].into() };
        assert_eq!(pool.take_evicted(), if noted { vec![right] } else { vec![] });
        pool.release(slot);
        // What is cleared or not to be trusted goes nowhere.
        pool.clear();
        let (_, slots) = run(&mut pool, &tokens).expect("room");
        pool.discard_all(&slots);
        assert!(pool.take_evicted().is_empty());
        pool.note_evicted();
    }
    pool.check().expect("whole");
}

/// Uses a prompt of its own, of two blocks, and gives it back.
fn once(pool: &mut BlockPool, number: u32) {
    let tokens: Vec<TokenId> = (0..8).map(|at| 1_000 + number * 8 + at).collect();
    let (_, slots) = run(pool, &tokens).expect("room");
    pool.release_all(&slots);
}

#[test]
fn what_comes_back_outlives_a_flood_of_what_does_not_but_not_for_ever() {
    let tokens: Vec<TokenId> = (0..8).collect();
    let hashes = block_hashes(HashSeed(1), &tokens, BLOCK);
    for (readers, survives) in [(0, 0), (1, 1), (3, 2), (7, 3), (1_000, 3)] {
        let mut pool = BlockPool::new(16, BLOCK);
        for _ in 0..=readers {
            let (_, slots) = run(&mut pool, &tokens).expect("room");
            pool.release_all(&slots);
        }
        // A turn is as many blocks as the pool has: eight such prompts. The first turn fills what is free.
        let mut turns = 0;
        for number in 0..80 {
            once(&mut pool, number);
            pool.check().expect("whole");
            if pool.match_prefix(&hashes, &tokens).len() < 2 {
                break;
            }
            turns = (number + 1) / 8;
        }
        assert_eq!(turns, survives, "after {readers} more readers");
    }
}

#[test]
fn a_collision_costs_a_miss() {
    let mut pool = BlockPool::new(4, BLOCK);
    let hash = BlockHash(7);
    let slot = pool.allocate().expect("free");
    assert_eq!(pool.fill(slot, BlockKey { hash, parent: None, tokens: &[1, 2, 3, 4] }), Filled::Stored);
    assert_eq!(pool.find(BlockKey { hash, parent: None, tokens: &[1, 2, 3, 5] }), None);
    assert_eq!(pool.find(BlockKey { hash, parent: Some(slot), tokens: &[1, 2, 3, 4] }), None);
    let other = pool.allocate().expect("free");
    assert_eq!(pool.fill(other, BlockKey { hash, parent: None, tokens: &[9, 9, 9, 9] }), Filled::Private);
    assert_eq!(pool.state(other), BlockState::Filling);
    pool.release(other);
    pool.release(slot);
    pool.check().expect("whole");
}

#[test]
fn an_adopted_block_needs_its_parent_and_is_taken_once() {
    let mut pool = BlockPool::new(2, BLOCK);
    let (first, second) = (BlockHash(1), BlockHash(2));
    assert_eq!(pool.adopt(second, Some(first), &[0; 4]), Err(Refused::Orphan(first)));
    assert_eq!(pool.adopt(first, None, &[0; 3]), Err(Refused::Length { tokens: 3, block_tokens: BLOCK }));
    assert!(matches!(pool.adopt(first, None, &[0; 4]), Ok(Adopted::Write(_))));
    assert_eq!(pool.adopt(first, None, &[0; 4]), Ok(Adopted::Here));
    assert_eq!(pool.adopt(first, None, &[1; 4]), Err(Refused::Collision(first)));
    assert!(matches!(pool.adopt(second, Some(first), &[0; 4]), Ok(Adopted::Write(_))));
    assert_eq!(pool.adopt(BlockHash(3), Some(second), &[0; 4]), Err(Refused::NoRoom));
    assert_eq!(pool.inventory(), [(None, first), (Some(first), second)]);
    pool.check().expect("whole");
}

#[test]
fn discarded_blocks_are_not_kept() {
    let mut pool = BlockPool::new(4, BLOCK);
    let (_, slots) = run(&mut pool, &[1; 8]).expect("room");
    let (_, shared) = run(&mut pool, &[1; 4]).expect("room");
    pool.discard_all(&slots);
    assert_eq!(pool.counts(), BlockCounts { free: 3, pinned: 1, ..BlockCounts::default() });
    pool.release_all(&shared);
    pool.check().expect("whole");
}

#[test]
fn what_threads_give_back_comes_once() {
    let bin = ReturnBin::default();
    let mut back = Vec::new();
    std::thread::scope(|scope| {
        for thread in 0..3_u32 {
            let bin = &bin;
            scope.spawn(move || (0..20).for_each(|at| bin.push(&[BlockSlot(thread * 20 + at)], || ())));
        }
        while back.len() < 60 {
            back.extend(bin.take().into_iter().map(|slot| slot.0));
            std::thread::yield_now();
        }
    });
    back.sort_unstable();
    assert!(back.into_iter().eq(0..60) && bin.take().is_empty());
    bin.push(&[], || panic!("nobody is woken for nothing"));
}

proptest! {
    /// Sequences over a tiny alphabet come and go in any order: nothing leaks, events tell the truth.
    #[test]
    fn nothing_is_lost_and_events_equal_the_inventory(
        blocks in 1u32..12,
        steps in prop::collection::vec((prop::collection::vec(0u32..2, 0..24), any::<prop::sample::Index>(), 0u8..10), 1..60),
    ) {
        let mut pool = BlockPool::new(blocks, BLOCK);
        let mut live: Vec<Vec<BlockSlot>> = Vec::new();
        let mut told = std::collections::HashSet::new();
        for (tokens, pick, kind) in steps {
            match kind {
                0..6 => live.extend(run(&mut pool, &tokens).map(|(_, slots)| slots)),
                6..8 if !live.is_empty() => pool.release_all(&live.swap_remove(pick.index(live.len()))),
                8 if !live.is_empty() => pool.discard_all(&live.swap_remove(pick.index(live.len()))),
                9 => pool.clear(),
                _ => {}
            }
            pool.check().map_err(TestCaseError::fail)?;
            for event in pool.take_events() {
                match event {
                    KvEvent::Stored { blocks, .. } => blocks.iter().for_each(|hash| assert!(told.insert(*hash))),
                    KvEvent::Removed { blocks } => blocks.iter().for_each(|hash| assert!(told.remove(hash))),
                    KvEvent::Cleared => told.clear(),
                    other => panic!("{other:?} without a lower tier"),
                }
            }
            let mut seen = std::collections::HashSet::new();
            for (parent, hash) in pool.inventory() {
                prop_assert!(parent.is_none_or(|parent| seen.contains(&parent)), "parents come first");
                seen.insert(hash);
            }
            prop_assert_eq!(&seen, &told);
            prop_assert_eq!(pool.counts().total(), blocks);
        }
        live.iter().for_each(|slots| pool.release_all(slots));
        prop_assert_eq!((pool.counts().pinned, pool.counts().filling), (0, 0));
        prop_assert_eq!(pool.available(), blocks);
    }
}
