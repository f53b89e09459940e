//! A node that leaves in order.

use std::sync::Arc;

use tokio::sync::Notify;

use super::*;
use crate::discovery::Lifecycle;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_finishes_what_runs_and_sends_new_calls_elsewhere() {
    let nodes = Nodes::new(3).await;
    let (release, inside) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let mut served = Vec::new();
    for mesh in &nodes.all[..2] {
        let (release, inside, node) = (release.clone(), inside.clone(), mesh.node().to_string());
        let (own, inner) = (mesh.clone(), node.clone());
        let inner = endpoint::<(), String>(mesh, "inner").serve(move |()| std::future::ready(Ok(inner.clone())));
        served.push(inner.unwrap());
        let hold = endpoint::<bool, String>(mesh, "hold").serve(move |hold: bool| {
            let (release, inside, node, own) = (release.clone(), inside.clone(), node.clone(), own.clone());
            async move {
                if hold {
                    inside.notify_one();
                    release.notified().await;
                    // What runs may ask its own node, also now.
                    let id = served_id(&own, "inner");
                    endpoint::<(), String>(&own, "inner").client().direct(&id).unary(&()).await?;
                }
                Ok(node)
            }
        });
        served.push(hold.unwrap());
    }
    let client = endpoint::<bool, String>(nodes.c(), "hold").client();
    ready(&client, 2).await;
    let (b, id) = (nodes.b().clone(), served_id(nodes.b(), "hold"));
    let direct = client.clone().direct(&id);
    let held = tokio::join!(direct.unary(&true), async {
        within("a request runs", inside.notified()).await;
        let mut leaving = Box::pin(b.leave());
        tokio::select! {
            () = &mut leaving => panic!("left with a request under way"),
            () = until("told to everybody", || {
                client.instances().iter().any(|view| view.id == id && view.lifecycle == Lifecycle::Draining)
            }) => {}
        }
        // Those who have not heard of it, and insist: refused with advice.
        let refused = client.clone().direct(&id).unary(&false).await.unwrap_err();
        assert_eq!(refused.fault().unwrap().kind, FaultKind::Draining);
        assert_eq!((refused.advice(), refused.may_have_acted()), (Advice::RetryElsewhere, false));
        for _ in 0..4 {
            assert_eq!(client.unary(&false).await.unwrap(), "a");
        }
        assert_eq!(endpoint::<(), ()>(&b, "late").serve(|()| async { Ok(()) }).unwrap_err(), ServeError::Leaving);
        release.notify_one();
        within("it leaves", leaving).await;
    });
    assert_eq!(held.0.unwrap(), "b", "what ran was finished");
    until("b has left", || nodes.c().snapshot().node(b.node()).is_none()).await;
    nodes.leave().await;
}

fn served_id(mesh: &Mesh, name: &str) -> InstanceId {
    let endpoint = endpoint::<(), ()>(mesh, name).name().clone();
    InstanceId { endpoint, node: mesh.node().clone(), incarnation: mesh.incarnation() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_never_ends_is_left_behind_after_the_limit() {
    let nodes = Nodes::new(2).await;
    let stuck = endpoint::<(), ()>(nodes.b(), "stuck").serve_stream(|()| async {
        Ok(emit(|out| async move {
            out.send(()).await?;
            std::future::pending().await
        }))
    });
    let _stuck = stuck.unwrap();
    let client = endpoint::<(), ()>(nodes.a(), "stuck").client();
    ready(&client, 1).await;
    let mut answers = client.stream(&()).await.unwrap();
    assert_eq!(answers.next().await, Some(Ok(())));
    within("it leaves all the same", nodes.b().leave_within(Duration::from_millis(200))).await;
    let broken = within("the stream ends", answers.next()).await.unwrap().unwrap_err();
    assert!(matches!(broken, CallError::Request(RequestFault::Broken(_))), "{broken}");
    assert!(broken.may_have_acted());
    nodes.leave().await;
}
