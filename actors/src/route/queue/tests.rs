use std::{collections::HashMap, time::Duration};

use proptest::prelude::*;

use super::{
    order::{FRONT, MORE},
    rooms::Need,
    *,
};

fn secs(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

fn claim(tenant: &str, priority: i32, cost_tokens: u64) -> Claim {
    let (miss_tokens, deadline) = (cost_tokens, secs(3_600));
    let tenant = tenant.into();
    Claim { tenant, weight: 1, priority, miss_tokens, cost_tokens, deadline, ..Claim::default() }
}

fn queue(config: QueueConfig) -> Queue<&'static str> {
    Queue::new(config)
}

fn put(queue: &mut Queue<&'static str>, claim: Claim, name: &'static str, now: Duration) -> Place {
    queue.offer(claim, name, now).unwrap_or_else(|(refusal, _)| panic!("{name}: {refusal:?}")).0
}

/// Places are names; nothing is given back with them.
fn drop_place(_: Place) {}

fn pop<T>(queue: &mut Queue<T>, now: Duration) -> Option<T> {
    let place = queue.next(now)?;
    queue.take(place, now).map(|entry| entry.payload)
}

fn refused(queue: &mut Queue<&'static str>, claim: Claim, now: Duration) -> Refusal {
    match queue.offer(claim, "no", now) {
        Err((refusal, _)) => refusal,
        Ok((place, _)) => panic!("let in as {place:?}"),
    }
}

#[test]
fn classes_go_in_order_and_the_begun_before_all() {
    let mut queue = queue(QueueConfig::default());
    put(&mut queue, claim("a", 5, 10), "low", ms(0));
    put(&mut queue, claim("a", 0, 10), "usual", ms(1));
    put(&mut queue, claim("a", -5, 10), "high", ms(2));
    put(&mut queue, Claim { begun: true, ..claim("a", 9, 10) }, "begun", ms(3));
    let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, ms(4))).collect();
    assert_eq!(order, ["begun", "high", "usual", "low"]);
    assert!(queue.is_empty() && queue.tenants.is_empty() && queue.sizes.is_empty() && queue.lanes.is_empty());
}

#[test]
fn inside_a_tenant_the_earliest_deadline_or_the_smallest_miss_goes_first() {
    for (order, expected) in [(Order::Deadline, ["b", "c", "a"]), (Order::ShortestMiss, ["c", "a", "b"])] {
        let mut queue = queue(QueueConfig { order, ..QueueConfig::default() });
        put(&mut queue, Claim { deadline: secs(30), ..claim("t", 0, 50) }, "a", ms(0));
        put(&mut queue, Claim { deadline: secs(10), ..claim("t", 0, 90) }, "b", ms(1));
        put(&mut queue, Claim { deadline: secs(20), ..claim("t", 0, 10) }, "c", ms(2));
        let got: Vec<_> = std::iter::from_fn(|| pop(&mut queue, ms(3))).collect();
        assert_eq!(got, expected, "{order:?}");
    }
}

#[test]
fn tenants_share_tokens_by_weight_not_requests() {
    let mut queue: Queue<u64> = Queue::new(QueueConfig { tenant_places: 4_000, places: 9_000, ..Default::default() });
    for _ in 0..1_500 {
        queue.offer(claim("small", 0, 100), 100, ms(0)).expect("room");
        queue.offer(Claim { weight: 3, ..claim("heavy", 0, 100) }, 300, ms(0)).expect("room");
        queue.offer(claim("large", 0, 1_000), 1_000, ms(0)).expect("room");
    }
    let mut turns: HashMap<u64, u64> = HashMap::new();
    (0..1_000).for_each(|_| *turns.entry(pop(&mut queue, ms(1)).expect("plenty")).or_default() += 1);
    // Three parts of 100 tokens, one part of 100 and one of 1,000 that comes a tenth as often.
    assert!((720..=740).contains(&turns[&300]), "{turns:?}");
    assert!((238..=248).contains(&turns[&100]), "{turns:?}");
    assert!((23..=26).contains(&turns[&1_000]), "{turns:?}");
}

