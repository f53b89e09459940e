use std::{cell::RefCell, collections::HashMap};

use starling_ids::{Incarnation, NodeId, RequestId};
use starling_kv::{
    events::KvEvent,
    index::{IndexLimits, PrefixIndex},
};

use super::*;
use crate::route::{
    fleet::{Heard, Places, Standing},
    policy::PolicyConfig,
    queue::{QueueConfig, rooms::HeldBack},
    rates::Rates,
    wishes::Wishes,
};

const LIFE: Incarnation = Incarnation(1);
const BLOCK: u32 = 16;

fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

fn worker(index: u16) -> WorkerId {
    WorkerId { node: NodeId::new("n").expect("name"), index }
}

struct Waiter {
    request: u128,
    chain: Vec<BlockHash>,
    gone: bool,
    wishes: Wishes,
    exclude: Vec<WorkerId>,
    leaves: Option<WorkerId>,
}

impl Waiter {
    fn new(request: u128, chain: &[BlockHash]) -> Self {
        Self {
            request,
            chain: chain.to_vec(),
            gone: false,
            wishes: Wishes::default(),
            exclude: Vec::new(),
            leaves: None,
        }
    }
}

impl Waits for Waiter {
    fn ask(&self) -> Ask<'_> {
        let prompt_tokens = self.chain.len() as u32 * BLOCK;
        let request = RequestId(self.request);
        let (wishes, leaves) = (Some(&self.wishes), self.leaves.as_ref());
        let (exclude, failed) = (&self.exclude[..], &self.exclude[..]);
        let ask = Ask { request, prompt_tokens, block_tokens: BLOCK, hashes: &self.chain, ..Ask::default() };
        Ask { wishes, exclude, failed, leaves, ..ask }
    }

    fn is_gone(&self) -> bool {
        self.gone
    }
}

struct Known {
    index: PrefixIndex,
    lookups: RefCell<usize>,
}

impl Known {
    fn hold(&self, index: u16, chain: &[BlockHash]) {
        let event = KvEvent::Stored { parent: None, blocks: chain.to_vec() };
        self.index.apply(&worker(index), LIFE, &event).expect("applied");
    }
}

impl Caches for Known {
    fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap> {
        *self.lookups.borrow_mut() += 1;
        let mut overlaps = Vec::new();
        self.index.overlaps(chain, &mut overlaps);
        overlaps
    }

    fn who(&self, holder: Holder) -> Option<WorkerId> {
        self.index.who(holder).map(|(worker, ..)| worker)
    }

    fn gave(&self, _: &Decision, _: &[BlockHash], _: u32) {}
}

/// A shard with two workers that compute a token in a millisecond, steps of 512.
struct Shard {
    queue: Queue<Waiter>,
    desk: Desk,
    known: Known,
}

impl Shard {
    fn new() -> Self {
        let config = QueueConfig::default();
        let known = Known { index: PrefixIndex::new(IndexLimits::default()), lookups: RefCell::default() };
        let mut desk = Desk::new(PolicyConfig::default().build().expect("composed"), 1).with_rooms(config.rooms);
        for index in 0..2 {
            known.index.add_worker(worker(index), LIFE).expect("new");
            let places = Places { sequences: 64, waiting: 64, step_tokens: 512, blocks: 10_000, ..Places::default() };
            desk.seat(&worker(index), LIFE, places, Standing::Sound);
        }
        Self { queue: Queue::new(config), desk, known }
    }

    /// Each worker says how many prompt tokens it has to compute.
    fn hear(&mut self, queued: [u64; 2], admitted: u64, at: Duration) {
        let rates = Some(Rates { prefill_ms_per_token: 1.0, ..Rates::default() });
        for (index, prefill_tokens) in queued.into_iter().enumerate() {
            let heard = Heard { at, running: 1, prefill_tokens, admitted, rates, ..Heard::default() };
            self.desk.hear(&worker(index as u16), LIFE, heard);
        }
    }

    fn wait(&mut self, request: u128, chain: &[BlockHash], now: Duration) {
        self.enter(Waiter::new(request, chain), now);
    }

