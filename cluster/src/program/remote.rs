//! Actors on other nodes: start them by a factory's name, ask and tell them, follow them, stop them.
//!
//! Called by programs. Starting and stopping are control operations; requests are streams to the actor's own
//! endpoint, in the incarnation that it was started in. Bounds: a deadline on each; one outbox a handle.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use serde::Serialize;
use serde_bytes::ByteBuf;
use starling_ids::{Incarnation, NodeId};
use tokio::time::Instant;

use super::{
    actor::Actor,
    client::Client,
    codec::{decode_request, encode_reply},
    error::CallError,
    instances::InstanceId,
    monitor::Monitor,
    owners::Owner,
    spawn::{OP_SPAWN, OP_STOP, SpawnError, SpawnRequest, endpoint_of},
    told::{Outbox, TellError},
    tries::Shared,
};
use crate::{
    mesh::Mesh,
    stream::{Fault, FaultKind},
    supervise::Restart,
};

/// With whom an actor that was started from elsewhere ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// With its owner: the actor in whose code it was started, in that life of it, or else the program's node. It is
    /// stopped when the owner ends or its node is declared down, also by a split of the network; a broken link alone
    /// does nothing. Until then its restart policy holds.
    #[default]
    Linked,
    /// With nobody: until it is stopped, or its own node ends.
    Detached,
}

/// How an actor is started on another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpawnOptions {
    /// Its name there; the factory's name and a random number unless set.
    pub name: Option<String>,
    /// When its supervisor there starts it again.
    pub restart: Restart,
    /// With whom it ends.
    pub lifetime: Lifetime,
    /// Longest wait for the other node.
    pub limit: Duration,
}

impl Default for SpawnOptions {
    fn default() -> Self {
        let limit = Duration::from_secs(10);
        Self { name: None, restart: Restart::Permanent, lifetime: Lifetime::Linked, limit }
    }
}

/// An actor on some node, in one life of that node. Cheap to clone. Dropping it stops nothing.
pub struct RemoteActor<A: Actor> {
    mesh: Mesh,
    name: String,
    id: InstanceId,
    client: Client<A::Request, A::Reply>,
    outbox: Arc<Outbox>,
    _of: PhantomData<fn() -> A>,
}

impl<A: Actor> Clone for RemoteActor<A> {
    fn clone(&self) -> Self {
        Self {
            mesh: self.mesh.clone(),
            name: self.name.clone(),
            id: self.id.clone(),
            client: self.client.clone(),
            outbox: self.outbox.clone(),
            _of: PhantomData,
        }
    }
}

impl<A: Actor> std::fmt::Debug for RemoteActor<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteActor({}@{})", self.name, self.id.node)
    }
}

impl Mesh {
    /// Starts an actor on a node (also on this one) with a factory that it has registered. Resolves when the actor
    /// runs there. It ends with whoever starts it ([`Lifetime::Linked`]).
    pub async fn spawn_on<A: Actor>(
        &self,
        node: &NodeId,
        factory: &str,
        args: &(impl Serialize + Sync),
    ) -> Result<RemoteActor<A>, SpawnError> {
        self.spawn_on_with(node, factory, args, SpawnOptions::default()).await
    }

