//! What scripts rely on: exit codes, streams, the key's mode, the inspection verbs, clear errors.

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::harness::{Cluster, ask, client};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_end_with_2_and_one_line() {
    let cluster = Cluster::new().await;
    let file = cluster.path().join("wrong.toml");
    std::fs::write(&file, "worker = 2\n").unwrap();
    for (args, says) in [
        (vec!["up", "--workers", "0"], "workers"),
        (vec!["up", "--engine", "tgi"], "embedded, simulated, vllm"),
        (vec!["up", "--engine", "vllm"], "--engine-url"),
        (vec!["up", "--config", file.to_str().unwrap()], "did you mean `workers`?"),
        (vec!["up", "--model", "/nowhere.gguf"], "/nowhere.gguf"),
        (vec!["join", "--engine", "simulated"], "seed"),
        (vec!["join", "no-port", "--engine", "simulated"], "HOST:PORT"),
    ] {
        let out = cluster.run(&args).await;
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(says) && error.trim().lines().count() == 1, "{args:?}: {error}");
        assert!(out.stdout.is_empty(), "{args:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_without_a_key_says_what_to_do() {
    let cluster = Cluster::new().await;
    let out = cluster.run(&["join", "127.0.0.1:1", "--engine", "simulated"]).await;
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("--key-file"), "{}", text(&out.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_running_node_ends_with_3() {
    let cluster = Cluster::new().await;
    let out = cluster.run(&["nodes"]).await;
    assert_eq!(out.status.code(), Some(3), "{}", text(&out.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_effective_configuration_names_its_sources() {
    let cluster = Cluster::new().await;
    let out =
        cluster.command(&["config", "--json", "--workers", "7"]).env("STARLING_KV_MIB", "99").output().await.unwrap();
    let rows: Vec<Value> = serde_json::from_slice(&out.stdout).unwrap();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap().clone();
    assert_eq!((row("workers")["value"].as_str(), row("workers")["source"].as_str()), (Some("7"), Some("flag")));
    assert_eq!(row("kv-mib")["source"], "environment STARLING_KV_MIB");
    assert!(row("name")["value"].is_null() && row("name")["derived"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_start_makes_a_private_key_and_verbs_find_the_node_by_its_folder() {
    let cluster = Cluster::new().await;
    // No --key-file and no --data-dir: the defaults below HOME, which is the temporary folder.
    let args = ["up", "--engine", "simulated", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let home = cluster.path().join(".local/share/starling");
    let mut child = cluster.command(&args).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = tokio::io::BufReader::new(child.stdout.take().unwrap());
    let mut seen = String::new();
    while !seen.contains("ready name=") {
        use tokio::io::AsyncBufReadExt;
        assert!(lines.read_line(&mut seen).await.unwrap() > 0, "it ended: {seen}");
    }
    let mode = std::fs::metadata(home.join("cluster.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(seen.contains("curl -N http://127.0.0.1:"), "{seen}");
    for verb in ["nodes", "instances", "actors"] {
        let table = cluster.run(&[verb]).await;
        assert!(table.status.success(), "{verb}: {}", text(&table.stderr));
        assert!(text(&table.stdout).lines().count() > 1, "{verb}: {}", text(&table.stdout));
    }
    let answer = cluster.run(&["chat", "-m", "hello", "--max-tokens", "8", "--stats"]).await;
    assert!(answer.status.success() && !answer.stdout.is_empty(), "{}", text(&answer.stderr));
    assert!(text(&answer.stderr).contains("tokens/s"), "{}", text(&answer.stderr));
    let second = cluster.run(&args).await;
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("another starling"), "{}", text(&second.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_without_the_key_learns_nothing() {
    let cluster = Cluster::new().await;
    let node = cluster.up("one", &[]).await;
    let other = cluster.path().join("other.key");
    cluster.run(&["keys", "new", other.to_str().unwrap()]).await;
    let out = cluster.run(&["nodes", "--node", &node.address, "--key-file", other.to_str().unwrap()]).await;
    assert_eq!(out.status.code(), Some(3), "{}", text(&out.stderr));
    assert!(out.stdout.is_empty());
    assert_eq!(node.chat(&ask(&node.model, "still here", 2)).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_with_a_key_file_answers_key_holders_only() {
    let cluster = Cluster::new().await;
    let keys = cluster.path().join("api-keys");
    std::fs::write(&keys, "# team a\nsecret-of-team-a\n").unwrap();
    let node = cluster.up("keyed", &["--engine", "simulated", "--api-keys-file", keys.to_str().unwrap()]).await;
    let post = || client().post(node.url("/v1/chat/completions")).json(&ask("simulated", "hello", 4));
    let told: Value = {
        let stranger = post().send().await.unwrap();
        assert_eq!(stranger.status(), 401);
        stranger.json().await.unwrap()
    };
    assert!(told["error"]["message"].is_string() && !told.to_string().contains("secret-of-team-a"), "{told}");
    assert_eq!(post().bearer_auth("secret-of-team-b").send().await.unwrap().status(), 401);
    assert_eq!(post().bearer_auth("secret-of-team-a").send().await.unwrap().status(), 200);
    let url = node.url("");
    let mut chat = cluster.command(&["chat", "-m", "hello", "--max-tokens", "4", "--url", &url]);
    let out = chat.env("STARLING_API_KEY", "secret-of-team-a").output().await.unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}
