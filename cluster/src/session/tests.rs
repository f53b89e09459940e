//! Sessions between two nodes of one process, over real ractor_cluster sessions on loopback pipes.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use starling_ids::{Incarnation, NodeId};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

use super::*;
use crate::{
    discovery::{NodeRecord, NodeState, NodeView, Snapshot},
    stream::{Fault, FaultKind},
    supervise::{ActorBook, Policy, SupervisorHandle},
};

const WAIT: Duration = Duration::from_secs(10);

struct Node {
    name: NodeId,
    sessions: SessionsHandle,
    ops: Ops,
    book: ActorBook,
    root: SupervisorHandle,
    dials: Arc<Mutex<usize>>,
    _accepting: JoinSet<()>,
}

fn name(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

/// Nodes that know each other, each with its Sessions and Control actors and a plain TCP listener.
async fn nodes(names: &[(&str, u64)]) -> (Vec<Node>, watch::Sender<Arc<Snapshot>>) {
    let (told, snapshots) = watch::channel(Arc::new(Snapshot::default()));
    let (mut nodes, mut records) = (Vec::new(), BTreeMap::new());
    for (text, boot) in names {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        records.insert(name(text), record(text, *boot, address));
        nodes.push(node(text, *boot, listener, snapshots.clone()).await);
    }
    told.send_replace(Arc::new(Snapshot { nodes: records.into_values().collect() }));
    (nodes, told)
}

fn record(text: &str, boot: u64, address: SocketAddr) -> NodeView {
    let record = NodeRecord { version: 1, ..NodeRecord::new(name(text), Incarnation(boot), address) };
    NodeView { record: Arc::new(record), state: NodeState::Alive }
}

async fn node(text: &str, boot: u64, listener: TcpListener, snapshots: watch::Receiver<Arc<Snapshot>>) -> Node {
    let (ops, book) = (Ops::default(), ActorBook::default());
    let root = SupervisorHandle::root(book.clone(), Policy::default()).await.unwrap();
    let sessions = SessionsHandle::new(name(text), Incarnation(boot), ops.clone(), snapshots);
    let dials = Arc::new(Mutex::new(0));
    let counted = dials.clone();
    let dial: Dial = Arc::new(move |_node, address| {
        *counted.lock().unwrap() += 1;
        Box::pin(async move { Ok(Box::new(TcpStream::connect(address).await?) as SessionStream) })
    });
    root.add(sessions_child(&sessions, hex(b"cookie"), dial)).await.unwrap();
    root.add(control_child(&sessions)).await.unwrap();
    let mut accepting = JoinSet::new();
    let taker = sessions.clone();
    accepting.spawn(async move {
        while let Ok((stream, from)) = listener.accept().await {
            taker.accept(Box::new(stream), from);
        }
    });
    Node { name: name(text), sessions, ops, book, root, dials, _accepting: accepting }
}

fn echo(ops: &Ops) {
    ops.serve(
        "test/echo",
        Arc::new(|from, body| {
            let said = [from.as_str().as_bytes(), b": ", &body].concat();
            Box::pin(std::future::ready(Ok(Bytes::from(said))))
        }),
    );
}

async fn ask(from: &Node, to: &Node, op: &str, body: &'static [u8], limit: Duration) -> Result<Bytes, Fault> {
    from.sessions.call(&to.name, op, Bytes::from_static(body), limit).await
}

/// Asks until it works; a session or an actor may be on its way.
async fn ask_until(from: &Node, to: &Node, op: &str) -> Bytes {
    let asking = async {
        loop {
            match ask(from, to, op, b"hi", Duration::from_secs(2)).await {
                Ok(answer) => return answer,
                Err(fault) => assert!(fault.kind.elsewhere() || fault.kind == FaultKind::DeadlineExceeded, "{fault}"),
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(WAIT, asking).await.expect("an answer in time")
}

#[tokio::test]
async fn nodes_ask_each_other_over_one_session() {
    let (nodes, _told) = nodes(&[("sa", 1), ("sb", 4)]).await;
    nodes.iter().for_each(|node| echo(&node.ops));
    let answers = futures::future::join_all((0..20).map(|_| ask(&nodes[0], &nodes[1], "test/echo", b"hi", WAIT))).await;
    assert!(answers.iter().all(|answer| *answer == Ok(Bytes::from_static(b"sa: hi"))), "{answers:?}");
    assert_eq!(*nodes[0].dials.lock().unwrap(), 1, "one dial for all who wait");
    assert_eq!(ask(&nodes[1], &nodes[0], "test/echo", b"yo", WAIT).await, Ok(Bytes::from_static(b"sb: yo")));
    assert_eq!(*nodes[1].dials.lock().unwrap(), 0, "the other way uses the same session");
    assert_eq!(ask(&nodes[0], &nodes[0], "test/echo", b"me", WAIT).await, Ok(Bytes::from_static(b"sa: me")));
}

#[tokio::test]
async fn each_failure_has_its_kind() {
    let (nodes, told) = nodes(&[("fa", 1), ("fb", 1)]).await;
    echo(&nodes[1].ops);
    nodes[1].ops.serve("test/never", Arc::new(|_, _| Box::pin(std::future::pending())));
    nodes[1].ops.serve("test/huge", Arc::new(|_, _| Box::pin(std::future::ready(Ok(vec![0; BODY_MAX + 1].into())))));
    let kind = |outcome: Result<Bytes, Fault>| outcome.expect_err("a fault").kind;
    assert_eq!(kind(ask(&nodes[0], &nodes[1], "test/none", b"", WAIT).await), FaultKind::NotFound);
    assert_eq!(kind(ask(&nodes[0], &nodes[1], "test/huge", b"", WAIT).await), FaultKind::Internal);
    let short = Duration::from_millis(50);
    assert_eq!(kind(ask(&nodes[0], &nodes[1], "test/never", b"", short).await), FaultKind::DeadlineExceeded);
    let long = Bytes::from(vec![0; BODY_MAX + 1]);
    let outcome = nodes[0].sessions.call(&nodes[1].name, "test/echo", long, WAIT).await;
    assert_eq!(kind(outcome), FaultKind::Invalid);
    let full = Bytes::from(vec![7; BODY_MAX - 4]);
    let outcome = nodes[0].sessions.call(&nodes[1].name, "test/echo", full, WAIT).await;
    assert_eq!(outcome.map(|answer| answer.len()), Ok(BODY_MAX), "the limit itself passes");
    assert_eq!(kind(nodes[0].sessions.call(&name("nobody"), "x", Bytes::new(), short).await), FaultKind::NotFound);
    // The snapshot names a life that the other side is not in.
    let snapshot = told.borrow().clone();
    let stale = record("fb", 9, snapshot.node(&name("fb")).unwrap().record.address);
    told.send_replace(Arc::new(Snapshot { nodes: vec![snapshot.nodes[0].clone(), stale] }));
    let outcome = ask(&nodes[0], &nodes[1], "test/echo", b"", Duration::from_millis(500)).await;
    assert!(outcome.is_err(), "a question for another life is not answered: {outcome:?}");
}

#[tokio::test]
async fn a_restarted_control_or_sessions_actor_is_found_again() {
    let (nodes, _told) = nodes(&[("ra", 1), ("rb", 1)]).await;
    nodes.iter().for_each(|node| echo(&node.ops));
    assert_eq!(ask_until(&nodes[0], &nodes[1], "test/echo").await, Bytes::from_static(b"ra: hi"));
    for path in ["control", "sessions"] {
        assert!(nodes[1].book.inject_panic(path).await, "{path}");
        let restarted = |node: &Node| node.book.snapshot().iter().any(|row| row.path == path && row.restarts > 0);
        let asking = async {
            while !restarted(&nodes[1]) {
                // The panic strikes at the next message.
                let _lost_or_answered = ask(&nodes[0], &nodes[1], "test/echo", b"hi", Duration::from_millis(200)).await;
            }
        };
        tokio::time::timeout(WAIT, asking).await.expect("restarted");
        assert_eq!(ask_until(&nodes[0], &nodes[1], "test/echo").await, Bytes::from_static(b"ra: hi"), "{path}");
    }
}

#[tokio::test]
async fn a_peer_that_is_gone_fails_questions_at_once_and_is_dialled_with_backoff() {
    let (mut nodes, _told) = nodes(&[("ga", 1), ("gb", 1)]).await;
    nodes.iter().for_each(|node| echo(&node.ops));
    assert_eq!(ask_until(&nodes[0], &nodes[1], "test/echo").await, Bytes::from_static(b"ga: hi"));
    nodes[1].ops.serve("test/never", Arc::new(|_, _| Box::pin(std::future::pending())));
    let gone = nodes.pop().unwrap();
    let pending = nodes[0].sessions.call(&gone.name, "test/never", Bytes::new(), WAIT);
    let root = gone.root.clone();
    let started = tokio::time::Instant::now();
    let stop = async {
        tokio::task::yield_now().await;
        root.stop_all().await.unwrap();
    };
    let (outcome, ()) = tokio::join!(pending, stop);
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(started.elapsed() < WAIT, "it did not wait for its deadline");
    drop(gone);
    let mut kinds = Vec::new();
    for _ in 0..3 {
        kinds.push(nodes[0].sessions.call(&name("gb"), "test/echo", Bytes::new(), WAIT).await.expect_err("gone").kind);
    }
    assert!(kinds.iter().all(|kind| *kind == FaultKind::Unavailable), "{kinds:?}");
}