#[test]
fn one_request_at_a_time_wins_nothing() {
    let mut queue: Queue<&str> = Queue::new(QueueConfig::default());
    (0..200).for_each(|_| drop_place(put(&mut queue, claim("steady", 0, 100), "steady", ms(0))));
    let mut served = 0;
    for _ in 0..100 {
        if !queue.tenants.contains_key("sly") {
            put(&mut queue, claim("sly", 0, 100), "sly", ms(0));
        }
        served += usize::from(pop(&mut queue, ms(0)) == Some("sly"));
    }
    assert!((49..=51).contains(&served), "{served} of 100 turns");
}

#[test]
fn a_low_class_is_never_starved() {
    let mut queue = queue(QueueConfig { overdue_ms: 1_000, ..QueueConfig::default() });
    put(&mut queue, claim("low", 9, 10), "low", ms(0));
    let mut waited = 0;
    for turn in 0..100u64 {
        let now = ms(turn * 100);
        put(&mut queue, claim("high", 0, 10), "high", now);
        put(&mut queue, claim("high", 0, 10), "high", now);
        if pop(&mut queue, now) == Some("low") {
            waited = turn;
            break;
        }
    }
    // Overdue after ten turns, then at most one turn in eight later.
    assert!((10..=10 + u64::from(OVERDUE_TURN)).contains(&waited), "served at turn {waited}");
}

#[test]
fn when_full_a_higher_class_displaces_the_last_of_the_lowest() {
    let mut queue = queue(QueueConfig { places: 3, ..QueueConfig::default() });
    put(&mut queue, claim("a", 0, 10), "usual", ms(0));
    put(&mut queue, claim("a", 7, 10), "low-1", ms(1));
    put(&mut queue, claim("a", 7, 10), "low-2", ms(2));
    let refusal = refused(&mut queue, claim("a", 7, 10), ms(3));
    assert_eq!(refusal, Refusal { reason: Reason::Full, retry_after: secs(1) });
    let (_, displaced) = queue.offer(claim("a", -1, 10), "high", ms(4)).expect("let in");
    assert_eq!(displaced.map(|entry| entry.payload), Some("low-2"));
    let (_, displaced) = queue.offer(claim("a", 0, 10), "usual-2", ms(5)).expect("let in");
    assert_eq!(displaced.map(|entry| entry.payload), Some("low-1"));
    assert_eq!(refused(&mut queue, claim("a", 0, 10), ms(6)).reason, Reason::Full);
    assert_eq!(queue.len(), 3);
}

#[test]
fn when_full_the_largest_tenant_makes_way_and_is_the_one_told_429() {
    let mut queue = queue(QueueConfig { places: 4, ..QueueConfig::default() });
    (0..4).for_each(|at| drop_place(put(&mut queue, claim("greedy", 0, 10), "greedy", ms(at))));
    assert_eq!(refused(&mut queue, claim("greedy", 0, 10), ms(5)).reason, Reason::Full, "alone it is capacity");
    for _ in 0..2 {
        let (_, displaced) = queue.offer(claim("modest", 0, 10), "modest", ms(6)).expect("let in");
        assert_eq!(displaced.map(|entry| entry.payload), Some("greedy"));
    }
    // Two each now.
    assert_eq!(refused(&mut queue, claim("greedy", 0, 10), ms(7)).reason, Reason::Full);
    let (_, displaced) = queue.offer(claim("third", 0, 10), "third", ms(8)).expect("let in");
    assert!(displaced.is_some());
    let low = refused(&mut queue, claim("fourth", 3, 10), ms(9));
    assert_eq!(low.reason, Reason::Full, "a lower class displaces nobody");
    let mut queue = self::queue(QueueConfig { tenant_places: 2, ..QueueConfig::default() });
    (0..2).for_each(|at| drop_place(put(&mut queue, claim("greedy", 0, 10), "greedy", ms(at))));
    assert_eq!(refused(&mut queue, claim("greedy", 0, 10), ms(3)).reason, Reason::TenantShare);
    (0..5).for_each(|at| drop_place(put(&mut queue, claim("", 0, 10), "nobody's", ms(at))));
}

