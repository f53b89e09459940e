//! A client's side of a budget: what it has leased, what it owes, when it asks.
//!
//! Called by the client before and after each request of a tenant with a budget. Pure. Bounds: [`TENANTS_MAX`] tenants;
//! the one used longest ago makes way, with what it had leased.

use std::{collections::HashMap, time::Duration};

use super::{Bucket, LEASE, Lease, Standing, burst};

/// Tenants remembered.
pub const TENANTS_MAX: usize = 16_384;

/// A lease used up sooner than this was too small.
const BUSY: Duration = Duration::from_secs(1);

/// Answer tokens assumed before one has ended, and the weight of one that has.
const ANSWER_PRIOR: f64 = 128.0;
const ANSWER_PACE: f64 = 0.05;

/// Whether a request may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spend {
    /// It is paid for.
    Paid,
    /// The lease is used up: ask the owner, then try again.
    Ask {
        /// Tokens that the tenant owes here; more than these are needed before anything is let in.
        owed: u64,
        /// Tokens wanted, these among them.
        want: u64,
    },
    /// The budget is used up; some of it is there again after this.
    Denied(Duration),
}

#[derive(Debug)]
struct Account {
    /// Tokens leased and not spent; below zero what is owed.
    balance: i64,
    until: Duration,
    denied_until: Duration,
    /// When the last lease was asked for, and what it brought.
    asked: Option<(Duration, u64)>,
    /// Tokens charged since then, for the size of the next.
    spent: u64,
    /// What it grants itself while no owner answers; kept, so that an owner that comes and goes fills it no faster.
    own: Option<Bucket>,
    answer: f64,
    used: Duration,
    /// What the owner could still grant, and when that was so.
    left: Option<(Duration, u64)>,
}

impl Account {
    /// What the next lease should bring: as much as was spent of the last one, twice that when it was used up at once. So a
    /// busy client asks about once in [`BUSY`], and an idle one holds little that others could spend.
    fn next_size(&self, now: Duration) -> u64 {
        match self.asked {
            Some((asked, tokens)) if now.saturating_sub(asked) < BUSY => tokens.saturating_mul(2).max(self.spent),
            Some(_) if now < self.until => self.spent,
            _ => 0,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Lessee {
    accounts: HashMap<String, Account>,
}

impl Lessee {
    /// Pays for one request of so many tokens, or says what to do.
    pub fn spend(&mut self, tenant: &str, tokens: u64, now: Duration) -> Spend {
        let account = self.account(tenant, now);
        if now >= account.until {
            account.balance = account.balance.min(0);
        }
        if account.balance > 0 {
            account.balance = account.balance.saturating_sub_unsigned(tokens);
            account.spent = account.spent.saturating_add(tokens);
            return Spend::Paid;
        }
        if now < account.denied_until {
            return Spend::Denied(account.denied_until - now);
        }
        let owed = account.balance.unsigned_abs();
        let size = account.next_size(now).max(tokens).max(1);
        Spend::Ask { owed, want: owed.saturating_add(size) }
    }

    /// The owner answered an ask that was sent at `asked`.
    pub fn leased(&mut self, tenant: &str, lease: Lease, asked: Duration) {
        let account = self.account(tenant, asked);
        if asked >= account.until {
            account.balance = account.balance.min(0);
        }
        account.balance = account.balance.saturating_add_unsigned(lease.tokens);
        account.left = Some((asked, lease.left));
        // Counted from the question: the owner took the tokens out after it.
        account.until = asked + LEASE;
        (account.asked, account.spent) = (Some((asked, lease.tokens)), 0);
        if account.balance <= 0 {
            let retry_ms = lease.retry_after_ms.clamp(100, 60_000);
            account.denied_until = asked + Duration::from_millis(retry_ms);
        }
    }

    /// Nobody answered: this client's part of the budget, one of so many gateways', is its own to grant.
    pub fn alone(&mut self, tenant: &str, per_minute: u64, gateways: usize, now: Duration) {
        let part = per_minute as f64 / gateways.max(1) as f64;
        let account = self.account(tenant, now);
        let bucket = account.own.get_or_insert_with(|| Bucket::new(part, now));
        bucket.fill(part, now);
        let whole = bucket.level.floor().max(0.0) as u64;
        bucket.take(whole);
        self.leased(tenant, Lease { tokens: whole, retry_after_ms: 1_000, left: 0 }, now);
    }

    /// How a tenant's budget of so many tokens per minute stands.
    #[must_use]
    pub fn standing(&self, tenant: &str, per_minute: u64, now: Duration) -> Standing {
        let rate = per_minute as f64;
        let most = burst(rate);
        let account = self.accounts.get(tenant);
        let there = account.map_or(most, |account| {
            // Below 2^52, so exact.
            let own = if now < account.until { account.balance } else { account.balance.min(0) } as f64;
            let owner = account.left.map_or(most, |(at, left)| {
                (left as f64 + now.saturating_sub(at).as_secs_f64() * rate / 60.0).min(most)
            });
            own + owner
        });
        let denied = account.is_some_and(|account| account.balance <= 0 && now < account.denied_until);
        let remaining = if denied { 0.0 } else { there.clamp(0.0, most) };
        let reset = Duration::from_secs_f64(((most - there).max(0.0) * 60.0 / rate.max(1.0)).min(86_400.0));
        Standing { limit: per_minute, remaining: remaining.floor() as u64, reset }
    }

    /// How many tokens an answer of at most so many usually has.
    pub fn answer_expected(&mut self, tenant: &str, tokens_max: u64, now: Duration) -> u64 {
        (self.account(tenant, now).answer.ceil() as u64).min(tokens_max)
    }

    /// A request that paid for `expected` answer tokens ended with `real` ones.
    pub fn settle(&mut self, tenant: &str, expected: u64, real: u64, now: Duration) {
        let account = self.account(tenant, now);
        account.answer += (real as f64 - account.answer) * ANSWER_PACE;
        account.balance = account.balance.saturating_add_unsigned(expected).saturating_sub_unsigned(real);
    }

    /// A request that was paid for never reached a worker.
    pub fn refund(&mut self, tenant: &str, tokens: u64, now: Duration) {
        let account = self.account(tenant, now);
        account.balance = account.balance.saturating_add_unsigned(tokens);
    }

    fn account(&mut self, tenant: &str, now: Duration) -> &mut Account {
        if !self.accounts.contains_key(tenant) && self.accounts.len() >= TENANTS_MAX {
            let oldest = self.accounts.iter().min_by_key(|(_, account)| account.used).map(|(name, _)| name.clone());
            if let Some(oldest) = oldest {
                self.accounts.remove(&oldest);
            }
        }
        let fresh = || Account {
            balance: 0,
            until: Duration::ZERO,
            denied_until: Duration::ZERO,
            asked: None,
            spent: 0,
            own: None,
            answer: ANSWER_PRIOR,
            used: now,
            left: None,
        };
        let account = self.accounts.entry(tenant.to_owned()).or_insert_with(fresh);
        account.used = account.used.max(now);
        account
    }
}
