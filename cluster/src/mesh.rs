//! The handle of a node: what the rest of the product and other people's programs hold.
//!
//! Assembles the actor tree of this crate and offers its doors: endpoints, streams, the directory, control
//! operations. Called by roles, the gateway and the command line. Never: knows what a stream carries.
//!
//! ```text
//! root ─ handlers ─ links ─ dialler ─ sessions ─ control ─ directory ─ membership ─ keys ─ listener ─ roles …
//! ```
//!
//! Children stop in reverse order, so a node falls silent in gossip while its links still carry what is left.

mod failed;
mod program;
mod start;

#[cfg(test)]
mod tests;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use starling_ids::{EndpointName, Incarnation, Metric, NameError, NodeId};
use thiserror::Error;
use tokio::{net::TcpListener, sync::watch};

pub use self::failed::Failed;
pub(crate) use self::program::WeakMesh;
use self::start::Start;
use crate::{
    blobs::{Blobs, Shelf},
    config::{ClusterConfig, ConfigError},
    discovery::{DirectoryHandle, NodeRecord, PublishError, Snapshot},
    keys::{KeyRoller, catch_up},
    link::LinkLayer,
    membership::{
        AdvertiseError, Claim, ClaimError, MembershipHandle, MembershipView, Seeds, advertise, bind_pair, claim,
    },
    program::{Programs, install},
    security::{KeyError, Keys, Tls, TlsError},
    session::{OpHandler, SessionsHandle},
    stream::{Context, Endpoints, Fault, Opened, StreamError, local},
    supervise::{ActorBook, Policy, SuperviseError, SupervisorHandle, Tasks},
    wire::{OpenHead, limits},
};

/// Gossip of clusters with other names is not authentic here; the key tells clusters apart already.
const CLUSTER: &str = "starling";

/// Longest wait of [`Mesh::leave`] for requests and messages of programs.
pub const LEAVE_MAX: Duration = Duration::from_secs(10);

/// Why a node did not start.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// A setting cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no key, or its file cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The port could not be bound for TCP and UDP.
    #[error("cannot listen on {0} (TCP and UDP): {1}")]
    Bind(SocketAddr, std::io::Error),
    /// No address that others can dial.
    #[error(transparent)]
    Advertise(#[from] AdvertiseError),
    /// The name is taken, or the boot counter could not be raised.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// This process's certificates could not be made.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An actor did not start.
    #[error(transparent)]
    Actor(#[from] SuperviseError),
    /// A fixed name was refused; cannot happen.
    #[error(transparent)]
    Name(#[from] NameError),
}

/// A running node. Cheap to clone. Dropping the last clone leaves it running: call [`Mesh::leave`].
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
    links: LinkLayer,
    sessions: SessionsHandle,
    directory: DirectoryHandle,
    membership: MembershipHandle,
    view: watch::Receiver<Arc<MembershipView>>,
    programs: Programs,
    shelf: Shelf,
    keys: KeyRoller,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mesh({}, {})", self.inner.node, self.inner.incarnation)
    }
}

impl Mesh {
    /// Starts a node: binds its port, claims its name, starts its actors and joins through its seeds.
    ///
    /// Returns as soon as the node answers; other members appear in [`Mesh::watch`] as gossip finds them.
    pub async fn start(config: ClusterConfig) -> Result<Self, ClusterError> {
        config.validate()?;
        let seeds = Seeds::new(&config.seeds).map_err(ConfigError::seeds)?;
        let (listener, gossip) = bind_pair(config.bind).map_err(|error| ClusterError::Bind(config.bind, error))?;
        let bound = listener.local_addr().map_err(|error| ClusterError::Bind(config.bind, error))?;
        let found = seeds.resolve().await;
        let address = advertise(bound, config.advertise, &found)?;
        let keys = Keys::from(&config.keys);
        catch_up(&keys, &found, address).await;
        let incarnation = claim(Claim {
            socket: &gossip,
            keys: &keys,
            cluster: CLUSTER,
            seeds: &found,
            node: &config.name,
            address,
            data_dir: &config.data_dir,
        })
        .await?;
        let listener = TcpListener::from_std(listener).map_err(|error| ClusterError::Bind(bound, error))?;
        let tls = Tls::new(&keys, &config.name)?;
        // Many kinds of actors share this limit; one that fails over and over alone is slowed by its backoff instead.
        let policy = Policy { failures_max: 20, ..Policy::default() };
        let root = SupervisorHandle::root(ActorBook::default(), policy).await?;
        let start = Start { config, address, incarnation, tls, seeds, root: root.clone() };
        let started = start.run(listener, gossip).await;
        match &started {
            Ok(mesh) => install(mesh),
            Err(_) => root.stop_all().await?,
        }
        started
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

    /// Rolls the cluster's keys.
    #[must_use]
    pub fn keys(&self) -> &KeyRoller {
        &self.inner.keys
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

    /// Every member as of now, this node included.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.inner.directory.snapshot()
    }

    /// Follows the members.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.inner.directory.watch()
    }

