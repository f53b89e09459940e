//! A real engine's messages, made-up ones in every form, and an oracle that knows all contents.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;
use starling_ids::{BlockHash, TokenId};

use super::*;
use crate::hash::block_hashes;

const SEED: HashSeed = HashSeed(7);

/// What vLLM 0.32 on a CPU, serving SmolLM2-135M-Instruct with blocks of 32, published for a few chats: number and payload.
/// The file has for each message how many frames, and for each frame its length and bytes; numbers are u32, little-endian.
fn recorded() -> Vec<(u64, Vec<u8>)> {
    let mut messages = Vec::new();
    let mut rest = &include_bytes!("vllm_kv_events.bin")[..];
    let take = |rest: &mut &[u8], len: usize| {
        let (taken, left) = rest.split_at(len);
        *rest = left;
        taken.to_vec()
    };
    while !rest.is_empty() {
        let frames = u32::from_le_bytes(take(&mut rest, 4).try_into().unwrap());
        let mut parts: Vec<Vec<u8>> = Vec::new();
        for _ in 0..frames {
            let len = u32::from_le_bytes(take(&mut rest, 4).try_into().unwrap());
            parts.push(take(&mut rest, len as usize));
        }
        assert_eq!(parts[0], b"kv-events");
        messages.push((u64::from_be_bytes(parts[1][..].try_into().unwrap()), parts[2].clone()));
    }
    messages
}

/// The sequences of tokens that the recorded blocks are, by the engine's name of their last block.
fn sequences(messages: &[(u64, Vec<u8>)]) -> HashMap<EngineHash, Vec<TokenId>> {
    let mut sequences: HashMap<EngineHash, Vec<TokenId>> = HashMap::new();
    for (_, payload) in messages {
        for event in decode(payload).unwrap().events {
            let EngineEvent::Stored(stored) = event else { panic!("only stores were recorded") };
            let mut all = stored.parent.map(|parent| sequences[&parent].clone()).unwrap_or_default();
            for (hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks(stored.block_tokens)) {
                all.extend(tokens);
                sequences.insert(*hash, all.clone());
            }
        }
    }
    sequences
}

