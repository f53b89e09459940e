//! One class of a queue: tenants take turns by tokens.
//!
//! Deficit round robin with the rounds left out: what a tenant was served, divided by its weight, is its account; the
//! smallest account goes next and is charged with what its turn costs. That is the round robin whose quantum is one token:
//! two tenants that both wait are never served further apart than one request of each, and no turn loops over rounds.
//! Who comes to wait starts at the class's present account, or at its own if that is larger: a tenant that sends one
//! request at a time wins nothing. Called by [`super::Queue`]. Pure. Bounds: one entry per tenant that waits, and
//! [`DEBTORS_MAX`] that do not.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use super::{Claim, Place};

/// Tenants remembered that wait for nothing and were served beyond the class's present account.
const DEBTORS_MAX: usize = 4_096;

/// Accounts are kept in this part of a token, so that a weight divides them finely.
const FINE: u64 = 1_024;

/// One tenant's waiting requests.
#[derive(Debug, Default)]
struct Tenant {
    /// Served so far by weight, in parts of a token.
    account: u64,
    weight: u32,
    /// Who waits, next first.
    order: BTreeSet<(u64, Place)>,
    /// Passed over for now, still waiting.
    parked: usize,
    /// Tokens of all of them.
    tokens: u64,
    /// Up to where those behind the front were looked at again; none at the beginning of a round.
    looked: Option<(u64, Place)>,
    /// All of them are passed over for now.
    aside: bool,
}

impl Tenant {
    fn waits(&self) -> bool {
        !self.order.is_empty() || self.parked > 0
    }

    /// Whether somebody of it may be taken.
    fn may_be_taken(&self) -> bool {
        !self.aside && !self.order.is_empty()
    }

