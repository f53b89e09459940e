//! A worker is killed under load, started again, frozen and thawed.

use std::time::{Duration, Instant};

use crate::harness::{Cluster, Node, PATIENCE, ask, ask_long, until};

struct Three {
    cluster: Cluster,
    gateway: Node,
    w1: Node,
    w2: Node,
}

async fn three() -> Three {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let w1 = cluster.join("w1", &[&gateway.address], &["--http", "127.0.0.1:0"]).await;
    let w2 = cluster.join("w2", &[&gateway.address], &["--http", "127.0.0.1:0"]).await;
    let both =
        async || cluster.serving_workers("w1", &gateway).await + cluster.serving_workers("w2", &gateway).await == 2;
    until("both workers serve", PATIENCE, both).await;
    Three { cluster, gateway, w1, w2 }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_workers_answers_go_on_elsewhere_word_for_word_and_it_comes_back() {
    let Three { cluster, gateway, mut w1, w2 } = three().await;
    let model = w2.model.clone();
    let mut streams = Vec::new();
    for n in 0..8 {
        let mut events = gateway.stream(&ask_long(&model, &format!("{n}: tell me a long story"), 600)).await;
        events.first_text().await;
        streams.push(events);
    }
    let doomed = w1.metric("starling_worker_sequences_running", "").await as usize;
    assert!(doomed > 0 && doomed < 8, "both workers have streams: {doomed} of 8 on w1");
    let killed = Instant::now();
    w1.child.kill().await.unwrap();
    let (status, body) = gateway.chat(&ask(&model, "right after the kill", 4)).await;
    assert_eq!(status, 200, "a new request succeeds at once: {body}");
    let rest = futures::future::join_all(streams.into_iter().map(|events| events.rest()));
    let gone = async {
        let absent = async || !cluster.lists("w1", &gateway).await;
        until("the dead worker leaves the tables", Duration::from_secs(5).saturating_sub(killed.elapsed()), absent)
            .await;
        killed.elapsed()
    };
    let (told, left) = tokio::join!(rest, gone);
    eprintln!("left the tables {left:?} after the kill");
    assert!(told.iter().all(|told| told.error.is_none() && told.done && told.finish.is_some()), "{told:?}");
    let calm = (0..8).map(async |n| {
        gateway.stream(&ask_long(&model, &format!("{n}: tell me a long story"), 600)).await.rest().await.text
    });
    for (told, calm) in told.iter().zip(futures::future::join_all(calm).await) {
        // The first piece was read before the kill.
        assert!(told.text.len() > 100 && calm.ends_with(&told.text), "{:?} is not the end of {calm:?}", told.text);
    }

    let again = cluster.join("w1", &[&gateway.address], &["--http", "127.0.0.1:0"]).await;
    let number = std::sync::atomic::AtomicU32::new(0);
    let busy = async || {
        let n = number.fetch_add(4, std::sync::atomic::Ordering::Relaxed);
        let bodies: Vec<_> = (n..n + 4).map(|n| ask(&model, &format!("{n} again"), 2)).collect();
        futures::future::join_all(bodies.iter().map(|body| gateway.chat(body))).await;
        again.metric("starling_worker_tokens_generated_total", "").await > 0.0
    };
    let took = until("the restarted worker serves", Duration::from_secs(2), busy).await;
    eprintln!("served {took:?} after ready");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_worker_is_dropped_and_is_back_within_five_seconds_of_thawing() {
    let Three { cluster, gateway, w1, w2 } = three().await;
    w1.signal("STOP").await;
    let frozen = Instant::now();
    let gone = async || cluster.serving_workers("w1", &gateway).await == 0;
    let took = until("the frozen worker is no longer routable", Duration::from_secs(12), gone).await;
    eprintln!("not routable after {took:?}");
    let (status, body) = gateway.chat(&ask(&w2.model, "meanwhile", 4)).await;
    assert_eq!(status, 200, "{body}");
    // The rest of the freeze: past the time in which gossip declares a member down.
    tokio::time::sleep(Duration::from_secs(12).saturating_sub(frozen.elapsed())).await;
    w1.signal("CONT").await;
    let thawed = Instant::now();
    for node in [&gateway, &w2, &w1] {
        let back =
            async || cluster.serving_workers("w1", node).await == 1 && cluster.serving_workers("w2", node).await == 1;
        until("everyone sees everyone", Duration::from_secs(5).saturating_sub(thawed.elapsed()), back).await;
    }
    eprintln!("back in every table {:?} after thawing", thawed.elapsed());
}
