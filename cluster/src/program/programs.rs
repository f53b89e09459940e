//! What a node knows about its programs: their actors, their factories, and what runs in their handlers.
//!
//! Held by the node; written by [`super::spawn`] and read by everybody in this module. All actors of programs are
//! children of the supervisor `programs`, which never gives up: one that fails over and over is slowed by its backoff
//! and takes no other with it. Bounds: those of [`super::spawn`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use starling_ids::EndpointName;
use tokio::sync::{Notify, OnceCell, watch};

use super::{
    gate::Gate,
    handlers::{Door, Run},
    monitor::{Life, StopReason},
    owners::{Owner, Owners},
    spawn::{SpawnError, SpawnRequest},
};
use crate::{
    discovery::{InstanceKind, Lifecycle},
    mesh::{Mesh, WeakMesh},
    near,
    stream::{Endpoints, Fault, FaultKind},
    supervise::{Handle, Policy, Restart, SuperviseError, SupervisorHandle, child},
};

pub(super) type Factory = dyn Fn(Mesh, SpawnRequest) -> BoxFuture<'static, Result<(), Fault>> + Send + Sync;

/// One actor.
pub(super) struct Entry {
    /// Of the request that started it.
    pub(super) id: u64,
    pub(super) life: Arc<watch::Sender<Life>>,
    /// Who it ends with.
    pub(super) owner: Option<Owner>,
}

type Book = Arc<Mutex<BTreeMap<String, Entry>>>;

/// What a node knows about its programs' actors.
pub(crate) struct Programs {
    supervisor: OnceCell<SupervisorHandle>,
    owners: OnceCell<()>,
    factories: RwLock<BTreeMap<String, Arc<Factory>>>,
    actors: Book,
    /// All requests in handlers of programs.
    gate: Arc<Gate>,
    /// Messages on their way to remote actors.
    outgoing: Arc<Gate>,
    leaving: Arc<AtomicBool>,
    relook: Arc<Notify>,
}

impl Default for Programs {
    fn default() -> Self {
        Self {
            supervisor: OnceCell::new(),
            owners: OnceCell::new(),
            factories: RwLock::default(),
            actors: Arc::default(),
            gate: Gate::new(usize::MAX),
            outgoing: Gate::new(usize::MAX),
            leaving: Arc::default(),
            relook: Arc::default(),
        }
    }
}

impl Programs {
    pub(super) async fn supervisor(&self, mesh: &Mesh) -> Result<&SupervisorHandle, SuperviseError> {
        // Crash loops are slowed by backoff; they never end the supervisor and with it everybody else's actors.
        let policy = Policy { failures_max: usize::MAX, window: Duration::ZERO, ..Policy::default() };
        self.supervisor.get_or_try_init(|| mesh.supervisor().child_supervisor("programs", policy)).await
    }

    /// Starts to keep watch over owners, once.
    pub(super) async fn watch_owners(&self, mesh: &Mesh) -> Result<(), SuperviseError> {
        let start = || {
            let weak = mesh.downgrade();
            let make = move || (Owners, weak.clone());
            mesh.supervisor().add(child("program-owners", "owners", Restart::Permanent, &Handle::new(), make))
        };
        self.owners.get_or_try_init(start).await?;
        self.relook.notify_one();
        Ok(())
    }

    pub(super) fn actors(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        lock(&self.actors)
    }

    pub(super) fn life(&self, name: &str) -> Option<watch::Receiver<Life>> {
        self.actors().get(name).map(|entry| entry.life.subscribe())
    }

    /// Everybody who owns an actor here.
    pub(super) fn owners(&self) -> BTreeSet<Owner> {
        self.actors().values().filter_map(|entry| entry.owner.clone()).collect()
    }

