//! Who is let in, who makes way, and what those are told who are not.

use super::*;

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
