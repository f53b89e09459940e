//! Networks that lose and delay packets.

use std::time::{Duration, Instant};

use crate::{
    harness::{Node, PATIENCE, ask},
    net::{
        eyes::{settled, settled_for},
        figures::{bar, lasting, seconds},
        lab::Lab,
    },
};

/// Failed requests: how many, and the first of them. One gone wrong is told, thousands are not.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    first: Vec<String>,
}

impl Failures {
    fn note(&mut self, after: Duration, body: &serde_json::Value) {
        self.count += 1;
        if self.first.len() < 3 {
            self.first.push(format!("after {after:?}: {body}"));
        }
    }
}

/// Eight nodes under loss: who is declared down, who answers, how soon a dead one is noticed.
async fn weather(loss: f64, staying_down_max: f64) {
    let Some(lab) = Lab::new(8).await else { return };
    let gateway: &[&str] = &["--role", "router,gateway"];
    let mut nodes = vec![lab.start(0, "n0", &[], gateway).await];
    lab.weather(loss, Duration::from_millis(2));
    let percent = loss * 100.0;
    let launched: Vec<_> = (1..8).map(|place| lab.launch(place, &format!("n{place}"), &[0], &[])).collect();
    nodes.extend(futures::future::join_all(launched.into_iter().map(|launched| launched.ready())).await);
    let all: Vec<&Node> = nodes.iter().collect();
    let names = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"];
    let took = settled("one cluster", PATIENCE, || lab.eyes.one_cluster(&all, &names)).await;
    eprintln!("joined at {percent} % loss {took:?} after ready");
    let watch = lab.eyes.watch(&all, &names);
    let begun = Instant::now();
    let time = lasting(12, 120);
    let (mut answered, mut failed, mut slowest) = (0, Failures::default(), Duration::ZERO);
    while begun.elapsed() < time {
        let asked = Instant::now();
        let (status, body) = nodes[0].chat(&ask(&nodes[1].model, &format!("{answered} in the rain"), 8)).await;
        slowest = slowest.max(asked.elapsed());
        if status == 200 {
            answered += 1;
        } else {
            failed.note(begun.elapsed(), &body);
            if failed.count == 1 {
                eprintln!("at the first failure n0 lists {:?}", lab.eyes.instances(&nodes[0]).await);
            }
        }
    }
    let lapses = watch.end();
    let down: Vec<_> = lapses.iter().filter(|(lapse, _)| lapse.state == "down").collect();
    eprintln!("{answered} answered, the slowest in {slowest:?}; failed: {failed:?}; seen down: {down:?}");
    let what = format!("{percent} % loss, {} s", time.as_secs());
    bar(&format!("{what}: pairs in which a healthy node was declared down"), down.len() as f64, staying_down_max);
    bar(&format!("{what}: requests that failed"), f64::from(failed.count), 0.0);
    settled("nobody stays down", Duration::from_secs(10), || lab.eyes.one_cluster(&all, &names)).await;
    nodes[7].child.kill().await.unwrap();
    let rest: Vec<&Node> = nodes[..7].iter().collect();
    let took = settled("down everywhere", PATIENCE, || lab.eyes.one_cluster(&rest, &names[..7])).await;
    seconds(&format!("{what}: killed, down everywhere"), took, 6.0);
    lab.weather(0.0, Duration::ZERO);
    settled_for("and stays so", PATIENCE, Duration::from_secs(2), || lab.eyes.one_cluster(&rest, &names[..7])).await;
    lab.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_five_percent_loss_takes_nobody_down() {
    weather(0.05, 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mesh_twenty_percent_loss_keeps_nobody_down() {
    weather(0.20, 2.0).await;
}
