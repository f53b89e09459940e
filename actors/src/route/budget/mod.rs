//! Tokens per minute of a tenant, over the whole cluster: one owner grants leases, clients spend them.
//!
//! Every tenant has an owner among the router nodes, by rendezvous. It keeps a bucket that fills at the tenant's rate up to
//! [`BURST_S`] seconds of it, and takes out what it grants before it grants it. A client spends its lease without asking
//! anybody and asks again when it is used up; what is left when the lease ends is void. A request is let in while the
//! balance is above zero and may take it below: the debt is paid by the next lease.
//!
//! The bound: in any `T` seconds the requests let in cost at most `k * (rate * (T + LEASE_S) + burst) + n * (m + 1)` tokens,
//! with `n` clients, `m` the largest single request, and `k` the owners' lives in that time and the lease before: 1 while no
//! router dies, one more for each death and for each side of a partition. Clients without an owner share the rate evenly
//! among the gateways that they see, and count as one owner more. Answers longer than expected are charged when they end.
//!
//! Called by the client ([`lessee`]) and by router nodes ([`owner`]). Pure: time is an argument.

pub mod lessee;
pub mod owner;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Seconds of a tenant's rate that may be spent at once.
pub const BURST_S: f64 = 15.0;

/// How long a lease lasts.
pub const LEASE: Duration = Duration::from_secs(10);

/// What a client asks the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseAsk {
    /// Whose budget.
    pub tenant: String,
    /// Its size, as the client's keys say.
    pub per_minute: u64,
    /// Tokens wanted.
    pub want: u64,
}

/// What the owner answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Tokens granted, from none to all that was wanted.
    pub tokens: u64,
    /// When the rest may be there, milliseconds; 0 when all was granted.
    pub retry_after_ms: u64,
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
