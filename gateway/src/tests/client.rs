//! A client: in process for what is said, over a socket for how it is sent and for leaving early.

use std::{net::SocketAddr, sync::Arc};

use axum::{Router, body::Body};
use http_body_util::BodyExt as _;
use hyper::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::oneshot,
    task::JoinSet,
};
use tower::ServiceExt as _;

use crate::{DrainReport, Gateway, GatewayConfig, context::App, fixtures::cluster::Cluster, server};

/// A reply, read to its end.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Reply {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The error's field, after checking the envelope.
    pub(super) fn error_param(&self) -> Option<String> {
        let value = self.json();
        let error = value["error"].as_object().unwrap_or_else(|| panic!("no envelope: {value}"));
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{value}");
        let kinds =
            ["invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"];
        assert!(kinds.contains(&error["type"].as_str().expect("a type")), "{value}");
        assert!(error["code"].is_string() || error["code"].is_null(), "{value}");
        error["param"].as_str().map(str::to_owned)
    }

    /// The events of a stream: JSON, with the closing mark as a string.
    pub(super) fn events(&self) -> Vec<Value> {
        let text = self.text();
        let lines = text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
        lines
            .map(|event| match event.strip_prefix("data: ").expect("a data line") {
                "[DONE]" => json!("[DONE]"),
                data => serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}")),
            })
            .collect()
    }

    /// The text of each choice of a chat stream, and its finish reasons.
    pub(super) fn streamed(&self, choices: usize) -> Vec<(String, Vec<String>)> {
        let mut all = vec![(String::new(), Vec::new()); choices];
        for event in self.events() {
            for choice in event["choices"].as_array().into_iter().flatten() {
                let (text, finishes) = &mut all[choice["index"].as_u64().expect("an index") as usize];
                let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str());
                text.push_str(piece.unwrap_or(""));
                finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
            }
        }
        all
    }
}

/// A gateway without a socket.
pub(super) struct Local {
    pub(super) app: Arc<App>,
    router: Router,
}

impl Local {
    pub(super) fn new(cluster: &Arc<Cluster>) -> Self {
        Self::with(cluster, GatewayConfig::default())
    }

    pub(super) fn with(cluster: &Arc<Cluster>, config: GatewayConfig) -> Self {
        let app = server::app(config, cluster.clone(), Arc::new(|| "metrics\n".into()));
        Self { router: server::router(app.clone()), app }
    }

    pub(super) async fn send(&self, request: Request<Body>) -> Reply {
        let response = self.router.clone().oneshot(request).await.expect("infallible");
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes().to_vec();
        Reply { status: head.status, headers: head.headers, body }
    }

    pub(super) async fn get(&self, path: &str) -> Reply {
        self.send(Request::get(path).body(Body::empty()).expect("a good request")).await
    }

    pub(super) async fn post(&self, path: &str, body: impl Into<Body>) -> Reply {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(body.into()).expect("a good request")).await
    }

    pub(super) async fn chat(&self, extra: Value) -> Reply {
        self.post("/v1/chat/completions", chat_body(extra)).await
    }

    pub(super) async fn completions(&self, extra: Value) -> Reply {
        self.post("/v1/completions", with_fields(json!({"model": "m", "prompt": "hi"}), extra)).await
    }
}

fn with_fields(mut body: Value, extra: Value) -> String {
    for (key, value) in extra.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body.to_string()
}

/// A small chat request with these fields added.
pub(super) fn chat_body(extra: Value) -> String {
    with_fields(json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}), extra)
}

/// A gateway with a socket.
pub(super) struct Remote {
    pub(super) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    served: JoinSet<DrainReport>,
}

impl Remote {
    pub(super) async fn new(cluster: &Arc<Cluster>, config: GatewayConfig) -> Self {
        let config = GatewayConfig { http: SocketAddr::from(([127, 0, 0, 1], 0)), ..config };
        let gateway = Gateway::bind(config, cluster.clone(), Arc::new(|| "metrics\n".into())).await.expect("binds");
        let address = gateway.local_addr();
        let (stop, stopped) = oneshot::channel();
        let mut served = JoinSet::new();
        served.spawn(gateway.serve(async move {
            let _dropped = stopped.await.is_err();
        }));
        Self { address, stop: Some(stop), served }
    }

    /// A connection that has sent a chat request.
    pub(super) async fn ask(&self, extra: Value) -> TcpStream {
        self.ask_on("/v1/chat/completions", &chat_body(extra)).await
    }

    pub(super) async fn ask_on(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.expect("connects");
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await.expect("writes");
        stream
    }

    pub(super) async fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.expect("connects");
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("writes");
        read_to_end(stream).await
    }

    pub(super) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop.send(()).expect("still serving");
        }
    }

    pub(super) async fn stopped(&mut self) -> DrainReport {
        self.served.join_next().await.expect("one task").expect("no panic")
    }
}

pub(super) async fn read_to_end(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.expect("reads");
    String::from_utf8(bytes).expect("UTF-8")
}

/// Reads until `needle` was seen.
pub(super) async fn read_until(stream: &mut TcpStream, needle: &str) -> String {
    let mut seen = Vec::new();
    let mut chunk = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains(needle) {
        let count = stream.read(&mut chunk).await.expect("reads");
        assert!(count > 0, "closed before {needle:?}: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&chunk[..count]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}
