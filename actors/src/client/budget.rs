//! Pays for requests of tenants with a budget: from the lease in hand, or from a new one.
//!
//! Called by the generate loop before a request is routed. Decisions are in [`crate::route::budget::lessee`]; here are the
//! clock, the lock and the question to the owner. A request that finds the lease used up asks for the next one, and others of
//! its tenant wait for the same answer. Bounds: one question a tenant at a time (tenants share [`DESKS`] desks), [`ASK_MAX`]
//! for its answer, [`ASKS_MAX`] for one request.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use starling_cluster::discovery::InstanceKind;
use starling_ids::Metric;

use super::{Call, Inner};
use crate::{
    generate::GenerateError,
    names,
    route::budget::{
        Lease, LeaseAsk, Standing,
        lessee::{Lessee, Spend},
        owners,
    },
};

/// Longest wait for an owner's answer; then this client takes its own part.
const ASK_MAX: Duration = Duration::from_millis(1_500);
/// Questions for one request: the tokens of one may go to others that waited.
const ASKS_MAX: u32 = 3;
/// When to try again after these.
const AGAIN_MS: u64 = 1_000;

/// Places where tenants wait for their next lease.
const DESKS: usize = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Budgets {
    began: Instant,
    lessee: Mutex<Lessee>,
    hasher: RandomState,
    desks: Vec<tokio::sync::Mutex<()>>,
}

impl Default for Budgets {
    fn default() -> Self {
        let desks = std::iter::repeat_with(tokio::sync::Mutex::default).take(DESKS).collect();
        Self { began: Instant::now(), lessee: Mutex::default(), hasher: RandomState::new(), desks }
    }
}

/// What a request has paid. Its drop charges what it really cost; nothing if no worker took it.
#[derive(Debug)]
pub(super) struct Charge {
    budgets: Arc<Budgets>,
    tenant: String,
    prompt: u64,
    expected: u64,
    /// Answer tokens so far; `None` until a worker has taken it.
    answer: Option<u64>,
}

impl Charge {
    /// A worker took the request.
    pub(super) fn taken(&mut self) {
        self.answer.get_or_insert(0);
    }

    /// So many more tokens of its answers came.
    pub(super) fn answered(&mut self, tokens: usize) {
        *self.answer.get_or_insert(0) += tokens as u64;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let now = self.budgets.now();
        let mut lessee = self.budgets.lessee();
        match self.answer {
            Some(real) => lessee.settle(&self.tenant, self.expected, real, now),
            None => lessee.refund(&self.tenant, self.prompt + self.expected, now),
        }
    }
}

impl Budgets {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn lessee(&self) -> MutexGuard<'_, Lessee> {
        self.lessee.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a tenant's budget stands here; `None` without one.
pub(super) fn standing(budgets: &Budgets, tenant: &str, per_minute: u64) -> Option<Standing> {
    (per_minute > 0).then(|| budgets.lessee().standing(tenant, per_minute, budgets.now()))
}

/// Pays for a request, if its tenant has a budget.
pub(super) async fn pay(inner: &Inner, call: &Call) -> Result<Option<Charge>, GenerateError> {
    if call.budget == 0 {
        return Ok(None);
    }
    let budgets = &inner.budgets;
    let tenant = call.tenant.as_str();
    let prompt = call.spec.prompt.len() as u64;
    let answer_max = u64::from(call.spec.choices).saturating_mul(u64::from(call.spec.stop.tokens_max));
    let expected = budgets.lessee().answer_expected(tenant, answer_max, budgets.now());
    let (mut turn, mut asks) = (None, 0);
    loop {
        let spend = budgets.lessee().spend(tenant, prompt + expected, budgets.now());
        match spend {
            Spend::Paid => break,
            Spend::Denied(wait) => return Err(refused(tenant, wait.as_millis())),
            Spend::Ask { .. } if turn.is_none() => {
                let desk = budgets.hasher.hash_one(tenant) as usize % DESKS;
                // Whoever was before may have brought enough, so look again.
                turn = Some(budgets.desks[desk].lock().await);
            }
            Spend::Ask { .. } if asks == ASKS_MAX => return Err(refused(tenant, u128::from(AGAIN_MS))),
            Spend::Ask { owed, want } => {
                asks += 1;
                let ask = LeaseAsk { tenant: tenant.to_owned(), per_minute: call.budget, want, owed };
                renew(inner, &ask).await;
            }
        }
    }
    Ok(Some(Charge { budgets: budgets.clone(), tenant: tenant.to_owned(), prompt, expected, answer: None }))
}

/// Asks the owner for the next lease; without one, takes this client's own part.
async fn renew(inner: &Inner, ask: &LeaseAsk) {
    let budgets = &inner.budgets;
    let asked = budgets.now();
    if let Some(lease) = lease(inner, ask).await {
        budgets.lessee().leased(&ask.tenant, lease, asked);
        return;
    }
    metrics::counter!(Metric::BudgetLeases.name(), "outcome" => "alone").increment(1);
    let gateways = inner.view.mesh().snapshot().routable(InstanceKind::Gateway).count();
    budgets.lessee().alone(&ask.tenant, ask.per_minute, gateways, budgets.now());
}

async fn lease(inner: &Inner, ask: &LeaseAsk) -> Option<Lease> {
    let catalog = inner.view.catalog();
    let live = if catalog.routers.is_empty() { &catalog.routers_suspect } else { &catalog.routers };
    let owner = owners(&ask.tenant, live.clone()).into_iter().next()?;
    let body = rmp_serde::to_vec(ask).ok()?;
    match inner.view.mesh().call(&owner, names::OP_BUDGET, body.into(), ASK_MAX).await {
        Ok(bytes) => rmp_serde::from_slice(&bytes).ok(),
        Err(error) => {
            tracing::debug!(%owner, %error, "the owner of a tenant's budget gave no lease");
            None
        }
    }
}

fn refused(tenant: &str, wait_ms: u128) -> GenerateError {
    metrics::counter!(Metric::BudgetRefused.name()).increment(1);
    let reason = format!("the budget of tokens per minute of `{tenant}` is used up");
    GenerateError::TenantLimit { reason, retry_after_ms: u64::try_from(wait_ms).unwrap_or(u64::MAX) }
}
