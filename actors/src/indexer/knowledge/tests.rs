use starling_engine::EngineLoad;
use starling_ids::NodeId;
use starling_kv::{
    events::KvEvent,
    index::{Cache, Tier},
};

use super::*;

const LIFE: Incarnation = Incarnation(1);

fn worker() -> WorkerId {
    WorkerId { node: NodeId::new("n").expect("name"), index: 0 }
}

fn part(seq: u64, blocks: &[u128]) -> InventoryPart {
    let blocks = blocks.iter().map(|hash| (None, BlockHash(*hash))).collect();
    InventoryPart { worker: worker(), incarnation: LIFE, seq, more: false, blocks, tier: Tier::Device }
}

fn stored(seq: u64, blocks: &[u128]) -> EventBatch {
    let blocks = blocks.iter().map(|hash| BlockHash(*hash)).collect();
    let events = vec![KvEvent::Stored { parent: None, blocks }];
    EventBatch { worker: worker(), incarnation: LIFE, seq, events }
}

fn removed(seq: u64, hash: u128) -> EventBatch {
    let events = vec![KvEvent::Removed { blocks: vec![BlockHash(hash)] }];
    EventBatch { worker: worker(), incarnation: LIFE, seq, events }
}

fn of(knowledge: &Knowledge, incarnation: Incarnation, chain: &[BlockHash]) -> Option<WorkerStatus> {
    knowledge.survey([(&worker(), incarnation)], chain).pop().flatten()
}

fn hits(knowledge: &Knowledge, chain: &[u128]) -> Option<u32> {
    let chain: Vec<_> = chain.iter().map(|hash| BlockHash(*hash)).collect();
    of(knowledge, LIFE, &chain).map(|status| status.hit_blocks)
}

fn followed() -> (Knowledge, Token) {
    let knowledge = Knowledge::default();
    let token = knowledge.follow(&worker(), LIFE).expect("room");
    knowledge.connected(&worker(), token, true).expect("own token");
    (knowledge, token)
}

#[test]
fn idx_01_a_late_event_of_a_worker_that_left_puts_nothing_back() {
    let (knowledge, token) = followed();
    knowledge.inventory(&worker(), token, part(0, &[1, 2])).expect("own token");
    assert_eq!(hits(&knowledge, &[1, 2, 3]), Some(2));
    knowledge.forget(&worker());
    assert_eq!(knowledge.events(&worker(), token, stored(0, &[1])), Err(Unfit::Replaced));
    assert_eq!(knowledge.memberships(), 0);
    let second = knowledge.follow(&worker(), LIFE).expect("room");
    assert_eq!(knowledge.inventory(&worker(), token, part(0, &[1])), Err(Unfit::Replaced), "an old subscription");
    knowledge.inventory(&worker(), second, part(0, &[])).expect("own token");
    assert_eq!(hits(&knowledge, &[1]), Some(0));
}

#[test]
fn idx_03_a_cleared_worker_holds_nothing() {
    let (knowledge, token) = followed();
    knowledge.inventory(&worker(), token, part(0, &[1, 2])).expect("own token");
    let batch = EventBatch { events: vec![KvEvent::Cleared], ..stored(0, &[]) };
    knowledge.events(&worker(), token, batch).expect("in order");
    assert_eq!(hits(&knowledge, &[1]), Some(0));
}

#[test]
fn idx_05_a_gap_asks_for_an_inventory_and_a_repeat_changes_nothing() {
    let (knowledge, token) = followed();
    knowledge.inventory(&worker(), token, part(5, &[1])).expect("own token");
    knowledge.events(&worker(), token, stored(5, &[2])).expect("in order");
    knowledge.events(&worker(), token, removed(6, 2)).expect("in order");
    knowledge.events(&worker(), token, stored(5, &[2])).expect("a repeat");
    assert_eq!(hits(&knowledge, &[1, 2]), Some(1), "the repeat did not bring block 2 back");
    assert_eq!(knowledge.events(&worker(), token, stored(8, &[3])), Err(Unfit::Gap { expected: 7, got: 8 }));
}

