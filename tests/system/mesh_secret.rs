//! What is on the wire, and what a node with another key makes of it.

use std::time::Duration;

use crate::{
    harness::{Node, PATIENCE, ask},
    net::{eyes::settled, lab::Lab},
};

#[tokio::test(flavor = "multi_thread")]
async fn mesh_no_name_is_readable_on_the_wire_and_a_stranger_changes_nothing() {
    let Some(lab) = Lab::new(4).await else { return };
    lab.fabric.rules(|rules| rules.capture = true);
    let g = lab.start(0, "heron-gateway", &[], &["--role", "router,gateway"]).await;
    let w1 = lab.start(1, "egret-worker", &[0], &["--served-name", "ibis-model"]).await;
    let mut w2 = lab.start(2, "stork-worker", &[0], &["--served-name", "ibis-model"]).await;
    let names = ["egret-worker", "heron-gateway", "stork-worker"];
    let all = [&g, &w1, &w2];
    settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    settled("all instances", PATIENCE, || lab.eyes.same_instances(&all, 4)).await;
    for n in 0..4 {
        let (status, body) = g.chat(&ask("ibis-model", &format!("{n} the secret cormorant"), 8)).await;
        assert_eq!(status, 200, "{body}");
    }
    let other = lab.cluster.path().join("other.key");
    let made = lab.cluster.run(&["keys", "new", other.to_str().unwrap()]).await;
    assert!(made.status.success());
    let watch = lab.eyes.watch(&all, &names);
    let args = ["--key-file", other.to_str().unwrap()];
    let stranger: Node = lab.launch(3, "bittern-stranger", &[0, 1, 2], &args).ready().await;
    let key = other.to_str().unwrap();
    let told = async || {
        let out = lab.run(3, &["nodes", "--json", "--node", &stranger.address, "--key-file", key]).await;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let alone = text.contains("bittern-stranger") && !names.iter().any(|name| text.contains(name));
        if alone { Ok(()) } else { Err(text) }
    };
    settled("the stranger knows itself alone", PATIENCE, told).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    settled("still alone", Duration::ZERO + Duration::from_secs(1), told).await;
    assert_eq!(watch.end(), [], "nobody was disturbed");
    settled("nobody lists it", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    w2.signal("TERM").await;
    tokio::time::timeout(PATIENCE, w2.child.wait()).await.expect("it ends").unwrap();
    let rest = [&g, &w1];
    settled("its goodbye is heard", PATIENCE, || lab.eyes.one_cluster(&rest, &names[..2])).await;
    let seen = lab.done();
    assert!(seen.captured.len() > 50_000, "only {} bytes were captured", seen.captured.len());
    let secrets = ["heron", "egret", "stork", "ibis", "bittern", "cormorant", "worker-0", "gateway"];
    for secret in secrets {
        let at = seen.captured.windows(secret.len()).position(|window| window.eq_ignore_ascii_case(secret.as_bytes()));
        let around = at.map(|at| {
            let around = &seen.captured[at.saturating_sub(40)..(at + 60).min(seen.captured.len())];
            String::from_utf8_lossy(around).into_owned()
        });
        assert_eq!(around, None, "{secret} can be read on the wire");
    }
}
