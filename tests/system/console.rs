//! What a person sees: the page in a real browser, and `starling requests`.

use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use serde_json::Value;
use tokio::process::Command;

use crate::{
    harness::{Cluster, Node, PATIENCE, ask, client, until},
    net::figures,
};

/// Debian's names for the browser without a window; `scripts/chromium.sh` brings the first.
const BROWSERS: [&str; 3] = ["/usr/bin/chromium-headless-shell", "/usr/bin/chromium", "/usr/bin/google-chrome"];

/// The page after its script has run for some (virtual) seconds, as text. `None` when it took too long.
async fn dom(browser: &str, profile: &Path, url: &str) -> Option<String> {
    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]);
    command.args(["--virtual-time-budget=4000", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", profile.display())).arg(url);
    let run = command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).output();
    let out = tokio::time::timeout(Duration::from_secs(60), run).await.ok()?.expect("the browser starts");
    Some(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The page once it is in a state.
async fn page_in(browser: &str, profile: &Path, url: &str, state: &str) -> String {
    let begun = Instant::now();
    loop {
        let page = dom(browser, profile, url).await.unwrap_or_default();
        if page.contains(&format!("data-state=\"{state}\"")) {
            return page;
        }
        assert!(begun.elapsed() < PATIENCE, "the page is never {state}: {page}");
    }
}

/// The newest request's row, as the verb prints it.
async fn newest(cluster: &Cluster, node: &Node) -> Value {
    cluster.rows("requests", node).await["requests"][0].clone()
}

/// The newest request, once it is known what came of it.
async fn ended(cluster: &Cluster, node: &Node) -> String {
    until("it is known what came of the request", PATIENCE, || async {
        newest(cluster, node).await["outcome"]["answer_tokens"] == 4
    })
    .await;
    newest(cluster, node).await["request"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn console_and_verb_show_the_newest_requests_from_any_node() {
    let cluster = Cluster::new().await;
    let first = cluster.up("one", &["--engine", "simulated"]).await;
    let second = cluster.join("two", &[&first.address], &["--engine", "simulated", "--role", "worker"]).await;
    assert_eq!(first.chat(&ask(&first.model, "where does it go", 4)).await.0, 200);
    let request = ended(&cluster, &first).await;
    assert_eq!(ended(&cluster, &second).await, request);
    assert_eq!(newest(&cluster, &second).await["router"], "one");
    let shown = client().get(first.url("/ui/data/requests")).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!(shown["requests"][0]["request"], request.as_str());
    let nodes = client().get(first.url("/ui/data/nodes")).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!(nodes.as_array().map(Vec::len), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn console_in_a_browser_shows_nodes_workers_and_why() {
    let Some(browser) = BROWSERS.into_iter().find(|path| Path::new(path).exists()) else {
        figures::skipped("no chromium here: scripts/chromium.sh brings it");
        return;
    };
    let cluster = Cluster::new().await;
    let node = cluster.up("looked-at", &["--engine", "simulated", "--label", "zone=<b>north</b>"]).await;
    assert_eq!(node.chat(&ask(&node.model, "look at me", 4)).await.0, 200);
    let id = ended(&cluster, &node).await;
    let page = page_in(browser, &cluster.path().join("browser"), &node.url(&format!("/ui#why/{id}")), "shown").await;
    for text in [
        "1 node; 2 workers take requests",
        "looked-at/0",
        "looked-at/1",
        &id[..12],
        "came of it: 0 prompt tokens cached",
        "queued tokens",
        "TTFT p50 / p99",
    ] {
        assert!(page.contains(text), "no {text:?} in {page}");
    }
    // What the cluster says is text there, never markup.
    assert!(page.contains("zone=&lt;b&gt;north&lt;/b&gt;") && !page.contains("<b>north"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn console_in_a_browser_asks_for_a_key_where_keys_are_set() {
    let Some(browser) = BROWSERS.into_iter().find(|path| Path::new(path).exists()) else {
        figures::skipped("no chromium here: scripts/chromium.sh brings it");
        return;
    };
    let cluster = Cluster::new().await;
    let keys = cluster.path().join("api-keys");
    std::fs::write(&keys, "secret-of-team-a\nsecret-that-sees scopes=view\n").unwrap();
    let node = cluster.up("keyed", &["--engine", "simulated", "--api-keys-file", keys.to_str().unwrap()]).await;
    let page = page_in(browser, &cluster.path().join("browser"), &node.url("/ui"), "fault").await;
    assert!(page.contains("a valid API key is needed") && page.contains("<form id=\"login\">"), "{page}");
    assert!(!page.contains("keyed/0"), "{page}");
    for (key, status) in [("secret-of-team-a", 403), ("secret-that-sees", 200)] {
        let told = client().get(node.url("/ui/data/nodes")).bearer_auth(key).send().await.unwrap();
        assert_eq!(told.status(), status);
    }
}
