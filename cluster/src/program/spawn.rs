//! Actors of programs on this node: started by name, here or by another node through a registered factory.
//!
//! Called through [`Mesh`] and by the control operations `program/spawn` and `program/stop`. Bounds: [`ACTORS_MAX`]
//! actors, [`ASKERS_MAX`] requests of other nodes at one of them.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_bytes::ByteBuf;
use starling_ids::{EndpointName, NameError, NodeId};
use thiserror::Error;
use tokio::sync::watch;

use super::{
    actor::{Actor, ActorHandle, Begin, Host, Mailbox, Make},
    codec::{decode_request, encode_reply},
    gate::Gate,
    handlers::{self, Asked, Run},
    monitor::{self, Life, StopReason},
    owners::Owner,
    programs::{Entry, Programs},
    told,
};
use crate::{
    mesh::{Mesh, WeakMesh},
    stream::{Fault, FaultKind},
    supervise::{Restart, SuperviseError, child},
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
    /// Who it ends with; none for a detached one.
    #[serde(default)]
    pub(super) owner: Option<Owner>,
}

/// [`Restart`] as it crosses the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Again {
    Permanent,
    Transient,
    Temporary,
}

impl From<Again> for Restart {
    fn from(again: Again) -> Self {
        match again {
            Again::Permanent => Self::Permanent,
            Again::Transient => Self::Transient,
            Again::Temporary => Self::Temporary,
        }
    }
}

impl From<Restart> for Again {
    fn from(restart: Restart) -> Self {
        match restart {
            Restart::Permanent => Self::Permanent,
            Restart::Transient => Self::Transient,
            Restart::Temporary => Self::Temporary,
        }
    }
}

/// Serves what other nodes ask for; called once, when the node starts.
pub(crate) fn install(mesh: &Mesh) {
    let weak = mesh.downgrade();
    mesh.serve_op(OP_SPAWN, Arc::new(move |from, body| answer_spawn(weak.clone(), from, body).boxed()));
    let weak = mesh.downgrade();
    mesh.serve_op(OP_STOP, Arc::new(move |_from, body| answer_stop(weak.clone(), body).boxed()));
    monitor::serve(mesh);
}

/// Where an actor is asked by other nodes.
pub(super) fn endpoint_of(name: &str) -> Result<EndpointName, NameError> {
    EndpointName::new(&format!("starling/program/{name}")).map_err(|_| {
        let value = name.chars().take(80).collect();
        NameError { field: "actor name", value, rule: "1 to 48 of a-z 0-9 . _ -, beginning with a letter or digit" }
    })
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
        let birth = Birth { restart, id: rand::random(), owner: None };
        spawn_named(self, name, birth, Arc::new(move || Ok(make()))).await
    }

    /// Lets other nodes start actors here by the name of a factory and arguments. `make` builds the actor for each of
    /// its lives; a fault is told to who asked. A factory of the same name is replaced.
    pub fn register_factory<Args, A>(&self, name: &str, make: impl Fn(Args) -> Result<A, Fault> + Send + Sync + 'static)
    where
        Args: DeserializeOwned + Send + 'static,
        A: Actor,
    {
        let make = Arc::new(make);
        let factory = move |mesh: Mesh, request: SpawnRequest| -> BoxFuture<'static, Result<(), Fault>> {
            let make = make.clone();
            async move {
                let SpawnRequest { name, id, args, restart, owner, .. } = request;
                // Read once here, so that a wrong argument is told as such; and again for each life.
                decode_request::<Args>(&args)?;
                let begin = move || make(decode_request(&args)?);
                let birth = Birth { restart: restart.into(), id, owner };
                spawn_named(&mesh, &name, birth, Arc::new(begin)).await?;
                Ok(())
            }
            .boxed()
        };
        self.programs().add_factory(name, Arc::new(factory));
    }
}

/// How an actor comes into the world.
struct Birth {
    restart: Restart,
    id: u64,
    owner: Option<Owner>,
}

