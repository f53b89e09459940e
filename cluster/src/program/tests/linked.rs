//! Actors started on another node: from a factory, with an owner or without.

use serde::{Deserialize, Serialize};

use super::*;

#[derive(Serialize, Deserialize)]
struct From {
    start: i64,
}

fn register(mesh: &Mesh) {
    mesh.register_factory("counter", |from: From| {
        if from.start < 0 {
            return Err(Fault::new(FaultKind::Invalid, "begin at 0 or above"));
        }
        Ok(Counter { sum: from.start })
    });
}

fn programs(mesh: &Mesh) -> Vec<String> {
    let rows = mesh.book().snapshot().into_iter().filter(|row| row.kind == "program");
    rows.map(|row| row.path).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_actor_is_spawned_on_another_node_from_a_factory() {
    let nodes = Nodes::new(2).await;
    register(nodes.b());
    let (a, b) = (nodes.a(), nodes.b());
    let counter = a.spawn_on::<Counter>(b.node(), "counter", &From { start: 40 }).await.unwrap();
    let mut life = counter.monitor();
    assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    assert_eq!(counter.ask(&2).await.unwrap(), 42);
    let died = counter.ask(&-1).await.unwrap_err();
    assert_eq!(died.fault().unwrap().kind, FaultKind::Internal);
    assert_eq!(within("restarted", life.next()).await, Some(ActorEvent::Restarted { restarts: 1 }));
    // The monitor hears of the next life a moment before its mailbox is open.
    let again = async {
        loop {
            match counter.ask(&2).await {
                Err(error) if error.fault().is_some_and(|fault| fault.kind == FaultKind::Unavailable) => {}
                answer => return answer,
            }
        }
    };
    assert_eq!(within("it answers again", again).await.unwrap(), 42, "restarted with the same arguments");

    let kind = |error: SpawnError| Fault::from(error).kind;
    let unknown = a.spawn_on::<Counter>(b.node(), "adder", &()).await.unwrap_err();
    assert_eq!(kind(unknown), FaultKind::NotFound);
    let wrong = a.spawn_on::<Counter>(b.node(), "counter", &"text").await.unwrap_err();
    assert_eq!(kind(wrong), FaultKind::Invalid);
    let refused = a.spawn_on::<Counter>(b.node(), "counter", &From { start: -1 }).await.unwrap_err();
    assert_eq!(refused, SpawnError::Refused(Fault::new(FaultKind::Invalid, "begin at 0 or above")));
    assert_eq!(programs(b).len(), 1);

    let options = SpawnOptions { name: Some("mine".to_owned()), ..SpawnOptions::default() };
    let mine = a.spawn_on_with::<Counter>(b.node(), "counter", &From { start: 0 }, options).await.unwrap();
    let rows = b.book().snapshot();
    let row = rows.iter().find(|row| row.path == "programs/mine").unwrap();
    assert_eq!(row.owner.as_deref(), Some("a"), "who started it is listed");
    let mut mine_life = mine.monitor();
    assert_eq!(within("started", mine_life.next()).await, Some(ActorEvent::Started));
    assert_eq!(counter.stop().await, Ok(true));
    assert_eq!(within("stopped", life.next()).await, Some(ActorEvent::Stopped(StopReason::Asked)));
    b.leave().await;
    // A node that leaves in order stops its actors first; which news is faster does not matter.
    let last = within("the end", mine_life.next()).await;
    assert!(matches!(last, Some(ActorEvent::Stopped(StopReason::Leaving) | ActorEvent::NodeDown)), "{last:?}");
    assert_eq!(mine_life.next().await, None);
    until("b is gone", || a.snapshot().node(mine.node()).is_none()).await;
    assert_eq!(within("node down", mine.monitor().next()).await, Some(ActorEvent::NodeDown));
    let asked = mine.ask(&1).await.unwrap_err();
    assert_eq!(asked, CallError::Directory(DirectoryFault::Down(mine.node().clone())));
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_linked_actor_goes_with_the_node_that_started_it_and_a_detached_one_stays() {
    let nodes = Nodes::new(3).await;
    register(nodes.b());
    let spawn = |name: &str, lifetime| {
        let options = SpawnOptions { name: Some(name.to_owned()), lifetime, ..SpawnOptions::default() };
        nodes.c().spawn_on_with::<Counter>(nodes.b().node(), "counter", &From { start: 0 }, options)
    };
    let linked = spawn("linked", Lifetime::Linked).await.unwrap();
    spawn("detached", Lifetime::Detached).await.unwrap();
    // Until then its restart policy holds.
    linked.ask(&-1).await.unwrap_err();
    let watcher = nodes.a().actor_on::<Counter>(nodes.b().node(), "linked").unwrap();
    let mut life = watcher.monitor();
    assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    within("it is back", async { while watcher.ask(&1).await.is_err() {} }).await;
    kill(nodes.c()).await;
    loop {
        match within("the owner's death", life.next()).await {
            Some(ActorEvent::Restarted { .. }) => {}
            last => break assert_eq!(last, Some(ActorEvent::Stopped(StopReason::OwnerGone))),
        }
    }
    assert_eq!(programs(nodes.b()), ["programs/detached"]);
    // The same node in a later life owns nothing of the former one.
    let again = nodes.join("c").await;
    let detached = again.wait_for_node(nodes.b().node(), PATIENCE).await;
    detached.unwrap();
    let detached = again.actor_on::<Counter>(nodes.b().node(), "detached").unwrap();
    assert_eq!(detached.ask(&5).await.unwrap(), 5);
    again.leave().await;
    assert_eq!(detached.stop().await.map_err(|fault| fault.kind).ok(), None, "its own node has left");
    assert_eq!(programs(nodes.b()), ["programs/detached"]);
    nodes.leave().await;
}

/// Starts a child on the node it is asked for.
struct Parent {
    mesh: Mesh,
}

#[derive(Serialize, Deserialize)]
enum Order {
    Spawn(starling_ids::NodeId),
    Die,
}

impl Actor for Parent {
    type Request = Order;
    type Reply = String;

    async fn handle(&mut self, order: Order) -> Result<String, Fault> {
        let Order::Spawn(node) = order else { panic!("asked to die") };
        let child = self.mesh.spawn_on::<Counter>(&node, "counter", &From { start: 0 }).await?;
        Ok(child.name().to_owned())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_linked_actor_goes_with_the_life_of_the_actor_that_started_it() {
    let nodes = Nodes::new(2).await;
    let (a, b) = (nodes.a(), nodes.b());
    register(b);
    register(a);
    let mesh = a.clone();
    let parent = a.spawn("parent", Restart::Permanent, move || Parent { mesh: mesh.clone() }).await.unwrap();
    let own = a.spawn_on::<Counter>(b.node(), "counter", &From { start: 0 }).await.unwrap();
    let mut children = Vec::new();
    for node in [a, b] {
        let name = parent.ask(Order::Spawn(node.node().clone())).await.unwrap();
        let child = a.actor_on::<Counter>(node.node(), &name).unwrap();
        assert_eq!(child.ask(&1).await.unwrap(), 1);
        let rows = node.book().snapshot();
        let owner = rows.iter().find(|row| row.path == format!("programs/{name}")).and_then(|row| row.owner.clone());
        assert_eq!(owner.as_deref(), Some("a programs/parent"));
        let mut life = child.monitor();
        assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
        children.push((child, life));
    }
    parent.ask(Order::Die).await.unwrap_err();
    for (child, life) in &mut children {
        let news = within("the parent's death", life.next()).await;
        assert_eq!(news, Some(ActorEvent::Stopped(StopReason::OwnerGone)), "{child:?}");
    }
    // The next life of the parent has children of its own, and they go when it is stopped.
    let spawned = async {
        loop {
            match parent.ask(Order::Spawn(b.node().clone())).await {
                Ok(name) => return name,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    let name = within("the parent is back", spawned).await;
    let mut life = a.actor_on::<Counter>(b.node(), &name).unwrap().monitor();
    assert_eq!(within("started", life.next()).await, Some(ActorEvent::Started));
    assert!(b.book().inject_panic("program-owners").await, "whoever keeps watch may die as well");
    until("it keeps watch again", || {
        let rows = b.book().snapshot();
        rows.iter().any(|row| row.path == "program-owners" && row.restarts == 1 && row.state.label() == "running")
    })
    .await;
    assert_eq!(parent.stop().await, Ok(true));
    assert_eq!(within("the parent's end", life.next()).await, Some(ActorEvent::Stopped(StopReason::OwnerGone)));
    assert_eq!(own.ask(&1).await.unwrap(), 1, "an actor of the node itself goes on");
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_makes_somebody_else_an_owner() {
    let nodes = Nodes::new(2).await;
    register(nodes.b());
    let owner = owners::Owner { node: nodes.b().node().clone(), incarnation: nodes.b().incarnation(), actor: None };
    let told = owner.check(nodes.b(), nodes.a().node()).unwrap_err();
    assert_eq!(told.kind, FaultKind::Invalid);
    let past = owners::Owner { incarnation: starling_ids::Incarnation(0), ..owner.clone() };
    assert_eq!(past.check(nodes.a(), nodes.b().node()).unwrap_err().kind, FaultKind::StaleIncarnation);
    let unheard = owners::Owner { node: starling_ids::NodeId::new("z").unwrap(), ..owner };
    assert_eq!(unheard.check(nodes.a(), &unheard.node).unwrap_err().kind, FaultKind::Unavailable);
    nodes.leave().await;
}
