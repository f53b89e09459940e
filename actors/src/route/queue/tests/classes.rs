//! Classes, those that had begun, age, and those that are passed over.

use proptest::prelude::*;

use super::*;

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

#[test]
fn a_tenant_that_is_set_aside_leaves_the_turns_to_others_but_for_who_has_waited_too_long() {
    let mut queue = queue(QueueConfig { overdue_ms: 1_000, ..QueueConfig::default() });
    let first = put(&mut queue, claim("a", 0, 10), "a-1", ms(0));
    put(&mut queue, claim("a", 0, 10), "a-2", ms(1));
    put(&mut queue, claim("a", 7, 10), "a-low", ms(2));
    (0..9).for_each(|_| drop_place(put(&mut queue, claim("b", 0, 10), "b", ms(900))));
    queue.set_aside(first);
    put(&mut queue, claim("a", 0, 10), "a-3", ms(900));
    let order: Vec<_> = (0..7).map(|_| pop(&mut queue, ms(1_500)).expect("b waits")).collect();
    assert_eq!(order, ["b"; 7]);
    assert_eq!(pop(&mut queue, ms(1_500)), Some("a-1"), "the oldest");
    let rest: Vec<_> = std::iter::from_fn(|| pop(&mut queue, ms(1_500))).collect();
    assert_eq!(rest, ["b", "b", "a-low"], "its other class has turns");
    queue.unpark();
    let rest: Vec<_> = std::iter::from_fn(|| pop(&mut queue, ms(1_500))).collect();
    assert_eq!(rest, ["a-2", "a-3"]);
    assert!(queue.lanes.is_empty() && queue.ages.is_empty());
}

proptest! {
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
