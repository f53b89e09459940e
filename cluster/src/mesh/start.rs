//! The order in which a node's actors are made and introduced to one another.
//!
//! Called by [`Mesh::start`] once the port is bound and the name claimed. Never runs twice for one node.

use std::{net::SocketAddr, sync::Arc};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use starling_ids::{EndpointName, Incarnation};
use tokio::net::TcpListener;

use super::{CLUSTER, ClusterError, Inner, Mesh};
use crate::{
    blobs::{BLOB_ENDPOINT, BlobDoor, Shelf},
    config::ClusterConfig,
    discovery::{DirectoryArgs, DirectoryHandle, NodeRecord, directory_child},
    keys::{KeeperArgs, KeyRoller, keeper_child},
    link::{CONTROL_ENDPOINT, ControlEndpoint, LinkLayer, LinkSetup},
    membership::{
        Ask, MembershipArgs, MembershipHandle, Peer, Seeds, Visit, ask_by_session, membership_child, view_watch, visits,
    },
    program::Programs,
    security::{Alpn, Tls},
    session::{Caller, Dial, Ops, SessionStream, SessionsHandle, control_child, sessions_child},
    stream::Endpoints,
    supervise::{ChildSpec, Handle, Restart, SupervisorHandle, TaskOwner, Tasks, child},
    wire::{Hello, Party, limits},
};

/// What a start has found out before it starts actors.
pub(super) struct Start {
    pub(super) config: ClusterConfig,
    pub(super) address: SocketAddr,
    pub(super) incarnation: Incarnation,
    pub(super) tls: Tls,
    pub(super) seeds: Seeds,
    pub(super) root: SupervisorHandle,
}

impl Start {
    pub(super) async fn run(self, listener: TcpListener, gossip: std::net::UdpSocket) -> Result<Mesh, ClusterError> {
        let (ops, endpoints, root) = (Ops::default(), Endpoints::default(), self.root.clone());
        endpoints.serve(EndpointName::new(CONTROL_ENDPOINT)?, Arc::new(ControlEndpoint(ops.clone())));
        let shelf = Shelf::default();
        endpoints.serve(EndpointName::new(BLOB_ENDPOINT)?, Arc::new(BlobDoor(shelf.clone())));
        let directory = DirectoryHandle::new(self.first_record());
        let membership = MembershipHandle::default();
        let sessions = SessionsHandle::new(self.config.name.clone(), self.incarnation, ops.clone(), directory.watch());
        let handlers = start_handlers(&root).await?;
        let setup = self.link_setup(&endpoints, &handlers, (&directory, &membership), &sessions);
        let links = LinkLayer::start(&root, setup).await?;
        // It only guards against mis-wiring: TLS has authenticated both ends before, under keys that may be rolled.
        root.add(sessions_child(&sessions, CLUSTER.to_owned(), self.session_dial())).await?;
        root.add(control_child(&sessions)).await?;
        let view = view_watch();
        let (watch, caller) = (view.subscribe(), sessions.caller());
        let args = DirectoryArgs {
            view: watch.clone(),
            membership: membership.clone(),
            caller: caller.clone(),
            ops: ops.clone(),
        };
        root.add(directory_child(&directory, args)).await?;
        let roller = self.key_roller(&caller, &ops, &directory);
        let keeper = self.keeper(&caller, &directory);
        let args = MembershipArgs {
            node: self.config.name.clone(),
            incarnation: self.incarnation,
            address: self.address,
            socket: Arc::new(gossip),
            keys: self.tls.keys().clone(),
            cluster: CLUSTER.to_owned(),
            seeds: self.seeds.clone(),
            view,
            directory: directory.clone(),
            caller,
            visit: self.visit(&links, &sessions),
            ops,
        };
        root.add(membership_child(&membership, args)).await?;
        root.add(keeper).await?;
        links.listen(&root, Arc::new(listener)).await?;
        let inner = Inner {
            node: self.config.name,
            incarnation: self.incarnation,
            address: self.address,
            endpoints,
            book: root.book().clone(),
            root,
            handlers,
            links,
            sessions,
            directory,
            membership,
            view: watch,
            programs: Programs::default(),
            shelf,
            keys: roller,
        };
        Ok(Mesh { inner: Arc::new(inner) })
    }

