//! The shapes of a call, near and far.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use futures::StreamExt;

use super::*;
use crate::supervise::{Handle, child};

fn serve_echo(mesh: &Mesh) -> ServedEndpoint {
    let echo = endpoint::<String, String>(mesh, "echo").serve(|text: String| async move {
        if text.is_empty() {
            return Err(Fault::new(FaultKind::Invalid, "say something"));
        }
        Ok(text)
    });
    echo.unwrap()
}

fn serve_count(mesh: &Mesh) -> ServedEndpoint {
    let count = endpoint::<u32, u32>(mesh, "count").serve_stream(|upto: u32| async move {
        if upto > 1_000 {
            return Err(Fault::new(FaultKind::Invalid, "too far"));
        }
        Ok(emit(move |out| async move {
            for n in 0..upto {
                out.send(n).await?;
            }
            if upto == 13 { Err(Fault::new(FaultKind::Internal, "unlucky")) } else { Ok(()) }
        }))
    });
    count.unwrap()
}

fn serve_sum(mesh: &Mesh) -> ServedEndpoint {
    let sum = |mut numbers: Receiver<i64>, sums: Sender<i64>| async move {
        let mut sum = 0;
        while let Some(number) = numbers.next().await {
            sum += number?;
            sums.send(&sum).await?;
        }
        Ok(())
    };
    endpoint::<i64, i64>(mesh, "sum").serve_duplex(sum).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unary_call_is_the_same_near_and_far() {
    let nodes = Nodes::new(2).await;
    let _echo = serve_echo(nodes.b());
    let echo: Endpoint<String, String> = endpoint(nodes.b(), "echo");
    assert_eq!(echo.client().unary(&"at once".to_owned()).await.unwrap(), "at once", "a node knows its own at once");
    assert_eq!(echo.serve(|text| async move { Ok(text) }).unwrap_err(), ServeError::Taken(echo.name().clone()));
    for mesh in &nodes.all {
        let client = endpoint::<String, String>(mesh, "echo").client();
        ready(&client, 1).await;
        assert_eq!(client.unary(&"hello".to_owned()).await.unwrap(), "hello");
        let refused = client.unary(&String::new()).await.unwrap_err();
        assert_eq!(refused.fault().unwrap().message, "say something");
        assert_eq!(refused.advice(), Advice::GiveUp);
    }
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_answers_is_the_same_near_and_far() {
    let nodes = Nodes::new(2).await;
    let _count = serve_count(nodes.b());
    for mesh in &nodes.all {
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
    }
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_both_ways_is_the_same_near_and_far() {
    let nodes = Nodes::new(2).await;
    let _sum = serve_sum(nodes.b());
    for mesh in &nodes.all {
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
    nodes.leave().await;
}

/// Serves `door`: takes calls of the tenant `friend`, refuses others as `kind`.
fn serve_door(mesh: &Mesh, kind: FaultKind) -> ServedEndpoint {
    let node = mesh.node().to_string();
    let handler = move |opening: Opening<String, String>| {
        let node = node.clone();
        async move {
            let call = current_call().unwrap();
            if call.context.tenant != "friend" {
                return Err(Fault::new(kind, format!("{node} does not know you")).retry_after_ms(7));
            }
            let (mut words, heard) = opening.accept()?;
            while let Some(word) = words.next().await {
                heard.send(&format!("{node} heard {}", word?)).await?;
            }
            Ok(())
        }
    };
    endpoint::<String, String>(mesh, "door").serve_opening(handler).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_both_ways_is_refused_with_a_reason_before_any_data() {
    let nodes = Nodes::new(2).await;
    let _door = serve_door(nodes.b(), FaultKind::Invalid);
    for mesh in &nodes.all {
        let client = endpoint::<String, String>(mesh, "door").client();
        ready(&client, 1).await;
        let refused = client.duplex().await.unwrap_err();
        assert_eq!(refused.advice(), Advice::GiveUp);
        let CallError::Request(RequestFault::Rejected(fault)) = refused else { panic!("{refused}") };
        assert_eq!((fault.message.as_str(), fault.retry_after_ms), ("b does not know you", Some(7)));
        let mut call = client.context(|context| context.tenant = "friend".into()).duplex().await.unwrap();
        call.send(&"hi".to_owned()).await.unwrap();
        assert_eq!(call.next().await.unwrap().unwrap(), "b heard hi");
        assert_eq!(call.end().all().await.unwrap(), Vec::<String>::new());
    }
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_call_both_ways_is_taken_by_another_instance() {
    let nodes = Nodes::new(2).await;
    let _full = serve_door(nodes.b(), FaultKind::Overloaded);
    let handler = |opening: Opening<String, String>| async move {
        let (_words, heard) = opening.accept()?;
        let attempt = current_call().unwrap().context.attempt;
        heard.send(&format!("a, attempt {attempt}")).await?;
        Ok(())
    };
    let _free = endpoint::<String, String>(nodes.a(), "door").serve_opening(handler).unwrap();
    let client = endpoint::<String, String>(nodes.a(), "door").client();
    ready(&client, 2).await;
    let mut heard = Vec::new();
    for _ in 0..4 {
        heard.extend(client.duplex().await.unwrap().end().all().await.unwrap());
    }
    heard.sort();
    assert_eq!(heard, ["a, attempt 0", "a, attempt 0", "a, attempt 1", "a, attempt 1"]);
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_never_outlives_its_askers_patience() {
    let nodes = Nodes::new(2).await;
    let held = Arc::new(());
    let holds = held.clone();
    let _never = endpoint::<u32, u32>(nodes.b(), "never").serve_duplex(move |_numbers, _answers: Sender<u32>| {
        let held = holds.clone();
        async move {
            std::future::pending::<()>().await;
            drop(held);
            Ok(())
        }
    });
    let holds = held.clone();
    let undecided = endpoint::<u32, u32>(nodes.b(), "undecided").serve_stream(move |_: u32| {
        let held = holds.clone();
        async move {
            std::future::pending::<()>().await;
            drop(held);
            Ok(futures::stream::empty())
        }
    });
    let _undecided = undecided.unwrap();
    let limit = Duration::from_millis(300);
    let client = endpoint::<u32, u32>(nodes.a(), "never").client().deadline(limit);
    ready(&client, 1).await;
    let mut call = client.duplex().await.unwrap();
    assert_eq!(call.next().await, Some(Err(CallError::Request(RequestFault::Deadline))));
    let client = endpoint::<u32, u32>(nodes.a(), "undecided").client().deadline(limit);
    ready(&client, 1).await;
    assert_eq!(client.stream(&1).await.unwrap_err(), CallError::Request(RequestFault::Deadline));
    until("both handlers are dropped", || Arc::strong_count(&held) == 3).await;
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_handler_is_bound_by_its_asker_alone() {
    let nodes = Nodes::new(2).await;
    let held = Arc::new(());
    let holds = held.clone();
    let slow: Endpoint<u64, u64> = endpoint(nodes.b(), "slow");
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
    let client = endpoint::<u64, u64>(nodes.a(), "slow").client();
    ready(&client, 1).await;
    // Longer than the wait for an answer inside the accept.
    assert_eq!(client.unary(&1_300).await.unwrap(), 1_300);
    let late = client.clone().deadline(Duration::from_millis(1_500)).unary(&600_000).await.unwrap_err();
    assert_eq!(late, CallError::Request(RequestFault::Deadline));
    // The handler is dropped when its asker has left.
    until("the handler ends", || Arc::strong_count(&held) == 2).await;
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mistyped_name_is_answered_with_those_that_exist() {
    let nodes = Nodes::new(2).await;
    let _echo = serve_echo(nodes.b());
    ready(&endpoint::<String, String>(nodes.a(), "echo").client(), 1).await;
    let told = |name: &str| {
        let client = endpoint::<String, String>(nodes.a(), name).client();
        async move { client.unary(&"x".to_owned()).await.unwrap_err() }
    };
    let typo = told("ecko").await;
    assert_eq!(typo.to_string(), "no instance of test/t/ecko is known; did you mean \"test/t/echo\"?");
    assert!(matches!(typo, CallError::Directory(DirectoryFault::Unknown { .. })));
    assert!(told("nothing-alike").await.to_string().ends_with("is known; there is \"test/t/echo\""));
    let id = InstanceId {
        endpoint: endpoint::<(), ()>(nodes.a(), "ecko").name().clone(),
        node: nodes.b().node().clone(),
        incarnation: nodes.b().incarnation(),
    };
    let direct = endpoint::<(), ()>(nodes.a(), "ecko").client().direct(&id).unary(&()).await.unwrap_err();
    let expected = "no endpoint test/t/ecko on this node; did you mean \"test/t/echo\"?";
    assert_eq!(direct.fault().unwrap().message, expected);
    let factory = nodes.a().spawn_on::<Counter>(nodes.b().node(), "countr", &()).await.unwrap_err();
    assert!(factory.to_string().contains("it has registered none"), "{factory}");
    nodes.b().register_factory("counter", |sum: i64| Ok(Counter { sum }));
    let factory = nodes.a().spawn_on::<Counter>(nodes.b().node(), "countr", &()).await.unwrap_err();
    assert!(factory.to_string().ends_with("on this node; did you mean \"counter\"?"), "{factory}");
    let name = nodes.a().spawn("Bad name", Restart::Permanent, || Counter { sum: 0 }).await.unwrap_err();
    assert!(name.to_string().starts_with("actor name: \"Bad name\" is not allowed: 1 to 48 of"), "{name}");
    nodes.leave().await;
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
    type Arguments = Arc<AtomicUsize>;

    async fn pre_start(
        &self,
        _: ractor::ActorRef<PlainMsg>,
        starts: Arc<AtomicUsize>,
    ) -> Result<(), ractor::ActorProcessingErr> {
        starts.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    async fn handle(
        &self,
        _: ractor::ActorRef<PlainMsg>,
        PlainMsg::Double(number, reply): PlainMsg,
        (): &mut (),
    ) -> Result<(), ractor::ActorProcessingErr> {
        assert!(number != 13, "unlucky");
        let answer = number.checked_mul(2).ok_or_else(|| Fault::new(FaultKind::Invalid, "too large"));
        Ok(reply.send(answer)?)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_kills_its_actor_is_not_handed_to_the_next_one() {
    let nodes = Nodes::new(2).await;
    let (mut served, mut starts) = (Vec::new(), Vec::new());
    for mesh in &nodes.all {
        let (handle, started) = (Handle::new(), Arc::new(AtomicUsize::new(0)));
        let counted = started.clone();
        let make = move || (Plain, counted.clone());
        mesh.supervisor().add(child("plain", "plain", Restart::Permanent, &handle, make)).await.unwrap();
        let double = endpoint::<u32, u32>(mesh, "double").serve_actor(&handle, PATIENCE, PlainMsg::Double);
        served.push(double.unwrap());
        starts.push(started);
    }
    let double = endpoint::<u32, u32>(nodes.a(), "double").client();
    ready(&double, 2).await;
    assert_eq!(double.unary(&21).await.unwrap(), 42);
    assert_eq!(double.unary(&u32::MAX).await.unwrap_err().fault().unwrap().kind, FaultKind::Invalid);
    let killed = double.unary(&13).await.unwrap_err();
    assert!(killed.may_have_acted(), "{killed}");
    let sum = || starts.iter().map(|starts| starts.load(Ordering::SeqCst)).sum::<usize>();
    until("the one that died is back", || sum() == 3).await;
    // Who says that it may be done twice has it done twice.
    double.clone().idempotent().tries(2).unary(&13).await.unwrap_err();
    until("both have died", || sum() == 5).await;
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_ends_one_request_alone() {
    let nodes = Nodes::new(2).await;
    let calls = Arc::new(Mutex::new(0));
    let counted = calls.clone();
    let handler = move |lucky: bool| {
        let counted = counted.clone();
        async move {
            *counted.lock().unwrap() += 1;
            assert!(lucky, "unlucky");
            Ok(())
        }
    };
    let _served = endpoint::<bool, ()>(nodes.b(), "luck").serve(handler).unwrap();
    let client = endpoint::<bool, ()>(nodes.a(), "luck").client();
    ready(&client, 1).await;
    let broke = client.unary(&false).await.unwrap_err();
    assert_eq!(broke.fault().unwrap().kind, FaultKind::Internal);
    client.unary(&true).await.unwrap();
    assert_eq!(*calls.lock().unwrap(), 2);
    nodes.leave().await;
}
