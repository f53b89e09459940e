//! Whole nodes in one process whose keys are rolled while they work. Node names differ from test to test: sessions of one
//! process tell their nodes apart by name and life.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::{EndpointName, NodeId, RequestId};

use super::*;
use crate::{
    config::ClusterConfig,
    mesh::Mesh,
    security::{ClusterKey, KeyId, KeyRing, RingError},
    stream::{Context, Incoming, Opened, StreamError, StreamHandler},
};

const PATIENCE: Duration = Duration::from_secs(40);

struct Echo;

impl StreamHandler for Echo {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Some((tx, mut rx)) = incoming.acceptor.accept(Bytes::new()) else { return };
            while let Some(Ok(frame)) = rx.recv().await {
                if tx.send(frame).await.is_err() {
                    return;
                }
            }
            tx.end();
        })
    }
}

fn endpoint() -> EndpointName {
    EndpointName::new("t/echo/run").unwrap()
}

async fn start(keys: impl Into<KeyRing>, name: &str, folder: &Path, seeds: &[SocketAddr]) -> Mesh {
    let config = ClusterConfig::program(name, keys).unwrap().bind("127.0.0.1:0".parse().unwrap());
    let config = config.data_dir(folder.join(name));
    let config = seeds.iter().fold(config, |config, seed| config.seed(seed.to_string()));
    let mesh = Mesh::start(config).await.unwrap();
    mesh.endpoints().serve(endpoint(), Arc::new(Echo));
    mesh
}