    pub(super) fn owned_by(&self, owner: &Owner) -> Vec<String> {
        let actors = self.actors();
        let owned = actors.iter().filter(|(_, entry)| entry.owner.as_ref() == Some(owner));
        owned.map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn relook(&self) -> Arc<Notify> {
        self.relook.clone()
    }

    pub(super) fn add_factory(&self, name: &str, factory: Arc<Factory>) {
        self.factories.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), factory);
    }

    /// The factory of a name, or what there is.
    pub(super) fn factory(&self, name: &str) -> Result<Arc<Factory>, Fault> {
        let factories = self.factories.read().unwrap_or_else(PoisonError::into_inner);
        factories.get(name).cloned().ok_or_else(|| {
            let hint = near::hint(name, factories.keys().map(String::as_str), "; it has registered none");
            Fault::new(FaultKind::NotFound, format!("no factory {name:?} on this node{hint}"))
        })
    }

    /// The door of an endpoint with its own gate behind this node's.
    pub(super) fn door(&self, mesh: &Mesh, gate: Arc<Gate>, run: Arc<Run>) -> Door {
        Door { gate, node: self.gate.clone(), home: mesh.node().clone(), run }
    }

    #[cfg(test)]
    pub(super) fn gate_inside(&self) -> usize {
        self.gate.inside()
    }

    /// Counts messages to remote actors until they have arrived.
    pub(super) fn outgoing(&self) -> &Arc<Gate> {
        &self.outgoing
    }

    /// Refuses what a node that leaves does not begin any more.
    pub(super) fn check_staying(&self) -> Result<(), Fault> {
        if self.leaving.load(Ordering::SeqCst) {
            return Err(Fault::new(FaultKind::Draining, "this node is leaving the cluster"));
        }
        Ok(())
    }

    pub(super) async fn stop(&self, mesh: &Mesh, name: &str, why: StopReason) -> Result<bool, Fault> {
        let supervisor = self.supervisor(mesh).await.map_err(|error| Fault::from(SpawnError::from(error)))?;
        let life = self.actors().get(name).map(|entry| entry.life.clone());
        if let Some(life) = &life {
            life.send_modify(|life| life.why = life.why.or(Some(why)));
        }
        match supervisor.remove(name).await {
            Ok(()) => {
                if let Some(life) = life {
                    // The supervisor answers just before it drops the specification; from then on the name is free.
                    let mut life = life.subscribe();
                    let ended = life.wait_for(|life| life.ended);
                    let _over_either_way = tokio::time::timeout(Duration::from_secs(1), ended).await.is_ok();
                }
                Ok(true)
            }
            Err(SuperviseError::Unknown(_)) => Ok(false),
            Err(error) => Err(SpawnError::from(error).into()),
        }
    }

    /// Takes nothing new from other nodes, tells the cluster so, and waits for what runs: at most `limit`.
    pub(crate) async fn drain(&self, mesh: &Mesh, limit: Duration) {
        self.leaving.store(true, Ordering::SeqCst);
        self.gate.close();
        let serving = |kind, lifecycle| kind == InstanceKind::Service && lifecycle == Lifecycle::Serving;
        let own = mesh.own_record();
        if own.instances.iter().any(|instance| serving(instance.kind, instance.lifecycle)) {
            let told = mesh.publish(|record| {
                let services = record.instances.iter_mut();
                for instance in services.filter(|instance| serving(instance.kind, instance.lifecycle)) {
                    instance.lifecycle = Lifecycle::Draining;
                }
            });
            if let Err(error) = told {
                tracing::debug!(%error, "the drain was not announced; askers are refused one by one");
            }
        }
        let empty = async {
            self.gate.empty().await;
            self.outgoing.empty().await;
        };
        if tokio::time::timeout(limit, empty).await.is_err() {
            let (requests, messages) = (self.gate.inside(), self.outgoing.inside());
            tracing::warn!(requests, messages, ?limit, "left with work of programs under way");
        }
    }

    /// The guard that an actor's specification holds.
    pub(super) fn gone(
        &self,
        mesh: &Mesh,
        name: &str,
        endpoint: &EndpointName,
        life: Arc<watch::Sender<Life>>,
    ) -> Gone {
        Gone {
            name: name.to_owned(),
            endpoint: endpoint.clone(),
            mesh: mesh.downgrade(),
            endpoints: mesh.endpoints().clone(),
            actors: self.actors.clone(),
            leaving: self.leaving.clone(),
            relook: self.relook.clone(),
            life,
        }
    }
}

/// Dropped when the supervisor has given an actor up for good: the last thing that held its specification is gone.
pub(super) struct Gone {
    name: String,
    endpoint: EndpointName,
    mesh: WeakMesh,
    endpoints: Endpoints,
    actors: Book,
    leaving: Arc<AtomicBool>,
    relook: Arc<Notify>,
    life: Arc<watch::Sender<Life>>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        self.endpoints.remove(&self.endpoint);
        if let Some(mesh) = self.mesh.upgrade() {
            super::group::forget_actor(&mesh, &self.endpoint);
        }
        lock(&self.actors).remove(&self.name);
        let leaving = self.leaving.load(Ordering::SeqCst);
        self.life.send_modify(|life| {
            let by_itself = if life.failed { StopReason::Failed } else { StopReason::Finished };
            life.why = life.why.or(Some(if leaving { StopReason::Leaving } else { by_itself }));
            life.running = false;
            life.ended = true;
        });
        self.relook.notify_one();
    }
}

fn lock(actors: &Mutex<BTreeMap<String, Entry>>) -> MutexGuard<'_, BTreeMap<String, Entry>> {
    actors.lock().unwrap_or_else(PoisonError::into_inner)
}
