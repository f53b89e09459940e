//! Actors started here: restarted, followed, stopped.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_actor_is_spawned_restarted_followed_and_stopped() {
    let nodes = Nodes::new(2).await;
    let lives = Arc::new(AtomicU32::new(0));
    let counted = lives.clone();
    let make = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        Counter { sum: 0 }
    };
    let counter = nodes.a().spawn("counter", Restart::Permanent, make).await.unwrap();
    let mut life = counter.monitor();
    assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    assert_eq!(counter.ask(5).await.unwrap(), 5);
    assert_eq!(counter.ask(5).await.unwrap(), 10);
    let twice = nodes.a().spawn("counter", Restart::Permanent, || Counter { sum: 0 }).await.unwrap_err();
    assert_eq!(Fault::from(twice).kind, FaultKind::Invalid);
    let far = nodes.b().actor_on::<Counter>(nodes.a().node(), "counter").unwrap();
    assert_eq!(far.ask(&1).await.unwrap(), 11);
    assert_eq!(counter.ask(-1).await.unwrap_err().kind, FaultKind::Internal);
    assert_eq!(within("restarted", life.next()).await, Some(ActorEvent::Restarted { restarts: 1 }));
    assert_eq!(far.ask(&7).await.unwrap(), 7, "a new life begins with a new value");
    assert_eq!(lives.load(Ordering::SeqCst), 2);
    assert!(nodes.a().book().snapshot().iter().any(|row| row.path == "programs/counter" && row.restarts == 1));
    assert_eq!(far.stop().await, Ok(true));
    assert_eq!(within("stopped", life.next()).await, Some(ActorEvent::Stopped(StopReason::Asked)));
    assert_eq!(life.next().await, None);
    assert_eq!(counter.stop().await, Ok(false));
    assert_eq!(far.ask(&1).await.unwrap_err().fault().unwrap().kind, FaultKind::NotFound);
    // The name is free again.
    let again = nodes.a().spawn("counter", Restart::Permanent, || Counter { sum: 100 }).await.unwrap();
    assert_eq!(again.ask(1).await.unwrap(), 101);
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn act_07_an_actor_is_found_by_name_from_anywhere_and_leaves_no_ghost() {
    let nodes = Nodes::new(2).await;
    let counter = nodes.a().spawn("counter", Restart::Transient, || Counter { sum: 0 }).await.unwrap();
    let far = nodes.b().actor_on::<Counter>(nodes.a().node(), "counter").unwrap();
    assert_eq!(far.ask(&3).await.unwrap(), 3);
    let (mut near_life, mut far_life) = (counter.monitor(), far.monitor());
    for life in [&mut near_life, &mut far_life] {
        assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    }
    kill(nodes.a()).await;
    // The tree stops in order here, so the news of the actor's own end may come first.
    let last = within("the end of its own node", near_life.next()).await;
    assert!(matches!(last, None | Some(ActorEvent::Stopped(_))), "{last:?}");
    let last = within("the end of its node", far_life.next()).await;
    assert!(matches!(last, Some(ActorEvent::NodeDown | ActorEvent::Stopped(_))), "{last:?}");
    assert_eq!(far_life.next().await, None);
    within("no ghost", async {
        let gone = |mesh: &Mesh| mesh.snapshot().node(far.node()).is_none();
        until("a is down", || gone(nodes.b())).await;
    })
    .await;
    let asked = far.ask(&1).await.unwrap_err();
    assert!(matches!(asked, CallError::Directory(DirectoryFault::Down(_))), "{asked}");
    assert!(nodes.b().actor_on::<Counter>(far.node(), "counter").is_err());
    assert_eq!(within("down at once", far.monitor().next()).await, Some(ActorEvent::NodeDown));
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn why_an_actor_ended_is_told() {
    let nodes = Nodes::new(1).await;
    for (restart, name) in [(Restart::Temporary, "temporary"), (Restart::Permanent, "permanent")] {
        let counter = nodes.a().spawn(name, restart, || Counter { sum: 0 }).await.unwrap();
        let mut life = counter.monitor();
        assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
        counter.ask(-1).await.unwrap_err();
        let then = within("news", life.next()).await;
        match restart {
            Restart::Temporary => assert_eq!(then, Some(ActorEvent::Stopped(StopReason::Failed))),
            _ => {
                assert_eq!(then, Some(ActorEvent::Restarted { restarts: 1 }));
                nodes.a().leave_within(Duration::ZERO).await;
                let last = within("the end", life.next()).await;
                assert!(matches!(last, None | Some(ActorEvent::Stopped(StopReason::Leaving))), "{last:?}");
            }
        }
    }
    let late = nodes.a().spawn("late", Restart::Permanent, || Counter { sum: 0 }).await.unwrap_err();
    assert_eq!(Fault::from(late).kind, FaultKind::Draining);
    nodes.leave().await;
}

/// Asks upward when it is stopped, which nobody should.
struct Upward(Option<ActorHandle<Counter>>);

impl Actor for Upward {
    type Request = ();
    type Reply = ();

    async fn handle(&mut self, (): ()) -> Result<(), Fault> {
        Ok(())
    }

    async fn stopped(&mut self) {
        if let Some(parent) = self.0.take() {
            parent.ask(1).await.ok();
            std::future::pending::<()>().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn act_08_a_child_that_asks_upward_in_its_stop_hook_ends_by_the_deadline() {
    let nodes = Nodes::new(1).await;
    let parent = nodes.a().spawn("parent", Restart::Permanent, || Counter { sum: 0 }).await.unwrap();
    let make = move || Upward(Some(parent.clone()));
    let child = nodes.a().spawn("child", Restart::Permanent, make).await.unwrap();
    child.ask(()).await.unwrap();
    within("the node leaves", nodes.a().leave()).await;
    nodes.leave().await;
}