    fn enter(&mut self, waiter: Waiter, now: Duration) {
        let overlaps = self.known.overlaps(&waiter.chain);
        let rights = Claim { weight: 1, deadline: now + ms(60_000), ..Claim::default() };
        let claim = claim(&mut self.desk, &self.known, &waiter.ask(), &overlaps, rights);
        let why = self.desk.held_back();
        assert!(self.queue.offer_held_back(claim, why, waiter, now).is_ok());
    }

    fn hand_out(&mut self, now: Duration) -> Vec<(u128, u16, u32)> {
        let gone = hand_out(&mut self.queue, &mut self.desk, &self.known, now);
        let told = |(entry, decision): (Entry<Waiter>, Decision)| {
            (entry.payload.request, decision.worker.index, decision.hit_blocks)
        };
        gone.into_iter().map(told).collect()
    }
}

fn chain(own: u128, blocks: u128) -> Vec<BlockHash> {
    (0..blocks).map(|at| BlockHash((own << 64) + at)).collect()
}

#[test]
fn a_request_that_waits_goes_by_what_is_cached_when_its_turn_comes() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    assert!(!shard.desk.has_room(ms(0)));
    let (plain, document) = (chain(1, 40), chain(2, 40));
    shard.wait(1, &plain, ms(0));
    shard.wait(2, &document, ms(5));
    assert!(shard.hand_out(ms(6)).is_empty());
    // Meanwhile another request has left the document at the second worker.
    shard.known.hold(1, &document);
    shard.hear([1_535, 1_535], 0, ms(10));
    let gone = shard.hand_out(ms(10));
    assert_eq!(gone[0], (2, 1, 40), "the later one goes first, to where it is cached: {gone:?}");
    assert_eq!(gone.get(1).map(|(request, worker, _)| (*request, *worker)), Some((1, 0)));
    let receipt = shard.desk.explain(RequestId(2)).remove(0);
    assert_eq!((receipt.waited_ms, receipt.waited_for.as_str()), (5.0, HeldBack::Prompts.label()));
}

#[test]
fn many_that_wish_for_a_taken_worker_keep_nobody_from_a_free_one() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    let pinned = Wishes { worker: Some(worker(0)), ..Wishes::default() };
    for request in 0..300u128 {
        let waiter = Waiter { wishes: pinned.clone(), ..Waiter::new(request, &chain(request, 4)) };
        shard.enter(waiter, ms(request as u64));
    }
    shard.wait(999, &chain(999, 4), ms(300));
    shard.hear([1_536, 0], 0, ms(301));
    assert_eq!(shard.hand_out(ms(301)), [(999, 1, 0)]);
    shard.hear([1_000, 1_536], 1, ms(302));
    let gone = shard.hand_out(ms(302));
    assert!(
        !gone.is_empty() && gone.iter().all(|(request, worker, _)| (*request < 300, *worker) == (true, 0)),
        "{gone:?}"
    );
}

#[test]
fn what_a_waiting_request_met_is_held_against_nobody_while_it_waits() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    let (failed, left) = (vec![worker(0)], Some(worker(0)));
    shard.enter(Waiter { exclude: failed, ..Waiter::new(1, &chain(1, 4)) }, ms(0));
    shard.enter(Waiter { leaves: left, ..Waiter::new(2, &chain(2, 4)) }, ms(1));
    shard.wait(3, &chain(3, 4), ms(2));
    shard.hear([0, 1_536], 0, ms(3));
    assert_eq!(shard.hand_out(ms(3)), [(3, 0, 0)], "the two wait for the other worker, and this one serves meanwhile");
    shard.hear([1_536, 0], 1, ms(4));
    let gone: Vec<_> = shard.hand_out(ms(4)).into_iter().map(|(request, worker, _)| (request, worker)).collect();
    assert_eq!(gone, [(1, 1), (2, 1)]);
}

#[test]
fn what_was_evicted_while_it_waited_gives_no_turn() {
    let mut shard = Shard::new();
    let (plain, document) = (chain(1, 40), chain(2, 40));
    shard.known.hold(0, &document);
    shard.hear([1_536, 1_536], 0, ms(0));
    shard.wait(1, &plain, ms(0));
    shard.wait(2, &document, ms(5));
    let removed = KvEvent::Removed { blocks: document.clone() };
    shard.known.index.apply(&worker(0), LIFE, &removed).expect("applied");
    shard.hear([1_535, 1_536], 0, ms(10));
    assert_eq!(shard.hand_out(ms(10)), [(1, 0, 0)]);
}

