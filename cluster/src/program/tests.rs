//! Two nodes in one process: serve, call, spawn, follow, drain.

use std::{
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::StreamExt;
use serde::{Deserialize, Serialize};
use starling_ids::NodeId;

use super::*;
use crate::{
    config::ClusterConfig,
    discovery::{InstanceKind, Lifecycle},
    mesh::Mesh,
    security::ClusterKey,
    stream::{Fault, FaultKind},
    supervise::{Handle, Restart, child},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// The actor library keeps one table of names a process; many nodes in one process get in one another's way.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

struct Pair {
    a: Mesh,
    b: Mesh,
    _one: tokio::sync::MutexGuard<'static, ()>,
    _folder: tempfile::TempDir,
}

impl Pair {
    async fn new() -> Self {
        let one = ONE_AT_A_TIME.lock().await;
        let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
        let a = join(&key, "a", folder.path(), None).await;
        let b = join(&key, "b", folder.path(), Some(&a)).await;
        for (mesh, other) in [(&a, &b), (&b, &a)] {
            let mut watch = mesh.watch();
            let seen = watch.wait_for(|snapshot| snapshot.node(other.node()).is_some());
            tokio::time::timeout(PATIENCE, seen).await.unwrap().unwrap();
        }
        Self { a, b, _one: one, _folder: folder }
    }

    async fn leave(self) {
        self.b.leave().await;
        self.a.leave().await;
    }
}

async fn join(key: &ClusterKey, name: &str, folder: &Path, seed: Option<&Mesh>) -> Mesh {
    let config = ClusterConfig::program(name, key.clone()).unwrap();
    let mut config = config.bind("127.0.0.1:0".parse().unwrap()).data_dir(folder.join(name));
    if let Some(seed) = seed {
        config = config.seed(seed.address().to_string());
    }
    Mesh::join(config).await.unwrap()
}

fn endpoint<Req, Resp>(mesh: &Mesh, name: &str) -> Endpoint<Req, Resp> {
    mesh.namespace("test").unwrap().component("t").unwrap().endpoint(name).unwrap()
}

async fn ready<Req, Resp>(client: &Client<Req, Resp>, count: usize) {
    assert!(client.wait_for(count, PATIENCE).await, "{client:?}: {:?}", client.instances());
}

async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unary_stream_and_duplex_are_the_same_near_and_far() {
    let pair = Pair::new().await;
    let echo: Endpoint<String, String> = endpoint(&pair.b, "echo");
    let _echo = echo
        .serve(|text: String| async move {
            if text.is_empty() {
                return Err(Fault::new(FaultKind::Invalid, "say something"));
            }
            Ok(text)
        })
        .unwrap();
    let count: Endpoint<u32, u32> = endpoint(&pair.b, "count");
    let _count = count
        .serve_stream(|upto: u32| async move {
            if upto > 1_000 {
                return Err(Fault::new(FaultKind::Invalid, "too far"));
            }
            Ok(emit(move |out| async move {
                for n in 0..upto {
                    out.send(n).await?;
                }
                if upto == 13 { Err(Fault::new(FaultKind::Internal, "unlucky")) } else { Ok(()) }
            }))
        })
        .unwrap();
    let sum: Endpoint<i64, i64> = endpoint(&pair.b, "sum");
    let _sum = sum
        .serve_duplex(|mut numbers: Receiver<i64>, sums: Sender<i64>| async move {
            let mut sum = 0;
            while let Some(number) = numbers.next().await {
                sum += number?;
                sums.send(&sum).await?;
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(echo.client().unary(&"at once".to_owned()).await.unwrap(), "at once", "a node knows its own at once");
    assert_eq!(echo.serve(|text| async move { Ok(text) }).unwrap_err(), ServeError::Taken(echo.name().clone()));
    for mesh in [&pair.a, &pair.b] {
        let client = endpoint::<String, String>(mesh, "echo").client();
        ready(&client, 1).await;
        assert_eq!(client.unary(&"hello".to_owned()).await.unwrap(), "hello");
        let refused = client.unary(&String::new()).await.unwrap_err();
        assert_eq!(refused.fault().unwrap().message, "say something");
        assert_eq!(refused.advice(), Advice::Never);

        let client = endpoint::<u32, u32>(mesh, "count").client();
        ready(&client, 1).await;
        let answers = client.stream(&500).await.unwrap().all().await.unwrap();
        assert_eq!(answers, (0..500).collect::<Vec<_>>());
        assert!(matches!(
            client.stream(&2_000).await.unwrap_err(),
            CallError::Request(RequestFault::Rejected(fault)) if fault.kind == FaultKind::Invalid
        ));
        let unlucky: Vec<_> = client.stream(&13).await.unwrap().collect::<Vec<_>>().await;
        assert_eq!(unlucky.len(), 14);
        assert!(matches!(unlucky.last(), Some(Err(CallError::Request(RequestFault::Failed(_))))));
        assert!(client.unary(&5).await.unwrap_err().to_string().contains("more than one value"));
        assert_eq!(client.unary(&1).await.unwrap(), 0);

        let client = endpoint::<i64, i64>(mesh, "sum").client();
        ready(&client, 1).await;
        let mut call = client.duplex().await.unwrap();
        for (number, sum) in [(1, 1), (2, 3), (-5, -2)] {
            call.send(&number).await.unwrap();
            assert_eq!(call.next().await.unwrap().unwrap(), sum);
        }
        call.send(&10).await.unwrap();
        assert_eq!(call.end().all().await.unwrap(), [8]);
    }
    pair.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_handler_is_bound_by_its_asker_alone() {
    let pair = Pair::new().await;
    let held = Arc::new(());
    let holds = held.clone();
    let slow: Endpoint<u64, u64> = endpoint(&pair.b, "slow");
    let _served = slow
        .serve(move |ms: u64| {
            let held = holds.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(ms)).await;
                drop(held);
                Ok(ms)
            }
        })
        .unwrap();
    let client = endpoint::<u64, u64>(&pair.a, "slow").client();
    ready(&client, 1).await;
    // Longer than the wait for an answer inside the accept.
    assert_eq!(client.unary(&1_300).await.unwrap(), 1_300);
    let late = client.clone().deadline(Duration::from_millis(1_500)).unary(&600_000).await.unwrap_err();
    assert_eq!(late, CallError::Request(RequestFault::Deadline));
    // The handler is dropped when its asker has left.
    within("the handler ends", async {
        while Arc::strong_count(&held) > 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    pair.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_are_chosen_counted_and_retried_elsewhere() {
    let pair = Pair::new().await;
    let who: Endpoint<(), String> = endpoint(&pair.a, "who");
    let _a = who.clone().label("zone", "north").serve(|()| async { Ok("a".to_owned()) }).unwrap();
    let refusing = Arc::new(Mutex::new(None::<FaultKind>));
    let refuse = refusing.clone();
    let b = endpoint::<(), String>(&pair.b, "who").label("zone", "south");
    let b = b
        .serve(move |()| {
            let fault = refuse.lock().unwrap().map(|kind| Fault::new(kind, "not now"));
            async move { fault.map_or_else(|| Ok("b".to_owned()), Err) }
        })
        .unwrap();
    let client = who.client();
    ready(&client, 2).await;
    let nodes: Vec<_> = client.instances().iter().map(|view| view.id.node.to_string()).collect();
    assert_eq!(nodes, ["a", "b"]);
    let mut turns = Vec::new();
    for _ in 0..4 {
        turns.push(client.unary(&()).await.unwrap());
    }
    assert_eq!(turns, ["a", "b", "a", "b"]);
    for _ in 0..3 {
        assert_eq!(client.clone().direct(&b.id()).unary(&()).await.unwrap(), "b");
        let south = client.clone().pick_with(|candidates| {
            candidates.iter().position(|candidate| candidate.instance.labels["zone"] == "south")
        });
        assert_eq!(south.unary(&()).await.unwrap(), "b");
        client.clone().pick(Picker::Random).unary(&()).await.unwrap();
        client.clone().pick(Picker::LeastInFlight).unary(&()).await.unwrap();
    }
    let nobody = client.clone().pick_with(|_| None).unary(&()).await.unwrap_err();
    assert!(matches!(nobody, CallError::Directory(DirectoryFault::NoneServing { listed: 2, .. })));

    *refusing.lock().unwrap() = Some(FaultKind::Overloaded);
    for _ in 0..4 {
        assert_eq!(client.unary(&()).await.unwrap(), "a", "an overloaded instance is passed over");
    }
    *refusing.lock().unwrap() = Some(FaultKind::Invalid);
    let answers = [client.unary(&()).await, client.unary(&()).await];
    assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), 1, "a wrong request is wrong everywhere");
    *refusing.lock().unwrap() = Some(FaultKind::Draining);
    let direct = client.clone().direct(&b.id()).unary(&()).await.unwrap_err();
    assert_eq!(direct.fault().unwrap().kind, FaultKind::Draining);
    let unknown = endpoint::<(), ()>(&pair.a, "nowhere");
    let error = unknown.client().unary(&()).await.unwrap_err();
    assert_eq!(error, CallError::Directory(DirectoryFault::Unknown(unknown.name().clone())));
    let stale = InstanceId { incarnation: starling_ids::Incarnation(0), ..b.id() };
    let error = client.clone().direct(&stale).unary(&()).await.unwrap_err();
    assert!(matches!(error, CallError::Directory(DirectoryFault::Stale { .. })));
    let gone = InstanceId { node: NodeId::new("z").unwrap(), ..b.id() };
    let error = client.clone().direct(&gone).unary(&()).await.unwrap_err();
    assert_eq!(error, CallError::Directory(DirectoryFault::Down(gone.node)));
    pair.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_see_every_change_and_a_drain_waits_for_what_runs() {
    let pair = Pair::new().await;
    let hold: Endpoint<(), u32> = endpoint(&pair.b, "hold");
    let release = Arc::new(tokio::sync::Notify::new());
    let wait = release.clone();
    let mut watch = endpoint::<(), u32>(&pair.a, "hold").watch();
    assert_eq!(watch.next().await, Some(InstanceEvent::Resync(Vec::new())));
    let served = hold
        .serve_stream(move |()| {
            let wait = wait.clone();
            async move {
                Ok(emit(move |out| async move {
                    out.send(1).await?;
                    wait.notified().await;
                    out.send(2).await
                }))
            }
        })
        .unwrap();
    let id = served.id();
    let added = within("added", watch.next()).await;
    assert!(matches!(added, Some(InstanceEvent::Added(view)) if view.id == id && view.kind == InstanceKind::Service));
    let client = endpoint::<(), u32>(&pair.a, "hold").client();
    ready(&client, 1).await;
    let mut answers = client.stream(&()).await.unwrap();
    assert_eq!(answers.next().await.unwrap().unwrap(), 1);
    assert_eq!(served.in_flight(), 1);
    let mut drain = Box::pin(served.drain());
    assert!(futures::poll!(&mut drain).is_pending());
    let changed = within("changed", watch.next()).await;
    assert!(matches!(changed, Some(InstanceEvent::Changed(view)) if view.lifecycle == Lifecycle::Draining));
    let refused = client.clone().direct(&id).stream(&()).await.unwrap_err();
    assert_eq!(refused.fault().unwrap().kind, FaultKind::Draining);
    assert!(futures::poll!(&mut drain).is_pending());
    release.notify_one();
    assert_eq!(answers.all().await.unwrap(), [2]);
    within("drained", drain).await;
    assert_eq!(within("removed", watch.next()).await, Some(InstanceEvent::Removed(id)));
    pair.leave().await;
}

/// Adds up; negative numbers kill it.
struct Counter {
    sum: i64,
}

impl Actor for Counter {
    type Request = i64;
    type Reply = i64;

    async fn handle(&mut self, number: i64) -> Result<i64, Fault> {
        assert!(number >= 0, "asked to die");
        self.sum += number;
        Ok(self.sum)
    }
}

#[derive(Serialize, Deserialize)]
struct From {
    start: i64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_actor_is_spawned_restarted_followed_and_stopped() {
    let pair = Pair::new().await;
    let lives = Arc::new(AtomicU32::new(0));
    let counted = lives.clone();
    let make = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        Counter { sum: 0 }
    };
    let counter = pair.a.spawn("counter", Restart::Permanent, make).await.unwrap();
    let mut life = counter.monitor();
    assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    assert_eq!(counter.ask(5).await.unwrap(), 5);
    assert_eq!(counter.ask(5).await.unwrap(), 10);
    let twice = pair.a.spawn("counter", Restart::Permanent, || Counter { sum: 0 }).await.unwrap_err();
    assert_eq!(Fault::from(twice).kind, FaultKind::Invalid);
    let far = pair.b.actor_on::<Counter>(pair.a.node(), "counter").unwrap();
    assert_eq!(far.ask(&1).await.unwrap(), 11);
    assert_eq!(counter.ask(-1).await.unwrap_err().kind, FaultKind::Unavailable);
    assert_eq!(within("restarted", life.next()).await, Some(ActorEvent::Restarted { restarts: 1 }));
    assert_eq!(far.ask(&7).await.unwrap(), 7, "a new life begins with a new value");
    assert_eq!(lives.load(Ordering::SeqCst), 2);
    assert!(pair.a.book().snapshot().iter().any(|row| row.path == "programs/counter" && row.restarts == 1));
    assert_eq!(far.stop().await, Ok(true));
    assert_eq!(within("stopped", life.next()).await, Some(ActorEvent::Stopped));
    assert_eq!(life.next().await, None);
    assert_eq!(counter.stop().await, Ok(false));
    assert_eq!(far.ask(&1).await.unwrap_err().fault().unwrap().kind, FaultKind::NotFound);
    // The name is free again.
    let again = pair.a.spawn("counter", Restart::Permanent, || Counter { sum: 100 }).await.unwrap();
    assert_eq!(again.ask(1).await.unwrap(), 101);
    let bad = pair.a.spawn("Bad name", Restart::Permanent, || Counter { sum: 0 }).await;
    assert!(matches!(bad, Err(SpawnError::Name(_))));
    pair.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_actor_is_spawned_on_another_node_from_a_factory() {
    let pair = Pair::new().await;
    let make = |from: From| {
        if from.start < 0 {
            return Err(Fault::new(FaultKind::Invalid, "begin at 0 or above"));
        }
        Ok(Counter { sum: from.start })
    };
    pair.b.register_factory("counter", make);
    let counter = pair.a.spawn_on::<Counter>(pair.b.node(), "counter", &From { start: 40 }).await.unwrap();
    let mut life = counter.monitor();
    assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    assert_eq!(counter.ask(&2).await.unwrap(), 42);
    let died = counter.ask(&-1).await.unwrap_err();
    assert_eq!(died.fault().unwrap().kind, FaultKind::Unavailable);
    assert_eq!(within("restarted", life.next()).await, Some(ActorEvent::Restarted { restarts: 1 }));
    assert_eq!(counter.ask(&2).await.unwrap(), 42, "restarted with the same arguments");

    let kind = |error: SpawnError| Fault::from(error).kind;
    let unknown = pair.a.spawn_on::<Counter>(pair.b.node(), "adder", &()).await.unwrap_err();
    assert_eq!(kind(unknown), FaultKind::NotFound);
    let wrong = pair.a.spawn_on::<Counter>(pair.b.node(), "counter", &"text").await.unwrap_err();
    assert_eq!(kind(wrong), FaultKind::Invalid);
    let refused = pair.a.spawn_on::<Counter>(pair.b.node(), "counter", &From { start: -1 }).await.unwrap_err();
    assert_eq!(refused, SpawnError::Refused(Fault::new(FaultKind::Invalid, "begin at 0 or above")));
    assert!(pair.b.book().snapshot().iter().filter(|row| row.kind == "program").count() == 1);

    let options = SpawnOptions { name: Some("mine".to_owned()), ..SpawnOptions::default() };
    let mine = pair.a.spawn_on_with::<Counter>(pair.b.node(), "counter", &From { start: 0 }, options).await.unwrap();
    let mut mine_life = mine.monitor();
    assert_eq!(within("started", mine_life.next()).await, Some(ActorEvent::Started));
    assert_eq!(counter.stop().await, Ok(true));
    assert_eq!(within("stopped", life.next()).await, Some(ActorEvent::Stopped));
    pair.b.leave().await;
    // A node that leaves in order stops its actors first; which news is faster does not matter.
    let last = within("the end", mine_life.next()).await;
    assert!(matches!(last, Some(ActorEvent::Stopped | ActorEvent::NodeDown)), "{last:?}");
    assert_eq!(mine_life.next().await, None);
    let mut watch = pair.a.watch();
    let gone = watch.wait_for(|snapshot| snapshot.node(mine.node()).is_none());
    within("b is gone", gone).await.unwrap();
    assert_eq!(within("node down", mine.monitor().next()).await, Some(ActorEvent::NodeDown));
    let asked = mine.ask(&1).await.unwrap_err();
    assert_eq!(asked, CallError::Directory(DirectoryFault::Down(mine.node().clone())));
    pair.a.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_told_as_one() {
    let pair = Pair::new().await;
    let (mut guards, mut members) = (Vec::new(), Vec::new());
    for mesh in [&pair.a, &pair.b] {
        let node = mesh.node().to_string();
        let served = endpoint::<String, String>(mesh, "ear").serve(move |said: String| {
            let heard = format!("{node} heard {said}");
            async move { Ok(heard) }
        });
        let served = served.unwrap();
        members.push(mesh.group::<String, String>("ears").unwrap().join(&served).unwrap());
        guards.push(served);
    }
    let group = pair.a.group::<String, String>("ears").unwrap();
    let mut watch = group.watch();
    within("both are members", async {
        while group.members().len() < 2 {
            watch.next().await;
        }
    })
    .await;
    let heard: Vec<_> = group.broadcast(&"hi".to_owned()).await.into_iter().map(|(_, heard)| heard.unwrap()).collect();
    assert_eq!(heard, ["a heard hi", "b heard hi"]);
    drop(members.pop());
    within("one has left", async {
        while group.members().len() > 1 {
            watch.next().await;
        }
    })
    .await;
    assert_eq!(group.broadcast(&"hi".to_owned()).await.len(), 1);
    assert_eq!(endpoint::<String, String>(&pair.a, "ear").list_instances().len(), 2, "the endpoint goes on");
    pair.leave().await;
}

/// Lower case on the way in, numbered on the way out.
struct Numbered;

impl Operator for Numbered {
    type Request = String;
    type Response = (usize, String);
    type InnerRequest = String;
    type InnerResponse = String;
    type State = usize;

    async fn forward(&self, request: String) -> Result<(String, usize), Fault> {
        if request.is_empty() {
            return Err(Fault::new(FaultKind::Invalid, "nothing to say"));
        }
        Ok((request.to_lowercase(), 1))
    }

    fn backward(&self, first: usize, answers: Answers<String>) -> Answers<(usize, String)> {
        Answers::new(answers.enumerate().map(move |(at, word)| Ok((at + first, word?))))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_is_the_same_over_a_function_and_over_another_node() {
    let pair = Pair::new().await;
    let split = |text: String| async move {
        let words: Vec<_> = text.split(' ').map(|word| Ok(word.to_owned())).collect();
        Ok(futures::stream::iter(words))
    };
    let _words = endpoint::<String, String>(&pair.b, "words").serve_stream(split).unwrap();
    let client = endpoint::<String, String>(&pair.a, "words").client();
    ready(&client, 1).await;
    let expected = [(1, "to".to_owned()), (2, "be".to_owned())];
    let far = Numbered.over(client);
    let near = Numbered.over(service_fn(split));
    assert_eq!(far.call("To BE".to_owned()).await.unwrap().all().await.unwrap(), expected);
    assert_eq!(near.call("To BE".to_owned()).await.unwrap().all().await.unwrap(), expected);
    let refused = near.call(String::new()).await.unwrap_err();
    assert_eq!(refused.advice(), Advice::Never);
    // Behind an endpoint: b asks a, whose pipeline asks b.
    let _numbered = endpoint::<String, (usize, String)>(&pair.a, "numbered").serve_service(far).unwrap();
    let client = endpoint::<String, (usize, String)>(&pair.b, "numbered").client();
    ready(&client, 1).await;
    assert_eq!(client.stream(&"To BE".to_owned()).await.unwrap().all().await.unwrap(), expected);
    pair.leave().await;
}

/// An actor as people who know the actor library write it.
struct Plain;

enum PlainMsg {
    Double(u32, ractor::RpcReplyPort<Result<u32, Fault>>),
}

impl ractor::Message for PlainMsg {}

impl ractor::Actor for Plain {
    type Msg = PlainMsg;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ractor::ActorRef<PlainMsg>, (): ()) -> Result<(), ractor::ActorProcessingErr> {
        Ok(())
    }

    async fn handle(
        &self,
        _: ractor::ActorRef<PlainMsg>,
        PlainMsg::Double(number, reply): PlainMsg,
        (): &mut (),
    ) -> Result<(), ractor::ActorProcessingErr> {
        let answer = number.checked_mul(2).ok_or_else(|| Fault::new(FaultKind::Invalid, "too large"));
        Ok(reply.send(answer)?)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_is_answered_by_a_supervised_actor_and_context_crosses_hops() {
    let pair = Pair::new().await;
    let handle = Handle::new();
    pair.b.supervisor().add(child("plain", "plain", Restart::Permanent, &handle, || (Plain, ()))).await.unwrap();
    let served = endpoint::<u32, u32>(&pair.b, "double").serve_actor(&handle, PATIENCE, PlainMsg::Double);
    let _served = served.unwrap();
    let double = endpoint::<u32, u32>(&pair.a, "double").client();
    ready(&double, 1).await;
    assert_eq!(double.unary(&21).await.unwrap(), 42);
    assert_eq!(double.unary(&u32::MAX).await.unwrap_err().fault().unwrap().kind, FaultKind::Invalid);

    // b asks a, a asks b: the second hop sees the first one's request and no more time than it has.
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let note = move |_: ()| {
        let call = current_call().unwrap();
        noted.lock().unwrap().push((call.peer.to_string(), call.context.request, call.time_left().unwrap()));
        async { Ok(()) }
    };
    let _inner = endpoint::<(), ()>(&pair.b, "inner").serve(note.clone()).unwrap();
    let inner = endpoint::<(), ()>(&pair.a, "inner").client();
    ready(&inner, 1).await;
    let _outer = endpoint::<(), ()>(&pair.a, "outer").serve(move |()| {
        let (noted, inner) = (note(()), inner.clone());
        async move {
            noted.await?;
            Ok(inner.unary(&()).await?)
        }
    });
    let outer = endpoint::<(), ()>(&pair.b, "outer").client().deadline(Duration::from_secs(20));
    ready(&outer, 1).await;
    outer.unary(&()).await.unwrap();
    let seen = seen.lock().unwrap().clone();
    assert_eq!((seen[0].0.as_str(), seen[1].0.as_str()), ("b", "a"));
    assert_eq!(seen[0].1, seen[1].1);
    assert!(seen[0].2 <= Duration::from_secs(20) && seen[1].2 <= seen[0].2);
    assert!(current_call().is_none());
    pair.leave().await;
}
