//! Whole nodes in one process: gossip over real sockets, sessions over loopback, the directory above both.

mod hostile;
mod pure;
mod scale;

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use starling_ids::{Incarnation, NodeId};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use super::*;
use crate::{
    membership::{
        Claim, ClaimError, MembershipArgs, MembershipHandle, MembershipView, Proof, Seeds, Visit, bind_pair, claim,
        membership_child, view_watch,
    },
    security::{ClusterKey, Keys},
    session::{Dial, Ops, SessionStream, SessionsHandle, control_child, hex, sessions_child},
    supervise::{ActorBook, Policy, SupervisorHandle},
};

const WAIT: Duration = Duration::from_secs(15);
const CLUSTER: &str = "test";

struct Site {
    node: NodeId,
    incarnation: Incarnation,
    address: SocketAddr,
    directory: DirectoryHandle,
    membership: MembershipHandle,
    view: Arc<tokio::sync::watch::Sender<Arc<MembershipView>>>,
    book: ActorBook,
    root: SupervisorHandle,
    _accepting: JoinSet<()>,
}

/// What a node is started with.
struct Setup<'a> {
    name: &'a str,
    seeds: Vec<String>,
    data_dir: PathBuf,
    key: u8,
    /// Advertises a port that is forwarded to its own.
    forwarded: bool,
}

impl Setup<'_> {
    fn keys(&self) -> Keys {
        Keys::from(&ClusterKey::from_bytes([self.key; 32]))
    }
}

fn setup<'a>(name: &'a str, seeds: &[&Site], data_dir: &tempfile::TempDir) -> Setup<'a> {
    let seeds = seeds.iter().map(|seed| seed.address.to_string()).collect();
    Setup { name, seeds, data_dir: data_dir.path().join(name), key: 7, forwarded: false }
}

async fn start(setup: Setup<'_>) -> Result<Site, ClaimError> {
    let node = NodeId::new(setup.name).unwrap();
    let (listener, socket) = bind_pair("127.0.0.1:0".parse().unwrap())?;
    let mut accepting = JoinSet::new();
    let bound = listener.local_addr()?;
    let address = if setup.forwarded { forward(bound, &mut accepting) } else { bound };
    let sources = Seeds::new(&setup.seeds).unwrap();
    let seeds = sources.resolve().await;
    let keys = setup.keys();
    let incarnation = claim(Claim {
        socket: &socket,
        keys: &keys,
        cluster: CLUSTER,
        seeds: &seeds,
        node: &node,
        address,
        data_dir: &setup.data_dir,
    })
    .await?;
    let (ops, book, membership, view) =
        (Ops::default(), ActorBook::default(), MembershipHandle::default(), view_watch());
    let root = SupervisorHandle::root(book.clone(), Policy::default()).await.unwrap();
    let directory = DirectoryHandle::new(first_record(&node, incarnation, address));
    let sessions = SessionsHandle::new(node.clone(), incarnation, ops.clone(), directory.watch());
    root.add(sessions_child(&sessions, hex(b"cookie"), dial())).await.unwrap();
    root.add(control_child(&sessions)).await.unwrap();
    let (caller, membership_too) = (sessions.caller(), membership.clone());
    let args = DirectoryArgs { view: view.subscribe(), membership: membership_too, caller, ops: ops.clone() };
    root.add(directory_child(&directory, args)).await.unwrap();
    let args = MembershipArgs {
        node: node.clone(),
        incarnation,
        address,
        socket: Arc::new(socket),
        keys,
        cluster: CLUSTER.into(),
        seeds: sources,
        view: view.clone(),
        directory: directory.clone(),
        caller: sessions.caller(),
        visit: visit(),
        ops,
    };
    root.add(membership_child(&membership, args)).await.unwrap();
    accept(TcpListener::from_std(listener)?, sessions, &mut accepting);
    Ok(Site { node, incarnation, address, directory, membership, view, book, root, _accepting: accepting })
}

