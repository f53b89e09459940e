//! Many gateways, one decider: workers are never overfilled and a burst is spread as from one gateway.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::future::join_all;
use tokio::{sync::Barrier, task::JoinSet};

use crate::testing::{Rig, TestModel, all, eventually, prompt, spec, within};

const GATEWAYS: usize = 8;

/// A node with a router and workers, and eight nodes that only ask.
async fn fleet(name: &str, model: TestModel, workers: u16) -> (Rig, Vec<Rig>) {
    let back = Rig::ready(&format!("{name}-back"), model, workers).await;
    let seeds = vec![back.mesh.address().to_string()];
    let names: Vec<String> = (0..GATEWAYS).map(|at| format!("{name}-gw{at}")).collect();
    let gateways = join_all(names.iter().map(|name| Rig::join(name, None, false, seeds.clone()))).await;
    for gateway in &gateways {
        let client = gateway.node.client();
        eventually("it sees the workers", || client.models().iter().any(|m| m.workers == usize::from(workers))).await;
    }
    (back, gateways)
}

async fn end(back: Rig, gateways: Vec<Rig>) {
    back.at_rest().await;
    for gateway in gateways {
        gateway.end().await;
    }
    back.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bal_02_eight_gateways_at_a_barrier_do_not_herd() {
    let (back, gateways) = fleet("herd", TestModel::slow(20), 4).await;
    let (barrier, mut asking) = (Arc::new(Barrier::new(64)), JoinSet::new());
    for at in 0..64u32 {
        let gateway = &gateways[at as usize % GATEWAYS];
        let (client, barrier) = (gateway.node.client().clone(), barrier.clone());
        let call = gateway.call(spec(prompt(at * 40, 4), 400), Duration::from_secs(20));
        asking.spawn(async move {
            barrier.wait().await;
            client.generate(call).await.expect("accepted")
        });
    }
    let (mut counts, mut streams) = ([0u32; 4], Vec::new());
    while let Some(stream) = within("all are accepted", asking.join_next()).await {
        let stream = stream.expect("no panic");
        counts[usize::from(stream.worker.index)] += 1;
        streams.push(stream);
    }
    let (most, least) = (counts.iter().max().expect("four"), counts.iter().min().expect("four"));
    assert!(most - least <= 2, "{counts:?}");
    drop(streams);
    end(back, gateways).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cnt_06_eight_gateways_that_flood_never_overfill_a_worker_and_all_are_served() {
    let model = TestModel { sequences_max: 4, waiting_max: 2, ..TestModel::slow(4) };
    let peak = model.peak.clone();
    let (back, gateways) = fleet("flood", model, 2).await;
    let mut asking = JoinSet::new();
    for at in 0..160u32 {
        let gateway = &gateways[at as usize % GATEWAYS];
        let client = gateway.node.client().clone();
        let call = gateway.call(spec(prompt(at * 40, 20), 5), Duration::from_secs(60));
        asking.spawn(async move { all(client.generate(call).await?).await });
    }
    let mut refused = Vec::new();
    while let Some(answer) = within("all are served", asking.join_next()).await {
        match answer.expect("no panic") {
            Ok(frames) => assert_eq!(frames.len(), 5),
            Err(error) => refused.push(error),
        }
    }
    assert!(refused.is_empty(), "{} of 160 refused, first {:?}", refused.len(), refused[0]);
    let peak = peak.load(Ordering::Relaxed);
    assert!((4..=6).contains(&peak), "a worker had {peak} sequences; it takes 4 and 2 more");
    end(back, gateways).await;
}

/// It knew the members, not yet their records and cards, and refused every request for as long as those were on their way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lif_04_a_gateway_that_has_just_met_the_cluster_answers_its_first_request() {
    let back = Rig::ready("met-back", TestModel::new(), 2).await;
    for round in 0..5 {
        let seeds = vec![back.mesh.address().to_string()];
        let gateway = Rig::join(&format!("met-gw{round}"), None, false, seeds).await;
        eventually("it has met the cluster", || gateway.mesh.snapshot().nodes.len() > 1).await;
        assert_eq!(gateway.complete(spec(prompt(round, 60), 2)).await.expect("served").len(), 2);
        gateway.end().await;
    }
    back.end().await;
}