    /// How a member that gossip cannot reach is looked for.
    fn visit(&self, links: &LinkLayer, sessions: &SessionsHandle) -> Visit {
        let (links, for_open) = (links.clone(), sessions.clone());
        let by_link: Ask = Arc::new(move |peer, limit| {
            let links = links.clone();
            Box::pin(async move { links.answers(&peer.node, peer.incarnation, limit).await })
        });
        let is_open = Arc::new(move |peer: &Peer| for_open.is_open(&peer.node, peer.incarnation));
        visits(vec![by_link, ask_by_session(sessions.caller(), is_open)], self.tls.clone())
    }

    fn key_roller(&self, caller: &Caller, ops: &Ops, directory: &DirectoryHandle) -> KeyRoller {
        KeyRoller::new(self.config.name.clone(), self.tls.keys().clone(), (caller.clone(), ops), directory.watch())
    }

    fn keeper(&self, caller: &Caller, directory: &DirectoryHandle) -> ChildSpec {
        keeper_child(KeeperArgs {
            node: self.config.name.clone(),
            address: self.address,
            keys: self.tls.keys().clone(),
            seeds: self.seeds.clone(),
            caller: caller.clone(),
            snapshots: directory.watch(),
        })
    }

    fn first_record(&self) -> NodeRecord {
        NodeRecord {
            http: self.config.http,
            roles: self.config.roles.clone(),
            software: self.config.software.clone(),
            labels: self.config.labels.clone(),
            ..NodeRecord::new(self.config.name.clone(), self.incarnation, self.address)
        }
    }

    fn link_setup(
        &self,
        endpoints: &Endpoints,
        handlers: &Tasks,
        (directory, membership): (&DirectoryHandle, &MembershipHandle),
        sessions: &SessionsHandle,
    ) -> LinkSetup {
        let (for_reach, for_sessions, membership) = (directory.clone(), sessions.clone(), membership.clone());
        let tls = self.tls.clone();
        LinkSetup {
            hello: Hello::new(Party::Node, self.config.name.clone(), self.incarnation, self.config.software.clone()),
            tls: self.tls.clone(),
            timings: self.config.timings,
            endpoints: endpoints.clone(),
            handlers: handlers.clone(),
            snapshots: directory.watch(),
            reach: Arc::new(move |node, incarnation, reachable| {
                for_reach.set_reachable(node.clone(), incarnation, reachable);
                if !reachable {
                    membership.doubt(node, incarnation);
                }
            }),
            sessions: Arc::new(move |connection, from| for_sessions.accept(Box::new(tls.fading(connection)), from)),
        }
    }

    fn session_dial(&self) -> Dial {
        let (tls, dial_max) = (self.tls.clone(), self.config.timings.dial_max);
        Arc::new(move |node, address| {
            let tls = tls.clone();
            Box::pin(async move {
                let connection = tls.connect(address, Some(&node), Alpn::Session, dial_max).await;
                let connection = connection.map_err(std::io::Error::other)?;
                Ok(Box::new(tls.fading(connection)) as SessionStream)
            })
        })
    }
}

async fn start_handlers(root: &SupervisorHandle) -> Result<Tasks, ClusterError> {
    let tasks = Tasks::closed(limits::HANDLERS_MAX);
    let (handle, for_actor) = (Handle::new(), tasks.clone());
    let make = move || (Handlers, for_actor.clone());
    root.add(child("handlers", "handlers", Restart::Permanent, &handle, make)).await?;
    Ok(tasks)
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
