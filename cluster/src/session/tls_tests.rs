//! Sessions through the real TLS layer: whole nodes, one of them behind a pipe that can be frozen.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::watch,
    task::JoinSet,
};

use super::BODY_MAX;
use crate::{
    config::{ClusterConfig, Timings},
    mesh::Mesh,
    security::{Alpn, ClusterKey, Tls},
    stream::{Fault, FaultKind},
};

const WAIT: Duration = Duration::from_secs(30);

/// Forwards TCP and UDP of one port to another; TCP stands still while `frozen`.
struct Pipe {
    outer: SocketAddr,
    _tasks: JoinSet<()>,
}

async fn pipe(inner: SocketAddr, gate: watch::Receiver<bool>) -> Pipe {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let outer = listener.local_addr().unwrap();
    let datagrams = UdpSocket::bind(outer).await.unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut buffer = [0; 2000];
        while let Ok((length, _)) = datagrams.recv_from(&mut buffer).await {
            datagrams.send_to(&buffer[..length], inner).await.unwrap();
        }
    });
    tasks.spawn(async move {
        let mut halves = JoinSet::new();
        while let Ok((outside, _)) = listener.accept().await {
            let Ok(inside) = TcpStream::connect(inner).await else { continue };
            let ((from_outside, to_outside), (from_inside, to_inside)) = (outside.into_split(), inside.into_split());
            halves.spawn(copy(from_outside, to_inside, gate.clone()));
            halves.spawn(copy(from_inside, to_outside, gate.clone()));
        }
    });
    Pipe { outer, _tasks: tasks }
}

