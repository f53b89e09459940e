//! The handle of a node: what the rest of the product and other people's programs hold.
//!
//! Assembles the actor tree of this crate and offers its doors: endpoints, streams, the directory, control
//! operations. Called by roles, the gateway and the command line. Never: knows what a stream carries.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_ids::{EndpointName, Incarnation, NodeId};
use thiserror::Error;

use crate::{
    config::{ClusterConfig, ConfigError},
    stream::{Context, Endpoints, Opened, StreamError, local},
    supervise::{ActorBook, Handle, Policy, Restart, SuperviseError, SupervisorHandle, TaskOwner, Tasks, child},
    wire::limits,
};

/// Why a node did not start.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// A setting cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An actor did not start.
    #[error(transparent)]
    Actor(#[from] SuperviseError),
}

/// A running node. Cheap to clone.
#[derive(Clone)]
pub struct Mesh {
    inner: Arc<Inner>,
}

struct Inner {
    node: NodeId,
    incarnation: Incarnation,
    address: SocketAddr,
    endpoints: Endpoints,
    book: ActorBook,
    root: SupervisorHandle,
    handlers: Tasks,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mesh({}, {})", self.inner.node, self.inner.incarnation)
    }
}

impl Mesh {
    /// Starts a node.
    pub async fn start(config: ClusterConfig) -> Result<Self, ClusterError> {
        config.validate()?;
        let book = ActorBook::default();
        let root = SupervisorHandle::root(book.clone(), Policy::default()).await?;
        let handlers = Self::start_handlers(&root).await?;
        let inner = Inner {
            node: config.name,
            incarnation: Incarnation(1),
            address: config.advertise.unwrap_or(config.bind),
            endpoints: Endpoints::default(),
            book,
            root,
            handlers,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    async fn start_handlers(root: &SupervisorHandle) -> Result<Tasks, ClusterError> {
        let tasks = Tasks::closed(limits::HANDLERS_MAX);
        let (handle, for_actor) = (Handle::new(), tasks.clone());
        let make = move || (Handlers, for_actor.clone());
        root.add(child("handlers", "handlers", Restart::Permanent, &handle, make)).await?;
        Ok(tasks)
    }

    /// This node's name.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.inner.node
    }

    /// This process's life of it.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.inner.incarnation
    }

    /// What others dial.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.inner.address
    }

    /// What this node answers to.
    #[must_use]
    pub fn endpoints(&self) -> &Endpoints {
        &self.inner.endpoints
    }

    /// The root of the actor tree, to add roles to.
    #[must_use]
    pub fn supervisor(&self) -> &SupervisorHandle {
        &self.inner.root
    }

    /// All actors of this node.
    #[must_use]
    pub fn book(&self) -> &ActorBook {
        &self.inner.book
    }

    /// Opens a stream to an endpoint of a node in one incarnation: accepted with a reply, or the reason why not.
    pub async fn open(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        endpoint: &EndpointName,
        context: Context,
        body: Bytes,
    ) -> Result<Opened, StreamError> {
        if body.len() > limits::FRAME_PAYLOAD_MAX {
            return Err(StreamError::TooLarge { len: body.len(), limit: limits::FRAME_PAYLOAD_MAX });
        }
        if *node == self.inner.node {
            let current = self.inner.incarnation;
            if incarnation != current {
                return Err(StreamError::Stale { node: node.clone(), wanted: incarnation, current });
            }
            return local::open(&self.inner.endpoints, &self.inner.handlers, node, (endpoint, context, body)).await;
        }
        Err(StreamError::UnknownNode(node.clone()))
    }

    /// Ends every actor and task of this node, from the leaves up.
    pub async fn leave(&self) {
        if let Err(error) = self.inner.root.stop_all().await {
            tracing::warn!(%error, "the actor tree did not stop in order");
        }
    }
}

/// Owns the tasks in which stream handlers run. If it dies, they end and their streams break.
struct Handlers;

struct HandlersMsg;

impl ractor::Message for HandlersMsg {}

impl Actor for Handlers {
    type Msg = HandlersMsg;
    type State = TaskOwner;
    type Arguments = Tasks;

    async fn pre_start(&self, _myself: ActorRef<HandlersMsg>, tasks: Tasks) -> Result<TaskOwner, ActorProcessingErr> {
        Ok(TaskOwner::open(&tasks))
    }
}