    /// Changes this node's record; its version rises and the cluster is told.
    ///
    /// Fails, without a change, when the record would be larger than one session message, or an instance would take a step
    /// that no life has.
    pub fn publish(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<(), PublishError> {
        self.inner.directory.publish(change)
    }

    /// Opens a stream to an endpoint of a node in one incarnation: accepted with a reply, or the reason why not.
    ///
    /// Local streams are channels; others go over the link to the node, which is dialled if there is none.
    #[allow(clippy::too_many_arguments)] // an address has three parts; a struct would only be built to be taken apart
    pub async fn open(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        endpoint: &EndpointName,
        context: Context,
        body: Bytes,
    ) -> Result<Opened, StreamError> {
        let opened = self.try_open((node, incarnation), endpoint, context, body).await;
        if let Err(error) = &opened {
            error.count();
        }
        opened
    }

    async fn try_open(
        &self,
        (node, incarnation): (&NodeId, Incarnation),
        endpoint: &EndpointName,
        context: Context,
        body: Bytes,
    ) -> Result<Opened, StreamError> {
        if body.len() > limits::FRAME_PAYLOAD_MAX {
            return Err(StreamError::TooLarge { len: body.len(), limit: limits::FRAME_PAYLOAD_MAX });
        }
        let inner = &self.inner;
        let local = *node == inner.node;
        let current = if local { Some(inner.incarnation) } else { self.known_incarnation(node) };
        match current {
            Some(current) if incarnation < current || (local && incarnation != current) => {
                metrics::counter!(Metric::StaleRefused.name(), "what" => "stream").increment(1);
                Err(StreamError::Stale { node: node.clone(), wanted: incarnation, current })
            }
            Some(_) if local => local::open(&inner.endpoints, &inner.handlers, node, (endpoint, context, body)).await,
            Some(_) => {
                inner.links.open(node, incarnation, OpenHead { endpoint: endpoint.clone(), context }, body).await
            }
            None => Err(self.not_a_member(node)),
        }
    }

    /// Down lately, or never heard of.
    fn not_a_member(&self, node: &NodeId) -> StreamError {
        let node = node.clone();
        match self.inner.directory.down_for(&node) {
            Some(since) => StreamError::Down { node, since_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) },
            None => StreamError::UnknownNode(node),
        }
    }

    fn known_incarnation(&self, node: &NodeId) -> Option<Incarnation> {
        self.snapshot().node(node).map(|view| view.record.incarnation)
    }

    /// The address of another living process that last claimed this node's name, and lost to it.
    #[must_use]
    pub fn rival(&self) -> Option<SocketAddr> {
        self.inner.view.borrow().rival.as_ref().map(|rival| rival.address())
    }

    /// Content-addressed bytes that nodes hand to one another.
    #[must_use]
    pub fn blobs(&self) -> Blobs {
        Blobs::new(self.clone(), self.inner.shelf.clone())
    }

    /// Asks a control operation of a node (also of this one) over an actor session.
    pub async fn call(&self, node: &NodeId, op: &str, body: Bytes, limit: Duration) -> Result<Bytes, Fault> {
        self.inner.sessions.call(node, op, body, limit).await
    }

    /// Answers a control operation, named `subject/verb`, for sessions and for tools alike.
    pub fn serve_op(&self, op: &'static str, handler: OpHandler) {
        self.inner.sessions.ops().serve(op, handler);
    }

    /// Leaves in order: takes no new request of other nodes ([`crate::stream::FaultKind::Draining`], try elsewhere),
    /// waits up to [`LEAVE_MAX`] for what runs in handlers of programs and for messages on their way, says goodbye, and
    /// ends every actor and task of this node from the leaves up. A handler that calls this is itself waited for, up to
    /// the limit.
    pub async fn leave(&self) {
        self.leave_within(LEAVE_MAX).await;
    }

    /// The same with another limit for what runs; with zero nothing is waited for.
    pub async fn leave_within(&self, limit: Duration) {
        self.inner.programs.drain(self, limit).await;
        if let Err(error) = self.inner.membership.leave().await {
            tracing::warn!(%error, "left without a goodbye in gossip");
        }
        if let Err(error) = self.inner.root.stop_all().await {
            tracing::warn!(%error, "the actor tree did not stop in order");
        }
    }
}
