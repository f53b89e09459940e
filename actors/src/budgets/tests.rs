//! Several clients and one budget over a real mesh.

use std::time::{Duration, Instant};

use starling_cluster::discovery::InstanceKind;

use crate::{
    client::Call,
    generate::GenerateError,
    route::budget::{BURST_S, owners},
    testing::{Rig, TestModel, all, eventually, prompt, spec},
};

/// Ten tokens a second, 150 at once.
const PER_MINUTE: u64 = 600;
/// One request: 20 of its prompt, 5 of its answer.
const COST: f64 = 25.0;

fn call(rig: &Rig, tenant: &str, kind: u32) -> Call {
    let call = rig.call(spec(prompt(kind * 40, 20), 5), Duration::from_secs(20));
    Call { tenant: tenant.to_owned(), budget: PER_MINUTE, ..call }
}

/// What asking until each was refused has cost.
struct Spent {
    tokens: f64,
    since: Instant,
    /// Somebody had no answer in time and took a part of its own.
    slow: bool,
    retry_after_ms: u64,
}

async fn spend_all(gateways: &[&Rig], tenant: &str) -> Spent {
    let mut spent = Spent { tokens: 0.0, since: Instant::now(), slow: false, retry_after_ms: 0 };
    let mut refused = vec![false; gateways.len()];
    for kind in 0.. {
        let at = kind as usize % gateways.len();
        if refused.iter().all(|refused| *refused) {
            break;
        }
        let (gateway, begun) = (gateways[at], Instant::now());
        match gateway.node.client().generate(call(gateway, tenant, kind)).await {
            Ok(stream) => {
                all(stream).await.expect("an answer");
                spent.tokens += COST;
            }
            Err(GenerateError::TenantLimit { retry_after_ms, reason }) => {
                assert!(reason.contains(tenant), "{reason}");
                (refused[at], spent.retry_after_ms) = (true, retry_after_ms);
            }
            Err(error) => panic!("{error}"),
        }
        spent.slow |= begun.elapsed() > Duration::from_millis(1_300);
    }
    spent
}

impl Spent {
    /// The bound that the module of the budget states, for so many lives of owners and clients.
    fn within(&self, lives: f64, clients: f64) {
        let (lives, owners) = if self.slow { (lives + clients, 2.0) } else { (lives, 1.0) };
        let rate = PER_MINUTE as f64 / 60.0;
        let bound =
            owners * rate * self.since.elapsed().as_secs_f64() + lives * rate * BURST_S + clients * (COST + 1.0);
        assert!(self.tokens <= bound, "{} tokens, bound {bound}", self.tokens);
    }
}

async fn sees_routers(rig: &Rig, count: usize) {
    eventually("it sees the routers", || rig.mesh.snapshot().routable(InstanceKind::Router).count() == count).await;
    eventually("it sees the worker", || rig.node.client().is_ready()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gateways_spend_one_budget_and_no_more() {
    let back = Rig::ready("budget-back", TestModel::new(), 1).await;
    let seeds = vec![back.mesh.address().to_string()];
    let one = Rig::join("budget-gw1", None, false, seeds.clone()).await;
    let two = Rig::join("budget-gw2", None, false, seeds).await;
    sees_routers(&one, 1).await;
    sees_routers(&two, 1).await;
    let spent = spend_all(&[&one, &two], "search").await;
    spent.within(1.0, 2.0);
    assert!(spent.tokens >= 3.0 * COST, "{} of 150 at once", spent.tokens);
    assert!((100..=60_000).contains(&spent.retry_after_ms), "{}", spent.retry_after_ms);
    // Others do not feel it, nor do those without a budget.
    let other = one.node.client().generate(call(&one, "ads", 1)).await.expect("a budget of its own");
    let free = Call { budget: 0, ..call(&one, "search", 2) };
    let free = one.node.client().generate(free).await.expect("no budget");
    all(other).await.expect("an answer");
    all(free).await.expect("an answer");
    for rig in [one, two, back] {
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_whose_owner_leaves_is_granted_by_the_next_one() {
    let first = Rig::ready("budget-r1", TestModel::new(), 1).await;
    let seeds = vec![first.mesh.address().to_string()];
    let second = Rig::join("budget-r2", Some((TestModel::new(), 1)), true, seeds.clone()).await;
    let gateway = Rig::join("budget-r-gw", None, false, seeds).await;
    sees_routers(&gateway, 2).await;
    let nodes = [first.mesh.node().clone(), second.mesh.node().clone()];
    let before = spend_all(&[&gateway], "search").await;
    before.within(1.0, 1.0);
    let (owner, heir) = if owners("search", nodes.to_vec())[0] == nodes[0] { (first, second) } else { (second, first) };
    owner.end().await;
    sees_routers(&gateway, 1).await;
    // It may have been told to wait; only a tenth of a second is certain, so ask until it is let in.
    let begun = Instant::now();
    let mut after = spend_all(&[&gateway], "search").await;
    while after.tokens == 0.0 && begun.elapsed() < Duration::from_secs(15) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        after = spend_all(&[&gateway], "search").await;
    }
    assert!(after.tokens > 0.0, "the next owner grants");
    let both = Spent { tokens: before.tokens + after.tokens, slow: before.slow || after.slow, ..before };
    both.within(2.0, 1.0);
    gateway.end().await;
    heir.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_router_a_client_spends_its_own_part() {
    let rig = Rig::start("budget-alone", TestModel::new(), 1, false).await;
    eventually("the worker is listed", || rig.node.client().is_ready()).await;
    let spent = spend_all(&[&rig], "search").await;
    assert!(spent.tokens >= 100.0, "{}", spent.tokens);
    spent.within(1.0, 1.0);
    rig.end().await;
}
