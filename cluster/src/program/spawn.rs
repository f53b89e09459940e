//! Actors of programs on this node: started by name, here or by another node through a registered factory.
//!
//! Called through [`Mesh`] and by the control operations `program/spawn` and `program/stop`. All of them are children
//! of the supervisor `programs`, which never gives up: an actor that fails over and over is slowed by its backoff and
//! takes no other with it. Bounds: [`ACTORS_MAX`] actors.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_bytes::ByteBuf;
use starling_ids::{EndpointName, NameError};
use thiserror::Error;
use tokio::sync::{OnceCell, watch};

use super::{
    actor::{Actor, ActorHandle, Host, Mailbox, Make},
    codec::{decode_request, encode_reply},
    gate::Gate,
    handlers::{self, Door},
    monitor::{self, Life},
};
use crate::{
    mesh::{Mesh, WeakMesh},
    stream::{Endpoints, Fault, FaultKind},
    supervise::{Policy, Restart, SuperviseError, SupervisorHandle, child},
};

/// Starts an actor on the node asked.
pub(super) const OP_SPAWN: &str = "program/spawn";
/// Stops one.
pub(super) const OP_STOP: &str = "program/stop";
/// Actors of programs on one node.
const ACTORS_MAX: usize = 16_384;
/// Requests of other nodes that one actor is asked at a time; they wait in its mailbox.
const ASKERS_MAX: usize = 1_024;

/// Why an actor was not started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpawnError {
    /// The name cannot be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The supervisor said no: the name is taken, or the start failed.
    #[error(transparent)]
    Supervise(#[from] SuperviseError),
    /// Too many.
    #[error("{ACTORS_MAX} actors of programs run on this node already")]
    Full,
    /// The other node said no, or could not be asked.
    #[error(transparent)]
    Refused(#[from] Fault),
}

impl From<SpawnError> for Fault {
    fn from(error: SpawnError) -> Self {
        let kind = match &error {
            SpawnError::Refused(fault) => return fault.clone(),
            SpawnError::Name(_) | SpawnError::Supervise(SuperviseError::Duplicate(_)) => FaultKind::Invalid,
            SpawnError::Full => FaultKind::Overloaded,
            SpawnError::Supervise(SuperviseError::Unavailable(_)) => FaultKind::Unavailable,
            SpawnError::Supervise(_) => FaultKind::Internal,
        };
        Fault::new(kind, error.to_string())
    }
}

/// What another node asks for. The id makes a repeated question start one actor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SpawnRequest {
    pub(super) factory: String,
    pub(super) name: String,
    pub(super) id: u64,
    pub(super) restart: Again,
    pub(super) args: ByteBuf,
}

/// [`Restart`] as it crosses the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Again {
    Permanent,
    Transient,
    Temporary,
}

type Factory = dyn Fn(Mesh, SpawnRequest) -> BoxFuture<'static, Result<(), Fault>> + Send + Sync;

struct Entry {
    id: u64,
    life: watch::Receiver<Life>,
}

/// What a node knows about its programs' actors.
pub(crate) struct Programs {
    supervisor: OnceCell<SupervisorHandle>,
    factories: RwLock<BTreeMap<String, Arc<Factory>>>,
    actors: Arc<Mutex<BTreeMap<String, Entry>>>,
    installed: std::sync::Once,
}

impl Default for Programs {
    fn default() -> Self {
        let (factories, actors) = (RwLock::default(), Arc::default());
        Self { supervisor: OnceCell::new(), factories, actors, installed: std::sync::Once::new() }
    }
}

impl Programs {
    async fn supervisor(&self, mesh: &Mesh) -> Result<&SupervisorHandle, SuperviseError> {
        // Crash loops are slowed by backoff; they never end the supervisor and with it everybody else's actors.
        let policy = Policy { failures_max: usize::MAX, window: Duration::ZERO, ..Policy::default() };
        self.supervisor.get_or_try_init(|| mesh.supervisor().child_supervisor("programs", policy)).await
    }

    fn actors(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.actors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn factory(&self, name: &str) -> Option<Arc<Factory>> {
        self.factories.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    pub(super) fn life(&self, name: &str) -> Option<watch::Receiver<Life>> {
        self.actors().get(name).map(|entry| entry.life.clone())
    }

    pub(super) async fn stop(&self, mesh: &Mesh, name: &str) -> Result<bool, Fault> {
        let supervisor = self.supervisor(mesh).await.map_err(|error| Fault::from(SpawnError::from(error)))?;
        let life = self.life(name);
        match supervisor.remove(name).await {
            Ok(()) => {
                if let Some(mut life) = life {
                    // The supervisor answers just before it drops the specification; from then on the name is free.
                    let ended = life.wait_for(|life| life.ended);
                    let _over_either_way = tokio::time::timeout(Duration::from_secs(1), ended).await.is_ok();
                }
                Ok(true)
            }
            Err(SuperviseError::Unknown(_)) => Ok(false),
            Err(error) => Err(SpawnError::from(error).into()),
        }
    }

    /// Serves what other nodes ask for, once.
    fn install(&self, mesh: &Mesh) {
        self.installed.call_once(|| {
            let weak = mesh.downgrade();
            mesh.serve_op(OP_SPAWN, Arc::new(move |_from, body| answer_spawn(weak.clone(), body).boxed()));
            let weak = mesh.downgrade();
            mesh.serve_op(OP_STOP, Arc::new(move |_from, body| answer_stop(weak.clone(), body).boxed()));
            monitor::serve(mesh);
        });
    }
}

/// Where an actor is asked by other nodes.
pub(super) fn endpoint_of(name: &str) -> Result<EndpointName, NameError> {
    EndpointName::new(&format!("starling/program/{name}"))
}

/// Dropped when the supervisor has given an actor up for good: the last thing that held its specification is gone.
struct Gone {
    name: String,
    endpoint: EndpointName,
    endpoints: Endpoints,
    actors: Arc<Mutex<BTreeMap<String, Entry>>>,
    life: Arc<watch::Sender<Life>>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        self.endpoints.remove(&self.endpoint);
        self.actors.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
        self.life.send_modify(|life| {
            life.running = false;
            life.ended = true;
        });
    }
}

impl Mesh {
    /// Starts an actor under `programs/NAME`; `make` builds it for each of its lives. The name is 1 to 48 of
    /// `a-z 0-9 . _ -`, unique on this node. Other nodes reach it with [`Mesh::actor_on`].
    pub async fn spawn<A: Actor>(
        &self,
        name: &str,
        restart: Restart,
        make: impl Fn() -> A + Send + Sync + 'static,
    ) -> Result<ActorHandle<A>, SpawnError> {
        spawn_named(self, name, (restart, rand::random()), Arc::new(move || Ok(make()))).await
    }

