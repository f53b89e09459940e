//! Sessions, wishes about the worker, and the scopes that they need.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use hyper::Request;
use serde_json::json;
use starling_actors::{
    engine::FinishReason,
    route::{
        receipt::{Judged, Outcome, Receipt},
        wishes::Wishes,
    },
};
use starling_ids::{Incarnation, NodeId, RequestId, WorkerId};

use super::client::{Local, Reply, chat_body};
use crate::{
    ApiKey, Call, Caller, GatewayConfig, Scope,
    fixtures::cluster::{Cluster, Plan},
};

fn hello() -> Arc<Cluster> {
    Cluster::new(|_| Plan::text("hello", FinishReason::Stop))
}

async fn ask(local: &Local, headers: &[(&str, &str)]) -> Reply {
    let request = Request::post("/v1/chat/completions");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    local.send(request.body(Body::from(chat_body(json!({})))).expect("good")).await
}

#[tokio::test]
async fn a_session_goes_to_the_cluster_under_the_configured_header() {
    let cluster = hello();
    let local = Local::new(&cluster);
    assert_eq!(ask(&local, &[("x-session-id", "chat 7")]).await.status, 200);
    assert_eq!(ask(&local, &[]).await.status, 200);
    let calls = cluster.calls();
    assert_eq!((calls[0].session.as_deref(), calls[1].session.as_deref()), (Some("chat 7"), None));
    assert_eq!(calls[0].wishes, Wishes::default());
    let long = ask(&local, &[("x-session-id", &"s".repeat(257))]).await;
    assert_eq!((long.status.as_u16(), long.json()["error"]["code"].as_str()), (400, Some("invalid_header")));
    let named = Local::with(&cluster, GatewayConfig { session_header: "x-thread".to_owned(), ..Default::default() });
    assert_eq!(ask(&named, &[("X-Thread", "t"), ("x-session-id", "s")]).await.status, 200);
    assert_eq!(cluster.calls()[2].session.as_deref(), Some("t"));
    let wrong = GatewayConfig { session_header: "X Thread".to_owned(), ..Default::default() };
    assert!(wrong.validate().expect_err("no header").to_string().contains("session_header"));
}

#[tokio::test]
async fn wishes_need_a_scope_and_are_never_ignored() {
    let cluster = hello();
    let key = |key: &str, scopes: &[Scope]| ApiKey {
        key: key.to_owned(),
        caller: Caller { scopes: scopes.to_vec(), ..Caller::default() },
    };
    let keys = vec![
        key("key-without", &[]),
        key("key-that-pins", &[Scope::Pin]),
        key("key-for-all", &[Scope::Pin, Scope::Select]),
    ];
    let local = Local::with(&cluster, GatewayConfig { api_keys: keys, ..Default::default() });
    for (key, header, value, status) in [
        ("key-without", "x-starling-worker", "box/0", 403),
        ("key-without", "x-starling-select", "zone=north", 403),
        ("key-that-pins", "x-starling-tolerate", "batch", 403),
        ("key-that-pins", "x-starling-worker", "box/1", 200),
        ("key-that-pins", "x-starling-worker", "box", 400),
        ("key-for-all", "x-starling-select", "zone=north,!spot", 200),
        ("key-for-all", "x-starling-select", "a b", 400),
        ("key-for-all", "x-starling-tolerate", "batch, gpu", 200),
        ("key-for-all", "x-starling-tolerate", "batch,", 400),
        ("key-unknown", "x-starling-worker", "box/0", 401),
        ("key-without", "x-starling-receipt", "1", 200),
        ("key-without", "x-starling-receipt", "yes", 400),
        ("key-without", "x-starling-revision", "", 400),
        ("key-without", "x-starling-revision", "2026-11", 200),
        ("key-without", "x-starling-adapter", "", 400),
        ("key-without", "x-starling-adapter", "law", 200),
    ] {
        let bearer = format!("Bearer {key}");
        let reply = ask(&local, &[("authorization", &bearer), (header, value)]).await;
        assert_eq!(reply.status, status, "{key} {header}: {value}");
        if status == 403 {
            let error = &reply.json()["error"];
            assert_eq!((&error["code"], &error["type"]), (&json!("missing_scope"), &json!("permission_error")));
            let message = error["message"].as_str().expect("text");
            assert!(message.contains(header) && message.contains("scope"), "{message}");
        }
    }
    let calls = cluster.calls();
    assert_eq!(calls[5].spec.adapter.as_deref(), Some("law"));
    let wishes: Vec<Wishes> = calls.into_iter().map(|call| call.wishes).collect();
    assert_eq!(wishes[0].worker.as_ref().map(ToString::to_string).as_deref(), Some("box/1"));
    assert_eq!(wishes[1].select, "zone=north,!spot");
    assert_eq!(wishes[2].tolerate, ["batch", "gpu"]);
    assert!(wishes[3].receipt);
    assert_eq!(wishes[4].revision.as_deref(), Some("2026-11"));
    // Where no key is asked for, nobody has a scope.
    let open = Local::new(&cluster);
    assert_eq!(ask(&open, &[("x-starling-worker", "box/0")]).await.status, 403);
}

