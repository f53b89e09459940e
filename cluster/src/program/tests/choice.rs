//! Which instance answers, and which after it.

use std::sync::{Arc, Mutex};

use starling_ids::NodeId;

use super::*;

type Refusing = Arc<Mutex<Option<FaultKind>>>;

/// Serves `who` with the node's name; refuses while told to.
fn serve_who(mesh: &Mesh, zone: &str) -> (ServedEndpoint, Refusing) {
    let (refusing, node) = (Refusing::default(), mesh.node().to_string());
    let refuse = refusing.clone();
    let who = endpoint::<(), String>(mesh, "who").label("zone", zone);
    let served = who.serve(move |()| {
        let fault = refuse.lock().unwrap().map(|kind| Fault::new(kind, "not now"));
        let answer = fault.map_or_else(|| Ok(node.clone()), Err);
        async move { answer }
    });
    (served.unwrap(), refusing)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_picker_takes_whom_it_should() {
    let nodes = Nodes::new(2).await;
    let ((_a, _), (b, _)) = (serve_who(nodes.a(), "north"), serve_who(nodes.b(), "south"));
    let who = endpoint::<(), String>(nodes.a(), "who");
    let client = who.client();
    ready(&client, 2).await;
    let order: Vec<_> = client.instances().iter().map(|view| view.id.node.to_string()).collect();
    assert_eq!(order, ["a", "b"]);
    // Turns go on from client to client of one endpoint.
    let mut turns = Vec::new();
    for _ in 0..4 {
        turns.push(who.client().unary(&()).await.unwrap());
    }
    assert!(turns == ["a", "b", "a", "b"] || turns == ["b", "a", "b", "a"], "{turns:?}");
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
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_taken_elsewhere_and_a_wrong_request_is_not() {
    let nodes = Nodes::new(2).await;
    let ((_a, _), (b, refusing)) = (serve_who(nodes.a(), "north"), serve_who(nodes.b(), "south"));
    let client = endpoint::<(), String>(nodes.a(), "who").client();
    ready(&client, 2).await;
    for kind in [FaultKind::Overloaded, FaultKind::Draining, FaultKind::Unavailable] {
        *refusing.lock().unwrap() = Some(kind);
        for _ in 0..3 {
            assert_eq!(client.unary(&()).await.unwrap(), "a", "one that refuses as {kind:?} is passed over");
        }
    }
    for kind in [FaultKind::Invalid, FaultKind::NotFound, FaultKind::Internal] {
        *refusing.lock().unwrap() = Some(kind);
        let answers = [client.unary(&()).await, client.unary(&()).await];
        assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), 1, "{kind:?} is not tried elsewhere");
    }
    *refusing.lock().unwrap() = Some(FaultKind::Internal);
    for _ in 0..2 {
        assert_eq!(client.clone().idempotent().unary(&()).await.unwrap(), "a", "it may be done twice");
    }
    *refusing.lock().unwrap() = Some(FaultKind::Draining);
    let direct = client.clone().direct(&b.id()).unary(&()).await.unwrap_err();
    assert_eq!(direct.fault().unwrap().kind, FaultKind::Draining);
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_directory_knows_is_told_before_anything_is_sent() {
    let nodes = Nodes::new(2).await;
    let (b, _) = serve_who(nodes.b(), "south");
    let client = endpoint::<(), String>(nodes.a(), "who").client();
    ready(&client, 1).await;
    let stale = InstanceId { incarnation: starling_ids::Incarnation(0), ..b.id() };
    let error = client.clone().direct(&stale).unary(&()).await.unwrap_err();
    assert!(matches!(error, CallError::Directory(DirectoryFault::Stale { .. })));
    assert_eq!(error.advice(), Advice::RetrySame);
    let gone = InstanceId { node: NodeId::new("z").unwrap(), ..b.id() };
    let error = client.clone().direct(&gone).unary(&()).await.unwrap_err();
    assert_eq!(error, CallError::Directory(DirectoryFault::Down(gone.node)));
    assert!(!error.may_have_acted());
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_are_paid_for_and_end_when_the_budget_is_spent() {
    let nodes = Nodes::new(2).await;
    let ((_a, refuse_a), (_b, refuse_b)) = (serve_who(nodes.a(), "north"), serve_who(nodes.b(), "south"));
    let who = endpoint::<(), String>(nodes.a(), "who");
    ready(&who.client(), 2).await;
    for refuse in [&refuse_a, &refuse_b] {
        *refuse.lock().unwrap() = Some(FaultKind::Overloaded);
    }
    let calls = async {
        for _ in 0..40 {
            // Another client each time: the budget is the endpoint's.
            who.client().unary(&()).await.unwrap_err();
        }
    };
    within("forty refusals", calls).await;
    *refuse_a.lock().unwrap() = None;
    let mut answers = [who.client().unary(&()).await, who.client().unary(&()).await];
    answers.sort_by_key(Result::is_err);
    assert_eq!(answers[0].as_deref(), Ok("a"));
    assert_eq!(answers[1].as_ref().unwrap_err().fault().unwrap().kind, FaultKind::Overloaded, "no retry was left");
    nodes.leave().await;
}