#[test]
fn what_a_real_engine_published_has_the_names_that_a_router_computes() {
    let messages = recorded();
    assert_eq!(messages.len(), 11);
    let sequences = sequences(&messages);
    for ours in [8, 16, 32, 64, 128] {
        let mut feed = Feed::new(Adapter::new(SEED, ours, 1000));
        for (seq, payload) in &messages {
            let step = feed.message(*seq, decode(payload).unwrap().events, Arrival::Live).unwrap();
            assert_eq!(step.replay_from, None);
        }
        let want: BTreeSet<BlockHash> =
            sequences.values().flat_map(|tokens| block_hashes(SEED, tokens, ours)).collect();
        let have: BTreeSet<BlockHash> = feed.adapter().blocks(Tier::Device).collect();
        assert_eq!(have, want, "blocks of {ours}");
        assert_eq!(feed.adapter().left_out(), LeftOut::default());
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_name() {
    let (_, payload) = &recorded()[0];
    let mut feed = Feed::new(Adapter::new(SEED, 24, 1000));
    let error = feed.message(0, decode(payload).unwrap().events, Arrival::Live).unwrap_err();
    assert_eq!(error, BlockTokensDiffer { theirs: 32, ours: 24 });
    assert!(error.to_string().contains("--block-size"));
}

fn pack(value: &serde_json::Value) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

/// Events of one message that holds this one.
fn event(value: serde_json::Value) -> EngineEvent {
    decode(&pack(&serde_json::json!([1.5, [value], 3]))).unwrap().events.remove(0)
}

fn apply(adapter: &mut Adapter, value: serde_json::Value) -> Vec<KvEvent> {
    let mut out = Vec::new();
    adapter.apply(&event(value), &mut out).unwrap();
    out
}

#[test]
fn both_forms_of_an_event_say_the_same() {
    let array = event(serde_json::json!(["BlockStored", [5, -1], 4, [1, 2, 3, 4], 2, null, "GPU", null, null, 0]));
    let map = event(serde_json::json!({
        "medium": "GPU", "block_hashes": [5, u64::MAX], "parent_block_hash": 4, "token_ids": [1, 2, 3, 4], "block_size": 2,
        "group_idx": 0, "new_in_a_later_version": {"a": [1]}, "type": "BlockStored",
    }));
    assert_eq!(array, map);
    assert_eq!(event(serde_json::json!(["AllBlocksCleared"])), EngineEvent::Cleared);
    assert_eq!(event(serde_json::json!({"type": "AllBlocksCleared"})), EngineEvent::Cleared);
    assert_eq!(event(serde_json::json!(["SomethingNew", 1, [2]])), EngineEvent::Other);
    let removed = RemovedBlocks { hashes: vec![EngineHash(9)], medium: Some("CPU".into()), group: None };
    assert_eq!(event(serde_json::json!(["BlockRemoved", [9], "CPU"])), EngineEvent::Removed(removed));
    let batch = decode(&pack(&serde_json::json!({"ts": 1.0, "events": [], "data_parallel_rank": 3}))).unwrap();
    assert_eq!(batch, EngineBatch { events: Vec::new(), rank: 3 });
}

#[test]
fn a_message_that_is_wrong_is_an_error_that_says_where() {
    let message = |value: serde_json::Value| decode(&pack(&serde_json::json!([1.0, [value]]))).unwrap_err().to_string();
    let tokens = message(serde_json::json!(["BlockStored", [5, 6], null, [1, 2, 3], 2]));
    assert!(tokens.contains("want 4 token_ids, there are 3"), "{tokens}");
    assert!(message(serde_json::json!(["BlockStored", [], null, [], 0])).contains("block_size 0"));
    assert!(message(serde_json::json!({"block_hashes": []})).contains("type"));
    assert!(matches!(decode(&vec![0; PAYLOAD_MAX + 1]), Err(WireError::TooLong(_))));
}

#[test]
fn pages_of_one_token_make_a_block_when_all_are_there() {
    let mut adapter = Adapter::new(SEED, 4, 100);
    let store = |hashes: &[u64], parent: Option<u64>, tokens: &[u32]| {
        serde_json::json!(["BlockStored", hashes, parent, tokens, 1])
    };
    assert_eq!(apply(&mut adapter, store(&[1, 2, 3], None, &[10, 11, 12])), []);
    let names = block_hashes(SEED, &[10, 11, 12, 13, 14, 15, 16, 17], 4);
    let first = KvEvent::Stored { parent: None, blocks: vec![names[0]] };
    assert_eq!(apply(&mut adapter, store(&[4, 5], Some(3), &[13, 14])), [first]);
    let second = KvEvent::Stored { parent: Some(names[0]), blocks: vec![names[1]] };
    assert_eq!(apply(&mut adapter, store(&[6, 7, 8], Some(5), &[15, 16, 17])), [second]);
    // One page of the second block is enough to lose it; the rest says nothing more.
    let gone = KvEvent::Removed { blocks: vec![names[1]] };
    assert_eq!(apply(&mut adapter, serde_json::json!(["BlockRemoved", [6]])), [gone]);
    assert_eq!(apply(&mut adapter, serde_json::json!(["BlockRemoved", [8, 7]])), []);
    assert_eq!(adapter.blocks(Tier::Device).collect::<Vec<_>>(), [names[0]]);
}

#[test]
fn a_block_that_the_engine_has_twice_is_there_until_both_are_gone() {
    let mut adapter = Adapter::new(SEED, 2, 100);
    let store = serde_json::json!(["BlockStored", [1], null, [10, 11], 2]);
    assert_eq!(apply(&mut adapter, store.clone()).len(), 1);
    assert_eq!(apply(&mut adapter, store), []);
    let remove = serde_json::json!(["BlockRemoved", [1]]);
    assert_eq!(apply(&mut adapter, remove.clone()), []);
    assert_eq!(apply(&mut adapter, remove.clone()).len(), 1);
    assert_eq!(apply(&mut adapter, remove), [], "a third removal is of nothing");
}

#[test]
fn lower_tiers_are_told_apart_and_strange_places_left_out() {
    let mut adapter = Adapter::new(SEED, 2, 100);
    let names = block_hashes(SEED, &[10, 11, 12, 13], 2);
    let store = |medium: &str| serde_json::json!(["BlockStored", [1, 2], null, [10, 11, 12, 13], 2, null, medium]);
    assert_eq!(apply(&mut adapter, store("GPU")), [KvEvent::Stored { parent: None, blocks: names.clone() }]);
    let below = KvEvent::StoredBelow { tier: Tier::Host, parent: None, blocks: names.clone() };
    assert_eq!(apply(&mut adapter, store("CPU_PINNED")), [below]);
    assert_eq!(apply(&mut adapter, store("EXTERNAL")), []);
    assert_eq!(adapter.left_out().places, 2);
    let gone = KvEvent::Removed { blocks: vec![names[0]] };
    assert_eq!(apply(&mut adapter, serde_json::json!(["BlockRemoved", [1], "GPU"])), [gone]);
    // The device's chain still grows from a parent that only the host has.
    let more = serde_json::json!(["BlockStored", [3], 2, [14, 15], 2, null, "GPU"]);
    assert_eq!(apply(&mut adapter, more).len(), 1);
    let cleared = apply(&mut adapter, serde_json::json!(["AllBlocksCleared"]));
    assert_eq!(cleared, [KvEvent::Cleared, KvEvent::ClearedBelow { tier: Tier::Host }]);
}

#[test]
fn adapters_and_salts_are_part_of_the_name_and_media_have_none() {
    let stored = |extra: serde_json::Value, lora: serde_json::Value, hash: u64| {
        serde_json::json!(["BlockStored", [hash], null, [10, 11], 2, null, null, lora, [extra]])
    };
    let name = |adapter, salt| block_hashes(SEED.scoped(adapter, salt), &[10, 11], 2);
    let mut adapter = Adapter::new(SEED, 2, 100);
    let null = serde_json::Value::Null;
    let mut first = |extra, lora, hash| match apply(&mut adapter, stored(extra, lora, hash)).pop() {
        Some(KvEvent::Stored { blocks, .. }) => blocks,
        other => panic!("{other:?}"),
    };
    assert_eq!(first(null.clone(), serde_json::json!("sql"), 1), name(Some("sql"), None));
    assert_eq!(
        first(serde_json::json!(["sql", "tenant-1"]), serde_json::json!("sql"), 2),
        name(Some("sql"), Some("tenant-1"))
    );
    assert_eq!(first(serde_json::json!(["tenant-1"]), null.clone(), 3), name(None, Some("tenant-1")));
    assert_eq!(first(null.clone(), serde_json::json!({"cache_salt": "tenant-2"}), 4), name(None, Some("tenant-2")));
    assert_eq!(apply(&mut adapter, stored(serde_json::json!([["image", 3]]), null.clone(), 5)), []);
    assert_eq!(apply(&mut adapter, stored(serde_json::json!(["image", "tenant"]), null, 6)), []);
    assert_eq!(adapter.left_out().unnamed, 2);
    assert_eq!(apply(&mut adapter, serde_json::json!(["BlockStored", [7], 6, [1, 2], 2])), []);
    assert_eq!(adapter.left_out().orphans, 1, "a child of what has no name has none");
}

#[test]
fn of_several_groups_of_layers_the_first_that_keeps_everything_counts() {
    let mut adapter = Adapter::new(SEED, 2, 100);
    let store = |group: u32, kind: &str| {
        serde_json::json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "group_idx": group,
            "kv_cache_spec_kind": kind})
    };
    assert_eq!(apply(&mut adapter, store(0, "sliding_window")), []);
    assert_eq!(apply(&mut adapter, store(1, "full_attention")).len(), 1);
    assert_eq!(apply(&mut adapter, store(2, "full_attention")), []);
    assert_eq!(adapter.left_out().groups, 2);
    let remove = |group: u32| serde_json::json!({"type": "BlockRemoved", "block_hashes": [1], "group_idx": group});
    assert_eq!(apply(&mut adapter, remove(0)), []);
    assert_eq!(apply(&mut adapter, remove(1)).len(), 1);
}

