//! Clients that leave, at every point: CNT faults over real sockets.

use std::time::Duration;

use serde_json::{Value, json};
use starling_actors::engine::FinishReason;
use tokio::net::TcpStream;

use super::client::{Local, Remote, read_until};
use crate::{
    GatewayConfig,
    fixtures::{
        byte,
        cluster::{Accept, Cluster, Frames, Plan},
        frame,
    },
};

/// Leaves after `needle` was read (at once when it is empty) and expects the work to end.
async fn leaves(plan: fn() -> Plan, fields: Value, needle: &str) {
    let cluster = Cluster::new(move |_| plan());
    let remote = Remote::new(&cluster, GatewayConfig::default()).await;
    let mut stream: TcpStream = remote.ask(fields).await;
    cluster.running(1).await;
    if !needle.is_empty() {
        read_until(&mut stream, needle).await;
    }
    drop(stream);
    cluster.running(0).await;
}

#[tokio::test]
async fn cnt_05_a_client_that_leaves_before_the_head_cancels() {
    let never = || Plan { accept: Accept::Never, frames: Frames::List(Vec::new()) };
    leaves(never, json!({"stream": true}), "").await;
}

#[tokio::test]
async fn cnt_05_a_client_that_leaves_before_the_first_token_cancels() {
    leaves(|| Plan::hang(Vec::new()), json!({"stream": true}), "HTTP/1.1 200").await;
}

#[tokio::test]
async fn cnt_05_a_client_that_leaves_in_the_stream_cancels() {
    leaves(|| Plan::hang(vec![frame(0, &[byte(b'a')], None)]), json!({"stream": true}), "\"a\"").await;
}

#[tokio::test]
async fn cnt_05_a_client_that_leaves_a_unary_request_cancels() {
    leaves(|| Plan::hang(vec![frame(0, &[byte(b'a')], None)]), json!({}), "").await;
}

#[tokio::test]
async fn http_200_is_said_only_when_a_worker_has_accepted() {
    let cluster = Cluster::new(|_| Plan { accept: Accept::Never, frames: Frames::List(Vec::new()) });
    let config = GatewayConfig { request_ms_max: 200, ..Default::default() };
    let reply = Local::with(&cluster, config).chat(json!({"stream": true})).await;
    assert_eq!((reply.status.as_u16(), reply.json()["error"]["code"].as_str()), (504, Some("deadline_exceeded")));
    cluster.running(0).await;
}

#[tokio::test]
async fn cnt_06_permits_come_back_from_clients_that_vanish_and_stay_while_a_body_lives() {
    let cluster = Cluster::new(|call| match call.spec.sampling.seed % 3 {
        0 => Plan { accept: Accept::Never, frames: Frames::List(Vec::new()) },
        1 => Plan::hang(Vec::new()),
        _ => Plan::hang(vec![frame(0, &[byte(b'a')], None)]),
    });
    let config = GatewayConfig { permits_max: 2, ..Default::default() };
    let remote = Remote::new(&cluster, config).await;
    for seed in 0..20 {
        let mut stream = remote.ask(json!({"stream": seed % 2 == 0, "seed": seed})).await;
        if seed % 3 == 2 && seed % 2 == 0 {
            read_until(&mut stream, "HTTP/1.1").await;
        }
        drop(stream);
    }
    cluster.running(0).await;
    // Permits are given back right after the work; ask until two are there.
    let mut held = Vec::new();
    let all = async {
        while held.len() < 2 {
            let mut stream = remote.ask(json!({"stream": true, "seed": 2})).await;
            if read_until(&mut stream, "\r\n\r\n").await.starts_with("HTTP/1.1 200") {
                held.push(stream);
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), all).await.expect("two permits come back");
    let mut third = remote.ask(json!({"stream": true, "seed": 2})).await;
    let refused = read_until(&mut third, "overloaded").await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 1"), "{refused}");
    drop(held);
    cluster.running(0).await;
}

#[tokio::test]
async fn cnt_02_a_permit_is_held_to_the_end_of_the_body_in_every_way() {
    let cluster = Cluster::new(|_| Plan::text("x", FinishReason::Stop));
    let local = Local::with(&cluster, GatewayConfig { permits_max: 1, ..Default::default() });
    for _ in 0..3 {
        assert_eq!(local.chat(json!({})).await.status, 200);
        assert_eq!(local.chat(json!({"stream": true})).await.status, 200);
        assert_eq!(local.chat(json!({"max_tokens": 0})).await.status, 400);
    }
    assert_eq!((local.app.admission.in_flight(), local.app.admission.permits_free()), (0, 1));
}

#[tokio::test]
async fn cnt_07_requests_of_every_route_and_of_every_prompt_count_as_load() {
    let cluster = Cluster::new(|_| Plan::hang(Vec::new()));
    let remote = Remote::new(&cluster, GatewayConfig { permits_max: 3, ..Default::default() }).await;
    let many = json!({"model": "m", "prompt": ["a", "b", "c"], "stream": true}).to_string();
    let one = json!({"model": "m", "prompt": "a"}).to_string();
    let mut held = vec![remote.ask(json!({"stream": true})).await];
    cluster.running(1).await;
    held.push(remote.ask_on("/v1/completions", &many).await);
    cluster.running(4).await;
    held.push(remote.ask_on("/v1/completions", &one).await);
    cluster.running(5).await;
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let refused = read_until(&mut remote.ask_on(path, &one).await, "overloaded").await;
        assert!(refused.starts_with("HTTP/1.1 503"), "{path}: {refused}");
    }
    drop(held);
    cluster.running(0).await;
}
