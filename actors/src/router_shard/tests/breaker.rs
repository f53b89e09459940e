//! Workers that keep failing: who is asked instead, and who tries them again.

use std::{sync::Arc, time::Duration};

use futures::future::{BoxFuture, FutureExt};
use starling_cluster::stream::{Fault, FaultKind, Incoming, StreamHandler};
use tokio::sync::watch;

use crate::{
    names,
    testing::{Rig, TestModel, all, eventually, prompt, spec},
};

/// A worker's door that is broken while it says so, and counts who came.
struct Broken {
    inner: Arc<dyn StreamHandler>,
    kind: FaultKind,
    broken: watch::Receiver<bool>,
    came: watch::Sender<u32>,
}

impl StreamHandler for Broken {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        if !*self.broken.borrow() {
            return self.inner.open(incoming);
        }
        self.came.send_modify(|came| *came += 1);
        let kind = self.kind;
        async move { incoming.acceptor.reject(Fault::new(kind, "broken for a test")) }.boxed()
    }
}

/// Puts such a door before worker 0.
fn break_door(rig: &Rig, kind: FaultKind) -> (watch::Sender<bool>, watch::Receiver<u32>) {
    let (switch, broken) = watch::channel(true);
    let (came, count) = watch::channel(0);
    let endpoint = names::worker_generate(0);
    let inner = rig.mesh.endpoints().get(&endpoint).expect("a worker");
    rig.mesh.endpoints().serve(endpoint, Arc::new(Broken { inner, kind, broken, came }));
    (switch, count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ded_08_a_worker_that_fails_cools_its_request_succeeds_elsewhere_and_it_is_tried_again() {
    let rig = Rig::ready("breaker", TestModel::new(), 2).await;
    let (switch, came) = break_door(&rig, FaultKind::Internal);
    for kind in 0..60 {
        let stream = rig.generate(spec(prompt(kind * 9, 40), 2)).await.expect("the other one serves");
        assert_eq!(stream.worker.index, 1, "never the broken one");
        all(stream).await.expect("an answer");
    }
    // It cools half a second after each fault, and after three for longer; how many that makes depends on the machine.
    assert!((1..=30).contains(&*came.borrow()), "{} of 60 met it", *came.borrow());
    // Three faults in a row, whose coolings have passed in between, cut it off.
    eventually_cut_off(&rig, 1).await;
    let receipt = decide_once(&rig).await;
    assert!(receipt.cut_off.iter().any(|(worker, _)| worker.index == 0), "{receipt:?}");
    switch.send(false).expect("the door listens");
    eventually_cut_off(&rig, 0).await;
    let mut served = std::collections::BTreeSet::new();
    for kind in 0..20 {
        let stream = rig.generate(spec(prompt(kind * 9 + 5, 40), 2)).await.expect("served");
        served.insert(stream.worker.index);
        all(stream).await.expect("an answer");
    }
    assert_eq!(served.len(), 2, "both are back");
    rig.end().await;
}

/// Asks until the shard says that so many workers are cut off.
async fn eventually_cut_off(rig: &Rig, count: usize) {
    let asked = async {
        let mut kind = 1_000;
        while decide_once(rig).await.cut_off.len() != count {
            kind += 1;
            rig.complete(spec(prompt(kind, 40), 1)).await.expect("served");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    crate::testing::within("its breaker turns", asked).await;
}

async fn decide_once(rig: &Rig) -> crate::route::receipt::Receipt {
    let call = rig.call(spec(prompt(rand::random::<u32>() % 4_000, 40), 1), Duration::from_secs(20));
    let request = call.request;
    all(rig.node.client().generate(call).await.expect("served")).await.expect("an answer");
    rig.node.explain(request).await.pop().expect("a receipt")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clients_fault_never_counts_against_a_worker() {
    let rig = Rig::ready("breaker-client", TestModel::new(), 1).await;
    let (_switch, came) = break_door(&rig, FaultKind::Invalid);
    for kind in 0..10 {
        rig.generate(spec(prompt(kind, 40), 2)).await.map(drop).expect_err("refused");
    }
    assert_eq!(*came.borrow(), 10, "none was tried twice and none was kept away");
    drop(rig.generate(spec(Vec::new(), 2)).await);
    _switch.send(false).expect("the door listens");
    assert!(decide_once(&rig).await.cut_off.is_empty());
    eventually("nothing is held", || rig.node.reservations() == 0).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_not_multiplied_by_retries() {
    let rig = Rig::ready("breaker-outage", TestModel::new(), 1).await;
    let (_switch, came) = break_door(&rig, FaultKind::Internal);
    // One worker, and it fails: there is nobody else to try, so nothing is tried twice.
    for kind in 0..20 {
        rig.generate(spec(prompt(kind, 40), 2)).await.map(drop).expect_err("refused");
    }
    assert!(*came.borrow() <= 20, "{}", *came.borrow());
    rig.end().await;
}
