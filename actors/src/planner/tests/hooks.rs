//! Programs that start and stop workers: what they get, and what is made of how they end.

use std::{os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use starling_ids::WorkerId;

use crate::{
    plan::{Action, Decision, Fleet, Observation, Seen, WorkerSeen},
    planner::hook::{Hook, Order},
    route::split::Role,
};

/// A script in a folder.
fn script(dir: &tempfile::TempDir, body: &str) -> PathBuf {
    let path = dir.path().join("hook");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    path
}

async fn run(body: &str, limit: Duration) -> Result<(), String> {
    let dir = tempfile::tempdir().expect("a folder");
    Hook { path: script(&dir, body), limit }.run(Ok("{}".to_owned())).await
}

fn order() -> Order {
    let node = starling_ids::NodeId::new("host-b").expect("name");
    let worker = WorkerSeen {
        id: WorkerId { node: node.clone(), index: 0 },
        incarnation: starling_ids::Incarnation(1),
        role: Role::Decode,
        sound: true,
        removable: true,
        rates: None,
        sequences_max: 16,
        step_tokens: 512,
        blocks: 100,
        blocks_pinned: 0,
        running: 0,
        waiting: 0,
        queued_tokens: 0,
        prefilled: 0,
        generated: 0,
    };
    let gone = WorkerId { node, index: 1 };
    let wanted = Fleet { both: 0, prefill: 1, decode: 1 };
    let decision =
        Decision { action: Action::Scale { wanted, remove: vec![gone] }, reason: "because \"so\"".to_owned() };
    let observation = Observation {
        window: Duration::from_secs(1),
        seen: Seen::default(),
        missing: Vec::new(),
        workers: vec![worker],
        block_tokens: 16,
    };
    let model = starling_ids::ModelId::new("m").expect("name");
    Order::new(&model, &starling_ids::NodeId::new("host-a").expect("name"), &decision, &observation, 7)
}

#[test]
fn an_order_is_one_document_that_stays_as_it_is() {
    let expected = concat!(
        r#"{"version":1,"id":"host-a-7","model":"m","leader":"host-a","reason":"because \"so\"","roles":["#,
        r#"{"role":"both","now":0,"wanted":0},{"role":"prefill","now":0,"wanted":1},"#,
        r#"{"role":"decode","now":1,"wanted":1}],"remove":["host-b/1"],"#,
        r#""workers":[{"worker":"host-b/0","role":"decode","sound":true}]}"#,
    );
    assert_eq!(order().json().expect("json"), expected);
}

#[tokio::test]
async fn a_hook_gets_the_document_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("got");
    let path = script(&dir, &format!("cat > {0}; echo $# >> {0}", out.display()));
    let hook = Hook { path, limit: Duration::from_secs(20) };
    hook.run(order().json()).await.expect("it ends well");
    let got = std::fs::read_to_string(out).expect("written");
    assert_eq!(got, format!("{}\n0\n", order().json().expect("json")));
}

#[tokio::test]
async fn how_a_hook_ends_is_told_with_its_last_words() {
    let long = Duration::from_secs(20);
    assert_eq!(run("exit 0", long).await, Ok(()), "one that does not read knows what it does");
    let error = run("echo first >&2; echo no room >&2; exit 3", long).await.expect_err("it failed");
    assert!(error.contains("ended with 3") && error.ends_with("no room"), "{error}");
    let error = run("kill -9 $$", long).await.expect_err("it failed");
    assert!(error.contains("signal"), "{error}");
    let error = run("exec sleep 1000", Duration::from_millis(300)).await.expect_err("it is killed");
    assert!(error.contains("has not ended"), "{error}");
    let missing = Hook { path: "/nowhere/hook".into(), limit: long };
    assert!(missing.run(Ok(String::new())).await.expect_err("it is not there").contains("does not start"));
}

#[tokio::test]
async fn what_a_hook_leaves_running_holds_nobody_up() {
    let dir = tempfile::tempdir().expect("a folder");
    let id = dir.path().join("id");
    let path = script(&dir, &format!("sleep 1000 & echo $! > {}; exit 0", id.display()));
    let hook = Hook { path, limit: Duration::from_secs(20) };
    assert_eq!(hook.run(Ok("{}".to_owned())).await, Ok(()));
    let id = std::fs::read_to_string(id).expect("written");
    std::process::Command::new("kill").arg(id.trim()).status().expect("ended");
}
