use starling_engine::EngineLoad;
use starling_ids::NodeId;
use starling_kv::{
    events::KvEvent,
    hash::BucketDigests,
    index::{Cache, Tier},
};

use super::*;

const LIFE: Incarnation = Incarnation(1);

fn worker() -> WorkerId {
    WorkerId { node: NodeId::new("n").expect("name"), index: 0 }
}

fn part(seq: u64, blocks: &[u128]) -> InventoryPart {
    let blocks = blocks.iter().map(|hash| (None, BlockHash(*hash))).collect();
    InventoryPart { worker: worker(), incarnation: LIFE, seq, more: false, blocks, tier: Tier::Device, epoch: 1 }
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
        tiers: None,
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

/// What an engine holds, as its digests say.
fn digests(seq: u64, held: &HashSet<BlockHash>) -> CacheDigests {
    let mut digests = BucketDigests::default();
    held.iter().for_each(|hash| digests.toggle(*hash));
    let digests = digests.parts().to_vec();
    CacheDigests { worker: worker(), incarnation: LIFE, seq, tier: Tier::Device, digests }
}

/// What it answers when it is asked for buckets, in parts of one block.
fn buckets(seq: u64, held: &HashSet<BlockHash>, ask: BucketAsk) -> Vec<BucketPart> {
    let asked = (0..64u8).filter(|bucket| ask.buckets >> bucket & 1 == 1);
    let parts = asked.flat_map(|bucket| {
        let inside = held.iter().copied().filter(|hash| BucketDigests::bucket(*hash) == usize::from(bucket));
        let mut parts: Vec<Vec<BlockHash>> = inside.map(|hash| vec![hash]).collect();
        parts.push(Vec::new());
        let last = parts.len() - 1;
        let part = move |(at, blocks)| {
            let (tier, more) = (ask.tier, at < last);
            BucketPart { worker: worker(), incarnation: LIFE, seq, tier, bucket, more, blocks }
        };
        parts.into_iter().enumerate().map(part)
    });
    parts.collect()
}

#[test]
fn idx_03_digests_find_what_no_event_told_and_only_that_bucket_is_taken_again() {
    let (knowledge, token) = followed();
    let high = 9u128 << 122;
    knowledge.inventory(&worker(), token, part(0, &[1, 2, high])).expect("own token");
    let mut held: HashSet<BlockHash> = [1, 2, high].map(BlockHash).into();
    assert_eq!(knowledge.digests(&worker(), token, &digests(0, &held)), Ok(None), "nothing differs");
    // It lost a block and stored another without a word.
    held.remove(&BlockHash(2));
    held.insert(BlockHash(3));
    assert_eq!(knowledge.digests(&worker(), token, &digests(7, &held)), Ok(None), "of another moment");
    let ask = knowledge.digests(&worker(), token, &digests(0, &held)).expect("own token").expect("it differs");
    assert_eq!(ask, BucketAsk { tier: Tier::Device, buckets: 1 });
    for part in buckets(0, &held, ask) {
        knowledge.bucket(&worker(), token, part).expect("own token");
    }
    assert_eq!(knowledge.memberships(), 3);
    assert_eq!(
        (hits(&knowledge, &[1]), hits(&knowledge, &[1, 2]), hits(&knowledge, &[high])),
        (Some(1), Some(1), Some(1))
    );
    assert_eq!(knowledge.digests(&worker(), token, &digests(0, &held)), Ok(None));
    // An answer that events have overtaken is not taken.
    let late = buckets(0, &HashSet::new(), ask);
    knowledge.events(&worker(), token, stored(0, &[4])).expect("in order");
    for part in late {
        knowledge.bucket(&worker(), token, part).expect("own token");
    }
    assert_eq!(knowledge.memberships(), 4);
}

mod streams {
    use proptest::prelude::*;

    use super::*;

    /// One step of an engine, and what becomes of its word.
    #[derive(Debug, Clone)]
    struct Step {
        stores: bool,
        blocks: Vec<u128>,
        /// Its event is never sent.
        lies: bool,
        fate: Fate,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        Comes,
        Lost,
        Twice,
        /// After the one that follows.
        Late,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let fate = prop_oneof![
            6 => Just(Fate::Comes), 1 => Just(Fate::Lost), 2 => Just(Fate::Twice), 1 => Just(Fate::Late)
        ];
        let block = (0u128..6, 1u128..40).prop_map(|(bucket, at)| bucket << 122 | at);
        let blocks = prop::collection::btree_set(block, 1..5).prop_map(|blocks| blocks.into_iter().collect());
        let step = (any::<bool>(), blocks, prop::bool::weighted(0.1), fate)
            .prop_map(|(stores, blocks, lies, fate)| Step { stores, blocks, lies, fate });
        prop::collection::vec(step, 0..60)
    }

    /// A subscription that does as the indexer does.
    struct Reader {
        knowledge: Knowledge,
        token: Token,
        held: HashSet<BlockHash>,
        seq: u64,
        resyncs: u32,
    }

    impl Reader {
        fn inventory(&mut self) {
            self.knowledge.connected(&worker(), self.token, true).expect("own token");
            let blocks = self.held.iter().map(|hash| (None, *hash)).collect();
            let whole = InventoryPart { blocks, ..part(self.seq, &[]) };
            self.knowledge.inventory(&worker(), self.token, whole).expect("own token");
        }

        fn hear(&mut self, batch: EventBatch) {
            match self.knowledge.events(&worker(), self.token, batch) {
                Ok(()) => {}
                Err(Unfit::Gap { .. }) => {
                    self.resyncs += 1;
                    self.inventory();
                }
                Err(other) => panic!("{other:?}"),
            }
        }

        fn check(&mut self) -> usize {
            let told = digests(self.seq, &self.held);
            let Some(ask) = self.knowledge.digests(&worker(), self.token, &told).expect("own token") else { return 0 };
            for part in buckets(self.seq, &self.held, ask) {
                self.knowledge.bucket(&worker(), self.token, part).expect("own token");
            }
            ask.buckets.count_ones() as usize
        }

        fn is_true(&self) -> bool {
            let known = self.knowledge.index.held(&worker(), Cache::default(), None);
            known.into_iter().collect::<HashSet<_>>() == self.held
        }
    }

    proptest! {
        /// Batches are lost, come twice or late, and some changes are never told: after the digests all is true, and only
        /// buckets in which something was not told are taken again.
        #[test]
        fn idx_05_lost_repeated_and_late_events_and_changes_without_a_word_end_in_the_truth(steps in steps()) {
            let (knowledge, token) = followed();
            let mut reader = Reader { knowledge, token, held: HashSet::new(), seq: 0, resyncs: 0 };
            reader.inventory();
            let (mut late, mut untold, mut lost): (Vec<EventBatch>, HashSet<usize>, u32) = Default::default();
            for Step { stores, blocks, lies, fate } in steps {
                let hashes: Vec<BlockHash> = blocks.iter().map(|hash| BlockHash(*hash)).collect();
                for hash in &hashes {
                    let changed = if stores { reader.held.insert(*hash) } else { reader.held.remove(hash) };
                    if lies && changed {
                        untold.insert(BucketDigests::bucket(*hash));
                    }
                }
                if lies {
                    continue;
                }
                // A block's hash names the one before it, so each of these is a chain of its own.
                let event = |hash: &BlockHash| match stores {
                    true => KvEvent::Stored { parent: None, blocks: vec![*hash] },
                    false => KvEvent::Removed { blocks: vec![*hash] },
                };
                let batch = EventBatch { events: hashes.iter().map(event).collect(), ..stored(reader.seq, &[]) };
                reader.seq += hashes.len() as u64;
                match fate {
                    Fate::Comes => reader.hear(batch),
                    Fate::Lost => { lost += 1; continue }
                    Fate::Twice => { reader.hear(batch.clone()); reader.hear(batch) }
                    Fate::Late => { lost += 1; late.push(batch); continue }
                }
                late.drain(..).for_each(|batch| reader.hear(batch));
            }
            // The engine goes on: whatever was lost at the end shows as a gap.
            let last = EventBatch { events: vec![KvEvent::Removed { blocks: vec![BlockHash(7)] }], ..stored(reader.seq, &[]) };
            reader.held.remove(&BlockHash(7));
            reader.seq += 1;
            reader.hear(last);
            let repaired = reader.check();
            prop_assert!(repaired <= untold.len(), "{repaired} repaired, {untold:?} untold");
            prop_assert!(reader.is_true());
            prop_assert_eq!(reader.check(), 0);
            prop_assert!(reader.resyncs <= lost);
        }
    }
}

#[test]
fn idx_05_a_stream_that_broke_goes_on_with_the_range_that_is_missing() {
    let (knowledge, token) = followed();
    assert_eq!(knowledge.read_up_to(&worker(), token), None, "it needs an inventory");
    knowledge.inventory(&worker(), token, part(5, &[1])).expect("own token");
    knowledge.events(&worker(), token, stored(5, &[1, 2])).expect("in order");
    knowledge.connected(&worker(), token, false).expect("own token");
    assert_eq!(knowledge.read_up_to(&worker(), token), Some(ReadUpTo { epoch: 1, seq: 6 }));
    assert_eq!(hits(&knowledge, &[1, 2]), Some(2), "what is known stays");
    knowledge.connected(&worker(), token, true).expect("own token");
    // The last batch comes again, then the range, without an inventory.
    knowledge.events(&worker(), token, stored(5, &[1, 2])).expect("a repeat");
    knowledge.events(&worker(), token, removed(6, 2)).expect("in order");
    assert_eq!(hits(&knowledge, &[1, 2]), Some(1));
    // A gap is the same: what came after it is kept until the range is here.
    assert_eq!(knowledge.events(&worker(), token, stored(8, &[1, 3])), Err(Unfit::Gap { expected: 7, got: 8 }));
    assert_eq!(knowledge.read_up_to(&worker(), token), Some(ReadUpTo { epoch: 1, seq: 7 }));
    assert_eq!(knowledge.read_up_to(&worker(), token), None, "the range did not help");
    knowledge.events(&worker(), token, stored(7, &[1, 4])).expect("the range");
    assert_eq!((hits(&knowledge, &[1, 3]), hits(&knowledge, &[1, 4])), (Some(2), Some(2)));
    assert_eq!(knowledge.read_up_to(&worker(), token), Some(ReadUpTo { epoch: 1, seq: 9 }));
    let late = Token(token.0 + 1);
    assert_eq!(knowledge.read_up_to(&worker(), late), None);
}

#[test]
fn what_a_silent_worker_holds_is_guessed_until_it_is_old() {
    let knowledge = Knowledge::default();
    let token = knowledge.follow_as(&worker(), LIFE, true).expect("room");
    knowledge.connected(&worker(), token, true).expect("own token");
    knowledge.inventory(&worker(), token, part(0, &[])).expect("own token");
    let chain = |from: u128, len: u128| (from..from + len).map(BlockHash).collect::<Vec<_>>();
    knowledge.gave(&worker(), LIFE, &chain(1, 4), 6);
    assert_eq!((hits(&knowledge, &[1, 2, 3, 4]), hits(&knowledge, &[1, 9])), (Some(4), Some(1)));
    // Its pool holds no more than six: the first prompt's end makes way.
    knowledge.gave(&worker(), LIFE, &chain(20, 4), 6);
    assert_eq!((hits(&knowledge, &[1, 2, 3, 4]), knowledge.memberships()), (Some(2), 6));
    knowledge.gave(&worker(), Incarnation(2), &chain(40, 4), 6);
    assert_eq!(knowledge.memberships(), 6, "another life");
    knowledge.inventory(&worker(), token, part(0, &[])).expect("own token");
    assert_eq!(knowledge.memberships(), 0, "its engine is a new one");
    // Of a worker that tells, nothing is guessed.
    let (knowledge, token) = followed();
    knowledge.inventory(&worker(), token, part(0, &[])).expect("own token");
    knowledge.gave(&worker(), LIFE, &chain(1, 4), 6);
    assert_eq!(knowledge.memberships(), 0);
}
