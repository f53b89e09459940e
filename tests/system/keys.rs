//! The cluster's key is replaced while requests stream; who has missed it stays outside.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use serde_json::Value;

use crate::{
    harness::{Cluster, Launched, Node, PATIENCE, ask_long, until},
    net::{eyes::settled, lab::Lab},
};

/// A copy of the cluster's key file, as on another machine.
fn copy(cluster: &Cluster, name: &str) -> PathBuf {
    // The mode is copied too.
    let to = cluster.path().join(format!("{name}.key"));
    std::fs::copy(cluster.key(), &to).unwrap();
    to
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `starling keys …` against a node. Exit code, JSON rows, standard error.
async fn keys(cluster: &Cluster, node: &Node, key: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut all = vec!["keys"];
    all.extend(args);
    all.extend(["--json", "--node", &node.address, "--key-file", text(key)]);
    let out = cluster.run(&all).await;
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    (out.status.code().unwrap(), serde_json::from_slice(&out.stdout).unwrap_or_default(), error)
}

/// A step that every node must take; the id of its key.
async fn step(cluster: &Cluster, node: &Node, key: &Path, args: &[&str], names: &[&str]) -> String {
    let (code, told, error) = keys(cluster, node, key, args).await;
    assert_eq!(code, 0, "{args:?}: {told}\n{error}\n{}", node.tail());
    let rows = told["nodes"].as_array().unwrap();
    let taken: Vec<_> =
        rows.iter().map(|row| (row["node"].as_str().unwrap(), row["result"].as_str().unwrap())).collect();
    let wanted: Vec<_> = names.iter().map(|name| (*name, "ok")).collect();
    assert_eq!(taken, wanted, "{args:?}");
    told["key"].as_str().unwrap().to_owned()
}

async fn in_use(cluster: &Cluster, node: &Node, key: &Path) -> String {
    let (code, told, error) = keys(cluster, node, key, &["list"]).await;
    assert_eq!(code, 0, "{error}");
    told["nodes"][0]["primary"].as_str().unwrap().to_owned()
}

/// Streams requests through a gateway, one after the other in a few lanes, until it is told to stop.
struct Traffic {
    over: Arc<AtomicBool>,
    done: Arc<AtomicU32>,
    lanes: tokio::task::JoinSet<Vec<String>>,
}

impl Traffic {
    fn start(gateway: &Node, model: &str) -> Self {
        let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let mut lanes = tokio::task::JoinSet::new();
        let url = gateway.url("/v1/chat/completions");
        for lane in 0..3 {
            let (over, done, url, model) = (over.clone(), done.clone(), url.clone(), model.to_owned());
            lanes.spawn(async move {
                let (mut faults, mut number) = (Vec::new(), 0);
                while !over.load(Ordering::Relaxed) {
                    number += 1;
                    let body = ask_long(&model, &format!("{lane} {number} tell me of the cormorant"), 64);
                    let told = crate::harness::stream_from(&url, &body).await.rest().await;
                    if told.error.is_some() || !told.done || told.finish.as_deref() != Some("length") {
                        faults.push(format!("{told:?}"));
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                faults
            });
        }
        Self { over, done, lanes }
    }

    /// Waits until some more requests were answered.
    async fn some_more(&self) {
        let wanted = self.done.load(Ordering::Relaxed) + 4;
        let more = async || self.done.load(Ordering::Relaxed) >= wanted;
        until("requests are answered", PATIENCE, more).await;
    }

    /// Ends it: how many were answered, and what went wrong.
    async fn end(self) -> (u32, Vec<String>) {
        self.over.store(true, Ordering::Relaxed);
        let faults = self.lanes.join_all().await.concat();
        (self.done.load(Ordering::Relaxed), faults)
    }
}

/// A node with the old key is alone, says that it was refused, and has heard no name.
async fn is_shut_out(late: Launched, cluster: &Cluster, old: &Path, names: &[&str]) -> Node {
    let late = late.ready().await;
    let refused = async || late.tail().contains("accepts none of this node's keys");
    until("the refusal is in the log", PATIENCE, refused).await;
    let out = cluster.run(&["keys", "list", "--json", "--node", &late.address, "--key-file", text(old)]).await;
    let told: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
    let known: Vec<_> = told["nodes"].as_array().into_iter().flatten().filter_map(|row| row["node"].as_str()).collect();
    assert_eq!(known, [late.name.as_str()]);
    let log = late.tail();
    assert!(!names.iter().any(|name| log.contains(name)), "it has heard a name:\n{log}");
    late
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_replaced_under_traffic_and_the_old_one_opens_nothing() {
    let cluster = Cluster::new().await;
    let (old, w1_key, w2_key) = (copy(&cluster, "old"), copy(&cluster, "egret"), copy(&cluster, "stork"));
    let gateway = cluster.up("heron", &["--role", "router,gateway"]).await;
    let w1 = cluster.join("egret", &[&gateway.address], &["--key-file", text(&w1_key)]).await;
    let w2 = cluster.join("stork", &[&gateway.address], &["--key-file", text(&w2_key)]).await;
    let (names, all) = (["egret", "heron", "stork"], [&gateway, &w1, &w2]);
    let both = async |cluster: &Cluster| {
        cluster.serving_workers("egret", &gateway).await + cluster.serving_workers("stork", &gateway).await == 2
    };
    until("both workers serve", PATIENCE, async || both(&cluster).await).await;
    let first = in_use(&cluster, &w1, &w1_key).await;
    let traffic = Traffic::start(&gateway, &w1.model);
    traffic.some_more().await;

    let (code, _, error) = keys(&cluster, &w1, &w1_key, &["use", "00000000"]).await;
    assert!(code == 1 && error.contains("not in the ring"), "{code} {error}");
    let (code, _, error) = keys(&cluster, &w1, &w1_key, &["remove", "first"]).await;
    assert!(code == 2 && error.contains("8 hex digits"), "{code} {error}");
    let (code, _, error) = keys(&cluster, &w1, &w1_key, &["remove", &first]).await;
    assert!(code == 1 && error.contains("is the one in use"), "{code} {error}");

    // Each step is asked of another node, with that machine's key file.
    let second = step(&cluster, &w1, &w1_key, &["add"], &names).await;
    traffic.some_more().await;
    assert_eq!(in_use(&cluster, &gateway, &cluster.key()).await, first);
    step(&cluster, &w2, &w2_key, &["use", &second], &names).await;
    traffic.some_more().await;
    assert_eq!(in_use(&cluster, &gateway, &cluster.key()).await, second);
    step(&cluster, &gateway, &cluster.key(), &["remove", &first], &names).await;
    traffic.some_more().await;
    let (answered, faults) = traffic.end().await;
    eprintln!("{answered} requests were streamed during the roll");
    assert_eq!(faults, [""; 0], "no request was cut off");
    for node in all {
        let members = node_names(&cluster, node).await;
        assert_eq!(members, names, "{} sees everybody", node.name);
    }
    for file in [&w1_key, &w2_key, &cluster.key()] {
        let kept = std::fs::read_to_string(file).unwrap();
        assert!(kept.starts_with("starling cluster key ring v1\nversion 3\n") && kept.lines().count() == 3);
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(file).unwrap().permissions()) & 0o777,
            0o600
        );
    }

    // The old file opens nothing: not for a tool, and not for a node.
    let (code, _, error) = keys(&cluster, &gateway, &old, &["list"]).await;
    assert!(code == 3 && error.contains("none of this node's cluster keys"), "{code} {error}");
    let seeds = [gateway.address.as_str(), &w1.address];
    let args = ["--key-file", text(&old)];
    let late = cluster.launch("late", &[&["join"], &seeds[..]].concat(), &args);
    let late = is_shut_out(late, &cluster, &old, &names).await;
    for node in all {
        assert_eq!(node_names(&cluster, node).await, names);
    }
    drop(late);
    // A restarted node comes back with what it kept.
    let mut w2 = w2;
    w2.signal("TERM").await;
    tokio::time::timeout(PATIENCE, w2.child.wait()).await.expect("it ends").unwrap();
    let _w2 = cluster.join("stork", &[&gateway.address], &["--key-file", text(&w2_key)]).await;
    until("both workers serve again", PATIENCE, async || both(&cluster).await).await;
}

async fn node_names(cluster: &Cluster, node: &Node) -> Vec<String> {
    let rows = cluster.rows("nodes", node).await;
    let alive = rows.as_array().into_iter().flatten().filter(|row| row["state"] == "alive");
    alive.filter_map(|row| row["name"].as_str().map(str::to_owned)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_a_roll_and_a_node_with_the_old_key_show_no_name_and_no_key_on_the_wire() {
    let Some(lab) = Lab::new(3).await else { return };
    lab.fabric.rules(|rules| rules.capture = true);
    let old = copy(&lab.cluster, "old");
    let egret_key = copy(&lab.cluster, "egret");
    let heron = lab.start(0, "heron-gateway", &[], &["--role", "router,gateway"]).await;
    let args = ["--served-name", "ibis-model", "--key-file", text(&egret_key)];
    let egret = lab.start(1, "egret-worker", &[0], &args).await;
    let (names, all) = (["egret-worker", "heron-gateway"], [&heron, &egret]);
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    let run = async |args: &[&str]| {
        let mut all = vec!["keys"];
        all.extend(args);
        let key = lab.cluster.key();
        all.extend(["--json", "--node", &heron.address, "--key-file", text(&key)]);
        let out = lab.run(1, &all).await;
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        let told: Value = serde_json::from_slice(&out.stdout).unwrap();
        told["key"].as_str().unwrap().to_owned()
    };
    let list = lab.run(1, &["keys", "list", "--json", "--node", &heron.address, "--key-file", text(&old)]).await;
    let list: Value = serde_json::from_slice(&list.stdout).unwrap();
    let first = list["nodes"][0]["primary"].as_str().unwrap().to_owned();
    let watch = lab.eyes.watch(&all, &names);
    let second = run(&["add"]).await;
    let ring = std::fs::read_to_string(&egret_key).unwrap();
    run(&["use", &second]).await;
    run(&["remove", &first]).await;
    let (status, body) = heron.chat(&crate::harness::ask("ibis-model", "the secret cormorant", 8)).await;
    assert_eq!(status, 200, "{body}");
    let late = lab.launch(2, "bittern-late", &[0, 1], &["--key-file", text(&old)]).ready().await;
    let refused = async || late.tail().contains("accepts none of this node's keys");
    until("the refusal is in the log", PATIENCE, refused).await;
    // It asks on and on; nobody answers, and nobody is disturbed.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!names.iter().any(|name| late.tail().contains(name)), "{}", late.tail());
    assert_eq!(watch.end(), [], "nobody was disturbed");
    settled("still one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    let seen = lab.done();
    assert!(seen.captured.len() > 30_000, "only {} bytes were captured", seen.captured.len());
    let shown = |what: &[u8]| seen.captured.windows(what.len()).any(|window| window == what);
    assert!(shown(b"starling-link/1"), "what is in the clear was captured");
    for secret in ["heron", "egret", "ibis", "bittern", "cormorant", "worker-0", "gateway"] {
        assert!(!shown(secret.as_bytes()), "{secret} can be read on the wire");
    }
    for digits in ring.lines().filter_map(|line| line.split(' ').next_back()).filter(|word| word.len() == 64) {
        let pairs = digits.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
        let bytes: Vec<u8> = pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect();
        assert!(!shown(&bytes) && !shown(digits.as_bytes()), "a key can be read on the wire");
    }
}
