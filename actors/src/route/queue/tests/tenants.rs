//! Tenants share what is computed, by weight.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

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

proptest! {
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

    /// Two tenants that both wait all the time share by weight what is really computed, however much of their prompts turns out
    /// to be cached when their turns come: they are never further apart than one request of each.
    #[test]
    fn tenants_share_what_is_really_computed_however_much_is_cached(
        costs in proptest::collection::vec(((100u64..2_000, 0u64..=100), (100u64..2_000, 0u64..=100)), 40..80),
        weights in (1u32..5, 1u32..5),
    ) {
        let config = QueueConfig { overdue_ms: u64::MAX, order: Order::Deadline, ..Default::default() };
        let mut queue: Queue<(usize, u64)> = Queue::new(config);
        let offers = costs.iter().flat_map(|(one, two)| [(0, weights.0, *one), (1, weights.1, *two)]);
        for (who, weight, (miss, missed_percent)) in offers {
            let (miss_tokens, cost_tokens) = (miss, miss + 10);
            let claim = Claim { weight, miss_tokens, ..claim(["one", "two"][who], 0, cost_tokens) };
            queue.offer(claim, (who, (miss * missed_percent / 100).max(1)), ms(0)).expect("room");
        }
        let by_weight = [f64::from(weights.0), f64::from(weights.1)];
        let bound = 2_010.0 / by_weight[0] + 2_010.0 / by_weight[1] + 1.0;
        let (mut served, mut left) = ([0.0f64; 2], [costs.len(); 2]);
        while left[0] > 0 && left[1] > 0 {
            let place = queue.next(ms(0)).expect("both wait");
            let computed = queue.get(place).expect("it waits").payload.1;
            let (who, computed) = queue.take_for(place, computed, ms(0)).expect("it waits").payload;
            served[who] += (computed + 10) as f64 / by_weight[who];
            left[who] -= 1;
            prop_assert!((served[0] - served[1]).abs() <= bound, "{served:?} within {bound}");
        }
    }
}