#[test]
fn siblings_follow_the_first_of_them() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    let document = chain(2, 200);
    for request in 0..6u128 {
        let own: Vec<BlockHash> = document.iter().copied().chain(chain(10 + request, 2)).collect();
        shard.wait(request, &own, ms(request as u64));
        shard.wait(100 + request, &chain(100 + request, 200), ms(request as u64));
    }
    let mut order = Vec::new();
    for step in 0..12 {
        // Each time one worker has room for one, which it has computed by the next time.
        let now = ms(20 + 20 * step);
        shard.hear([1_535, 1_536], 0, now);
        for (entry, decision) in hand_out(&mut shard.queue, &mut shard.desk, &shard.known, now) {
            order.push(entry.payload.request);
            shard.known.hold(decision.worker.index, &entry.payload.chain);
            assert!(shard.desk.release(decision.ticket));
        }
    }
    assert_eq!(order.len(), 12);
    let last_of_family = order.iter().rposition(|request| *request < 6).expect("they went");
    assert!(last_of_family <= 7, "{order:?}");
}

#[test]
fn the_lookups_of_a_turn_are_bounded_and_there_are_none_without_room() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    for request in 0..500 {
        shard.wait(request, &chain(request, 4), ms(0));
    }
    *shard.known.lookups.borrow_mut() = 0;
    assert!(shard.hand_out(ms(1)).is_empty());
    assert_eq!(*shard.known.lookups.borrow(), 0);
    shard.hear([1_535, 1_536], 0, ms(2));
    assert_eq!(shard.hand_out(ms(2)).len(), 1);
    assert!(*shard.known.lookups.borrow() <= crate::route::queue::order::FRONT + crate::route::queue::order::MORE + 1);
}

#[test]
fn what_the_caches_hold_of_a_waiting_prompt_is_looked_up_once_in_a_while() {
    let mut shard = Shard::new();
    // So many workers, that it pays; the others take nothing.
    for index in 2..64 {
        shard.desk.seat(&worker(index), LIFE, Places::default(), Standing::Draining);
    }
    shard.hear([1_536, 1_536], 0, ms(0));
    for request in 0..20 {
        shard.wait(request, &chain(request, 4), ms(0));
    }
    let lookups = |shard: &mut Shard, at| {
        *shard.known.lookups.borrow_mut() = 0;
        shard.hear([1_535, 9_000], 0, ms(at));
        let gone = hand_out(&mut shard.queue, &mut shard.desk, &shard.known, ms(at));
        assert_eq!(gone.len(), 1);
        assert!(shard.desk.release(gone[0].1.ticket));
        *shard.known.lookups.borrow()
    };
    assert_eq!(lookups(&mut shard, 1), 20 + 1, "each that waits, and the one that goes");
    for at in 2..10 {
        assert_eq!(lookups(&mut shard, at), 1, "the one that goes");
    }
    shard.wait(99, &chain(99, 4), ms(10));
    assert_eq!(lookups(&mut shard, 10), 1 + 1, "one that came");
    assert_eq!(lookups(&mut shard, 21), 10 + 1, "all but the one that came later");
}

#[test]
fn those_who_left_are_passed_over() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    shard.wait(1, &chain(1, 4), ms(0));
    shard.wait(2, &chain(2, 4), ms(1));
    let first = shard.queue.next(ms(1)).expect("it waits");
    let mut entry = shard.queue.remove(first, ms(1)).expect("it waits");
    entry.payload.gone = true;
    shard.queue.offer(entry.claim, entry.payload, ms(1)).ok();
    shard.hear([0, 0], 0, ms(2));
    assert_eq!(shard.hand_out(ms(2)).into_iter().map(|(request, ..)| request).collect::<Vec<_>>(), [2]);
    assert!(shard.queue.is_empty());
}