    /// Lets other nodes start actors here by the name of a factory and arguments. `make` builds the actor for each of
    /// its lives; a fault is told to who asked. A factory of the same name is replaced.
    pub fn register_factory<Args, A>(&self, name: &str, make: impl Fn(Args) -> Result<A, Fault> + Send + Sync + 'static)
    where
        Args: DeserializeOwned + Send + 'static,
        A: Actor,
    {
        let make = Arc::new(make);
        let factory = move |mesh: Mesh, request: SpawnRequest| {
            let make = make.clone();
            async move {
                let restart = match request.restart {
                    Again::Permanent => Restart::Permanent,
                    Again::Transient => Restart::Transient,
                    Again::Temporary => Restart::Temporary,
                };
                // Read once here, so that a wrong argument is told as such; and again for each life.
                decode_request::<Args>(&request.args)?;
                let SpawnRequest { name, id, args, .. } = request;
                let begin = move || make(decode_request(&args)?);
                spawn_named(&mesh, &name, (restart, id), Arc::new(begin)).await?;
                Ok(())
            }
            .boxed()
        };
        let programs = self.programs();
        programs.factories.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), Arc::new(factory));
        programs.install(self);
    }
}

async fn spawn_named<A: Actor>(
    mesh: &Mesh,
    name: &str,
    (restart, id): (Restart, u64),
    make: Make<A>,
) -> Result<ActorHandle<A>, SpawnError> {
    let (programs, endpoint) = (mesh.programs(), endpoint_of(name)?);
    programs.install(mesh);
    let supervisor = programs.supervisor(mesh).await?;
    let life = Arc::new(watch::Sender::new(Life::default()));
    let duplicate = || SuperviseError::Duplicate(format!("programs/{name}"));
    {
        let mut actors = programs.actors();
        if actors.contains_key(name) {
            return Err(duplicate().into());
        }
        if actors.len() >= ACTORS_MAX {
            return Err(SpawnError::Full);
        }
        actors.insert(name.to_owned(), Entry { id, life: life.subscribe() });
    }
    let gone = Gone {
        name: name.to_owned(),
        endpoint: endpoint.clone(),
        endpoints: mesh.endpoints().clone(),
        actors: programs.actors.clone(),
        life: life.clone(),
    };
    let mailbox = Mailbox::<A>::new();
    let asked = mailbox.clone();
    let ask = move |request| {
        let asked = asked.clone();
        async move { asked.ask(request).await }
    };
    mesh.endpoints().serve(endpoint, Arc::new(Door { gate: Gate::new(ASKERS_MAX), run: handlers::unary(ask) }));
    // The supervisor tells a failed start in words; the fault itself is kept for whoever asked.
    let refused = Arc::new(Mutex::new(None::<Fault>));
    let noted = refused.clone();
    let make: Make<A> = Arc::new(move || {
        make().inspect_err(|fault| *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault.clone()))
    });
    let begin = move || {
        let _kept_with_the_specification = &gone;
        (Host::<A>::new(), (make.clone(), life.clone()))
    };
    if let Err(error) = supervisor.add(child(name, "program", restart, mailbox.handle(), begin)).await {
        let refused = refused.lock().unwrap_or_else(PoisonError::into_inner).take();
        return Err(refused.map_or_else(|| error.into(), SpawnError::Refused));
    }
    Ok(ActorHandle::new(mesh, name.to_owned(), mailbox))
}

fn no_node() -> Fault {
    Fault::new(FaultKind::Unavailable, "the node has ended")
}

async fn answer_spawn(mesh: WeakMesh, body: Bytes) -> Result<Bytes, Fault> {
    let request: SpawnRequest = decode_request(&body)?;
    let mesh = mesh.upgrade().ok_or_else(no_node)?;
    let programs = mesh.programs();
    let known = programs.actors().get(&request.name).map(|entry| entry.id);
    if known != Some(request.id) {
        let Some(factory) = programs.factory(&request.factory) else {
            return Err(Fault::new(FaultKind::NotFound, format!("no factory {:?} on this node", request.factory)));
        };
        factory(mesh.clone(), request).await?;
    }
    encode_reply(&mesh.incarnation())
}

async fn answer_stop(mesh: WeakMesh, body: Bytes) -> Result<Bytes, Fault> {
    let name: String = decode_request(&body)?;
    let mesh = mesh.upgrade().ok_or_else(no_node)?;
    encode_reply(&mesh.programs().stop(&mesh, &name).await?)
}
