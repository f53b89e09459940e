//! Blobs between whole nodes of one process.

use std::{net::SocketAddr, path::Path};

use starling_ids::{EndpointName, NodeId};

use super::*;
use crate::{
    config::ClusterConfig,
    discovery::{Instance, InstanceKind, Lifecycle},
    security::ClusterKey,
};

const WAIT: Duration = Duration::from_secs(30);

async fn start(key: &ClusterKey, name: &str, folder: &Path, seeds: &[SocketAddr]) -> Mesh {
    let mut config = ClusterConfig::program(name, key.clone()).unwrap();
    config = config.bind("127.0.0.1:0".parse().unwrap()).data_dir(folder.join(name));
    config.seeds = seeds.iter().map(SocketAddr::to_string).collect();
    Mesh::start(config).await.unwrap()
}

async fn sees(mesh: &Mesh, what: &str, holds: impl Fn(&crate::discovery::Snapshot) -> bool) {
    let mut watch = mesh.watch();
    let seen = tokio::time::timeout(WAIT, watch.wait_for(|snapshot| holds(snapshot)));
    assert!(seen.await.is_ok(), "{mesh:?} does not see {what}: {:?}", mesh.snapshot());
}

fn offer(mesh: &Mesh, digest: BlobDigest) {
    let endpoint = EndpointName::new("t/worker/run").unwrap();
    let instance = Instance::new(endpoint, InstanceKind::Worker, Lifecycle::Serving);
    mesh.publish(|record| record.instances.push(Instance { bundle: Some(digest), ..instance })).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blob_is_fetched_once_checked_kept_and_served_on_by_whoever_has_it() {
    let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
    let a = start(&key, "ba", folder.path(), &[]).await;
    let b = start(&key, "bb", folder.path(), &[a.address()]).await;
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    let digest = a.blobs().put(bytes.clone()).unwrap();
    offer(&a, digest);
    let named = |snapshot: &crate::discovery::Snapshot| {
        snapshot.instances(InstanceKind::Worker).any(|(_, instance)| instance.bundle == Some(digest))
    };
    sees(&b, "the offer", named).await;
    let fetches = (0..5).map(|_| {
        let blobs = b.blobs();
        async move { blobs.get(digest, WAIT).await }
    });
    for fetched in futures::future::join_all(fetches).await {
        assert!(fetched.unwrap() == bytes);
    }
    assert!(b.blobs().shelf.inner.flights.lock().unwrap().is_empty(), "nothing is left of the fetch");

    // The source has gone; whoever fetched it serves it, though no record names it.
    let c = start(&key, "bc", folder.path(), &[b.address()]).await;
    a.leave().await;
    let only_b = |snapshot: &crate::discovery::Snapshot| {
        snapshot.node(&NodeId::new("ba").unwrap()).is_none() && snapshot.nodes.len() == 2
    };
    sees(&c, "that a has left", only_b).await;
    assert!(c.blobs().get(digest, WAIT).await.unwrap() == bytes);

    let nobodys = BlobDigest::of(b"nobody has this");
    assert_eq!(c.blobs().get(nobodys, WAIT).await, Err(BlobError::NotFound(nobodys)));
    let short = c.blobs().get(nobodys, Duration::from_millis(1)).await;
    assert!(matches!(short, Err(BlobError::Unavailable { limit_ms: 1, .. })), "{short:?}");
    for mesh in [c, b] {
        mesh.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_lies_is_passed_over() {
    let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
    let liar = start(&key, "la", folder.path(), &[]).await;
    let honest = start(&key, "lb", folder.path(), &[liar.address()]).await;
    let reader = start(&key, "lc", folder.path(), &[liar.address()]).await;
    let digest = honest.blobs().put(&b"the truth"[..]).unwrap();
    // Other bytes under this name.
    lock(&liar.blobs().shelf.inner.store).put(digest, Bytes::from_static(b"something else"), true).unwrap();
    offer(&liar, digest);
    offer(&honest, digest);
    sees(&reader, "both offers", |snapshot| snapshot.instances(InstanceKind::Worker).count() == 2).await;
    assert_eq!(reader.blobs().get(digest, WAIT).await.unwrap(), &b"the truth"[..]);
    for mesh in [reader, honest, liar] {
        mesh.leave().await;
    }
}
