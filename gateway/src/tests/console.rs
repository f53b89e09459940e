//! The page and who may read its data.

use axum::body::Body;
use hyper::Request;

use super::client::Local;
use crate::{
    ApiKey, Caller, GatewayConfig, Scope,
    fixtures::cluster::{Cluster, Plan},
};

#[tokio::test]
async fn the_page_is_whole_and_may_load_nothing_from_elsewhere() {
    let local = Local::new(&Cluster::serving(vec![], |_| Plan::frames(vec![])));
    for (path, kind, holds) in [
        ("/ui", "text/html", "<script src=\"/ui/page.js\" defer>"),
        ("/ui/page.css", "text/css", "prefers-color-scheme"),
        ("/ui/page.js", "text/javascript", "/ui/data/"),
    ] {
        let reply = local.get(path).await;
        assert_eq!(reply.status, 200, "{path}");
        assert!(reply.headers["content-type"].to_str().expect("text").starts_with(kind), "{path}");
        assert!(reply.headers["content-security-policy"].to_str().expect("text").contains("default-src 'none'"));
        assert!(reply.text().contains(holds), "{path}");
    }
}

#[tokio::test]
async fn data_that_do_not_exist_are_not_found() {
    let local = Local::new(&Cluster::serving(vec![], |_| Plan::frames(vec![])));
    assert_eq!(local.get("/ui/data/nodes").await.json(), serde_json::json!({"shown": "Nodes"}));
    let id = "6f1c9a0e5b7d4f2a8c3e1d0b9a876543";
    assert!(local.get(&format!("/ui/data/why/{id}")).await.text().contains(id));
    for path in ["/ui/data/secrets", "/ui/data/why/not-an-id", "/ui/data/why/", "/ui/other"] {
        let reply = local.get(path).await;
        assert_eq!(
            (reply.status.as_u16(), reply.json()["error"]["code"].as_str()),
            (404, Some("unknown_url")),
            "{path}"
        );
    }
}

#[tokio::test]
async fn with_keys_the_cluster_is_shown_to_keys_with_the_scope_alone() {
    let seeing = Caller { scopes: vec![Scope::View], ..Caller::default() };
    let api_keys = vec![ApiKey::from("plain-key"), ApiKey { key: "seeing-key".into(), caller: seeing }];
    let config = GatewayConfig { api_keys, ..GatewayConfig::default() };
    let local = Local::with(&Cluster::serving(vec![], |_| Plan::frames(vec![])), config);
    for (key, status) in [(None, 401), (Some("wrong-key"), 401), (Some("plain-key"), 403), (Some("seeing-key"), 200)] {
        let mut request = Request::get("/ui/data/instances");
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let reply = local.send(request.body(Body::empty()).expect("good")).await;
        assert_eq!(reply.status, status, "{key:?}: {}", reply.text());
    }
    // The page itself tells nothing; it asks for the key.
    assert_eq!(local.get("/ui").await.status, 200);
}