#[test]
fn blocks_beyond_the_bound_are_left_out() {
    let mut adapter = Adapter::new(SEED, 2, 3);
    let store = serde_json::json!(["BlockStored", [1, 2, 3, 4, 5], null, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2]);
    apply(&mut adapter, store);
    assert_eq!((adapter.blocks(Tier::Device).count(), adapter.left_out().over), (3, 2));
}

/// A store of one first block of its own.
fn message(of: u32) -> Vec<EngineEvent> {
    vec![event(serde_json::json!(["BlockStored", [of], null, [of, of], 2]))]
}

#[test]
fn a_gap_is_asked_for_once_and_closed_by_the_replay() {
    let mut feed = Feed::new(Adapter::new(SEED, 2, 100));
    assert_eq!(feed.message(0, message(0), Arrival::Live).unwrap().events.len(), 1);
    assert_eq!(feed.message(3, message(3), Arrival::Live).unwrap(), Step { events: vec![], replay_from: Some(1) });
    assert_eq!(feed.message(4, message(4), Arrival::Live).unwrap(), Step::default());
    assert_eq!(feed.message(1, message(1), Arrival::Replayed).unwrap().events.len(), 1);
    assert_eq!(feed.message(2, message(2), Arrival::Replayed).unwrap().events.len(), 3);
    assert_eq!(feed.message(3, message(3), Arrival::Replayed).unwrap(), Step::default());
    assert_eq!(feed.replay_ended().unwrap(), Step::default());
    assert_eq!((feed.adapter().blocks(Tier::Device).count(), feed.gaps()), (5, 0));
}

