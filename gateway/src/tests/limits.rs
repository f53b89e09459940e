//! Bodies: size, kind, encoding. ERR-06 and ERR-08.

use axum::body::Body;
use bytes::Bytes;
use futures::stream;
use hyper::Request;
use serde_json::json;
use starling_actors::engine::FinishReason;

use super::client::{Local, Remote, chat_body, read_until};
use crate::{
    GatewayConfig,
    fixtures::cluster::{Cluster, Plan, card},
};

/// A request of exactly `size` bytes.
fn sized(size: usize) -> String {
    let empty = chat_body(json!({"user": ""})).len();
    chat_body(json!({"user": "u".repeat(size - empty)}))
}

#[tokio::test]
async fn err_06_and_08_the_limit_is_on_decoded_bytes_and_comes_first() {
    let cluster = Cluster::serving(vec![card("m", 1 << 20)], |_| Plan::text("x", FinishReason::Stop));
    let local = Local::with(&cluster, GatewayConfig { body_bytes_max: 3 << 20, ..Default::default() });
    let path = "/v1/chat/completions";
    assert_eq!(local.post(path, sized(2_100_000)).await.status, 200);
    assert_eq!(local.post(path, sized(3 << 20)).await.status, 200);
    let chunked = |size: usize| {
        let bytes = Bytes::from(sized(size));
        let chunks: Vec<_> =
            bytes.chunks(70_000).map(|chunk| Ok::<_, std::io::Error>(Bytes::copy_from_slice(chunk))).collect();
        Body::from_stream(stream::iter(chunks))
    };
    assert_eq!(local.post(path, chunked(3 << 20)).await.status, 200);
    let calls = cluster.calls().len();
    for body in [Body::from(sized((3 << 20) + 1)), chunked((3 << 20) + 1)] {
        let reply = local.post(path, body).await;
        assert_eq!(reply.status, 413);
        assert_eq!(reply.json()["error"]["code"], "request_too_large");
    }
    assert_eq!(cluster.calls().len(), calls, "no worker was asked");
}

#[tokio::test]
async fn err_08_a_sender_of_too_much_still_reads_the_answer() {
    let cluster = Cluster::new(|_| Plan::text("x", FinishReason::Stop));
    let remote = Remote::new(&cluster, GatewayConfig { body_bytes_max: 1 << 20, ..Default::default() }).await;
    let mut stream = remote.ask_on("/v1/chat/completions", &sized(3 << 20)).await;
    assert!(read_until(&mut stream, "request_too_large").await.starts_with("HTTP/1.1 413"));
}

#[tokio::test]
async fn only_plain_json_is_read() {
    let local = Local::new(&Cluster::new(|_| Plan::text("x", FinishReason::Stop)));
    let send = async |name: &str, value: &str| {
        let request = Request::post("/v1/chat/completions").header(name, value);
        local.send(request.body(Body::from(chat_body(json!({})))).expect("good")).await
    };
    assert_eq!(send("content-type", "application/json; charset=utf-8").await.status, 200);
    assert_eq!(send("x-no-type", "1").await.status, 200);
    assert_eq!(send("content-encoding", "Identity").await.status, 200);
    for (name, value) in [("content-type", "text/plain"), ("content-encoding", "gzip")] {
        let reply = send(name, value).await;
        assert_eq!(reply.status, 415);
        reply.error_param();
    }
}