#[test]
fn a_request_that_would_come_too_late_is_told_at_once_and_when_to_come_back() {
    let mut queue: Queue<u64> = Queue::new(QueueConfig { wait_ms_max: 10_000, ..QueueConfig::default() });
    // Some are told that it is hopeless, which is what this is about.
    let waiting = |queue: &mut Queue<u64>, at| queue.offer(claim("a", 0, 100), at, ms(at)).map(|_| ()).unwrap_or(());
    (0..20).for_each(|at| waiting(&mut queue, at));
    // 100 tokens every 100 ms: a thousand a second.
    for at in 1..=20 {
        pop(&mut queue, ms(at * 100));
        waiting(&mut queue, at * 100);
    }
    (0..200).for_each(|at| waiting(&mut queue, 2_000 + at));
    let refused = queue.offer(claim("a", 0, 100), 0, ms(2_300)).map_err(|(refusal, _)| refusal);
    let Err(Refusal { reason: Reason::Hopeless, retry_after }) = refused else { panic!("{refused:?}") };
    // What is ahead takes about 10 s, which is as long as it may wait: it fits again soon.
    assert!(retry_after >= secs(1) && retry_after <= secs(3), "{retry_after:?}");
    assert!((90..130).contains(&queue.len()), "{} wait", queue.len());
    // Its own part is small, so another tenant would not wait long; a higher class not at all.
    assert!(queue.wait(&claim("b", 0, 100)) < secs(1));
    assert_eq!(queue.wait(&claim("b", -1, 100)), Duration::ZERO);
    queue.offer(claim("b", 0, 100), 0, ms(2_300)).expect("let in");
}

#[test]
fn what_expires_says_why() {
    let mut queue = queue(QueueConfig { wait_ms_max: 5_000, ..QueueConfig::default() });
    put(&mut queue, Claim { deadline: ms(1_500), ..claim("a", 0, 10) }, "short", ms(0));
    put(&mut queue, claim("a", 0, 10), "long", ms(0));
    assert!(queue.expire(ms(1_499)).is_empty());
    let mut gone =
        |now| queue.expire(now).into_iter().map(|(entry, why)| (entry.payload, why.reason)).collect::<Vec<_>>();
    assert_eq!(gone(ms(1_500)), [("short", Reason::Deadline)]);
    assert_eq!(gone(ms(5_000)), [("long", Reason::Waited)]);
}

#[test]
fn a_parked_request_is_passed_over_and_comes_back() {
    let mut queue = queue(QueueConfig::default());
    let first = put(&mut queue, claim("a", 0, 10), "first", ms(0));
    put(&mut queue, claim("a", 0, 10), "second", ms(1));
    queue.park(first);
    queue.park(first);
    assert_eq!(pop(&mut queue, ms(2)), Some("second"));
    assert_eq!(queue.next(ms(2)), None);
    queue.unpark();
    assert_eq!(pop(&mut queue, secs(60)), Some("first"));
    let gone = put(&mut queue, claim("b", 0, 10), "gone", ms(3));
    queue.park(gone);
    assert!(queue.remove(gone, ms(4)).is_some() && queue.remove(gone, ms(4)).is_none());
    queue.unpark();
    assert!(queue.is_empty() && queue.lanes.is_empty() && queue.tenants.is_empty());
}

#[derive(Debug, Clone)]
enum Step {
    Offer { tenant: u8, priority: i32, cost: u64, deadline_ms: u64, begun: bool },
    Pop,
    Park,
    Unpark,
    Cancel(usize),
    Look(u64),
    Expire,
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let offer = (0u8..4, -2i32..3, 1u64..500, 50u64..5_000, prop::bool::weighted(0.1));
    let step = prop_oneof![
        5 => offer.prop_map(|(tenant, priority, cost, deadline_ms, begun)| {
            Step::Offer { tenant, priority, cost, deadline_ms, begun }
        }),
        3 => Just(Step::Pop),
        1 => Just(Step::Park),
        1 => Just(Step::Unpark),
        1 => (0usize..50).prop_map(Step::Cancel),
        2 => (0u64..3_000).prop_map(Step::Look),
        1 => Just(Step::Expire),
        2 => (1u64..400).prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 0..150)
}