/// Waits until `mesh` sees exactly these nodes.
async fn sees(mesh: &Mesh, names: &[&str]) {
    let mut watch = mesh.watch();
    let seen = watch
        .wait_for(|snapshot| snapshot.nodes.iter().map(|view| view.record.node.as_str()).eq(names.iter().copied()));
    assert!(tokio::time::timeout(PATIENCE, seen).await.is_ok(), "{mesh:?} sees {:?}, not {names:?}", mesh.snapshot());
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn open(from: &Mesh, to: &Mesh) -> Result<Opened, StreamError> {
    let context = Context::new(RequestId(1), Duration::from_secs(300));
    from.open(to.node(), to.incarnation(), &endpoint(), context, Bytes::new()).await
}

async fn beat(opened: &mut Opened, n: u8) {
    opened.tx.send(Bytes::from(vec![n])).await.unwrap();
    let back = tokio::time::timeout(PATIENCE, opened.rx.recv()).await.expect("an answer");
    assert_eq!(back, Some(Ok(Bytes::from(vec![n]))));
}

fn taken(rolled: &Rolled, names: &[&str]) {
    let got: Vec<_> = rolled.nodes.iter().map(|row| row.node.as_str()).collect();
    assert_eq!(got, names);
    assert!(rolled.failed().is_empty(), "{rolled:?}");
}

fn held(mesh: &Mesh) -> (u64, Vec<KeyId>) {
    let ring = mesh.keys().ring();
    (ring.version, ring.keys)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_rolled_through_three_nodes_under_a_live_stream_and_nobody_goes_down() {
    let folder = tempfile::tempdir().unwrap();
    // Each node has a copy of the key file, as on three machines.
    let files = ["r-a", "r-b", "r-c"].map(|name| folder.path().join(format!("{name}.key")));
    let old = KeyRing::load_or_make(&files[0]).unwrap();
    files[1..].iter().for_each(|file| old.primary().store(file).unwrap());
    let load = |at: usize| KeyRing::load(&files[at]).unwrap();
    let a = start(load(0), "r-a", folder.path(), &[]).await;
    let b = start(load(1), "r-b", folder.path(), &[a.address()]).await;
    let c = start(load(2), "r-c", folder.path(), &[a.address()]).await;
    let all = ["r-a", "r-b", "r-c"];
    for mesh in [&a, &b, &c] {
        sees(mesh, &all).await;
    }
    let down = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut watching = tokio::task::JoinSet::new();
    for mesh in [a.clone(), b.clone(), c.clone()] {
        let (mut watch, down) = (mesh.watch(), down.clone());
        watching.spawn(async move {
            while watch.changed().await.is_ok() {
                if watch.borrow_and_update().nodes.len() < 3 {
                    down.lock().unwrap().push(mesh.node().clone());
                }
            }
        });
    }
    let mut stream = open(&b, &c).await.unwrap();
    beat(&mut stream, 0).await;
    let old_id = old.primary().id();

    let slip = "00000000".parse().unwrap();
    assert_eq!(b.keys().promote(slip).await.unwrap_err(), RollError::Ring(RingError::Unknown(slip)));
    let added = b.keys().add(None).await.unwrap();
    taken(&added, &all);
    let new_id = added.key;
    beat(&mut stream, 1).await;
    assert_eq!(b.keys().remove(old_id).await.unwrap_err(), RollError::Ring(RingError::Primary(old_id)));

    taken(&c.keys().promote(new_id).await.unwrap(), &all);
    beat(&mut stream, 2).await;
    for (from, to) in [(&a, &b), (&c, &a)] {
        beat(&mut open(from, to).await.unwrap(), 9).await;
    }

    taken(&a.keys().remove(old_id).await.unwrap(), &all);
    for (mesh, file) in [&a, &b, &c].into_iter().zip(&files) {
        assert_eq!(held(mesh), (3, vec![new_id]));
        let kept = KeyRing::load(file).unwrap();
        assert_eq!((kept.version(), kept.ids()), (3, vec![new_id]), "kept for the next start");
    }
    // The stream goes on over its old link, which takes no new ones and ends with it.
    beat(&mut stream, 3).await;
    for (from, to) in [(&a, &b), (&b, &c), (&c, &a), (&b, &a)] {
        beat(&mut open(from, to).await.unwrap(), 9).await;
        let list = from.keys().list().await;
        assert!(list.iter().all(|row| row.fault.is_none()), "{list:?}");
    }
    beat(&mut stream, 4).await;
    stream.tx.end();
    assert_eq!(stream.rx.recv().await, None);
    assert!(down.lock().unwrap().is_empty(), "nobody went down: {down:?}");

    // Who has missed it all starts with its old file, is refused, and learns no name.
    let late = folder.path().join("late.key");
    old.primary().store(&late).unwrap();
    let late = start(KeyRing::load(&late).unwrap(), "r-late", folder.path(), &[a.address(), b.address()]).await;
    let asked = crate::link::ControlClient::connect(a.address(), old.primary()).await;
    assert!(asked.is_err_and(|error| error.to_string().contains("none of this node's cluster keys")));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(late.snapshot().nodes.len(), 1);
    assert_eq!(held(&late).0, 0);
    for mesh in [&a, &b, &c] {
        assert_eq!(mesh.snapshot().nodes.len(), 3);
    }
    for mesh in [late, c, b, a] {
        mesh.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joiner_with_an_old_ring_is_brought_up_to_date_whichever_side_starts_first() {
    let folder = tempfile::tempdir().unwrap();
    let old = ClusterKey::generate();
    let a = start(&old, "j-a", folder.path(), &[]).await;
    let new = a.keys().add(None).await.unwrap().key;
    a.keys().promote(new).await.unwrap();
    // The seed is up: the ring comes before the first gossip.
    let b = start(&old, "j-b", folder.path(), &[a.address()]).await;
    assert_eq!(held(&b), held(&a));
    sees(&b, &["j-a", "j-b"]).await;
    sees(&a, &["j-a", "j-b"]).await;
    // The seed comes later, and is the one that is behind.
    let ring = a.keys().ring();
    b.leave().await;
    let alone = start(&old, "j-alone", folder.path(), &[]).await;
    let newer = KeyRing::from(&old).add(ClusterKey::generate()).unwrap();
    let newer = newer.promote(newer.ids()[1]).unwrap();
    let c = start(newer.clone(), "j-c", folder.path(), &[alone.address()]).await;
    sees(&alone, &["j-alone", "j-c"]).await;
    sees(&c, &["j-alone", "j-c"]).await;
    assert_eq!(held(&alone), (2, newer.ids()));
    assert_eq!(a.keys().ring(), ring, "nobody else was told");
    for mesh in [c, alone, a] {
        mesh.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_waits_for_a_member_that_is_behind_and_says_which() {
    let folder = tempfile::tempdir().unwrap();
    let key = ClusterKey::generate();
    let a = start(&key, "w-a", folder.path(), &[]).await;
    let b = start(&key, "w-b", folder.path(), &[a.address()]).await;
    sees(&a, &["w-a", "w-b"]).await;
    // `b` cannot answer about its keys.
    b.serve_op("keys/exchange", Arc::new(|_, _| Box::pin(std::future::pending())));
    let added = a.keys().add(None).await.unwrap();
    let failed: Vec<_> = added.failed().into_iter().map(|row| row.node.clone()).collect();
    assert_eq!(failed, [NodeId::new("w-b").unwrap()], "{added:?}");
    let refused = a.keys().promote(added.key).await.unwrap_err();
    assert!(matches!(&refused, RollError::Silent { node, .. } if node.as_str() == "w-b"), "{refused}");
    assert_eq!(held(&a).1[0], key.id(), "nothing was changed");
    for mesh in [b, a] {
        mesh.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_removed_here_alone_closes_its_links_and_sessions_and_shuts_the_others_out() {
    let folder = tempfile::tempdir().unwrap();
    let key = ClusterKey::generate();
    let a = start(&key, "x-a", folder.path(), &[]).await;
    let b = start(&key, "x-b", folder.path(), &[a.address()]).await;
    sees(&a, &["x-a", "x-b"]).await;
    beat(&mut open(&a, &b).await.unwrap(), 1).await;
    let links = |mesh: &Mesh| mesh.book().snapshot().iter().filter(|row| row.kind == "link").count();
    assert_eq!((links(&a), links(&b)), (1, 1));
    // `b` is stuck: it takes no ring any more, and `a` is told to go ahead without it.
    b.serve_op("keys/exchange", Arc::new(|_, _| Box::pin(std::future::pending())));
    let ring = KeyRing::from(&key).add(ClusterKey::generate()).unwrap();
    let ring = ring.promote(ring.ids()[1]).unwrap().remove(key.id()).unwrap();
    assert!(a.keys().take(ring.clone()).unwrap());
    until("the link of the removed key is closed", || links(&a) == 0 && links(&b) == 0).await;
    sees(&a, &["x-a"]).await;
    sees(&b, &["x-b"]).await;
    assert_eq!(held(&b), (0, vec![key.id()]));
    for mesh in [b, a] {
        mesh.leave().await;
    }
}
