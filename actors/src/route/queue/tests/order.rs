//! The order inside a tenant, and how it is kept true.

use std::collections::HashMap;

use proptest::prelude::*;

use super::{
    super::order::{FRONT, MORE},
    *,
};

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

#[test]
fn the_looks_of_a_tenant_or_a_class_are_not_taken_by_another() {
    let mut queue: Queue<(usize, usize)> = Queue::new(QueueConfig::default());
    let count = FRONT + 3 * MORE;
    let lanes = [("many", 0), ("other", 0), ("many", 7)];
    for at in 0..count {
        for (lane, (tenant, priority)) in lanes.into_iter().enumerate() {
            let claim = Claim { priority, ..found_out(tenant, at as u64, 50) };
            queue.offer(claim, (lane, at), ms(0)).expect("room");
        }
    }
    let firsts: Vec<Place> = (0..lanes.len())
        .map(|lane| *queue.entries.iter().find(|(_, entry)| entry.payload == (lane, 0)).expect("it waits").0)
        .collect();
    let mut seen: HashMap<(usize, usize), usize> = HashMap::new();
    // Each has as many turns as it takes to go round once, with those of the others in between.
    for _ in 0..3 {
        for first in &firsts {
            for place in queue.reconsidered(*first, FRONT + MORE) {
                *seen.entry(queue.get(place).expect("it waits").payload).or_default() += 1;
            }
        }
    }
    let missed = (0..lanes.len()).flat_map(|lane| (0..count).map(move |at| (lane, at)));
    let missed: Vec<_> = missed.filter(|one| !seen.contains_key(one)).collect();
    assert!(missed.is_empty(), "never looked at: {missed:?}");
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