proptest! {
    /// Whatever comes, goes, is parked or expires: nobody is lost or told twice, bounds hold, and nothing is left at the end.
    #[test]
    fn everybody_is_told_once_and_nothing_is_left(steps in steps(), order in 0usize..3) {
        let order = [Order::ShortestMiss, Order::Deadline, Order::Cached][order];
        let config = QueueConfig { places: 12, tenant_places: 8, overdue_ms: 500, order, ..QueueConfig::default() };
        let mut queue: Queue<u64> = Queue::new(config);
        let (mut now, mut number) = (ms(0), 0u64);
        let mut waiting: HashMap<u64, Place> = HashMap::new();
        let mut parked = 0;
        for step in steps {
            match step {
                Step::Offer { tenant, priority, cost, deadline_ms, begun } => {
                    let deadline = now + ms(deadline_ms);
                    let claim = Claim { deadline, begun, ..claim(&format!("t{tenant}"), priority, cost) };
                    number += 1;
                    match queue.offer(claim, number, now) {
                        Ok((place, displaced)) => {
                            if let Some(displaced) = displaced {
                                prop_assert!(!displaced.claim.begun && !begun);
                                prop_assert!(displaced.claim.priority >= priority);
                                prop_assert!(waiting.remove(&displaced.payload).is_some());
                            }
                            waiting.insert(number, place);
                        }
                        Err((_, returned)) => prop_assert!(returned == number && !begun),
                    }
                }
                Step::Pop => match queue.next(now) {
                    Some(place) => {
                        let entry = queue.take(place, now).expect("it waits");
                        prop_assert_eq!(waiting.remove(&entry.payload), Some(place));
                    }
                    None => prop_assert!(parked > 0 || waiting.is_empty()),
                },
                Step::Park => if let Some(place) = queue.next(now) {
                    queue.park(place);
                    parked += 1;
                },
                Step::Unpark => {
                    queue.unpark();
                    parked = 0;
                }
                Step::Cancel(at) => {
                    let some = waiting.iter().nth(at).map(|(number, place)| (*number, *place));
                    if let Some((number, place)) = some {
                        prop_assert_eq!(queue.remove(place, now).map(|entry| entry.payload), Some(number));
                        prop_assert!(queue.remove(place, now).is_none());
                        waiting.remove(&number);
                    }
                }
                Step::Look(prefill) => {
                    let turn = queue.next(now);
                    for place in turn.map(|turn| queue.reconsidered(turn, FRONT + MORE)).unwrap_or_default() {
                        queue.judge(place, ms(prefill));
                    }
                    prop_assert_eq!(queue.next(now).is_some(), turn.is_some());
                }
                Step::Expire => for (entry, _) in queue.expire(now) {
                    prop_assert!(waiting.remove(&entry.payload).is_some());
                },
                Step::Pass(by) => now += ms(by),
            }
            prop_assert_eq!(queue.len(), waiting.len());
            let counted = queue.entries.values().filter(|entry| !entry.claim.begun).count();
            prop_assert!(counted <= 12 && queue.tenants.values().all(|holding| holding.places <= 8));
            let tokens: u64 = queue.lanes.values().map(Lane::tokens).sum();
            prop_assert_eq!(tokens, queue.entries.values().map(|entry| entry.claim.cost_tokens).sum::<u64>());
        }
        queue.unpark();
        while let Some(number) = pop(&mut queue, now) {
            prop_assert!(waiting.remove(&number).is_some());
        }
        prop_assert!(waiting.is_empty() && queue.ages.is_empty() && queue.deadlines.is_empty());
        prop_assert!(queue.lanes.is_empty() && queue.tenants.is_empty() && queue.sizes.is_empty());
    }

    /// Two tenants that both wait all the time are never served further apart, by weight, than one request of each.
    #[test]
    fn fairness_is_within_one_request_of_each(
        costs in proptest::collection::vec((1u64..2_000, 1u64..2_000), 40..80),
        weights in (1u32..5, 1u32..5),
    ) {
        let mut queue: Queue<(usize, u64)> = Queue::new(QueueConfig { overdue_ms: u64::MAX, ..Default::default() });
        for (one, two) in &costs {
            queue.offer(Claim { weight: weights.0, ..claim("one", 0, *one) }, (0, *one), ms(0)).expect("room");
            queue.offer(Claim { weight: weights.1, ..claim("two", 0, *two) }, (1, *two), ms(0)).expect("room");
        }
        let by_weight = [f64::from(weights.0), f64::from(weights.1)];
        let largest = costs.iter().map(|(one, two)| (*one).max(*two)).max().unwrap_or(0) as f64;
        let bound = largest / by_weight[0] + largest / by_weight[1] + 1.0;
        let (mut served, mut left) = ([0.0f64; 2], [costs.len(), costs.len()]);
        while left[0] > 0 && left[1] > 0 {
            let (who, cost) = pop(&mut queue, ms(0)).expect("both wait");
            served[who] += cost as f64 / by_weight[who];
            left[who] -= 1;
            prop_assert!((served[0] - served[1]).abs() <= bound, "{served:?} within {bound}");
        }
    }

    /// An overdue request with `n` older ones goes within (n + 1) turns of the overdue, whatever else comes.
    #[test]
    fn the_overdue_are_served_in_time(low in 1usize..20, high_per_turn in 1usize..4) {
        let mut queue: Queue<usize> = Queue::new(QueueConfig { overdue_ms: 100, ..QueueConfig::default() });
        for at in 0..low {
            queue.offer(claim("low", 9, 10), at, ms(at as u64)).expect("room");
        }
        let mut seen = 0;
        for turn in 1..=(low * OVERDUE_TURN as usize) {
            for _ in 0..high_per_turn.min(900 - queue.len().min(900)) {
                queue.offer(claim("", 0, 10), usize::MAX, secs(1)).ok();
            }
            match pop(&mut queue, secs(1)) {
                Some(usize::MAX) => {}
                Some(at) => {
                    prop_assert!(at == seen && turn <= (at + 1) * OVERDUE_TURN as usize, "{at} at turn {turn}");
                    seen += 1;
                }
                None => prop_assert!(false, "somebody waits"),
            }
        }
        prop_assert_eq!(seen, low);
    }
}