fn first_record(node: &NodeId, incarnation: Incarnation, address: SocketAddr) -> NodeRecord {
    let (roles, software) = (vec!["worker".into()], "test".into());
    NodeRecord { roles, software, ..NodeRecord::new(node.clone(), incarnation, address) }
}

fn dial() -> Dial {
    Arc::new(|_node, address| {
        Box::pin(async move { Ok(Box::new(TcpStream::connect(address).await?) as SessionStream) })
    })
}

/// Without TLS whoever answers at the address is taken for the member.
fn visit() -> Visit {
    Arc::new(|peer, _look| {
        Box::pin(async move {
            match TcpStream::connect(peer.address).await {
                Ok(_) => Some(Proof::Alive),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Some(Proof::Refused),
                Err(_) => Some(Proof::Silent),
            }
        })
    })
}

fn accept(listener: TcpListener, sessions: SessionsHandle, tasks: &mut JoinSet<()>) {
    tasks.spawn(async move {
        while let Ok((stream, from)) = listener.accept().await {
            sessions.accept(Box::new(stream), from);
        }
    });
}

/// Opens a port whose datagrams and connections end at `inner`, as a NAT does; its address.
fn forward(inner: SocketAddr, tasks: &mut JoinSet<()>) -> SocketAddr {
    let (listener, socket) = bind_pair("127.0.0.1:0".parse().unwrap()).unwrap();
    let outer = listener.local_addr().unwrap();
    let (listener, socket) =
        (TcpListener::from_std(listener).unwrap(), tokio::net::UdpSocket::from_std(socket).unwrap());
    tasks.spawn(async move {
        let mut buffer = [0; 2000];
        while let Ok((length, _)) = socket.recv_from(&mut buffer).await {
            socket.send_to(&buffer[..length], inner).await.unwrap();
        }
    });
    tasks.spawn(async move {
        let mut pipes = JoinSet::new();
        while let Ok((mut outside, _)) = listener.accept().await {
            let mut inside = TcpStream::connect(inner).await.unwrap();
            pipes.spawn(async move { tokio::io::copy_bidirectional(&mut outside, &mut inside).await.is_ok() });
        }
    });
    outer
}

/// Waits until the site's snapshot satisfies `wanted`; how long it took.
async fn until(site: &Site, what: &str, wanted: impl FnMut(&Arc<Snapshot>) -> bool) -> Duration {
    let started = tokio::time::Instant::now();
    let mut watch = site.directory.watch();
    let outcome = tokio::time::timeout(WAIT, watch.wait_for(wanted)).await.map(|seen| seen.is_ok());
    assert_eq!(outcome, Ok(true), "{}: {what}: {:?}", site.node, site.directory.snapshot());
    started.elapsed()
}

/// Whether all of `nodes` are listed with their records.
fn complete(snapshot: &Snapshot, nodes: &[&Site]) -> bool {
    snapshot.nodes.len() == nodes.len()
        && nodes.iter().all(|site| {
            snapshot.node(&site.node).is_some_and(|view| {
                view.record.incarnation == site.incarnation && view.record.version > 0 && view.state == NodeState::Alive
            })
        })
}

