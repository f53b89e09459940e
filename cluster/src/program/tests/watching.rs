//! News of instances, told once and in order, also to those who read late.

use std::{collections::BTreeMap, sync::Arc};

use super::*;
use crate::discovery::{InstanceKind, Lifecycle};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_see_every_change_and_a_drain_waits_for_what_runs() {
    let nodes = Nodes::new(2).await;
    let hold: Endpoint<(), u32> = endpoint(nodes.b(), "hold");
    let release = Arc::new(tokio::sync::Notify::new());
    let wait = release.clone();
    let mut watch = endpoint::<(), u32>(nodes.a(), "hold").watch();
    assert_eq!(watch.next().await, Some(InstanceEvent::Resync(Vec::new())));
    let handler = move |()| {
        let wait = wait.clone();
        async move {
            Ok(emit(move |out| async move {
                out.send(1).await?;
                wait.notified().await;
                out.send(2).await
            }))
        }
    };
    let served = hold.serve_stream(handler).unwrap();
    let id = served.id();
    let added = within("added", watch.next()).await;
    assert!(matches!(added, Some(InstanceEvent::Added(view)) if view.id == id && view.kind == InstanceKind::Service));
    let client = endpoint::<(), u32>(nodes.a(), "hold").client();
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
    nodes.leave().await;
}

/// What a program that applies the events has.
fn apply(known: &mut BTreeMap<InstanceId, InstanceView>, event: InstanceEvent) {
    match event {
        InstanceEvent::Resync(all) => *known = all.into_iter().map(|view| (view.id.clone(), view)).collect(),
        InstanceEvent::Added(view) => assert!(known.insert(view.id.clone(), view).is_none()),
        InstanceEvent::Changed(view) => assert!(known.insert(view.id.clone(), view).is_some()),
        InstanceEvent::Removed(id) => assert!(known.remove(&id).is_some()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_slept_through_hundreds_of_changes_is_brought_up_to_date_at_once() {
    let nodes = Nodes::new(2).await;
    let mut watch = nodes.a().watch_instances();
    let mut known = BTreeMap::new();
    apply(&mut known, watch.next().await.unwrap());
    let serve = |n: usize| endpoint::<u32, u32>(nodes.b(), &format!("e{n}")).serve(|x| async move { Ok(x) }).unwrap();
    let mut served: Vec<_> = (0..300).map(serve).collect();
    let component = || nodes.a().namespace("test").unwrap().component("t").unwrap();
    until("a knows all", || component().list_instances().len() == 300).await;
    // Not one of 300 additions: the burst is told as a whole.
    let burst = within("a resync", watch.next()).await.unwrap();
    assert!(matches!(&burst, InstanceEvent::Resync(all) if all.len() == 300), "{burst:?}");
    apply(&mut known, burst);
    // Few changes are told one by one, each net of what happened in between.
    for _ in 0..3 {
        served[7].set_lifecycle(Lifecycle::Warming).unwrap();
        served[7].set_lifecycle(Lifecycle::Serving).unwrap();
    }
    served[8].set_label("zone", "north").unwrap();
    served.truncate(290);
    until("a has the news", || component().list_instances().len() == 290).await;
    let mut events = 0;
    while known.len() > 290 || known.values().all(|view| view.labels.is_empty()) {
        apply(&mut known, within("an event", watch.next()).await.unwrap());
        events += 1;
    }
    assert!(events <= 20, "{events} events");
    assert_eq!(known.into_values().collect::<Vec<_>>(), nodes.a().list_instances());
    kill(nodes.a()).await;
    let rest = async { while watch.next().await.is_some() {} };
    within("the watch ends with its node", rest).await;
    nodes.leave().await;
}
