//! Going away in order: LIF-02.

use serde_json::json;
use starling_actors::engine::FinishReason;
use tokio::sync::mpsc;

use super::client::{Remote, read_to_end, read_until};
use crate::{
    DrainReport, GatewayConfig,
    fixtures::{
        IM_END, byte,
        cluster::{Accept, Cluster, Frames, Plan},
        frame,
    },
};

#[tokio::test]
async fn lif_02_requests_that_are_here_finish_and_new_ones_are_sent_away() {
    let feeders = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let keep = feeders.clone();
    let cluster = Cluster::new(move |_| {
        let (feed, fed) = mpsc::unbounded_channel();
        keep.lock().expect("not poisoned").push(feed);
        Plan { accept: Accept::Now, frames: Frames::Fed(fed) }
    });
    let mut remote = Remote::new(&cluster, GatewayConfig::default()).await;
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.push(remote.ask(json!({"stream": true})).await);
    }
    cluster.running(10).await;
    for stream in &mut streams {
        read_until(stream, "HTTP/1.1 200").await;
    }
    remote.stop();
    // Draining begins a moment after the signal: health tells when.
    while !remote.get("/health").await.starts_with("HTTP/1.1 503") {}
    let late = read_to_end(remote.ask(json!({})).await).await;
    assert!(late.starts_with("HTTP/1.1 503") && late.contains("shutting_down"), "{late}");
    for feed in feeders.lock().expect("not poisoned").drain(..) {
        feed.send(frame(0, &[byte(b'a'), IM_END], Some(FinishReason::Stop))).expect("still read");
    }
    for stream in streams {
        assert!(read_to_end(stream).await.contains("data: [DONE]"));
    }
    assert_eq!(remote.stopped().await, DrainReport { cut_off: 0 });
}

#[tokio::test]
async fn a_drain_that_takes_too_long_is_cut_off() {
    let cluster = Cluster::new(|_| Plan::hang(Vec::new()));
    let mut remote = Remote::new(&cluster, GatewayConfig { drain_ms_max: 50, ..Default::default() }).await;
    let stream = remote.ask(json!({"stream": true})).await;
    cluster.running(1).await;
    remote.stop();
    assert_eq!(remote.stopped().await, DrainReport { cut_off: 1 });
    cluster.running(0).await;
    drop(stream);
}

#[tokio::test]
async fn lif_08_health_answers_beside_many_slow_streams() {
    let cluster = Cluster::new(|_| Plan::hang(vec![frame(0, &[byte(b'a')], None)]));
    let remote = Remote::new(&cluster, GatewayConfig::default()).await;
    let mut streams = Vec::new();
    for _ in 0..200 {
        streams.push(remote.ask(json!({"stream": true})).await);
    }
    cluster.running(200).await;
    assert!(remote.get("/health").await.starts_with("HTTP/1.1 200"));
    drop(streams);
    cluster.running(0).await;
}