async fn copy(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut frozen: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
        if frozen.wait_for(|frozen| !frozen).await.is_err() || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

async fn start(
    key: &ClusterKey,
    name: &str,
    folder: &Path,
    (bind, advertise): (SocketAddr, SocketAddr),
    other: Option<SocketAddr>,
) -> Mesh {
    let advertise = Some(advertise);
    let mesh = Mesh::start(ClusterConfig {
        bind,
        advertise,
        seeds: other.iter().map(SocketAddr::to_string).collect(),
        data_dir: folder.join(name),
        labels: BTreeMap::new(),
        timings: Timings::default(),
        ..ClusterConfig::program(name, key.clone()).unwrap()
    });
    let mesh = mesh.await.unwrap();
    mesh.serve_op("test/echo", Arc::new(|_, body| Box::pin(std::future::ready(Ok(body)))));
    mesh.serve_op("test/huge", Arc::new(|_, _| Box::pin(std::future::ready(Ok(vec![0; BODY_MAX + 1].into())))));
    mesh
}

fn free_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

struct Two {
    a: Mesh,
    b: Mesh,
    /// Either may dial the other: both stand behind a pipe, and both pipes freeze together.
    pipes: [Pipe; 2],
    frozen: watch::Sender<bool>,
    key: ClusterKey,
    _folder: tempfile::TempDir,
}

impl Two {
    async fn start() -> Self {
        let (key, folder, frozen) = (ClusterKey::generate(), tempfile::tempdir().unwrap(), watch::Sender::new(false));
        let (of_a, of_b) = (free_port(), free_port());
        let pipes = [pipe(of_a, frozen.subscribe()).await, pipe(of_b, frozen.subscribe()).await];
        let b = start(&key, "tb", folder.path(), (of_b, pipes[1].outer), None).await;
        let a = start(&key, "ta", folder.path(), (of_a, pipes[0].outer), Some(pipes[1].outer)).await;
        let mut watch = a.watch();
        let known = watch.wait_for(|snapshot| snapshot.node(b.node()).is_some());
        tokio::time::timeout(WAIT, known).await.expect("a sees b").unwrap();
        let two = Self { a, b, pipes, frozen, key, _folder: folder };
        tokio::time::timeout(WAIT, two.settled()).await.expect("one session");
        two
    }

    /// Nodes that find each other may dial each other at once; then one of the two sessions goes, and its questions with it.
    async fn settled(&self) {
        let mut answered = 0;
        while answered < 5 {
            match self.echo("settled?", WAIT).await {
                Ok(_) => answered += 1,
                Err(fault) => {
                    assert_eq!(fault.kind, FaultKind::Unavailable, "{fault}");
                    answered = 0;
                }
            }
        }
    }

    /// Runs a scenario to its end over one session. Under load the second of two sessions may come, and take the first one's
    /// place, long after [`Self::settled`]: what was asked over that one is unavailable, and the scenario begins again.
    async fn undisturbed(&self, scenario: impl AsyncFn() -> Result<(), Fault>) {
        for _ in 0..10 {
            match scenario().await {
                Ok(()) => return,
                Err(fault) => assert_eq!(fault.kind, FaultKind::Unavailable, "{fault}"),
            }
            self.frozen.send_replace(false);
            tokio::time::timeout(WAIT, self.settled()).await.expect("one session");
        }
        panic!("sessions break again and again");
    }

    async fn echo(&self, text: &'static str, limit: Duration) -> Result<Bytes, Fault> {
        self.a.call(self.b.node(), "test/echo", Bytes::from_static(text.as_bytes()), limit).await
    }

    async fn stop(self) {
        self.frozen.send_replace(false);
        for mesh in [self.a, self.b] {
            mesh.leave().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_peer_is_a_typed_fault_at_our_own_deadline_and_the_session_goes_on_after_it() {
    let two = Two::start().await;
    let scenario = async || {
        assert_eq!(two.echo("one", WAIT).await?, "one");
        two.frozen.send_replace(true);
        let begin = Instant::now();
        let fault = two.echo("two", Duration::from_millis(700)).await.expect_err("nobody answers");
        let took = begin.elapsed();
        if fault.kind != FaultKind::DeadlineExceeded {
            return Err(fault);
        }
        assert!(took >= Duration::from_millis(700) && took < Duration::from_secs(20), "{took:?}");
        two.frozen.send_replace(false);
        assert_eq!(two.echo("three", WAIT).await?, "three");
        Ok(())
    };
    two.undisturbed(scenario).await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_over_the_limit_is_a_typed_fault_and_the_session_survives() {
    let two = Two::start().await;
    let refusal = async |asked: &str, body: Bytes, kind| match two.a.call(two.b.node(), asked, body, WAIT).await {
        Err(fault) if fault.kind == FaultKind::Unavailable => Err(fault),
        other => {
            assert_eq!(other.map_err(|fault| fault.kind), Err(kind), "{asked}");
            Ok(())
        }
    };
    let scenario = async || {
        assert_eq!(two.echo("one", WAIT).await?, "one");
        refusal("test/echo", vec![0; BODY_MAX + 1].into(), FaultKind::Invalid).await?;
        refusal("test/huge", Bytes::new(), FaultKind::Internal).await?;
        let full = two.a.call(two.b.node(), "test/echo", vec![7; BODY_MAX].into(), WAIT).await?;
        assert_eq!(full.len(), BODY_MAX, "the limit itself passes");
        assert_eq!(two.echo("two", WAIT).await?, "two");

        // A holder of the key announces a frame that no session takes: that connection ends, no other does.
        let tls = Tls::new(&two.key, &"tc".parse().unwrap()).unwrap();
        let dialled = tls.connect(two.pipes[1].outer, Some(two.b.node()), Alpn::Session, WAIT).await;
        let mut rogue = dialled.unwrap();
        rogue.write_all(&u64::MAX.to_be_bytes()).await.unwrap();
        rogue.write_all(&[0; 1024]).await.unwrap();
        let mut rest = Vec::new();
        // An end or a reset; what counts is that it does not stay open.
        let _how = tokio::time::timeout(WAIT, rogue.read_to_end(&mut rest)).await.expect("it is closed");
        assert_eq!(two.echo("three", WAIT).await?, "three");
        Ok(())
    };
    two.undisturbed(scenario).await;
    two.stop().await;
}
