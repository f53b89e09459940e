//! The planner over real processes: a side that starves gets a worker of the other one; the hook is told what is wanted, and
//! which worker was drained; another router takes over from one that is killed.

use std::{os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use futures::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Cluster, Node, ask_long, until};

/// A planner looks once a second, and does nothing in its first looks. Machines are slow.
const PATIENCE: Duration = Duration::from_secs(90);

const ACTS: [&str; 6] = ["--role", "router,gateway", "--planner", "act", "--planner-interval", "1"];

/// What the leader of the only model says; null while nobody leads.
async fn plan(cluster: &Cluster, node: &Node) -> Value {
    cluster.rows("plan", node).await["plans"][0].clone()
}

async fn now(cluster: &Cluster, node: &Node, role: &str) -> u64 {
    plan(cluster, node).await["outlook"]["now"][role].as_u64().unwrap_or(0)
}

/// Sends one request after the other, several at a time, until `state` is there.
async fn under_load<F: Future<Output = bool>>(
    what: &str,
    (node, clients): (&Node, usize),
    body: impl Fn(usize, usize) -> Value,
    state: impl FnMut() -> F,
) {
    let client = async |kind: usize| {
        for turn in 0.. {
            let (status, told) = node.chat(&body(kind, turn)).await;
            // One that waited too long on a slow machine is no matter here.
            assert!(status == 200 || status >= 429, "{status}: {told}");
        }
    };
    let load = join_all((0..clients).map(client));
    tokio::select! {
        _ = until(what, PATIENCE, state) => {}
        _ = load => unreachable!("clients go on for ever"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_side_that_starves_gets_a_worker_of_the_other_and_gives_it_back_when_the_load_turns() {
    let cluster = Cluster::new().await;
    let targets = ["--planner-ttft-ms", "5000", "--planner-itl-ms", "1000"];
    let mut front = cluster.up("front", &[&ACTS[..], &targets].concat()).await;
    // So slow that they are what is short, also where a busy machine makes everything else slow: a prompt takes 0.7 s, a token 0.14 s.
    let common = ["--role", "worker", "--sequences-max", "2", "--fault", "slow=20"];
    let prompts =
        cluster.join("prompts", &[&front.address], &[&common[..], &["--worker-role", "prefill"]].concat()).await;
    let answers = ["--worker-role", "decode", "--workers", "3"];
    let answers = cluster.join("answers", &[&front.address], &[&common[..], &answers].concat()).await;
    front.model.clone_from(&prompts.model);
    let (model, of) = (front.model.clone(), |role: &'static str| now(&cluster, &front, role));
    until("it looks", PATIENCE, async || of("prefill").await == 1 && of("decode").await == 3).await;
    // Long prompts that nobody has seen before, and short answers.
    let long = |kind: usize, turn: usize| ask_long(&model, &format!("{kind} {turn} {}", "of the sea ".repeat(90)), 2);
    under_load("a worker computes prompts", (&front, 6), long, async || of("prefill").await >= 2).await;
    assert!(cluster.lists("answers", &front).await && of("decode").await >= 1, "one that answers stays");
    let said = plan(&cluster, &front).await;
    let first = said["past"].as_array().and_then(|past| past.last()).expect("a decision");
    assert_eq!(first["outcome"], "done", "{first}");
    assert!(first["reason"].as_str().is_some_and(|reason| reason.contains("prompts need")), "{first}");
    // Then the other way round.
    let before = of("decode").await;
    let short = |kind: usize, turn: usize| ask_long(&model, &format!("{kind} {turn}"), 16);
    under_load("it answers again", (&front, 10), short, async || of("decode").await > before).await;
    drop(answers);
}

/// A hook that writes what it gets into a file, whole or not at all.
fn hook(cluster: &Cluster, name: &str) -> (PathBuf, PathBuf) {
    let (path, out) = (cluster.path().join(format!("{name}.sh")), cluster.path().join(format!("{name}.json")));
    let text = format!("#!/bin/sh\ncat > {0}.new && mv {0}.new {0}\necho told >&2\n", out.display());
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (path, out)
}

/// The last order that one of the hooks got.
fn order(files: &[PathBuf]) -> Option<Value> {
    let read = |file: &PathBuf| Some(serde_json::from_str(&std::fs::read_to_string(file).ok()?).expect("JSON"));
    files.iter().find_map(read)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hook_is_told_what_is_wanted_and_whom_to_stop_and_another_router_leads_when_one_is_killed() {
    let cluster = Cluster::new().await;
    let ((one_hook, one_file), (two_hook, two_file)) = (hook(&cluster, "one"), hook(&cluster, "two"));
    let files = [one_file, two_file];
    let acts = |hook: &PathBuf| {
        let own = ["--planner-max", "2", "--planner-hook", hook.to_str().unwrap()].map(str::to_owned);
        ACTS.map(str::to_owned).into_iter().chain(own).collect::<Vec<String>>()
    };
    let args = acts(&one_hook);
    let one = cluster.up("one", &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let args = acts(&two_hook);
    let mut two = cluster.join("two", &[&one.address], &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let worker = ["--role", "worker", "--workers", "1", "--sequences-max", "2"];
    let first = cluster.join("first", &[&one.address], &worker).await;
    two.model.clone_from(&first.model);
    let model = two.model.clone();
    until("somebody leads", PATIENCE, async || now(&cluster, &one, "both").await == 1).await;
    let body = |kind: usize, turn: usize| ask_long(&model, &format!("{kind} {turn}"), 100);
    under_load("the hook is told", (&two, 8), body, async || order(&files).is_some()).await;
    let told = order(&files).unwrap();
    assert_eq!((&told["version"], &told["model"]), (&json!(1), &json!(model)), "{told}");
    assert_eq!(told["roles"][0], json!({"role": "both", "now": 1, "wanted": 2}), "{told}");
    assert_eq!(
        (&told["workers"][0]["worker"], &told["workers"][0]["role"]),
        (&json!("first/0"), &json!("both")),
        "{told}"
    );
    assert_eq!(told["remove"], json!([]));
    // As whoever starts workers would do.
    let second = cluster.join("second", &[&one.address], &worker).await;
    until("it is counted", PATIENCE, async || now(&cluster, &two, "both").await == 2).await;
    files.iter().for_each(|file| drop(std::fs::remove_file(file)));
    // Nothing comes any more: one of them is drained, and then the hook is told to stop it.
    until("the hook is told again", PATIENCE, async || order(&files).is_some()).await;
    let told = order(&files).unwrap();
    assert_eq!(told["roles"][0], json!({"role": "both", "now": 1, "wanted": 1}), "{told}");
    let drained = told["remove"][0].as_str().expect("somebody").to_owned();
    assert!(["first/0", "second/0"].contains(&drained.as_str()), "{told}");
    let row = cluster.rows("instances", &one).await;
    let drains = row.as_array().unwrap().iter().find(|row| drained.starts_with(row["node"].as_str().unwrap()));
    assert_eq!(drains.expect("it runs")["lifecycle"], "draining");
    // Whoever leads is killed; the other one goes on.
    let leader = plan(&cluster, &two).await["leader"].as_str().expect("a leader").to_owned();
    let (dies, lives) = if leader == one.name { (&one, &two) } else { (&two, &one) };
    dies.signal("KILL").await;
    let next = async || plan(&cluster, lives).await;
    until("another one leads", PATIENCE, async || next().await["leader"] == lives.name.as_str()).await;
    until("and looks", PATIENCE, async || now(&cluster, lives, "both").await == 1).await;
    drop((first, second));
}