async fn all_see(sites: &[&Site]) {
    for site in sites {
        until(site, "everybody", |snapshot| complete(snapshot, sites)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_publishes_is_seen_by_all_within_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let a = start(setup("da", &[], &dir)).await.unwrap();
    let b = start(setup("db", &[&a], &dir)).await.unwrap();
    let c = start(setup("dc", &[&a], &dir)).await.unwrap();
    let sites = [&a, &b, &c];
    all_see(&sites).await;
    let mut slowest = Duration::ZERO;
    for round in 0..3 {
        let endpoint = format!("test/worker/{round}").parse().unwrap();
        let instance = Instance::new(endpoint, InstanceKind::Worker, Lifecycle::Serving);
        c.directory.publish(|record| record.instances.push(instance)).unwrap();
        for site in &sites {
            let seen = |snapshot: &Arc<Snapshot>| snapshot.instances(InstanceKind::Worker).count() == round + 1;
            slowest = slowest.max(until(site, "the instance", seen).await);
        }
    }
    println!("an instance is seen by all within {slowest:?}");
    c.membership.leave().await.unwrap();
    for site in &sites[..2] {
        let left = until(site, "goodbye", |snapshot| complete(snapshot, &sites[..2])).await;
        println!("goodbye seen after {left:?}");
    }
}

/// The bar is a second, met with room on a quiet machine; the test waits for states, and says how long they took.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lif_05_a_step_in_life_is_seen_by_five_nodes_in_a_gossip_round() {
    let dir = tempfile::tempdir().unwrap();
    let first = start(setup("ga", &[], &dir)).await.unwrap();
    let mut sites = vec![first];
    for name in ["gb", "gc", "gd", "ge"] {
        let site = start(setup(name, &[&sites[0]], &dir)).await.unwrap();
        sites.push(site);
    }
    all_see(&sites.iter().collect::<Vec<_>>()).await;
    let endpoint: starling_ids::EndpointName = "test/worker/run".parse().unwrap();
    let instance = Instance::new(endpoint.clone(), InstanceKind::Worker, Lifecycle::Joining);
    sites[4].directory.publish(|record| record.instances.push(instance)).unwrap();
    let mut slowest = Duration::ZERO;
    for lifecycle in [Lifecycle::Warming, Lifecycle::Serving, Lifecycle::Draining, Lifecycle::Drained, Lifecycle::Gone]
    {
        let published = tokio::time::Instant::now();
        sites[4].directory.publish(|record| record.instances[0].lifecycle = lifecycle).unwrap();
        for site in &sites {
            let seen = |snapshot: &Arc<Snapshot>| {
                let mut instances = snapshot.instances(InstanceKind::Worker);
                instances.any(|(_, instance)| instance.endpoint == endpoint && instance.lifecycle == lifecycle)
            };
            until(site, lifecycle.label(), seen).await;
        }
        slowest = slowest.max(published.elapsed());
    }
    println!("a step in life is seen by five nodes within {slowest:?}");
    let refused = sites[4].directory.publish(|record| record.instances[0].lifecycle = Lifecycle::Serving);
    assert!(matches!(refused, Err(PublishError::IllegalStep { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mem_09_the_record_of_a_dead_node_is_gone_everywhere_and_stays_gone() {
    let dir = tempfile::tempdir().unwrap();
    let a = start(setup("va", &[], &dir)).await.unwrap();
    let b = start(setup("vb", &[&a], &dir)).await.unwrap();
    let dead = start(setup("vc", &[&a], &dir)).await.unwrap();
    all_see(&[&a, &b, &dead]).await;
    assert_eq!(a.directory.down_for(&dead.node), None);
    dead.root.stop_all().await.unwrap();
    let (node, incarnation) = (dead.node.clone(), dead.incarnation);
    drop(dead);
    // One that joins after the death learns of it from nobody.
    let late = start(setup("vd", &[&b], &dir)).await.unwrap();
    let all = [&a, &b, &late];
    for site in all {
        until(site, "gone", |snapshot| complete(snapshot, &all)).await;
    }
    assert!(a.directory.down_for(&node).is_some(), "down, and not never heard of");
    // Comparisons between all of them do not bring it back: each has its say at least twice.
    for round in 0..2 {
        for site in all {
            site.directory.publish(|record| record.software = format!("round {round}")).unwrap();
        }
        for site in all {
            let told = |snapshot: &Arc<Snapshot>| {
                complete(snapshot, &all)
                    && snapshot.nodes.iter().all(|view| view.record.software.ends_with(&round.to_string()))
            };
            until(site, "a round", told).await;
        }
    }
    assert!(all.iter().all(|site| site.directory.snapshot().node(&node).is_none()), "{node} {incarnation} is back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mem_05_a_killed_node_comes_back_on_another_port_in_its_next_life() {
    let dir = tempfile::tempdir().unwrap();
    let a = start(setup("ka", &[], &dir)).await.unwrap();
    let b = start(setup("kb", &[&a], &dir)).await.unwrap();
    all_see(&[&a, &b]).await;
    b.root.stop_all().await.unwrap();
    drop(b);
    let again = start(setup("kb", &[&a], &dir)).await.unwrap();
    assert_eq!(again.incarnation, Incarnation(2));
    all_see(&[&a, &again]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mem_17_a_lost_data_directory_is_stepped_over() {
    let (dir, lost) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let a = start(setup("la", &[], &dir)).await.unwrap();
    for expected in 1..4 {
        let b = start(setup("lb", &[&a], &dir)).await.unwrap();
        assert_eq!(b.incarnation, Incarnation(expected));
        all_see(&[&a, &b]).await;
        b.membership.leave().await.unwrap();
        b.root.stop_all().await.unwrap();
    }
    let b = start(setup("lb", &[&a], &lost)).await.unwrap();
    assert_eq!(b.incarnation, Incarnation(4), "above all that the cluster remembers");
    all_see(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mem_07_a_taken_name_is_refused_at_start_and_the_holder_is_unharmed() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let a = start(setup("na", &[], &dir)).await.unwrap();
    let b = start(setup("nb", &[&a], &dir)).await.unwrap();
    all_see(&[&a, &b]).await;
    let refused = start(setup("nb", &[&a], &other)).await.map(|site| site.address).expect_err("the name is taken");
    assert!(refused.to_string().contains("--name"), "{refused}");
    assert!(complete(&a.directory.snapshot(), &[&a, &b]));
    assert!(a.view.borrow().outranked.is_none() && b.view.borrow().outranked.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_membership_or_directory_actor_that_panics_is_back_without_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let a = start(setup("pa", &[], &dir)).await.unwrap();
    let b = start(setup("pb", &[&a], &dir)).await.unwrap();
    all_see(&[&a, &b]).await;
    for path in ["membership", "directory"] {
        assert!(b.book.inject_panic(path).await);
        let restarted = || b.book.snapshot().iter().any(|row| row.path == path && row.restarts > 0);
        let waiting = async {
            while !restarted() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(WAIT, waiting).await.expect("restarted");
        b.directory.publish(|record| record.software = path.into()).unwrap();
        let told = |snapshot: &Arc<Snapshot>| snapshot.node(&b.node).is_some_and(|view| view.record.software == path);
        let seen = until(&a, "news after the restart", told).await;
        println!("{path}: news after a panic seen after {seen:?}");
        all_see(&[&a, &b]).await;
    }
    assert_eq!(a.directory.snapshot().node(&b.node).map(|view| view.record.incarnation), Some(b.incarnation));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_the_key_learns_nothing_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let a = start(setup("xa", &[], &dir)).await.unwrap();
    let stranger = start(Setup { key: 8, ..setup("xs", &[&a], &dir) }).await.unwrap();
    let b = start(setup("xb", &[&a], &dir)).await.unwrap();
    all_see(&[&a, &b]).await;
    assert_eq!(stranger.directory.snapshot().nodes.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mem_14_an_advertised_address_is_used_for_gossip_and_sessions() {
    let dir = tempfile::tempdir().unwrap();
    let a = start(Setup { forwarded: true, ..setup("fwa", &[], &dir) }).await.unwrap();
    let b = start(Setup { forwarded: true, ..setup("fwb", &[&a], &dir) }).await.unwrap();
    all_see(&[&a, &b]).await;
    let seen = a.directory.snapshot().node(&b.node).map(|view| view.record.address);
    assert_eq!(seen, Some(b.address));
}