    /// See [`Lane::looks`].
    fn looks(&mut self, turn: Place, (front, more): (usize, usize), span: u64) -> Vec<Place> {
        let Self { order, looked, .. } = self;
        // One whose turn is for its age is not the first.
        let Some(first) = order.first().copied().filter(|(_, place)| *place == turn) else { return Vec::new() };
        let mut some: Vec<Place> = order.iter().take(front).map(|(_, place)| *place).collect();
        let Some(last) = order.iter().nth(front - 1).copied() else { return some };
        // Behind the front, from where the last look ended, as far as one may come forward.
        let (from, reach) = (looked.map_or(last, |looked| last.max(looked)), first.0.saturating_add(span));
        let rest = order.range((Excluded(from), Unbounded)).take_while(|(key, _)| *key <= reach);
        let behind: Vec<(u64, Place)> = rest.take(more).copied().collect();
        // At the end it begins anew behind the front.
        *looked = behind.last().copied().filter(|_| behind.len() == more);
        some.extend(behind.into_iter().map(|(_, place)| place));
        some
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lane {
    tenants: HashMap<Arc<str>, Tenant>,
    /// Tenants with somebody to take, the next one first.
    turns: BTreeSet<(u64, Arc<str>)>,
    /// Tenants without, whose account is ahead of `account`.
    debtors: BTreeSet<(u64, Arc<str>)>,
    /// The smallest account among those that waited at the last turn.
    account: u64,
    waiting: usize,
    tokens: u64,
    /// Weights of the tenants that wait.
    weights: u64,
}

impl Lane {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Tokens of all that wait here.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tokens that go before a request that comes now, with every tenant having its part.
    pub(super) fn tokens_before(&self, claim: &Claim) -> u64 {
        let own = self.tenants.get(&claim.tenant).filter(|tenant| tenant.waits());
        let own_tokens = own.map_or(0, |tenant| tenant.tokens);
        let weight = u64::from(claim.weight.max(1));
        let weights = if own.is_some() { self.weights } else { self.weights + weight };
        let others = (own_tokens + claim.cost_tokens).saturating_mul(weights - weight) / weight;
        (own_tokens + others).min(self.tokens)
    }

    /// Whose turn it is.
    pub(super) fn next(&self) -> Option<Place> {
        let (_, tenant) = self.turns.first()?;
        self.tenants.get(tenant)?.order.first().map(|(_, place)| *place)
    }

    /// Who would be served last.
    pub(super) fn last(&self) -> Option<Place> {
        let (_, tenant) = self.turns.last()?;
        self.last_of(tenant)
    }

    /// The last of one tenant.
    pub(super) fn last_of(&self, tenant: &Arc<str>) -> Option<Place> {
        self.tenants.get(tenant)?.order.last().map(|(_, place)| *place)
    }

    pub(super) fn insert(&mut self, claim: &Claim, key: u64, place: Place) {
        let (account, name) = (self.account, claim.tenant.clone());
        let tenant = self.tenants.entry(name.clone()).or_default();
        if tenant.waits() {
            self.weights -= u64::from(tenant.weight);
        } else {
            self.debtors.remove(&(tenant.account, name.clone()));
            tenant.account = tenant.account.max(account);
        }
        tenant.weight = claim.weight.max(1);
        self.weights += u64::from(tenant.weight);
        tenant.order.insert((key, place));
        tenant.tokens += claim.cost_tokens;
        if tenant.may_be_taken() {
            self.turns.insert((tenant.account, name));
        }
        self.tokens += claim.cost_tokens;
        self.waiting += 1;
    }

    /// One of this tenant has its turn, which costs so many tokens.
    pub(super) fn charge(&mut self, claim: &Claim, tokens: u64) {
        let Some(tenant) = self.tenants.get_mut(&claim.tenant) else { return };
        // Of the one whose turn it is; an overdue request may be another's.
        let present = self.turns.first().map_or(tenant.account, |(account, _)| *account);
        self.account = self.account.max(present);
        let listed = self.turns.remove(&(tenant.account, claim.tenant.clone()));
        tenant.account += tokens.max(1).saturating_mul(FINE) / u64::from(tenant.weight.max(1));
        if listed {
            self.turns.insert((tenant.account, claim.tenant.clone()));
        }
        while let Some((owed, _)) = self.debtors.first()
            && (*owed <= self.account || self.debtors.len() > DEBTORS_MAX)
        {
            if let Some((_, name)) = self.debtors.pop_first() {
                self.tenants.remove(&name);
            }
        }
    }

    pub(super) fn remove(&mut self, claim: &Claim, key: u64, place: Place, parked: bool) {
        let Some(tenant) = self.tenants.get_mut(&claim.tenant) else { return };
        if parked {
            tenant.parked -= 1;
        } else {
            tenant.order.remove(&(key, place));
        }
        tenant.tokens -= claim.cost_tokens;
        self.tokens -= claim.cost_tokens;
        self.waiting -= 1;
        let listed = (tenant.account, claim.tenant.clone());
        if tenant.order.is_empty() {
            self.turns.remove(&listed);
        }
        if !tenant.waits() {
            self.weights -= u64::from(tenant.weight);
            if tenant.account > self.account {
                tenant.aside = false;
                self.debtors.insert(listed);
            } else {
                self.tenants.remove(&claim.tenant);
            }
        }
    }

    /// Whom of a tenant to look at again before a turn that would be this one's: `front` of those next in line, and `more` of those
    /// behind them whose key is at most so far from the first one's, in rotation. Each tenant has a rotation of its own.
    pub(super) fn looks(
        &mut self,
        tenant: &Arc<str>,
        turn: Place,
        (front, more): (usize, usize),
        span: u64,
    ) -> Vec<Place> {
        self.tenants.get_mut(tenant).map(|tenant| tenant.looks(turn, (front, more), span)).unwrap_or_default()
    }

    /// One that waits and is not passed over has another key now.
    pub(super) fn rekey(&mut self, claim: &Claim, (before, now): (u64, u64), place: Place) {
        if let Some(tenant) = self.tenants.get_mut(&claim.tenant)
            && tenant.order.remove(&(before, place))
        {
            tenant.order.insert((now, place));
        }
    }

    pub(super) fn park(&mut self, claim: &Claim, key: u64, place: Place) {
        let Some(tenant) = self.tenants.get_mut(&claim.tenant) else { return };
        tenant.order.remove(&(key, place));
        tenant.parked += 1;
        if tenant.order.is_empty() {
            self.turns.remove(&(tenant.account, claim.tenant.clone()));
        }
    }

    pub(super) fn unpark(&mut self, claim: &Claim, key: u64, place: Place) {
        let Some(tenant) = self.tenants.get_mut(&claim.tenant) else { return };
        tenant.order.insert((key, place));
        tenant.parked -= 1;
        if tenant.may_be_taken() {
            self.turns.insert((tenant.account, claim.tenant.clone()));
        }
    }

    /// A tenant is passed over with all it has, or (false) has turns again.
    pub(super) fn set_aside(&mut self, name: &Arc<str>, aside: bool) {
        let Some(tenant) = self.tenants.get_mut(name) else { return };
        tenant.aside = aside;
        let listed = (tenant.account, name.clone());
        if tenant.may_be_taken() {
            self.turns.insert(listed);
        } else {
            self.turns.remove(&listed);
        }
    }
}