#[test]
fn a_worker_is_taken_by_its_batch_what_is_ahead_and_the_prompts_that_wait() {
    use crate::route::fleet::{Fleet, Heard, Places};
    let worker = starling_ids::WorkerId { node: starling_ids::NodeId::new("n").expect("name"), index: 0 };
    let mut fleet = Fleet::default();
    let places = Places { sequences: 8, waiting: 16, step_tokens: 512, blocks: 4_096, ..Places::default() };
    let slot = fleet.seat(&worker, starling_ids::Incarnation(1), places);
    let rooms = Rooms::default();
    let mut at = |running, waiting, prefill_tokens| {
        fleet.hear(slot, Heard { running, waiting, prefill_tokens, ..Heard::default() });
        (rooms.open(&fleet, slot, 16), rooms.fits(&fleet, slot, Need { sequences: 1, blocks: 1 }, 16))
    };
    assert_eq!(at(8, 1, 0), (true, true));
    assert_eq!(at(8, 2, 0), (false, true));
    assert_eq!(at(8, 15, 0), (false, true));
    assert_eq!(at(8, 16, 0), (false, false));
    assert_eq!(at(1, 1, 3 * 512 - 1), (true, true));
    assert_eq!(at(1, 1, 3 * 512), (false, true));
    at(0, 0, 0);
    let huge = Need { sequences: 100, blocks: 100_000 };
    assert!(
        rooms.open(&fleet, slot, 16) && rooms.fits(&fleet, slot, huge, 16),
        "nobody else would ever have room for it"
    );
}

#[test]
fn a_worker_is_taken_by_the_blocks_that_are_pinned_promised_and_waited_for() {
    use crate::route::fleet::{Fleet, Heard, Places};
    let worker = starling_ids::WorkerId { node: starling_ids::NodeId::new("n").expect("name"), index: 0 };
    let mut fleet = Fleet::default();
    let places = Places { sequences: 8, waiting: 16, step_tokens: 512, blocks: 200, ..Places::default() };
    let slot = fleet.seat(&worker, starling_ids::Incarnation(1), places);
    let rooms = Rooms { kv_percent: 100, ..Rooms::default() };
    let mut at = |blocks_pinned, prefill_tokens, blocks| {
        fleet.hear(slot, Heard { running: 1, blocks_pinned, prefill_tokens, ..Heard::default() });
        (rooms.open(&fleet, slot, 16), rooms.fits(&fleet, slot, Need { sequences: 1, blocks }, 16))
    };
    // Two of the 200 are the worker's own reserve.
    assert_eq!(at(190, 0, 8), (true, true));
    assert_eq!(at(190, 0, 9), (true, false));
    assert_eq!(at(190, 33, 5), (true, true));
    assert_eq!(at(190, 33, 6), (true, false));
    assert_eq!(at(190, 8 * 16, 1), (false, false));
    assert_eq!(at(198, 0, 0), (false, true), "one that leaves the wait to the worker");
    let any = Rooms { kv_percent: 0, ..Rooms::default() };
    assert!(any.open(&fleet, slot, 16) && any.fits(&fleet, slot, Need { sequences: 1, blocks: 1_000 }, 16));
}

