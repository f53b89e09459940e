//! Whole nodes in one process: serve, call, spawn, follow, group, compose, leave.

mod actors;
mod calls;
mod choice;
mod context;
mod groups;
mod leave;
mod linked;
mod pipelines;
mod told;
mod watching;

use std::{path::Path, time::Duration};

use super::*;
use crate::{
    mesh::Mesh,
    security::ClusterKey,
    stream::{Advice, Fault, FaultKind},
    supervise::Restart,
};

/// Longest wait for any state.
const PATIENCE: Duration = Duration::from_secs(60);

/// The actor library keeps one table of names a process; many nodes in one process get in one another's way.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Nodes `a`, `b`, `c` … that know one another.
struct Nodes {
    all: Vec<Mesh>,
    key: ClusterKey,
    folder: tempfile::TempDir,
    _one: tokio::sync::MutexGuard<'static, ()>,
}

impl Nodes {
    async fn new(count: usize) -> Self {
        let one = ONE_AT_A_TIME.lock().await;
        let (key, folder) = (ClusterKey::generate(), tempfile::tempdir().unwrap());
        let mut nodes = Self { all: Vec::new(), key, folder, _one: one };
        for name in ["a", "b", "c"].into_iter().take(count) {
            let mesh = nodes.join(name).await;
            nodes.all.push(mesh);
        }
        for mesh in &nodes.all {
            sees(mesh, &nodes.all).await;
        }
        nodes
    }

    /// Starts a node that joins through the first one.
    async fn join(&self, name: &str) -> Mesh {
        join(&self.key, name, self.folder.path(), self.all.first()).await
    }

    fn a(&self) -> &Mesh {
        &self.all[0]
    }

    fn b(&self) -> &Mesh {
        &self.all[1]
    }

    fn c(&self) -> &Mesh {
        &self.all[2]
    }

    async fn leave(self) {
        for mesh in self.all.iter().rev() {
            mesh.leave_within(Duration::ZERO).await;
        }
    }
}

async fn join(key: &ClusterKey, name: &str, folder: &Path, seed: Option<&Mesh>) -> Mesh {
    let bind = "127.0.0.1:0".parse().unwrap();
    let mut config = JoinConfig::new(name).key(key.clone()).bind(bind).data_dir(folder.join(name));
    if let Some(seed) = seed {
        config = config.seed(seed.address().to_string());
    }
    Mesh::join(config).await.unwrap()
}

/// Waits until `mesh` knows all of `others` in their present lives.
async fn sees(mesh: &Mesh, others: &[Mesh]) {
    let mut watch = mesh.watch();
    let seen = watch.wait_for(|snapshot| {
        let lives = |other: &Mesh| {
            snapshot.node(other.node()).is_some_and(|view| view.record.incarnation == other.incarnation())
        };
        others.iter().all(lives)
    });
    within("the nodes see one another", seen).await.unwrap();
}

/// Ends a node without a word to anybody, as far as that is possible within one process.
async fn kill(mesh: &Mesh) {
    mesh.supervisor().stop_all().await.unwrap();
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

/// Waits for a state that nothing announces.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    within(what, poll).await;
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
