//! A node with links but without gossip: the test is its directory.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::{EndpointName, Incarnation, NodeId, RequestId};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};

use super::super::*;
use crate::{
    config::Timings,
    discovery::{NodeRecord, NodeState, NodeView, Snapshot},
    security::{ClusterKey, Tls},
    session::Ops,
    stream::{
        Acceptor, Context, Endpoints, Fault, FaultKind, Incoming, Opened, StreamError, StreamHandler, StreamRx,
        StreamTx,
    },
    supervise::{ActorBook, Policy, SupervisorHandle, TaskOwner, Tasks},
    wire::{Hello, OpenHead, Party},
};

pub(super) type Halves = (StreamTx, StreamRx);
pub(super) type ReachLog = Arc<Mutex<Vec<(NodeId, bool)>>>;

/// Accepts with the body and hands its halves to the test.
pub(super) struct HandOver(mpsc::UnboundedSender<Halves>);

impl StreamHandler for HandOver {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let hand_over = self.0.clone();
        Box::pin(async move {
            if let Some(halves) = incoming.acceptor.accept(incoming.body) {
                hand_over.send(halves).ok();
            }
        })
    }
}

pub(super) struct Refuse;

impl StreamHandler for Refuse {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move { incoming.acceptor.reject(Fault::new(FaultKind::Overloaded, "full").retry_after_ms(5)) })
    }
}

pub(super) struct PanicOnOpen;

impl StreamHandler for PanicOnOpen {
    fn open(&self, _incoming: Incoming) -> BoxFuture<'static, ()> {
        panic!("asked to")
    }
}

/// Waits for ever with the question in its hands.
pub(super) struct Sit(mpsc::UnboundedSender<Acceptor>);

impl StreamHandler for Sit {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let hand_over = self.0.clone();
        Box::pin(async move {
            hand_over.send(incoming.acceptor).ok();
        })
    }
}

pub(super) struct Node {
    pub(super) name: NodeId,
    pub(super) incarnation: Incarnation,
    pub(super) address: SocketAddr,
    pub(super) root: SupervisorHandle,
    pub(super) layer: LinkLayer,
    pub(super) handlers: Tasks,
    pub(super) _owner: TaskOwner,
    pub(super) snapshots: watch::Sender<Arc<Snapshot>>,
    pub(super) reached: ReachLog,
    pub(super) far: mpsc::UnboundedReceiver<Halves>,
    pub(super) asked: mpsc::UnboundedReceiver<Acceptor>,
}

pub(super) fn id(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

pub(super) fn endpoint(text: &str) -> EndpointName {
    EndpointName::new(text).unwrap()
}

pub(super) async fn node(key: &ClusterKey, name: &str, timings: Timings) -> Node {
    let (name, incarnation) = (id(name), Incarnation(1));
    let tls = Tls::new(key, &name).unwrap();
    let socket = Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
    let address = socket.local_addr().unwrap();
    let root = SupervisorHandle::root(ActorBook::default(), Policy::default()).await.unwrap();
    let (snapshots, watched) = watch::channel(Arc::default());
    let (endpoints, handlers, ops) = (Endpoints::default(), Tasks::closed(1000), Ops::default());
    let owner = TaskOwner::open(&handlers);
    let ((halves, far), (acceptors, asked)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    endpoints.serve(endpoint("t/t/yes"), Arc::new(HandOver(halves)));
    endpoints.serve(endpoint("t/t/no"), Arc::new(Refuse));
    endpoints.serve(endpoint("t/t/panic"), Arc::new(PanicOnOpen));
    endpoints.serve(endpoint("t/t/sit"), Arc::new(Sit(acceptors)));
    ops.serve(
        "test/echo",
        Arc::new(|from, body| {
            Box::pin(async move {
                if body.is_empty() {
                    Err(Fault::new(FaultKind::Invalid, format!("nothing from {from}")))
                } else {
                    Ok(body)
                }
            })
        }),
    );
    endpoints.serve(endpoint(CONTROL_ENDPOINT), Arc::new(ControlEndpoint(ops)));
    let reached = ReachLog::default();
    let log = reached.clone();
    let setup = LinkSetup {
        hello: Hello::new(Party::Node, name.clone(), incarnation, "test".into()),
        tls,
        timings,
        endpoints,
        handlers: handlers.clone(),
        snapshots: watched,
        reach: Arc::new(move |node, _, reachable| log.lock().unwrap().push((node.clone(), reachable))),
        sessions: Arc::new(|_, _| {}),
    };
    let layer = LinkLayer::start(&root, setup).await.unwrap();
    layer.listen(&root, socket).await.unwrap();
    Node { name, incarnation, address, root, layer, handlers, _owner: owner, snapshots, reached, far, asked }
}

pub(super) fn view(name: &NodeId, incarnation: Incarnation, address: SocketAddr) -> NodeView {
    let record = NodeRecord { version: 1, ..NodeRecord::new(name.clone(), incarnation, address) };
    NodeView { record: Arc::new(record), state: NodeState::Alive }
}

impl Node {
    pub(super) fn knows(&self, others: &[(&NodeId, Incarnation, SocketAddr)]) {
        let nodes: BTreeMap<_, _> = others.iter().map(|(n, i, a)| ((*n).clone(), view(n, *i, *a))).collect();
        self.snapshots.send_replace(Arc::new(Snapshot { nodes: nodes.into_values().collect() }));
    }

    pub(super) async fn open(&self, to: &Node, at: &str, context: Context, body: Bytes) -> Result<Opened, StreamError> {
        self.layer.open(&to.name, to.incarnation, OpenHead { endpoint: endpoint(at), context }, body).await
    }

    pub(super) async fn stream(&self, to: &mut Node) -> (Opened, Halves) {
        let opened = self.open(to, "t/t/yes", context(), Bytes::from_static(b"hi")).await.unwrap();
        (opened, to.far.recv().await.unwrap())
    }

    pub(super) fn links(&self) -> Vec<String> {
        let rows = self.root.book().snapshot();
        rows.into_iter().filter(|row| row.kind == "link").map(|row| row.path).collect()
    }

    pub(super) fn open_streams(&self, to: &Node) -> usize {
        self.layer.registry().get(&to.name, to.incarnation).map_or(0, |mux| mux.load().0)
    }

    pub(super) async fn stop(self) {
        self.root.stop_all().await.unwrap();
    }
}

pub(super) async fn two(timings: Timings) -> (Node, Node) {
    let key = ClusterKey::generate();
    let (a, b) = (node(&key, "a", timings).await, node(&key, "b", timings).await);
    a.knows(&[(&b.name, b.incarnation, b.address)]);
    b.knows(&[(&a.name, a.incarnation, a.address)]);
    (a, b)
}

pub(super) fn context() -> Context {
    Context::new(RequestId(1), Duration::from_secs(60))
}

pub(super) fn frame(n: u8) -> Bytes {
    Bytes::from(vec![n; 3])
}

pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(super) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), what).await.expect("within 20 s")
}
