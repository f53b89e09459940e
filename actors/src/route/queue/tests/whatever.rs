//! A queue under any sequence of what can be done with it.

use std::collections::HashMap;

use proptest::prelude::*;

use super::{
    super::order::{FRONT, MORE},
    *,
};

#[derive(Debug, Clone)]
enum Step {
    Offer { tenant: u8, priority: i32, cost: u64, deadline_ms: u64, begun: bool },
    Pop(u64),
    Park,
    SetAside(usize),
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
        3 => (1u64..600).prop_map(Step::Pop),
        1 => Just(Step::Park),
        1 => (0usize..12).prop_map(Step::SetAside),
        1 => Just(Step::Unpark),
        1 => (0usize..50).prop_map(Step::Cancel),
        2 => (0u64..3_000).prop_map(Step::Look),
        1 => Just(Step::Expire),
        2 => (1u64..400).prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 0..150)
}

/// A queue and what has become of all that came.
struct World {
    queue: Queue<u64>,
    now: Duration,
    number: u64,
    waiting: HashMap<u64, Place>,
    /// Some are passed over.
    passed: bool,
}

impl World {
    fn offer(&mut self, claim: Claim) -> Result<(), TestCaseError> {
        self.number += 1;
        let Claim { begun, priority, .. } = claim;
        match self.queue.offer(claim, self.number, self.now) {
            Ok((place, displaced)) => {
                if let Some(displaced) = displaced {
                    prop_assert!(!displaced.claim.begun && !begun);
                    prop_assert!(displaced.claim.priority >= priority);
                    prop_assert!(self.waiting.remove(&displaced.payload).is_some());
                }
                self.waiting.insert(self.number, place);
            }
            Err((_, returned)) => prop_assert!(returned == self.number && !begun),
        }
        Ok(())
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        let Self { queue, now, waiting, passed, .. } = self;
        match step {
            Step::Offer { tenant, priority, cost, deadline_ms, begun } => {
                let deadline = *now + ms(deadline_ms);
                self.offer(Claim { deadline, begun, ..claim(&format!("t{tenant}"), priority, cost) })?;
            }
            Step::Pop(computed) => match queue.next(*now) {
                Some(place) => {
                    let entry = queue.take_for(place, computed, *now).expect("it waits");
                    prop_assert_eq!(waiting.remove(&entry.payload), Some(place));
                }
                None => prop_assert!(*passed || waiting.is_empty()),
            },
            Step::Park => {
                if let Some(place) = queue.next(*now) {
                    queue.park(place);
                    *passed = true;
                }
            }
            Step::SetAside(at) => {
                if let Some(place) = waiting.values().nth(at) {
                    queue.set_aside(*place);
                    *passed = true;
                }
            }
            Step::Unpark => {
                queue.unpark();
                *passed = false;
            }
            Step::Cancel(at) => {
                let some = waiting.iter().nth(at).map(|(number, place)| (*number, *place));
                if let Some((number, place)) = some {
                    prop_assert_eq!(queue.remove(place, *now).map(|entry| entry.payload), Some(number));
                    prop_assert!(queue.remove(place, *now).is_none());
                    waiting.remove(&number);
                }
            }
            Step::Look(prefill) => {
                let turn = queue.next(*now);
                for place in turn.map(|turn| queue.reconsidered(turn, FRONT + MORE)).unwrap_or_default() {
                    queue.judge(place, ms(prefill));
                }
                prop_assert_eq!(queue.next(*now).is_some(), turn.is_some());
            }
            Step::Expire => {
                for (entry, _) in queue.expire(*now) {
                    prop_assert!(waiting.remove(&entry.payload).is_some());
                }
            }
            Step::Pass(by) => *now += ms(by),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let queue = &self.queue;
        prop_assert_eq!(queue.len(), self.waiting.len());
        let counted = queue.entries.values().filter(|entry| !entry.claim.begun).count();
        prop_assert!(counted <= 12 && queue.tenants.values().all(|holding| holding.places <= 8));
        let tokens: u64 = queue.lanes.values().map(Lane::tokens).sum();
        prop_assert_eq!(tokens, queue.entries.values().map(|entry| entry.claim.cost_tokens).sum::<u64>());
        Ok(())
    }
}

proptest! {
    /// Whatever comes, goes, is passed over or expires: nobody is lost or told twice, bounds hold, and nothing is left at the end.
    #[test]
    fn everybody_is_told_once_and_nothing_is_left(steps in steps(), order in 0usize..3) {
        let order = [Order::ShortestMiss, Order::Deadline, Order::Cached][order];
        let config = QueueConfig { places: 12, tenant_places: 8, overdue_ms: 500, order, ..QueueConfig::default() };
        let (queue, waiting) = (Queue::new(config), HashMap::new());
        let mut world = World { queue, now: ms(0), number: 0, waiting, passed: false };
        for step in steps {
            world.step(step)?;
            world.check()?;
        }
        let World { mut queue, now, mut waiting, .. } = world;
        queue.unpark();
        while let Some(number) = pop(&mut queue, now) {
            prop_assert!(waiting.remove(&number).is_some());
        }
        prop_assert!(waiting.is_empty() && queue.ages.is_empty() && queue.deadlines.is_empty());
        prop_assert!(queue.lanes.is_empty() && queue.tenants.is_empty() && queue.sizes.is_empty());
    }
}
