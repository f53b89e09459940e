//! Tokens per minute of a tenant, over the whole cluster: one owner grants leases, clients spend them.
//!
//! Every tenant has an owner among the router nodes, by rendezvous. It keeps a bucket that fills at the tenant's rate up to
//! [`BURST_S`] seconds of it, and takes out what it grants before it grants it. A client spends its lease without asking
//! anybody and asks again when it is used up; what is left when the lease ends is void. A request is let in while the
//! balance is above zero and may take it below: the debt is paid by the next lease.
//!
//! The bound: in any `T` seconds the requests let in cost at most
//! `s * rate * (T + LEASE) + k * burst + n * (m + 1)` tokens, with
//! `s` the owners at one time: 1, one more for each further side of a partition, one more while clients reach none;
//! `k` the owners' lives in that time and the lease before: one more for each owner that dies, moves or is restarted;
//! `n` the clients' lives and `m` the largest single request. Clients without an owner share the rate evenly among the
//! gateways that they see, and are together one owner more. Clocks need not agree; one that runs fast adds by as much to the
//! rate. A request costs what was known of it when it began; when it ends, an answer longer than expected is charged, and what
//! a shorter one did not use may be spent again.
//!
//! Called by the client ([`lessee`]) and by router nodes ([`owner`]). Pure: time is an argument.

pub mod lessee;
pub mod owner;
#[cfg(test)]
mod tests;

use std::{hash::Hasher, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::NodeId;
use twox_hash::XxHash3_64;

/// Seconds of a tenant's rate that may be spent at once.
pub const BURST_S: f64 = 15.0;

/// How long a lease lasts.
pub const LEASE: Duration = Duration::from_secs(10);

/// Router nodes in the order in which they own a tenant's budget, by rendezvous.
#[must_use]
pub fn owners(tenant: &str, mut nodes: Vec<NodeId>) -> Vec<NodeId> {
    let weight = |node: &NodeId| {
        let mut hasher = XxHash3_64::with_seed(1);
        hasher.write(tenant.as_bytes());
        // A zero byte stands in neither name, so no two pairs run together.
        hasher.write_u8(0);
        hasher.write(node.as_str().as_bytes());
        hasher.finish()
    };
    nodes.sort_by_cached_key(|node| (std::cmp::Reverse(weight(node)), node.clone()));
    nodes
}

/// What a client asks the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseAsk {
    /// Whose budget.
    pub tenant: String,
    /// Its size, as the client's keys say.
    pub per_minute: u64,
    /// Tokens wanted.
    pub want: u64,
    /// Of these, tokens already spent.
    #[serde(default)]
    pub owed: u64,
}

/// What the owner answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Tokens granted, from none to all that was wanted.
    pub tokens: u64,
    /// When there may be more than what is owed, milliseconds; 0 when there is already.
    pub retry_after_ms: u64,
    /// Tokens that the owner could still grant at once.
    #[serde(default)]
    pub left: u64,
}

/// How a tenant's budget stands, as one client sees it: what others leased since it last heard of the owner is not in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Standing {
    /// Tokens per minute.
    pub limit: u64,
    /// Tokens that could be spent now.
    pub remaining: u64,
    /// When as much can be spent at once as ever.
    pub reset: Duration,
}

/// A bucket that fills with time. Levels are in tokens.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    at: Duration,
}

impl Bucket {
    /// A full one.
    fn new(per_minute: f64, now: Duration) -> Self {
        Self { level: burst(per_minute), at: now }
    }

    fn fill(&mut self, per_minute: f64, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.level = (self.level + passed * per_minute / 60.0).min(burst(per_minute));
    }

    fn take(&mut self, tokens: u64) -> bool {
        let enough = self.level >= tokens as f64;
        if enough {
            self.level -= tokens as f64;
        }
        enough
    }
}

fn burst(per_minute: f64) -> f64 {
    (per_minute * BURST_S / 60.0).max(1.0)
}