proptest! {
    /// However many gateways ask, in whatever order requests come, get on and end: what is promised on a busy worker never
    /// exceeds its pool, as far as the worker's own account can be known.
    #[test]
    fn kv_blocks_are_never_promised_beyond_the_pool(
        asks in prop::collection::vec((1u32..1_200, 0u8..4), 1..120),
        pool in 64u32..400,
    ) {
        use crate::route::{desk::{Ask, Desk}, fleet::{Heard, Places, Standing}, policy::PolicyConfig};
        let policy = PolicyConfig::default().build().expect("composed");
        let rooms = Rooms { kv_percent: 100, ahead_percent: 1_000, prefill_steps: 0 };
        let mut desk = Desk::new(policy, 3).with_rooms(rooms);
        let worker = |index| starling_ids::WorkerId { node: starling_ids::NodeId::new("n").expect("name"), index };
        let life = starling_ids::Incarnation(1);
        let places = Places { sequences: 512, waiting: 512, step_tokens: 512, blocks: pool, ..Places::default() };
        for index in 0..3 {
            desk.seat(&worker(index), life, places, Standing::Sound);
        }
        // Blocks of what runs at each worker, by ticket.
        let mut running: Vec<(u16, crate::route::desk::Ticket, u64)> = Vec::new();
        let mut admitted = [0u64; 3];
        for (at, (prompt_tokens, turn)) in asks.into_iter().enumerate() {
            let now = Duration::from_millis(at as u64);
            let request = starling_ids::RequestId(at as u128);
            if let Some(decision) = desk.decide(&Ask { request, prompt_tokens, ..Ask::default() }, &[], now) {
                let index = decision.worker.index;
                let blocks = u64::from(prompt_tokens.div_ceil(16));
                let there = running.iter().filter(|(other, ..)| *other == index).map(|(.., blocks)| blocks);
                let promised: u64 = there.clone().sum();
                prop_assert!(there.count() == 0 || promised + blocks <= u64::from(pool - pool / 100), "{promised} and {blocks}");
                admitted[usize::from(index)] += 1;
                desk.confirm(decision.ticket, admitted[usize::from(index)]);
                running.push((index, decision.ticket, blocks));
            }
            if turn == 0 && !running.is_empty() {
                let (_, ticket, _) = running.swap_remove(at % running.len());
                desk.release(ticket);
            }
            if turn <= 1 {
                for index in 0..3u16 {
                    let there = running.iter().filter(|(other, ..)| *other == index);
                    let blocks: u64 = there.clone().map(|(.., blocks)| blocks).sum();
                    let running = there.count() as u32;
                    let blocks_pinned = blocks as u32;
                    let admitted = admitted[usize::from(index)];
                    desk.hear(&worker(index), life, Heard { at: now, running, blocks_pinned, admitted, ..Heard::default() });
                }
            }
        }
    }
}

/// One in the queue of whom it was found out how long its prompt would be computed.
fn found_out(tenant: &str, at: u64, prefill: u64) -> Claim {
    Claim { deadline: secs(100) + ms(at), prefill: ms(prefill), ..claim(tenant, 0, 10) }
}