fn receipt(worker: &str) -> Receipt {
    let judged = |index: u16| Judged {
        worker: WorkerId { node: NodeId::new(worker).expect("name"), index },
        incarnation: Incarnation(1),
        hit_blocks: 2,
        in_flight: 0,
        queued_tokens: 0,
        cost: f64::from(index),
        terms: vec![("prefill".to_owned(), 1.0)],
        ttft_ms: 1.0,
        lower: None,
    };
    Receipt {
        request: RequestId(7),
        policy: "starling".to_owned(),
        at: Duration::ZERO,
        workers: 9,
        prompt_tokens: 40,
        candidates: (0..8).map(judged).collect(),
        chosen: 5,
        near_equals: 1,
        outcome: None,
        cut_off: Vec::new(),
        waited_ms: 0.0,
        source: None,
        regret_ms: None,
        shifted: None,
        waited_for: String::new(),
    }
}

#[tokio::test]
async fn a_receipt_comes_with_the_reply_when_it_is_asked_for() {
    let cluster = Cluster::new(|call: &Call| {
        if let Some(slip) = &call.slip {
            slip.push(receipt("box"));
            slip.ended(Outcome { answer_tokens: 5, ..Outcome::default() });
        }
        Plan::text("hello", FinishReason::Stop)
    });
    let local = Local::new(&cluster);
    assert!(!ask(&local, &[]).await.headers.contains_key("x-starling-receipt"));
    let reply = ask(&local, &[("x-starling-receipt", "1")]).await;
    let told: Vec<Receipt> = serde_json::from_slice(reply.headers["x-starling-receipt"].as_bytes()).expect("JSON");
    assert_eq!((told.len(), told[0].candidates.len(), told[0].workers), (1, 3, 9));
    let chosen = &told[0].candidates[told[0].chosen];
    assert_eq!(chosen.worker.to_string(), "box/5", "the chosen one is among the few");
    assert_eq!(told[0].outcome.map(|outcome| outcome.answer_tokens), Some(5));

    let body = Body::from(chat_body(json!({"stream": true})));
    let request = Request::post("/v1/chat/completions").header("x-starling-receipt", "1").body(body).expect("good");
    let text = local.send(request).await.text();
    let (before, after) = text.split_once(": x-starling-receipt ").expect("a comment");
    assert!(before.ends_with("\n\n") && after.ends_with("\n\ndata: [DONE]\n\n"), "{text}");
    let told: Vec<Receipt> = serde_json::from_str(after.lines().next().expect("a line")).expect("JSON");
    assert_eq!(told[0].candidates.len(), 8);
}
