//! Two nodes in one process over loopback: everything that a link promises.

mod model;
mod promises;
mod rest;
mod setup;

use std::time::Duration;

use bytes::Bytes;
use starling_ids::{Incarnation, RequestId};
use tokio::{io::AsyncWriteExt, net::TcpListener};

use self::setup::*;
use super::*;
use crate::{
    config::Timings,
    security::{ClusterKey, Tls},
    stream::{Context, Fault, FaultKind, Opened, StreamError},
    wire::{
        Hello, OpenHead, Party,
        limits::{self, STREAM_WINDOW_FRAMES},
    },
};

#[tokio::test]
async fn streams_work_in_both_directions_over_one_link() {
    let (mut a, mut b) = two(Timings::default()).await;
    for turn in 0..3u8 {
        let (near, (tx, mut rx)) = if turn == 1 { b.stream(&mut a).await } else { a.stream(&mut b).await };
        let Opened { reply, tx: near_tx, rx: mut near_rx } = near;
        assert_eq!(reply, "hi");
        for n in 0..200 {
            near_tx.send(frame(n)).await.unwrap();
            assert_eq!(rx.recv().await, Some(Ok(frame(n))));
            tx.send(frame(n)).await.unwrap();
            assert_eq!(near_rx.recv().await, Some(Ok(frame(n))));
        }
        near_tx.end();
        assert_eq!(rx.recv().await, None);
        let large = Bytes::from(vec![7; limits::FRAME_PAYLOAD_MAX]);
        tx.send(large.clone()).await.unwrap();
        tx.end();
        assert_eq!(near_rx.recv().await, Some(Ok(large)));
        assert_eq!(near_rx.recv().await, None);
    }
    assert_eq!((a.links(), b.links()), (vec!["links/b".to_owned()], vec!["links/a".to_owned()]));
    until("no stream is left", || a.open_streams(&b) == 0 && b.open_streams(&a) == 0).await;
    assert_eq!(*a.reached.lock().unwrap(), [(b.name.clone(), true)]);
    a.stop().await;
    until("the other side saw the goodbye", || b.links().is_empty()).await;
    assert_eq!(*b.reached.lock().unwrap(), [(id("a"), true)], "a goodbye is no break");
    b.stop().await;
}