#[test]
fn who_is_cached_goes_first_by_patience_for_each_millisecond_and_only_so_far() {
    let config = QueueConfig { patience: 10, passed_ms_max: 1_000, ..QueueConfig::default() };
    let mut queue = queue(config);
    put(&mut queue, found_out("t", 0, 90), "long", ms(0));
    put(&mut queue, found_out("t", 0, 5_000), "endless", ms(0));
    put(&mut queue, found_out("t", 800, 5), "cached", ms(800));
    put(&mut queue, found_out("t", 900, 1), "later", ms(900));
    put(&mut queue, found_out("t", 1_001, 0), "too late", ms(1_001));
    let got: Vec<_> = std::iter::from_fn(|| pop(&mut queue, ms(1_002))).collect();
    assert_eq!(got, ["cached", "long", "later", "endless", "too late"]);
}

#[test]
fn one_with_little_time_is_not_put_off_until_it_is_over() {
    let mut queue = queue(QueueConfig { patience: 10, passed_ms_max: 10_000, ..QueueConfig::default() });
    let hurried = Claim { deadline: ms(400), ..found_out("t", 0, 2_000) };
    put(&mut queue, hurried, "hurried", ms(0));
    put(&mut queue, Claim { deadline: ms(501), ..found_out("t", 0, 0) }, "cached", ms(0));
    assert_eq!(pop(&mut queue, ms(1)), Some("hurried"));
}

#[test]
fn those_in_front_are_looked_at_again_each_time_and_the_rest_in_rotation() {
    let mut queue: Queue<usize> = Queue::new(QueueConfig::default());
    let count = FRONT + 3 * MORE;
    for at in 0..count {
        queue.offer(found_out("t", at as u64, 50), at, ms(0)).expect("room");
    }
    // Beyond what anybody can be passed by.
    queue.offer(found_out("t", 60_000, 50), usize::MAX, ms(0)).expect("room");
    let mut seen: HashMap<usize, usize> = HashMap::new();
    for _ in 0..4 {
        let turn = queue.next(ms(1)).expect("many wait");
        let looked = queue.reconsidered(turn, FRONT + MORE);
        assert!(looked.len() <= FRONT + MORE);
        looked.iter().for_each(|place| *seen.entry(queue.get(*place).expect("waits").payload).or_default() += 1);
    }
    assert!((0..FRONT).all(|at| seen[&at] == 4), "{seen:?}");
    assert!((FRONT..count).all(|at| (1..=2).contains(&seen[&at])) && !seen.contains_key(&usize::MAX), "{seen:?}");
    // One behind is cached now.
    let place = queue.entries.iter().find(|(_, entry)| entry.payload == 40).map(|(place, _)| *place).expect("it waits");
    queue.judge(place, ms(0));
    assert_eq!(pop(&mut queue, ms(2)), Some(40));
    let plain = QueueConfig { order: Order::Deadline, ..QueueConfig::default() };
    let mut queue = self::queue(plain);
    let first = put(&mut queue, found_out("t", 0, 50), "a", ms(0));
    assert!(queue.reconsidered(first, FRONT + MORE).is_empty());
}

proptest! {
    /// Nobody is passed by one of its tenant and class whose deadline is later by more than the bound, whatever is found out.
    #[test]
    fn nobody_is_passed_for_longer_than_the_bound(
        come in prop::collection::vec((0u64..400, 0u64..4_000, 0u64..4_000), 2..60),
        patience in 0u32..50,
    ) {
        let config = QueueConfig { patience, passed_ms_max: 2_000, overdue_ms: u64::MAX, ..QueueConfig::default() };
        let mut queue: Queue<u64> = Queue::new(config);
        let mut at = 0;
        for (pause, prefill, _) in &come {
            at += pause;
            queue.offer(found_out("t", at, *prefill), *prefill, ms(at)).expect("room");
        }
        for (.., found) in &come {
            let turn = queue.next(ms(at)).expect("as many as came");
            for (more, place) in queue.reconsidered(turn, FRONT + MORE).into_iter().enumerate() {
                queue.judge(place, ms(found.wrapping_mul(more as u64 + 1) % 4_000));
            }
            let next = queue.next(ms(at)).expect("as many as came");
            let deadline = queue.get(next).expect("it waits").claim.deadline;
            let earliest = queue.entries.values().map(|entry| entry.claim.deadline).min().expect("one at least");
            prop_assert!(deadline <= earliest + ms(2_000), "{deadline:?} before {earliest:?}");
            queue.take(next, ms(at));
        }
        prop_assert!(queue.is_empty());
    }
}
