//! The owner's side of a budget: a bucket a tenant, and what it grants from it.
//!
//! Called by a router node for every [`LeaseAsk`]. Pure. Bounds: [`TENANTS_MAX`] tenants; the one asked for longest ago makes way.

use std::{collections::HashMap, time::Duration};

use super::{Bucket, Lease, LeaseAsk};

/// Tenants remembered. One that comes back starts with a full bucket, as it would have by then.
pub const TENANTS_MAX: usize = 16_384;

/// See the module.
#[derive(Debug, Default)]
pub struct Owner {
    buckets: HashMap<String, Bucket>,
}

impl Owner {
    /// Grants what is there. While the budget is short, half of what is left at most, so that no client takes all.
    pub fn grant(&mut self, ask: &LeaseAsk, now: Duration) -> Lease {
        let per_minute = ask.per_minute as f64;
        if !self.buckets.contains_key(&ask.tenant) {
            self.make_room();
        }
        let bucket = self.buckets.entry(ask.tenant.clone()).or_insert_with(|| Bucket::new(per_minute, now));
        bucket.fill(per_minute, now);
        let whole = bucket.level.floor().max(0.0) as u64;
        let tokens = if whole >= ask.want.saturating_mul(2) { ask.want } else { ask.want.min(whole.div_ceil(2)) };
        bucket.take(tokens);
        // Somebody who owes needs more than the debt before anything is let in.
        let lacking = if tokens > ask.owed { 0 } else { ask.owed + 1 - tokens };
        let wait_s = lacking as f64 * 60.0 / per_minute.max(1.0);
        let left = bucket.level.floor().max(0.0) as u64;
        Lease { tokens, retry_after_ms: (wait_s.min(600.0) * 1e3).ceil() as u64, left }
    }

    fn make_room(&mut self) {
        if self.buckets.len() < TENANTS_MAX {
            return;
        }
        let oldest = self.buckets.iter().min_by_key(|(_, bucket)| bucket.at).map(|(tenant, _)| tenant.clone());
        if let Some(tenant) = oldest {
            self.buckets.remove(&tenant);
        }
    }
}