    /// The same with a name, a restart policy, a lifetime and a limit of the caller's.
    pub async fn spawn_on_with<A: Actor>(
        &self,
        node: &NodeId,
        factory: &str,
        args: &(impl Serialize + Sync),
        options: SpawnOptions,
    ) -> Result<RemoteActor<A>, SpawnError> {
        let id: u64 = rand::random();
        let name = options.name.unwrap_or_else(|| format!("{factory}-{:08x}", id >> 32));
        endpoint_of(&name)?;
        let owner = Owner::current(self);
        // An actor that this node starts on itself ends with the node anyway.
        let linked = options.lifetime == Lifetime::Linked && (owner.actor.is_some() || node != self.node());
        let request = encode_reply(&SpawnRequest {
            factory: factory.to_owned(),
            name: name.clone(),
            id,
            restart: options.restart.into(),
            args: ByteBuf::from(Vec::from(encode_reply(args)?)),
            owner: linked.then_some(owner),
        })?;
        let deadline = Instant::now() + options.limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.call(node, OP_SPAWN, request.clone(), left).await {
                Ok(reply) => return Ok(RemoteActor::at(self, node, decode_request(&reply)?, name)?),
                // The question may have been acted on; the same id asked again starts no second actor.
                Err(fault) if fault.kind == FaultKind::Unavailable && Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(fault) => return Err(fault.into()),
            }
        }
    }

    /// Waits until a node is a member. `NotFound` when it is none within `limit`.
    pub async fn wait_for_node(&self, node: &NodeId, limit: Duration) -> Result<(), Fault> {
        let mut snapshots = self.watch();
        let seen = tokio::time::timeout(limit, snapshots.wait_for(|snapshot| snapshot.node(node).is_some())).await;
        match seen {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Fault::new(FaultKind::NotFound, format!("node {node} is not a member"))),
        }
    }

    /// The actor that runs, or will run, under `name` on a node in its present life. `NotFound` when the node is not a
    /// member. Whether there is such an actor shows when it is asked.
    pub fn actor_on<A: Actor>(&self, node: &NodeId, name: &str) -> Result<RemoteActor<A>, SpawnError> {
        let incarnation = if node == self.node() {
            Some(self.incarnation())
        } else {
            self.snapshot().node(node).map(|view| view.record.incarnation)
        };
        let unknown = || Fault::new(FaultKind::NotFound, format!("node {node} is not a member"));
        Ok(RemoteActor::at(self, node, incarnation.ok_or_else(unknown)?, name.to_owned())?)
    }
}

impl<A: Actor> RemoteActor<A> {
    fn at(mesh: &Mesh, node: &NodeId, incarnation: Incarnation, name: String) -> Result<Self, starling_ids::NameError> {
        let endpoint = endpoint_of(&name)?;
        let id = InstanceId { endpoint: endpoint.clone(), node: node.clone(), incarnation };
        let client = Client::new(mesh, endpoint, Shared::new()).direct(&id);
        let outbox = Outbox::new(id.clone(), name.clone());
        Ok(Self { mesh: mesh.clone(), name, id, client, outbox, _of: PhantomData })
    }

    /// Its name on its node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it runs.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.id.node
    }

    /// Asks and waits for the answer, at most 30 s.
    pub async fn ask(&self, request: &A::Request) -> Result<A::Reply, CallError> {
        self.client.unary(request).await
    }

    /// Sends a request whose answer nobody waits for. `Ok` says that it is in this handle's outbox, which is bounded:
    /// [`TellError::Full`] says that the actor is slower than its senders. What is told through one handle and its
    /// clones arrives in order, and at most once: what a broken link, the actor's death or its node's takes along is
    /// lost and counted. A message that finds the actor being restarted waits for it.
    pub fn tell(&self, request: &A::Request) -> Result<(), TellError> {
        self.outbox.put(&self.mesh, request)
    }

    /// A client of this actor alone, to set a deadline say.
    #[must_use]
    pub fn client(&self) -> Client<A::Request, A::Reply> {
        self.client.clone()
    }

    /// Follows its life, and that of its node.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        Monitor::new(&self.mesh, self.id.node.clone(), self.id.incarnation, self.name.clone())
    }

    /// Stops it in order. False when it had been stopped before, or its node has been restarted since.
    pub async fn stop(&self) -> Result<bool, Fault> {
        let known = self.mesh.snapshot().node(&self.id.node).map(|view| view.record.incarnation);
        if known.is_some_and(|current| current > self.id.incarnation) {
            return Ok(false);
        }
        let reply = self.mesh.call(&self.id.node, OP_STOP, encode_reply(&self.name)?, Duration::from_secs(20)).await?;
        decode_request(&reply)
    }
}