#[tokio::test]
async fn refusals_failures_and_panics_come_back_typed() {
    let (a, mut b) = two(Timings::default()).await;
    let kind = |error| match error {
        StreamError::Rejected(fault) => fault.kind,
        other => panic!("{other}"),
    };
    let full = Fault::new(FaultKind::Overloaded, "full").retry_after_ms(5);
    let refused = a.open(&b, "t/t/no", context(), Bytes::new()).await.unwrap_err();
    assert_eq!(refused, StreamError::Rejected(full));
    for (at, expected) in [("t/t/nobody", FaultKind::NotFound), ("t/t/panic", FaultKind::Internal)] {
        assert_eq!(kind(a.open(&b, at, context(), Bytes::new()).await.unwrap_err()), expected, "{at}");
    }
    let (mut near, (tx, rx)) = a.stream(&mut b).await;
    let fault = Fault::new(FaultKind::Internal, "out of blocks");
    tx.send(frame(1)).await.unwrap();
    tx.fail(fault.clone());
    drop(rx);
    assert_eq!(near.rx.recv().await, Some(Ok(frame(1))));
    assert_eq!(near.rx.recv().await, Some(Err(StreamError::Failed(fault))));
    assert_eq!(soon(near.tx.cancelled()).await, StreamError::Cancelled);
    drop(near);
    let (mut near, halves) = a.stream(&mut b).await;
    drop(halves);
    assert!(matches!(near.rx.recv().await, Some(Err(StreamError::Broken(_)))));
    drop(near);
    until("no stream is left", || a.open_streams(&b) == 0 && b.open_streams(&a) == 0).await;
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_cancel_reaches_the_sender_and_a_withdrawn_open_is_forgotten() {
    let (a, mut b) = two(Timings::default()).await;
    let (near, (tx, _rx)) = a.stream(&mut b).await;
    drop(near.rx);
    assert_eq!(soon(tx.cancelled()).await, StreamError::Cancelled);
    assert_eq!(tx.send(frame(1)).await, Err(StreamError::Cancelled));
    drop((near.tx, tx, _rx));

    let (name, head) = (b.name.clone(), OpenHead { endpoint: endpoint("t/t/sit"), context: context() });
    let open = a.layer.open(&name, b.incarnation, head, Bytes::new());
    let acceptor = tokio::select! {
        _ = open => panic!("nobody answers"),
        acceptor = b.asked.recv() => acceptor.unwrap(),
    };
    until("withdrawn at both ends", || a.open_streams(&b) == 0 && b.open_streams(&a) == 0).await;
    assert!(acceptor.accept(Bytes::new()).is_none());
    let short = Context::new(RequestId(1), Duration::from_millis(50));
    assert_eq!(a.open(&b, "t/t/sit", short, Bytes::new()).await.unwrap_err(), StreamError::Deadline);
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_slow_reader_stalls_only_its_own_stream() {
    let (a, mut b) = two(Timings::default()).await;
    let (near_slow, (slow, _slow_rx)) = a.stream(&mut b).await;
    let (mut near_fast, (fast, _fast_rx)) = a.stream(&mut b).await;
    let payload = Bytes::from(vec![1; 16_000]);
    let mut sent = 0;
    while slow.try_send(payload.clone()).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, STREAM_WINDOW_FRAMES, "what is under way is bounded");
    for _ in 0..10 * STREAM_WINDOW_FRAMES {
        soon(fast.send(payload.clone())).await.unwrap();
        assert_eq!(soon(near_fast.rx.recv()).await, Some(Ok(payload.clone())));
    }
    let mut near_slow = near_slow;
    for _ in 0..STREAM_WINDOW_FRAMES {
        assert!(soon(near_slow.rx.recv()).await.unwrap().is_ok());
    }
    soon(slow.send(payload)).await.unwrap();
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_panic_in_the_link_breaks_its_streams_and_the_next_open_makes_a_new_one() {
    let (a, mut b) = two(Timings::default()).await;
    let (mut near, (tx, mut rx)) = a.stream(&mut b).await;
    tx.send(frame(5)).await.unwrap();
    assert_eq!(near.rx.recv().await, Some(Ok(frame(5))));
    assert!(a.root.book().inject_panic("links/b").await);
    assert!(matches!(soon(near.rx.recv()).await, Some(Err(StreamError::Broken(_)))));
    assert!(matches!(soon(near.tx.cancelled()).await, StreamError::Broken(_)));
    assert!(matches!(soon(rx.recv()).await, Some(Err(StreamError::Broken(_)))));
    assert!(matches!(soon(tx.cancelled()).await, StreamError::Broken(_)));
    until("reported", || a.reached.lock().unwrap().contains(&(id("b"), false))).await;
    until("reached again by itself", || a.reached.lock().unwrap().last() == Some(&(id("b"), true))).await;
    let (mut near, (tx, _rx)) = soon(a.stream(&mut b)).await;
    tx.send(frame(6)).await.unwrap();
    assert_eq!(near.rx.recv().await, Some(Ok(frame(6))));
    // The other actors of the layer are no single point either.
    for path in ["dialler", "listener"] {
        assert!(b.root.book().inject_panic(path).await);
    }
    let row = |path: &str| b.root.book().snapshot().into_iter().find(|row| row.path == path).unwrap();
    until("restarted", || row("dialler").restarts == 1 && row("listener").restarts == 1).await;
    tx.send(frame(7)).await.unwrap();
    assert_eq!(near.rx.recv().await, Some(Ok(frame(7))), "an open link does not need them");
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn both_dialling_at_once_ends_with_one_link() {
    let (a, b) = two(Timings::default()).await;
    for _ in 0..3 {
        let (to_b, to_a) = tokio::join!(
            a.open(&b, "t/t/yes", context(), Bytes::new()),
            b.open(&a, "t/t/yes", context(), Bytes::new())
        );
        to_b.unwrap();
        to_a.unwrap();
    }
    until("one link each", || a.links().len() == 1 && b.links().len() == 1).await;
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_node_without_the_key_gets_nothing_and_garbage_does_not_matter() {
    let (a, mut b) = two(Timings::default()).await;
    let stranger = node(&ClusterKey::generate(), "c", Timings::default()).await;
    stranger.knows(&[(&b.name, b.incarnation, b.address)]);
    let refused = stranger.open(&b, "t/t/yes", context(), Bytes::new()).await.unwrap_err();
    assert!(matches!(refused, StreamError::Connect { .. }), "{refused}");
    assert!(ControlClient::connect(b.address, &ClusterKey::generate()).await.is_err());
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 5000], &[0xff; 3], b"\x16\x03\x01\xff\xff"] {
        let mut stream = tokio::net::TcpStream::connect(b.address).await.unwrap();
        stream.write_all(garbage).await.ok();
    }
    let _silent = tokio::net::TcpStream::connect(b.address).await.unwrap();
    soon(a.stream(&mut b)).await;
    assert_eq!(b.links(), ["links/a"]);
    let row = b.root.book().snapshot().into_iter().find(|row| row.path == "listener").unwrap();
    assert_eq!(row.restarts, 0);
    for node in [a, b, stranger] {
        node.stop().await;
    }
}

#[tokio::test]
async fn silent_connections_make_way_for_an_honest_one() {
    let (mut a, mut b) = two(Timings::default()).await;
    let mut silent = Vec::new();
    for _ in 0..limits::HANDSHAKES_MAX {
        silent.push(tokio::net::TcpStream::connect(b.address).await.unwrap());
    }
    // Before the first of them is given up for being late.
    tokio::time::timeout(limits::HANDSHAKE_TIME_MAX, a.stream(&mut b)).await.expect("it has made way");
    drop(silent);
    soon(b.stream(&mut a)).await;
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn bytes_that_are_no_frames_end_the_link_and_nothing_else() {
    let key = ClusterKey::generate();
    let b = node(&key, "b", Timings::default()).await;
    let tls = Tls::new(&key, &id("m")).unwrap();
    let dial = async || {
        let connection =
            tls.connect(b.address, None, crate::security::Alpn::Link, Duration::from_secs(5)).await.unwrap();
        let hello = Hello::new(Party::Node, id("m"), Incarnation(1), "test".into());
        handshake::greet(connection, &hello).await.unwrap().connection
    };
    let bad: [&[u8]; 3] = [&[0; 16], &[0xff; 64], &[0, 0, 0, 9, 5, 0, 0, 0, 4, 1, 2, 3, 4]];
    for (n, bytes) in bad.into_iter().enumerate() {
        let mut connection = dial().await;
        until("linked", || !b.links().is_empty()).await;
        connection.write_all(bytes).await.unwrap();
        connection.flush().await.unwrap();
        if n < 2 {
            until("unlinked", || b.links().is_empty()).await;
        }
    }
    assert_eq!(b.links().len(), 1, "data for an unknown stream is late, not wrong");
    b.stop().await;
}

#[tokio::test]
async fn an_earlier_life_is_refused_at_either_end() {
    let (a, mut b) = two(Timings::default()).await;
    // The directory of `a` is behind: `b` lives in another incarnation than `a` thinks.
    a.knows(&[(&b.name, Incarnation(9), b.address)]);
    let head = || OpenHead { endpoint: endpoint("t/t/yes"), context: context() };
    let stale = a.layer.open(&b.name, Incarnation(9), head(), Bytes::new()).await.unwrap_err();
    let wanted = Incarnation(9);
    assert_eq!(stale, StreamError::Stale { node: id("b"), wanted, current: Incarnation(1) });
    // `b` knows a later life of `a`: this one is a ghost.
    b.knows(&[(&a.name, Incarnation(2), a.address)]);
    a.knows(&[(&b.name, b.incarnation, b.address)]);
    let ghost = a.open(&b, "t/t/yes", context(), Bytes::new()).await.unwrap_err();
    assert!(matches!(ghost, StreamError::Stale { current: Incarnation(2), .. }), "{ghost}");
    b.knows(&[(&a.name, a.incarnation, a.address)]);
    soon(a.stream(&mut b)).await;
    // A known node that answers under another name is not talked to.
    let key = ClusterKey::generate();
    let (c, d) = (node(&key, "c", Timings::default()).await, node(&key, "d", Timings::default()).await);
    c.knows(&[(&id("x"), Incarnation(1), d.address)]);
    let wrong = c.layer.open(&id("x"), Incarnation(1), head(), Bytes::new()).await.unwrap_err();
    assert!(matches!(wrong, StreamError::Connect { .. }), "{wrong}");
    let unknown = c.layer.open(&id("y"), Incarnation(1), head(), Bytes::new()).await.unwrap_err();
    assert_eq!(unknown, StreamError::UnknownNode(id("y")));
    for node in [a, b, c, d] {
        node.stop().await;
    }
}

#[tokio::test]
async fn an_idle_link_is_closed_and_made_again_without_a_failed_open() {
    let idle =
        Timings { link_idle: Duration::from_millis(20), ping_every: Duration::from_millis(10), ..Timings::default() };
    let (a, mut b) = two(idle).await;
    for _ in 0..3 {
        let streams = soon(a.stream(&mut b)).await;
        drop(streams);
        until("closed", || a.links().is_empty() && b.links().is_empty()).await;
    }
    // Opens that meet the very moment of closing go to the next link.
    for _ in 0..50 {
        let streams = soon(a.stream(&mut b)).await;
        drop(streams);
        tokio::time::sleep(Duration::from_millis(19)).await;
    }
    assert!(a.reached.lock().unwrap().iter().all(|(_, reachable)| *reachable), "idle is not unreachable");
    a.stop().await;
    b.stop().await;
}

/// `a` and an open stream to a peer `m` whose socket is in the hands of the test.
async fn with_a_hand_made_peer(timings: Timings) -> (Node, Opened, handshake::Established) {
    let key = ClusterKey::generate();
    let a = node(&key, "a", timings).await;
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tls = Tls::new(&key, &id("m")).unwrap();
    a.knows(&[(&id("m"), Incarnation(1), socket.local_addr().unwrap())]);
    let peer = async {
        let (connection, _) = tls.accept(socket.accept().await.unwrap().0).await.unwrap();
        let hello = Hello::new(Party::Node, id("m"), Incarnation(1), "test".into());
        let mut established = handshake::answer(connection, (&tls, &hello), |_| Ok(())).await.unwrap();
        let mut bytes = bytes::BytesMut::new();
        crate::wire::encode(&crate::wire::Frame::Accept { stream: 1, reply: Bytes::new() }, &mut bytes);
        tokio::time::sleep(Duration::from_millis(50)).await;
        established.connection.write_all(&bytes).await.unwrap();
        established
    };
    let head = OpenHead { endpoint: endpoint("t/t/yes"), context: context() };
    let target = id("m");
    let (opened, peer) = tokio::join!(a.layer.open(&target, Incarnation(1), head, Bytes::new()), peer);
    (a, opened.unwrap(), peer)
}

#[tokio::test]
async fn a_peer_that_says_nothing_any_more_is_given_up() {
    let quick = Timings {
        ping_every: Duration::from_millis(20),
        silence_max: Duration::from_millis(200),
        ..Timings::default()
    };
    let (a, mut opened, _hung) = with_a_hand_made_peer(quick).await;
    let broken = soon(opened.rx.recv()).await;
    assert!(matches!(broken, Some(Err(StreamError::Broken(ref why))) if why.contains("nothing heard")), "{broken:?}");
    until("unreachable", || a.reached.lock().unwrap().contains(&(id("m"), false))).await;
    a.stop().await;
}

#[tokio::test]
async fn a_peer_that_was_killed_is_reported_without_the_words_of_a_library() {
    let (a, mut opened, killed) = with_a_hand_made_peer(Timings::default()).await;
    // The kernel closes the socket of a killed process; TLS has no say in it.
    drop(killed);
    let broken = soon(opened.rx.recv()).await;
    let plain = Err(StreamError::Broken("the other side closed the connection".to_owned()));
    assert_eq!(broken, Some(plain));
    a.stop().await;
}

#[tokio::test]
async fn ded_03_a_node_that_cannot_be_dialled_fails_fast_and_is_tried_again() {
    let key = ClusterKey::generate();
    let a = node(&key, "a", Timings::default()).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    a.knows(&[(&id("b"), Incarnation(1), closed)]);
    let head = || OpenHead { endpoint: endpoint("t/t/yes"), context: context() };
    let target = id("b");
    let opens = (0..20).map(|_| a.layer.open(&target, Incarnation(1), head(), Bytes::new()));
    for opened in soon(futures::future::join_all(opens)).await {
        assert!(matches!(opened, Err(StreamError::Connect { .. })));
    }
    assert_eq!(a.reached.lock().unwrap().first(), Some(&(id("b"), false)));
    // It comes up at another address; the next try finds it without anybody opening a stream.
    let b = node(&key, "b", Timings::default()).await;
    a.knows(&[(&b.name, b.incarnation, b.address)]);
    until("reached", || a.reached.lock().unwrap().last() == Some(&(id("b"), true))).await;
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_tool_calls_operations_and_opens_streams_without_being_a_member() {
    let key = ClusterKey::generate();
    let mut b = node(&key, "b", Timings::default()).await;
    let client = ControlClient::connect(b.address, &key).await.unwrap();
    assert_eq!((client.node(), client.incarnation()), (&b.name, b.incarnation));
    let limit = Duration::from_secs(10);
    assert_eq!(client.call("test/echo", Bytes::from_static(b"x"), limit).await, Ok(Bytes::from_static(b"x")));
    let empty = client.call("test/echo", Bytes::new(), limit).await.unwrap_err();
    assert_eq!((empty.kind, empty.message.as_str()), (FaultKind::Invalid, "nothing from client"));
    assert_eq!(client.call("no/op", Bytes::new(), limit).await.unwrap_err().kind, FaultKind::NotFound);
    let mut opened = client.open(&endpoint("t/t/yes"), context(), Bytes::new()).await.unwrap();
    let (tx, _rx) = b.far.recv().await.unwrap();
    tx.send(frame(1)).await.unwrap();
    assert_eq!(opened.rx.recv().await, Some(Ok(frame(1))));
    assert!(b.reached.lock().unwrap().is_empty(), "a tool is no node");
    drop(client);
    assert!(matches!(soon(tx.cancelled()).await, StreamError::Broken(_)));
    until("gone", || b.links().is_empty()).await;
    b.stop().await;
}

#[tokio::test]
async fn a_node_with_full_hands_says_overloaded() {
    let (a, b) = two(Timings::default()).await;
    while b.handlers.spawn(std::future::pending()) {}
    let refused = a.open(&b, "t/t/yes", context(), Bytes::new()).await.unwrap_err();
    assert!(matches!(refused, StreamError::Rejected(Fault { kind: FaultKind::Overloaded, .. })), "{refused}");
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_stopped_supervisor_of_links_comes_back_and_opens_work() {
    let (a, mut b) = two(Timings::default()).await;
    drop(soon(a.stream(&mut b)).await);
    assert!(a.root.book().inject_panic("links").await);
    let row = || a.root.book().snapshot().into_iter().find(|row| row.path == "links").unwrap();
    until("restarted", || row().restarts == 1).await;
    until("linked anew", || a.links() == ["links/b"]).await;
    drop(soon(a.stream(&mut b)).await);
    a.stop().await;
    b.stop().await;
}
