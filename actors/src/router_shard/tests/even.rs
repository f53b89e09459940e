//! Load is seen, every worker is used, and one that is silent or comes and goes holds nobody up.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt, join_all};
use starling_cluster::stream::{Incoming, StreamHandler};
use starling_ids::{NodeId, WorkerId};
use tokio::{sync::watch, task::JoinSet, time::timeout};

use crate::{
    client::{Call, Slip},
    generate::GenerateError::{self, Overloaded, Unavailable, WorkerLost},
    names,
    route::wishes::Wishes,
    testing::{Rig, TestModel, all, eventually, prompt, spec, within},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bal_05_a_policy_sees_what_was_given_out_before() {
    let rig = Rig::ready("even-seen", TestModel::slow(20), 2).await;
    let mut running = Vec::new();
    for given in 0..10 {
        let slip = Slip::default();
        let call = rig.call(spec(prompt(given * 40, 4), 1_000), Duration::from_secs(20));
        let call = Call { slip: Some(slip.clone()), ..call };
        running.push(rig.node.client().generate(call).await.expect("accepted"));
        let receipt = slip.receipts().pop().expect("told along with the decision");
        let seen: u32 = receipt.candidates.iter().map(|candidate| candidate.in_flight).sum();
        // One that runs may for a moment be in its worker's account and not confirmed yet; none is ever left out.
        assert!((given..=2 * given).contains(&seen), "{seen} seen, {given} given out");
        assert_eq!(rig.node.reservations(), running.len());
    }
    drop(running);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bal_06_single_turns_with_one_system_prompt_use_every_worker() {
    let rig = Rig::ready("even-system", TestModel::slow(1), 5).await;
    let turn = |kind: u32| [prompt(0, 16), prompt(100 + kind * 3, 48)].concat();
    // Its block is known before they come, or the first of them would all be alike.
    rig.complete(spec(turn(0), 1)).await.expect("served");
    eventually("the system prompt is indexed", || rig.node.indexed_blocks() > 0).await;
    let turns = (0..500).map(async |kind| {
        let stream = rig.generate(spec(turn(kind), 2)).await.expect("accepted");
        let worker = usize::from(stream.worker.index);
        all(stream).await.expect("an answer");
        worker
    });
    let mut counts = [0u32; 5];
    within("all are served", join_all(turns)).await.into_iter().for_each(|worker| counts[worker] += 1);
    assert!(counts.iter().all(|count| *count >= 50), "{counts:?}");
    rig.end().await;
}

/// Takes every request and says nothing.
struct Silent(watch::Sender<u32>);

impl StreamHandler for Silent {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        self.0.send_modify(|taken| *taken += 1);
        async move {
            let Some((_tx, mut rx)) = incoming.acceptor.accept(Bytes::from_static(b"yes")) else { return };
            // Its client has nothing more to say; the other half stays open until that gives up.
            while let Some(Ok(_)) = rx.recv().await {}
            tokio::time::sleep(Duration::from_secs(20)).await;
        }
        .boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ded_04_a_worker_that_takes_requests_and_is_silent_holds_up_nobody_else() {
    let rig = Rig::ready("even-silent", TestModel::new(), 2).await;
    let node = NodeId::new("even-silent").expect("name");
    let first = WorkerId { node, index: 0 };
    let pinned = Wishes { worker: Some(first), ..Wishes::default() };
    let fill = Call { wishes: pinned, ..rig.call(spec(prompt(1, 320), 1), Duration::from_secs(20)) };
    all(rig.node.client().generate(fill).await.expect("accepted")).await.expect("an answer");
    eventually("its prefix is indexed", || rig.node.indexed_blocks() == 20).await;
    let (taken, count) = watch::channel(0);
    rig.mesh.endpoints().serve(names::worker_generate(0), Arc::new(Silent(taken)));

    let mut held = JoinSet::new();
    for _ in 0..20 {
        let call = rig.call(spec(prompt(1, 320), 2), Duration::from_secs(3));
        let client = rig.node.client().clone();
        held.spawn(async move { all(client.generate(call).await?).await });
    }
    eventually("the silent one was given its prefix", || *count.borrow() > 0).await;
    for kind in 0..50 {
        let answer = match rig.generate(spec(prompt(200 + kind * 30, 40), 2)).await.expect("accepted") {
            // Nobody knows yet that it is silent; by its load, which only grows, it gets ever fewer.
            stream if stream.worker.index == 0 => continue,
            stream => all(stream).await,
        };
        assert_eq!(answer.expect("the other one answers").len(), 2);
    }
    while let Some(done) = within("each ends by its deadline", held.join_next()).await {
        match done.expect("no panic") {
            Ok(frames) => assert_eq!(frames.len(), 2, "it went to the other one"),
            Err(error) => assert_eq!(error, GenerateError::Deadline),
        }
    }
    rig.end().await;
}

/// How many workers come and go while requests are asked.
const ROUNDS: u32 = 5;

/// A worker comes, serves for a tenth of a second, and goes: in order, or with all that runs there.
async fn visit(number: u32, seeds: Vec<String>) {
    let name = format!("even-guest{number}");
    let guest = Rig::join(&name, Some((TestModel::slow(1), 1)), false, seeds).await;
    within("the guest serves", guest.node.ready()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    if number.is_multiple_of(2) {
        // In time or not: what still runs afterwards is cut off and goes on elsewhere.
        guest.node.drain(Duration::from_secs(2)).await;
    }
    guest.node.stop().await;
    guest.mesh.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ded_02_under_workers_that_come_and_go_every_request_ends_in_its_time() {
    let rig = Rig::ready("even-churn", TestModel::slow(1), 1).await;
    let seeds = vec![rig.mesh.address().to_string()];
    let (round, rounds) = watch::channel(0);
    let mut churn = JoinSet::new();
    churn.spawn(async move {
        for number in 0..ROUNDS {
            visit(number, seeds.clone()).await;
            round.send_modify(|round| *round += 1);
        }
    });
    let limit = Duration::from_secs(10);
    let one = async |kind: u32| {
        let call = rig.call(spec(prompt(kind % 500 * 7, 60), 20), limit);
        let answer = async { all(rig.node.client().generate(call).await?).await };
        match timeout(limit + Duration::from_secs(5), answer).await.expect("it ends by its deadline") {
            Ok(frames) => frames.len() == 20,
            Err(error) => {
                // What its client is told is of a kind that can be tried again.
                assert!(matches!(error, Unavailable(_) | Overloaded { .. } | WorkerLost { .. }), "{error:?}");
                false
            }
        }
    };
    let (mut asked, mut served) = (0, 0);
    while asked < 500 || *rounds.borrow() < ROUNDS {
        // Looked at before a batch, which takes a while: an end of the churn in panic shows below.
        if asked >= 500
            && let Some(ended) = churn.try_join_next()
        {
            ended.expect("no panic");
            break;
        }
        let answers = join_all((asked..asked + 25).map(one)).await;
        served += answers.into_iter().filter(|served| *served).count();
        asked += 25;
    }
    while let Some(ended) = within("the churn", churn.join_next()).await {
        ended.expect("no panic");
    }
    assert!(served * 10 >= asked as usize * 9, "{served} of {asked}");
    rig.end().await;
}