#[test]
fn a_gap_that_stays_open_makes_it_forget() {
    let mut feed = Feed::new(Adapter::new(SEED, 2, 100));
    feed.message(0, message(0), Arrival::Live).unwrap();
    feed.message(2, message(2), Arrival::Live).unwrap();
    let step = feed.replay_ended().unwrap();
    assert_eq!(step.events[0], KvEvent::Cleared);
    assert_eq!((feed.adapter().blocks(Tier::Device).count(), feed.gaps()), (1, 1));
    // Without any replay the bound is what gives it up.
    for seq in 4..=4 + HELD_MESSAGES_MAX as u64 {
        feed.message(seq, message(9), Arrival::Live).unwrap();
    }
    assert_eq!(feed.gaps(), 2);
}

#[test]
fn an_engine_that_starts_again_has_nothing() {
    let mut feed = Feed::new(Adapter::new(SEED, 2, 100));
    for seq in 0..3 {
        feed.message(seq, message(seq as u32), Arrival::Live).unwrap();
    }
    let step = feed.message(0, message(8), Arrival::Live).unwrap();
    assert_eq!(step.events.len(), 2);
    assert_eq!(step.events[0], KvEvent::Cleared);
    assert_eq!(feed.adapter().blocks(Tier::Device).count(), 1);
}

/// A step of a made-up engine: grow a new leaf block below one of its blocks, or take a leaf away.
#[derive(Debug, Clone)]
enum Deed {
    Grow { below: usize, token: u32, blocks: usize },
    Again { which: usize },
    Drop { which: usize },
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        4 => (0usize..50, 0u32..3, 1usize..6).prop_map(|(below, token, blocks)| Deed::Grow { below, token, blocks }),
        1 => (0usize..50).prop_map(|which| Deed::Again { which }),
        3 => (0usize..50).prop_map(|which| Deed::Drop { which }),
    ];
    prop::collection::vec(deed, 1..60)
}

/// The engine: each block by its whole content, and how often it has it.
#[derive(Default)]
struct Engine(std::collections::BTreeMap<Vec<TokenId>, u32>);