/// One that waits in the name of a tenant.
fn enter_as(shard: &mut Shard, tenant: &str, waiter: Waiter) {
    let prompt = waiter.chain.len() as u64 * u64::from(BLOCK);
    let rights = Claim { tenant: tenant.into(), weight: 1, deadline: ms(60_000), ..Claim::default() };
    let claim = Claim { cost_tokens: prompt, miss_tokens: prompt, ..rights };
    assert!(shard.queue.offer(claim, waiter, ms(0)).is_ok());
}

#[test]
fn tenants_share_what_is_computed_when_their_turns_come_not_what_was_missed_when_they_came() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    let document = chain(7, 30);
    for request in 0..60u128 {
        // All look alike when they come; three quarters of one tenant's prompts are cached before its turns come.
        let own = chain(1_000 + request, 10);
        enter_as(&mut shard, "cached", Waiter::new(request, &[&document[..], &own[..]].concat()));
        enter_as(&mut shard, "plain", Waiter::new(500 + request, &chain(100 + request, 40)));
    }
    shard.known.hold(0, &document);
    let mut served: HashMap<bool, (usize, u64)> = HashMap::new();
    for step in 0..40 {
        shard.hear([1_535, 1_536], 0, ms(step));
        for (entry, decision) in hand_out(&mut shard.queue, &mut shard.desk, &shard.known, ms(step)) {
            let (turns, tokens) = served.entry(&*entry.claim.tenant == "cached").or_default();
            (*turns, *tokens) = (*turns + 1, *tokens + decision.computed_tokens);
            assert!(shard.desk.release(decision.ticket));
        }
    }
    let ((turns, cached), (plain_turns, plain)) = (served[&true], served[&false]);
    assert!(cached.abs_diff(plain) <= 2 * 640 && turns >= 3 * plain_turns, "{served:?}");
}

#[test]
fn a_tenant_whose_wishes_are_of_too_many_kinds_is_set_aside_and_others_go_on() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    for request in 0..400u128 {
        // Each is a kind of its own: the worker that is taken, with one more that there never was.
        let exclude = vec![worker(100 + request as u16)];
        let wishes = Wishes { worker: Some(worker(0)), ..Wishes::default() };
        let tenant = format!("picky-{}", request % 4);
        enter_as(&mut shard, &tenant, Waiter { wishes, exclude, ..Waiter::new(request, &chain(request, 4)) });
    }
    enter_as(&mut shard, "modest", Waiter::new(999, &chain(999, 4)));
    let (wishes, exclude) = (Wishes { worker: Some(worker(1)), ..Wishes::default() }, vec![worker(7)]);
    enter_as(&mut shard, "pinned", Waiter { wishes, exclude, ..Waiter::new(998, &chain(998, 4)) });
    shard.hear([1_536, 0], 0, ms(1));
    let mut gone: Vec<_> = shard.hand_out(ms(1)).into_iter().map(|(request, worker, _)| (request, worker)).collect();
    gone.sort_unstable();
    assert_eq!(gone, [(998, 1), (999, 1)]);
    shard.hear([0, 1_536], 2, ms(2));
    let gone = shard.hand_out(ms(2));
    assert!(!gone.is_empty() && gone.iter().all(|(request, worker, _)| *request < 400 && *worker == 0), "{gone:?}");
}

#[test]
fn a_tenant_of_whom_nobody_fits_keeps_no_other_from_its_turn() {
    let mut shard = Shard::new();
    shard.hear([1_536, 1_536], 0, ms(0));
    for request in 0..40u128 {
        let exclude = vec![worker(1)];
        enter_as(&mut shard, "failed", Waiter { exclude, ..Waiter::new(request, &chain(request, 4)) });
    }
    enter_as(&mut shard, "modest", Waiter::new(999, &chain(999, 40)));
    let rates = Some(Rates { prefill_ms_per_token: 1.0, ..Rates::default() });
    let full = Heard { at: ms(1), running: 128, prefill_tokens: 1_536, rates, ..Heard::default() };
    shard.desk.hear(&worker(0), LIFE, full);
    shard.desk.hear(&worker(1), LIFE, Heard { running: 1, prefill_tokens: 1_535, ..full });
    assert_eq!(shard.hand_out(ms(1)), [(999, 1, 0)], "the others may only have the worker that is full");
}
