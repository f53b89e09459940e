//! The endpoint names under which the cast is found, in one place.

use starling_ids::EndpointName;

/// Where a worker takes requests.
#[must_use]
pub fn worker_generate(index: u16) -> EndpointName {
    valid(&format!("starling/worker-{index}/generate"))
}

/// Where a worker's KV events and load reports are subscribed to.
#[must_use]
pub fn worker_events(index: u16) -> EndpointName {
    valid(&format!("starling/worker-{index}/events"))
}

/// Where a worker's KV blocks are asked for.
#[must_use]
pub fn worker_kv(index: u16) -> EndpointName {
    valid(&format!("starling/worker-{index}/kv"))
}

/// Where a router shard is asked.
#[must_use]
pub fn router_route() -> EndpointName {
    valid("starling/router/route")
}

/// The index in a worker's generate endpoint; `None` of any other name.
#[must_use]
pub fn worker_index(endpoint: &EndpointName) -> Option<u16> {
    let middle = endpoint.as_str().strip_prefix("starling/worker-")?.strip_suffix("/generate")?;
    let index = middle.parse().ok()?;
    (worker_generate(index) == *endpoint).then_some(index)
}

fn valid(name: &str) -> EndpointName {
    EndpointName::new(name).unwrap_or_else(|error| unreachable!("names in this file follow the rule: {error}"))
}

/// The operation of a router node that tells its decisions about a request: takes the request's id as text, answers
/// `Vec<Receipt>`.
pub const OP_RECEIPTS: &str = "router/receipts";

/// The operation of a router node that tells its newest decisions: takes how many (u32), answers
/// `Vec<(ModelId, Duration, Receipt)>`, newest first, with how long ago each was taken.
pub const OP_NEWEST: &str = "router/newest";

/// The operation of a router node that tells what came and went: takes nothing, answers `SeenAll`.
pub const OP_SEEN: &str = "router/seen";

/// The operation of a router node that tells what its planner said last: takes nothing, answers `Vec<PlanRow>`, a row for each
/// model that it leads.
pub const OP_PLAN: &str = "planner/plan";

/// The operation of a router node that grants tokens of a tenant's budget: takes `LeaseAsk`, answers `Lease`.
pub const OP_BUDGET: &str = "router/budget";

/// The operation of a worker node that tells the caches of its workers: takes nothing, answers `Vec<CacheRow>`.
pub const OP_CACHES: &str = "worker/caches";

/// The operation of a worker node that gives one of its workers another role: takes (index, role), answers the role before.
pub const OP_ROLE: &str = "worker/role";

/// The operation of a worker node that drains one of its workers: takes (index, nothing), answers how many requests it has in
/// flight.
pub const OP_DRAIN: &str = "worker/drain";

/// The operation of a worker node that puts a fault into one of its simulated engines: takes (index, `Fault`), answers the one
/// before.
pub const OP_FAULT: &str = "worker/fault";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_found_by_its_own_name_only() {
        assert_eq!(worker_index(&worker_generate(0)), Some(0));
        assert_eq!(worker_index(&worker_generate(u16::MAX)), Some(u16::MAX));
        for other in [worker_events(1), worker_kv(1), router_route(), valid("starling/worker-01/generate")] {
            assert_eq!(worker_index(&other), None, "{other}");
        }
    }
}