async fn spawn_named<A: Actor>(
    mesh: &Mesh,
    name: &str,
    birth: Birth,
    make: Make<A>,
) -> Result<ActorHandle<A>, SpawnError> {
    let (programs, endpoint) = (mesh.programs(), endpoint_of(name)?);
    programs.check_staying()?;
    let supervisor = programs.supervisor(mesh).await?;
    let Birth { restart, id, owner } = birth;
    let (linked, life) = (owner.is_some(), Arc::new(watch::Sender::new(Life::default())));
    let mailbox = Mailbox::<A>::new();
    if let Some(owner) = &owner {
        mailbox.handle().stats().set_owner(&owner.to_string());
    }
    enter(programs, name, Entry { id, life: life.clone(), owner })?;
    let gone = programs.gone(mesh, name, &endpoint, life.clone());
    let door = programs.door(mesh, Gate::new(ASKERS_MAX), run(&mailbox, &life));
    mesh.endpoints().serve(endpoint, Arc::new(door));
    // The supervisor tells a failed start in words; the fault itself is kept for whoever asked.
    let refused = Arc::new(Mutex::new(None::<Fault>));
    let noted = refused.clone();
    let make: Make<A> = Arc::new(move || {
        make().inspect_err(|fault| *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault.clone()))
    });
    let (node, actor): (NodeId, Arc<str>) = (mesh.node().clone(), name.into());
    // Told when it can be asked: whoever hears of a new life and asks it at once is answered.
    let lives = life.clone();
    let reachable = move || {
        lives.send_modify(|life| {
            life.starts += 1;
            // It may have failed at its first request already.
            life.running = life.over < life.begun;
        });
    };
    let begin = move || {
        let _kept_with_the_specification = &gone;
        let begin = Begin { make: make.clone(), life: life.clone(), node: node.clone(), name: actor.clone() };
        (Host::<A>::new(), begin)
    };
    let spec = child(name, "program", restart, mailbox.handle(), begin).then(reachable);
    if let Err(error) = supervisor.add(spec).await {
        let refused = refused.lock().unwrap_or_else(PoisonError::into_inner).take();
        return Err(refused.map_or_else(|| error.into(), SpawnError::Refused));
    }
    if linked {
        programs.watch_owners(mesh).await?;
    }
    Ok(ActorHandle::new(mesh, name.to_owned(), mailbox))
}

/// Writes an actor into the book, under a name that is free.
fn enter(programs: &Programs, name: &str, entry: Entry) -> Result<(), SpawnError> {
    let mut actors = programs.actors();
    if actors.contains_key(name) {
        return Err(SuperviseError::Duplicate(format!("programs/{name}")).into());
    }
    if actors.len() >= ACTORS_MAX {
        return Err(SpawnError::Full);
    }
    actors.insert(name.to_owned(), entry);
    Ok(())
}

/// What an actor's endpoint does: one question with a body, or a stream of messages without.
fn run<A: Actor>(mailbox: &Mailbox<A>, life: &Arc<watch::Sender<Life>>) -> Arc<Run> {
    let asked = mailbox.clone();
    let ask = handlers::unary(move |request| {
        let asked = asked.clone();
        async move { asked.ask(request).await }
    });
    let told = told::listen(mailbox.clone(), life.clone());
    Arc::new(move |asked: Asked| if asked.body.is_empty() { told(asked) } else { ask(asked) })
}

fn no_node() -> Fault {
    Fault::new(FaultKind::Unavailable, "the node has ended")
}

async fn answer_spawn(mesh: WeakMesh, from: NodeId, body: Bytes) -> Result<Bytes, Fault> {
    let request: SpawnRequest = decode_request(&body)?;
    let mesh = mesh.upgrade().ok_or_else(no_node)?;
    let programs = mesh.programs();
    let known = programs.actors().get(&request.name).map(|entry| entry.id);
    if known != Some(request.id) {
        if let Some(owner) = &request.owner {
            owner.check(&mesh, &from)?;
        }
        programs.factory(&request.factory)?(mesh.clone(), request).await?;
    }
    encode_reply(&mesh.incarnation())
}

async fn answer_stop(mesh: WeakMesh, body: Bytes) -> Result<Bytes, Fault> {
    let name: String = decode_request(&body)?;
    let mesh = mesh.upgrade().ok_or_else(no_node)?;
    encode_reply(&mesh.programs().stop(&mesh, &name, StopReason::Asked).await?)
}