#[test]
fn idx_08_a_chain_in_one_event_matches_as_deep_as_it_is() {
    let (knowledge, token) = followed();
    knowledge.inventory(&worker(), token, part(0, &[])).expect("own token");
    knowledge.events(&worker(), token, stored(0, &[1, 2, 3])).expect("in order");
    assert_eq!(hits(&knowledge, &[1, 2, 3]), Some(3));
}

#[test]
fn an_inventory_in_parts_counts_when_it_is_whole() {
    let (knowledge, token) = followed();
    assert_eq!(knowledge.events(&worker(), token, stored(0, &[1])), Err(Unfit::NoInventory));
    knowledge.inventory(&worker(), token, InventoryPart { more: true, ..part(3, &[1]) }).expect("own token");
    assert_eq!(hits(&knowledge, &[1, 2]), Some(0));
    knowledge.inventory(&worker(), token, part(3, &[2])).expect("own token");
    assert_eq!(hits(&knowledge, &[1, 2]), Some(2));
}

#[test]
fn a_worker_is_sound_when_it_just_appeared_and_unsound_when_it_broke_off() {
    let (knowledge, token) = followed();
    let sound = |knowledge: &Knowledge| of(knowledge, LIFE, &[]).expect("followed").sound;
    assert!(sound(&knowledge), "not heard yet, but new");
    knowledge.inventory(&worker(), token, part(0, &[])).expect("own token");
    assert!(sound(&knowledge));
    knowledge.connected(&worker(), token, false).expect("own token");
    assert!(!sound(&knowledge));
    knowledge.connected(&worker(), token, true).expect("own token");
    let report = LoadReport {
        worker: worker(),
        incarnation: LIFE,
        draining: true,
        load: EngineLoad::default(),
        rates: None,
        turn_age_ms: 0,
        admitted: 0,
        link: crate::route::split::KvLink::default(),
    };
    knowledge.load(&worker(), token, report.clone()).expect("own token");
    assert!(!sound(&knowledge), "draining");
    knowledge.load(&worker(), token, LoadReport { draining: false, turn_age_ms: STUCK_MS, ..report }).expect("own");
    assert!(!sound(&knowledge), "stuck");
}

#[test]
fn ded_06_silence_is_noticed_without_any_event() {
    let (knowledge, token) = followed();
    knowledge.inventory(&worker(), token, part(0, &[])).expect("own token");
    let inner = knowledge.read();
    let followed = &inner.followed[&worker()];
    let heard = followed.heard.expect("heard");
    assert!(followed.sound(heard + SILENCE_MAX - Duration::from_millis(1)));
    assert!(!followed.sound(heard + SILENCE_MAX));
}

#[test]
fn another_life_is_not_known() {
    let (knowledge, _) = followed();
    assert_eq!(of(&knowledge, Incarnation(2), &[]), None);
}

#[test]
fn lower_tiers_are_known_from_inventory_and_events() {
    let knowledge = Knowledge::default();
    let token = knowledge.follow(&worker(), LIFE).expect("room");
    knowledge.connected(&worker(), token, true).expect("own token");
    let below = InventoryPart { tier: Tier::Disk, ..part(3, &[3, 4]) };
    knowledge.inventory(&worker(), token, InventoryPart { more: true, ..part(3, &[1, 2]) }).expect("own token");
    assert_eq!(knowledge.memberships(), 0, "not whole yet");
    knowledge.inventory(&worker(), token, below).expect("own token");
    assert_eq!(knowledge.memberships(), 4);
    let disk = Cache { rank: 0, tier: Tier::Disk };
    assert_eq!(knowledge.index.held(&worker(), disk, None).len(), 2);
    let events = vec![
        KvEvent::RemovedBelow { tier: Tier::Disk, blocks: vec![BlockHash(3)] },
        KvEvent::StoredBelow { tier: Tier::Host, parent: None, blocks: vec![BlockHash(9)] },
    ];
    let batch = EventBatch { events, ..stored(3, &[]) };
    knowledge.events(&worker(), token, batch).expect("own token");
    assert_eq!(knowledge.index.held(&worker(), disk, None), [BlockHash(4)]);
    assert_eq!(knowledge.memberships(), 4);
    // A new inventory without lower tiers takes them away.
    knowledge.inventory(&worker(), token, part(9, &[1])).expect("own token");
    assert_eq!(knowledge.memberships(), 1);
}
