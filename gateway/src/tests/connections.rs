//! Connections themselves: too many, silent ones, and bodies announced before they are sent.

use std::time::Duration;

use serde_json::json;
use starling_actors::engine::FinishReason;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::timeout};

use super::client::{Remote, chat_body, read_to_end, read_until};
use crate::{
    GatewayConfig,
    fixtures::{
        byte,
        cluster::{Cluster, Plan},
        frame,
    },
};

const PATIENCE: Duration = Duration::from_secs(10);

async fn connected(remote: &Remote, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(remote.address).await.expect("connects");
    stream.write_all(bytes).await.expect("writes");
    stream
}

#[tokio::test]
async fn lif_08_a_gateway_with_all_connections_taken_answers_its_health_check_and_503_to_others() {
    let cluster = Cluster::new(|_| Plan::hang(vec![frame(0, &[byte(b'a')], None)]));
    let remote = Remote::new(&cluster, GatewayConfig { connections_max: 2, ..Default::default() }).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = remote.ask(json!({"stream": true})).await;
        read_until(&mut stream, "\"a\"").await;
        held.push(stream);
    }
    for _ in 0..100 {
        assert!(remote.get("/health").await.starts_with("HTTP/1.1 200"));
    }
    assert!(remote.get("/metrics").await.starts_with("HTTP/1.1 200"));
    // Also to a client that would keep its connection: there is none to keep.
    let body = chat_body(json!({}));
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length";
    let refused =
        read_to_end(connected(&remote, format!("{head}: {}\r\n\r\n{body}", body.len()).as_bytes()).await).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(refused.contains("retry-after: 1") && refused.contains("connection: close"), "{refused}");
    assert!(refused.contains("limit of 2 connections") && refused.contains("\"code\":\"overloaded\""), "{refused}");
    drop(held);
    cluster.running(0).await;
    let served = async {
        while !read_until(&mut remote.ask(json!({"stream": true})).await, "\r\n\r\n").await.starts_with("HTTP/1.1 200")
        {
        }
    };
    timeout(PATIENCE, served).await.expect("places come back");
}

#[tokio::test]
async fn a_connection_that_brings_no_request_is_closed() {
    let cluster = Cluster::new(|_| Plan::text("x", FinishReason::Stop));
    let remote = Remote::new(&cluster, GatewayConfig { head_ms_max: 100, ..Default::default() }).await;
    for sent in [
        "",
        "P",
        "PRI * HT",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "POST /v1/chat/compl",
        "GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        let mut stream = connected(&remote, sent.as_bytes()).await;
        let closed = async {
            let mut rest = Vec::new();
            // Closed in order or reset: both are an end.
            let _how = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest).await.is_ok();
        };
        timeout(PATIENCE, closed).await.unwrap_or_else(|_| panic!("still open after {sent:?}"));
    }
}

#[tokio::test]
async fn err_08_a_body_that_would_be_too_large_is_refused_before_it_is_sent() {
    let cluster = Cluster::new(|_| Plan::text("x", FinishReason::Stop));
    let remote = Remote::new(&cluster, GatewayConfig::default()).await;
    let head = |length: usize| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             connection: close\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    let refused = read_to_end(connected(&remote, head(9 << 20).as_bytes()).await).await;
    assert!(refused.starts_with("HTTP/1.1 413") && refused.contains("request_too_large"), "{refused}");
    let body = chat_body(json!({}));
    let mut stream = connected(&remote, head(body.len()).as_bytes()).await;
    assert!(read_until(&mut stream, "\r\n\r\n").await.starts_with("HTTP/1.1 100"));
    stream.write_all(body.as_bytes()).await.expect("writes");
    assert!(read_to_end(stream).await.starts_with("HTTP/1.1 200"));
}
