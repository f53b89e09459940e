//! What the tests of the queue share: claims, and short names for what is done with a queue.

use std::time::Duration;

use super::*;

mod classes;
mod order;
mod places;
mod rooms;
mod tenants;
mod whatever;

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

/// One in the queue of whom it was found out how long its prompt would be computed.
fn found_out(tenant: &str, at: u64, prefill: u64) -> Claim {
    Claim { deadline: secs(100) + ms(at), prefill: ms(prefill), ..claim(tenant, 0, 10) }
}
