//! What a link promises about windows, halves, cancels and limits: each promise a test.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use starling_ids::{Incarnation, RequestId};
use tokio::io::AsyncWriteExt;

use super::{setup::*, with_a_hand_made_peer};
use crate::{
    config::Timings,
    link::{
        mux::{Ended, Mux},
        outgoing::Batch,
    },
    stream::{Context, Endpoints, Fault, FaultKind, StreamError},
    supervise::Tasks,
    wire::{
        Closing, Decoder, Frame, Hello, Party, StreamId, encode,
        limits::{self, STREAM_WINDOW_BYTES},
    },
};

#[tokio::test]
async fn each_direction_of_a_remote_stream_may_end_long_before_the_other() {
    let (a, mut b) = two(Timings::default()).await;
    for far_first in [false, true] {
        let (near, far) = a.stream(&mut b).await;
        let near = (near.tx, near.rx);
        let ((first, mut first_rx), (second, mut second_rx)) = if far_first { (far, near) } else { (near, far) };
        first.end();
        assert_eq!(soon(second_rx.recv()).await, None);
        for n in 0..200 {
            soon(second.send(frame(n))).await.unwrap();
            assert_eq!(soon(first_rx.recv()).await, Some(Ok(frame(n))));
        }
        second.end();
        assert_eq!(soon(first_rx.recv()).await, None);
    }
    until("no stream is left", || a.open_streams(&b) == 0 && b.open_streams(&a) == 0).await;
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_request_streams_while_its_answer_streams() {
    let (a, mut b) = two(Timings::default()).await;
    let (mut near, (tx, mut rx)) = a.stream(&mut b).await;
    // More than both windows: neither side could go on if one direction waited for the other.
    let answering = async move {
        let mut seen = 0u32;
        while let Some(item) = rx.recv().await {
            tx.send(item.unwrap()).await.unwrap();
            seen += 1;
        }
        tx.end();
        seen
    };
    let near_tx = near.tx;
    let asking = async move {
        for n in 0..2000u32 {
            near_tx.send(Bytes::copy_from_slice(&n.to_be_bytes())).await.unwrap();
        }
        near_tx.end();
    };
    let reading = async {
        let mut next = 0u32;
        while let Some(item) = near.rx.recv().await {
            assert_eq!(item.unwrap(), next.to_be_bytes().as_slice());
            next += 1;
        }
        next
    };
    let ((), read, answered) = soon(async { tokio::join!(asking, reading, answering) }).await;
    assert_eq!((read, answered), (2000, 2000));
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn either_side_cancels_the_other_and_only_that_direction() {
    let (a, mut b) = two(Timings::default()).await;
    for far_leaves in [false, true] {
        let (near, far) = a.stream(&mut b).await;
        let near = (near.tx, near.rx);
        let ((stays_tx, leaves), (other_tx, mut other_rx)) = if far_leaves { (far, near) } else { (near, far) };
        drop(leaves);
        assert_eq!(soon(other_tx.cancelled()).await, StreamError::Cancelled);
        assert_eq!(other_tx.is_cancelled(), Some(StreamError::Cancelled));
        assert_eq!(soon(other_tx.send(frame(1))).await, Err(StreamError::Cancelled));
        soon(stays_tx.send(frame(2))).await.unwrap();
        stays_tx.end();
        assert_eq!(soon(other_rx.recv()).await, Some(Ok(frame(2))));
        assert_eq!(soon(other_rx.recv()).await, None);
    }
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn deadline_and_inactivity_end_a_remote_stream_on_both_sides() {
    let (a, mut b) = two(Timings::default()).await;
    let short = Context::new(RequestId(1), Duration::from_millis(300));
    let mut near = a.open(&b, "t/t/yes", short, Bytes::new()).await.unwrap();
    let (tx, mut rx) = b.far.recv().await.unwrap();
    let both = soon(async { tokio::join!(near.rx.recv(), rx.recv()) }).await;
    assert_eq!(both, (Some(Err(StreamError::Deadline)), Some(Err(StreamError::Deadline))));
    while tx.try_send(frame(1)).is_ok() {}
    assert!(soon(tx.send(frame(1))).await.is_err());

    let (mut near, (tx, _rx)) = a.stream(&mut b).await;
    near.rx.set_inactivity(Some(Duration::from_millis(30)));
    assert_eq!(soon(near.rx.recv()).await, Some(Err(StreamError::Inactive(30))));
    assert_eq!(soon(tx.cancelled()).await, StreamError::Cancelled, "the silent side is told");
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn frames_hold_off_the_inactivity_limit_as_long_as_they_come() {
    let (a, mut b) = two(Timings::default()).await;
    let (mut near, (tx, _rx)) = a.stream(&mut b).await;
    let limit = Duration::from_millis(400);
    near.rx.set_inactivity(Some(limit));
    let start = std::time::Instant::now();
    let sending = async {
        while start.elapsed() < 3 * limit {
            tx.send(frame(1)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reading = async {
        let mut last = Ok(Bytes::new());
        while last.is_ok() {
            last = near.rx.recv().await.unwrap();
        }
        (last, start.elapsed())
    };
    let ((), (last, after)) = soon(async { tokio::join!(sending, reading) }).await;
    assert_eq!(last, Err(StreamError::Inactive(400)));
    assert!(after >= 3 * limit, "{after:?}");
    a.stop().await;
    b.stop().await;
}

#[tokio::test]
async fn a_peer_that_ignores_the_window_is_cut_off() {
    for (frames, len) in [(65, 1), (30, 40_000), (3, 2 << 20)] {
        let (a, mut opened, mut peer) = with_a_hand_made_peer(Timings::default()).await;
        let mut bytes = BytesMut::new();
        encode(&Frame::Data { stream: 1, payload: vec![0; len].into() }, &mut bytes);
        for _ in 0..frames {
            // The last ones may find the connection closed.
            if peer.connection.write_all(&bytes).await.is_err() {
                break;
            }
        }
        peer.connection.flush().await.ok();
        let mut read = 0;
        let last = loop {
            match soon(opened.rx.recv()).await {
                Some(Ok(frame)) => read += frame.len(),
                other => break other,
            }
        };
        let why = "protocol violation: more data than the window allows".to_owned();
        assert_eq!(last, Some(Err(StreamError::Broken(why))), "{frames} frames of {len}");
        assert!(read < frames * len);
        a.stop().await;
    }
}

/// A link without a socket, and what its other side would be told.
fn bare_link() -> std::sync::Arc<Mux> {
    let hello = Hello::new(Party::Node, id("peer"), Incarnation(1), "test".into());
    Mux::new(&hello, true, Endpoints::default(), Tasks::closed(10))
}

fn written(mux: &Mux) -> Vec<Frame> {
    let (mut batch, mut frames) = (Batch::default(), Vec::new());
    loop {
        mux.out.take(&mut batch);
        let mut slices = Vec::with_capacity(1000);
        batch.slices(0, &mut slices);
        let mut decoder = Decoder::default();
        slices.iter().for_each(|slice| decoder.buffer().extend_from_slice(slice));
        let before = frames.len();
        while let Some(frame) = decoder.decode().unwrap() {
            frames.push(frame);
        }
        let last = batch.last;
        mux.written(&mut batch);
        if last || frames.len() == before {
            return frames;
        }
    }
}

fn told(mux: &std::sync::Arc<Mux>, frames: &[Frame]) {
    let mut decoder = Decoder::default();
    frames.iter().for_each(|frame| encode(frame, decoder.buffer()));
    mux.take_all(&mut decoder).unwrap();
}

async fn opened(mux: &std::sync::Arc<Mux>, stream: StreamId) -> crate::stream::Opened {
    let head = crate::wire::OpenHead { endpoint: endpoint("t/t/yes"), context: context() };
    // A task that has done much already is told to wait for its turn.
    tokio::task::yield_now().await;
    let mut opening = Box::pin(mux.open(head, Bytes::new()));
    assert!(futures::poll!(&mut opening).is_pending());
    told(mux, &[Frame::Accept { stream, reply: Bytes::new() }]);
    opening.await.unwrap()
}

#[tokio::test]
async fn what_lies_unread_on_a_link_is_bounded_and_the_slowest_reader_pays() {
    let mux = bare_link();
    let mut streams = Vec::new();
    for n in 0..200u32 {
        streams.push(opened(&mux, 2 * n + 1).await);
    }
    // Nearly a window each; the memory is shared, so that the test needs none.
    let part = Bytes::from(vec![0; 16 << 10]);
    let mut held = Vec::new();
    for n in 0..200u32 {
        let frames = if n == 0 { 64 } else { 50 };
        for _ in 0..frames {
            let mut table = mux.table();
            if table.deliver(2 * n + 1, part.clone()).unwrap() {
                mux.cut_largest(&mut table);
            }
            held.push(table.streams.values().filter_map(|entry| entry.inbox.as_ref()).map(|inbox| inbox.held()).sum());
        }
    }
    let most: usize = held.into_iter().max().unwrap();
    assert!(most <= limits::LINK_UNREAD_BYTES, "{most}");
    assert!(most > limits::LINK_UNREAD_BYTES / 2, "{most}");
    let first = streams.remove(0);
    let mut rx = first.rx;
    let cut = rx.recv().await.unwrap().unwrap_err();
    assert!(matches!(cut, StreamError::Failed(Fault { kind: FaultKind::Overloaded, .. })), "{cut}");
    assert!(written(&mux).contains(&Frame::Cancel { stream: 1 }), "its sender is told to stop");
    let mut last = streams.pop().unwrap();
    assert_eq!(last.rx.recv().await, Some(Ok(part)), "others keep what they have");
}

#[tokio::test]
async fn a_link_that_retires_lets_its_last_stream_end_cleanly() {
    let mux = bare_link();
    let stream = opened(&mux, 1).await;
    written(&mux);
    mux.close(Closing::Duplicate);
    assert!(!mux.is_open());
    stream.tx.send(frame(1)).await.unwrap();
    told(&mux, &[Frame::End { stream: 1 }]);
    stream.tx.end();
    let expected =
        [Frame::Data { stream: 1, payload: frame(1) }, Frame::End { stream: 1 }, Frame::Goodbye(Closing::Duplicate)];
    assert_eq!(written(&mux), expected);
}

#[tokio::test]
async fn control_overtakes_data_that_waits_for_the_writer() {
    let mux = bare_link();
    let (slow, mut other) = (opened(&mux, 1).await, opened(&mux, 3).await);
    written(&mux);
    while slow.tx.try_send(Bytes::from(vec![0; 5000])).is_ok() {}
    for _ in 0..16 {
        told(&mux, &[Frame::Data { stream: 3, payload: frame(1) }]);
        other.rx.recv().await.unwrap().unwrap();
    }
    drop(other);
    let kinds = written(&mux);
    assert!(matches!(kinds[0], Frame::Credit { stream: 3, .. }), "{:?}", kinds[0]);
    assert_eq!(kinds[1], Frame::Cancel { stream: 3 });
    assert!(kinds[2..].iter().any(|frame| matches!(frame, Frame::Data { stream: 1, .. })));
    mux.end(&Ended { reason: "over".into(), orderly: false });
    assert_eq!(slow.tx.try_send(frame(1)).unwrap_err().to_string(), "stream broken: over");
}

#[tokio::test]
async fn a_peer_that_asks_and_takes_no_answers_is_cut_off() {
    let mux = bare_link();
    let mut decoder = Decoder::default();
    let mut asked = 0u64;
    let refused = loop {
        for _ in 0..10_000 {
            encode(&Frame::Ping(asked), decoder.buffer());
            asked += 1;
        }
        if let Err(refused) = mux.take_all(&mut decoder) {
            break refused;
        }
        assert!(asked < 10_000_000, "no end");
    };
    assert_eq!(refused.to_string(), "protocol violation: more questions than it takes answers to");
}

#[tokio::test]
async fn simultaneous_dials_of_fresh_pairs_always_end_with_one_link() {
    for _ in 0..8 {
        let (a, b) = two(Timings::default()).await;
        let opens = (0..4).map(|n| {
            let (from, to) = if n % 2 == 0 { (&a, &b) } else { (&b, &a) };
            from.open(to, "t/t/yes", context(), Bytes::new())
        });
        for opened in soon(futures::future::join_all(opens)).await {
            opened.unwrap();
        }
        until("one link each", || a.links().len() == 1 && b.links().len() == 1).await;
        a.stop().await;
        b.stop().await;
    }
}

// Both ends hold to the same total, whatever they are told.
const _: () = assert!(STREAM_WINDOW_BYTES * 2 < limits::LINK_UNREAD_BYTES);
