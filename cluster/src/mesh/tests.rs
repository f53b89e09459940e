//! Whole nodes in one process: join, find one another, talk, leave.

use std::{net::SocketAddr, path::Path};

use futures::future::BoxFuture;
use starling_ids::RequestId;

use super::*;
use crate::{
    config::Timings,
    discovery::{Instance, InstanceKind, Lifecycle},
    link::ControlClient,
    security::ClusterKey,
    stream::{FaultKind, Incoming, StreamHandler},
};

struct Echo;

impl StreamHandler for Echo {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Some((tx, mut rx)) = incoming.acceptor.accept(incoming.body) else { return };
            while let Some(Ok(frame)) = rx.recv().await {
                if tx.send(frame).await.is_err() {
                    return;
                }
            }
            tx.end();
        })
    }
}

fn id(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

fn endpoint() -> EndpointName {
    EndpointName::new("t/echo/run").unwrap()
}

async fn start(key: &ClusterKey, name: &str, data_dir: &Path, seeds: &[SocketAddr]) -> Mesh {
    let mesh = Mesh::start(ClusterConfig {
        name: id(name),
        bind: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        seeds: seeds.iter().map(SocketAddr::to_string).collect(),
        data_dir: data_dir.join(name),
        keys: key.into(),
        roles: vec!["worker".into()],
        http: None,
        labels: Default::default(),
        software: "test 1".into(),
        timings: Timings::default(),
    });
    let mesh = mesh.await.unwrap();
    mesh.endpoints().serve(endpoint(), Arc::new(Echo));
    mesh.serve_op(
        "test/hello",
        Arc::new(|from, body| {
            Box::pin(async move {
                let body = String::from_utf8_lossy(&body).into_owned();
                if body.is_empty() {
                    return Err(Fault::new(FaultKind::Invalid, "empty"));
                }
                Ok(Bytes::from(format!("{from} says {body}")))
            })
        }),
    );
    mesh
}

async fn sees(mesh: &Mesh, what: &str, holds: impl Fn(&Snapshot) -> bool) {
    let mut watch = mesh.watch();
    let seen = tokio::time::timeout(Duration::from_secs(30), watch.wait_for(|snapshot| holds(snapshot)));
    assert!(seen.await.is_ok(), "{mesh:?} does not see within 30 s: {what}; it sees {:?}", mesh.snapshot());
}

async fn echo(from: &Mesh, to: &Mesh) -> Result<(), StreamError> {
    let context = Context::new(RequestId(1), Duration::from_secs(30));
    let body = Bytes::from_static(b"first");
    let mut opened = from.open(to.node(), to.incarnation(), &endpoint(), context, body).await?;
    assert_eq!(opened.reply, "first");
    for n in 0..50u8 {
        opened.tx.send(Bytes::from(vec![n])).await?;
        assert_eq!(opened.rx.recv().await, Some(Ok(Bytes::from(vec![n]))));
    }
    opened.tx.end();
    assert_eq!(opened.rx.recv().await, None);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_find_one_another_talk_and_leave() {
    // Names of its own: sessions find the nodes of other tests in this process too.
    let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
    let a = start(&key, "mesh-a", folder.path(), &[]).await;
    let b = start(&key, "mesh-b", folder.path(), &[a.address()]).await;
    sees(&a, "b", |snapshot| snapshot.node(&id("mesh-b")).is_some()).await;
    sees(&b, "a", |snapshot| snapshot.node(&id("mesh-a")).is_some()).await;
    for (from, to) in [(&a, &b), (&b, &a), (&a, &a)] {
        echo(from, to).await.unwrap();
        let answer = from.call(to.node(), "test/hello", Bytes::from_static(b"hi"), Duration::from_secs(20)).await;
        assert_eq!(answer.unwrap(), format!("{} says hi", from.node()));
    }
    b.publish(|record| {
        record.instances.push(Instance::new(endpoint(), InstanceKind::Service, Lifecycle::Serving));
    })
    .unwrap();
    sees(&a, "the instance of b", |snapshot| snapshot.instances(InstanceKind::Service).count() == 1).await;

    // A tool asks the same operations without being a member.
    let client = ControlClient::connect(a.address(), &key).await.unwrap();
    let answer = client.call("test/hello", Bytes::from_static(b"yo"), Duration::from_secs(20)).await;
    assert_eq!(answer.unwrap(), "client says yo");

    let brief = || Context::new(RequestId(1), Duration::from_secs(9));
    let stale = a.open(b.node(), Incarnation(0), &endpoint(), brief(), Bytes::new()).await;
    assert!(matches!(stale, Err(StreamError::Stale { .. })));
    let nobody = a.open(&id("z"), Incarnation(1), &endpoint(), brief(), Bytes::new()).await;
    assert!(matches!(nobody, Err(StreamError::UnknownNode(_))));

    b.leave().await;
    sees(&a, "that b has left", |snapshot| snapshot.node(&id("mesh-b")).is_none()).await;
    assert!(b.book().snapshot().is_empty());
    let again = start(&key, "mesh-b", folder.path(), &[a.address()]).await;
    assert!(again.incarnation() > b.incarnation());
    sees(&a, "b again", |snapshot| {
        snapshot.node(&id("mesh-b")).is_some_and(|view| view.record.incarnation == again.incarnation())
    })
    .await;
    echo(&a, &again).await.unwrap();
    for mesh in [again, a] {
        mesh.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_actor_of_a_node_survives_a_panic() {
    // Names of its own: sessions find the nodes of other tests in this process too.
    let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
    let a = start(&key, "actors-a", folder.path(), &[]).await;
    let b = start(&key, "actors-b", folder.path(), &[a.address()]).await;
    sees(&a, "b", |snapshot| snapshot.node(&id("actors-b")).is_some()).await;
    echo(&a, &b).await.unwrap();
    // One after the other: five failures within half a minute are taken as a fault of the node itself.
    for path in ["handlers", "links/actors-b", "dialler", "listener"] {
        assert!(a.book().inject_panic(path).await, "{path}");
    }
    let up = |path: &'static str| {
        let rows = a.book().snapshot();
        rows.into_iter().any(|row| row.path == path && row.state.label() == "running" && row.restarts == 1)
    };
    for path in ["handlers", "dialler", "listener"] {
        let started = std::time::Instant::now();
        while !up(path) {
            assert!(started.elapsed() < Duration::from_secs(20), "{path} is not up: {:?}", a.book().snapshot());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    echo(&a, &b).await.unwrap();
    echo(&b, &a).await.unwrap();
    echo(&a, &a).await.unwrap();
    for mesh in [a, b] {
        mesh.leave().await;
    }
}