/// A name that an engine could have made of the content.
fn named(content: &[TokenId]) -> EngineHash {
    EngineHash(block_hashes(HashSeed(99), content, content.len())[0].0)
}

impl Engine {
    fn store(&mut self, path: &[TokenId], theirs: usize) -> EngineEvent {
        *self.0.entry(path.to_vec()).or_default() += 1;
        let (before, tokens) = path.split_at(path.len() - theirs);
        EngineEvent::Stored(StoredBlocks {
            hashes: vec![named(path)],
            parent: (!before.is_empty()).then(|| named(before)),
            tokens: tokens.to_vec(),
            block_tokens: theirs,
            adapter: Ok(None),
            salt: None,
            extra: Vec::new(),
            medium: None,
            group: None,
            kind: None,
        })
    }

    fn deed(&mut self, deed: &Deed, theirs: usize) -> Vec<EngineEvent> {
        let paths: Vec<Vec<TokenId>> = self.0.keys().cloned().collect();
        let pick = |at: usize| (!paths.is_empty()).then(|| paths[at % paths.len()].clone());
        match *deed {
            Deed::Grow { below, token, blocks } => {
                let mut path = if below == 0 { Vec::new() } else { pick(below).unwrap_or_default() };
                let mut events = Vec::new();
                for _ in 0..blocks {
                    path.extend((0..theirs).map(|_| token));
                    if !self.0.contains_key(&path) {
                        events.push(self.store(&path, theirs));
                    }
                }
                events
            }
            Deed::Again { which } => pick(which).map(|path| self.store(&path, theirs)).into_iter().collect(),
            Deed::Drop { which } => {
                let Some(path) = pick(which) else { return Vec::new() };
                if self.0.keys().any(|other| other.len() > path.len() && other.starts_with(&path)) {
                    return Vec::new();
                }
                let left = self.0.get_mut(&path).unwrap();
                *left -= 1;
                if *left == 0 {
                    self.0.remove(&path);
                }
                let hashes = vec![named(&path)];
                vec![EngineEvent::Removed(RemovedBlocks { hashes, medium: None, group: None })]
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What is announced is what a router would call the engine's content, and events tell it as it changes.
    #[test]
    fn names_follow_the_content(deeds in deeds(), theirs in prop::sample::select(vec![1usize, 2, 4, 8, 16])) {
        let ours = 4;
        let (mut engine, mut adapter) = (Engine::default(), Adapter::new(SEED, ours, 10_000));
        let mut told: BTreeSet<BlockHash> = BTreeSet::new();
        for deed in &deeds {
            for event in engine.deed(deed, theirs) {
                let mut out = Vec::new();
                adapter.apply(&event, &mut out).unwrap();
                for event in out {
                    match event {
                        KvEvent::Stored { parent, blocks } => {
                            prop_assert!(parent.is_none_or(|parent| told.contains(&parent)));
                            for block in blocks {
                                prop_assert!(told.insert(block), "announced twice");
                            }
                        }
                        KvEvent::Removed { blocks } => {
                            for block in blocks {
                                prop_assert!(told.remove(&block), "taken back twice");
                            }
                        }
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
            }
            let want: BTreeSet<BlockHash> = engine.0.keys().flat_map(|path| block_hashes(SEED, path, ours)).collect();
            prop_assert_eq!(&told, &want);
            prop_assert_eq!(&told, &adapter.blocks(Tier::Device).collect::<BTreeSet<_>>());
        }
        prop_assert_eq!(adapter.left_out(), LeftOut::default());
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        drop(decode(&bytes));
    }

    #[test]
    fn no_spoiled_message_makes_it_panic(which in 0usize..11, at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut payload = recorded()[which].1.clone();
        let at = at.index(payload.len());
        payload[at] = byte;
        if let Ok(batch) = decode(&payload) {
            let mut adapter = Adapter::new(SEED, 16, 100);
            for event in &batch.events {
                drop(adapter.apply(event, &mut Vec::new()));
            }
        }
    }
}
