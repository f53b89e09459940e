//! Local streams: every way in which one can begin, flow and end.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use starling_ids::{EndpointName, NodeId, RequestId};

use super::{local, *};
use crate::{
    supervise::{TaskOwner, Tasks},
    wire::limits::{STREAM_WINDOW_BYTES, STREAM_WINDOW_FRAMES},
};

type Halves = (StreamTx, StreamRx);

/// Accepts with the body and hands its halves to the test.
struct HandOver(tokio::sync::mpsc::UnboundedSender<Halves>);

impl StreamHandler for HandOver {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let hand_over = self.0.clone();
        Box::pin(async move {
            if let Some(halves) = incoming.acceptor.accept(incoming.body) {
                hand_over.send(halves).unwrap();
            }
        })
    }
}

struct Refuse;

impl StreamHandler for Refuse {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move { incoming.acceptor.reject(Fault::new(FaultKind::Overloaded, "full").retry_after_ms(5)) })
    }
}

struct Forget;

impl StreamHandler for Forget {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        Box::pin(async move { drop(incoming) })
    }
}

struct Setup {
    endpoints: Endpoints,
    tasks: Tasks,
    _owner: TaskOwner,
    far: tokio::sync::mpsc::UnboundedReceiver<Halves>,
}

fn name(text: &str) -> EndpointName {
    EndpointName::new(text).unwrap()
}

fn setup() -> Setup {
    let endpoints = Endpoints::default();
    let (sender, far) = tokio::sync::mpsc::unbounded_channel();
    endpoints.serve(name("t/t/yes"), Arc::new(HandOver(sender)));
    endpoints.serve(name("t/t/no"), Arc::new(Refuse));
    endpoints.serve(name("t/t/forget"), Arc::new(Forget));
    let tasks = Tasks::closed(100);
    let owner = TaskOwner::open(&tasks);
    Setup { endpoints, tasks, _owner: owner, far }
}

impl Setup {
    async fn open(&self, endpoint: &str, context: Context) -> Result<Opened, StreamError> {
        let node = NodeId::new("me").unwrap();
        local::open(&self.endpoints, &self.tasks, &node, (&name(endpoint), context, Bytes::from_static(b"hi"))).await
    }

    async fn pair(&mut self, context: Context) -> (Opened, Halves) {
        let opened = self.open("t/t/yes", context).await.unwrap();
        (opened, self.far.recv().await.unwrap())
    }
}

fn context() -> Context {
    Context::new(RequestId(1), Duration::from_secs(60))
}

fn frame(n: u8) -> Bytes {
    Bytes::from(vec![n; 3])
}

#[tokio::test]
async fn an_accepted_stream_carries_both_directions_to_their_ends() {
    let mut setup = setup();
    let (mut near, (tx, mut rx)) = setup.pair(context()).await;
    assert_eq!(near.reply, "hi");
    near.tx.send(frame(1)).await.unwrap();
    near.tx.end();
    assert_eq!(rx.recv().await, Some(Ok(frame(1))));
    assert_eq!(rx.recv().await, None);
    tx.send(frame(2)).await.unwrap();
    tx.send(frame(3)).await.unwrap();
    tx.end();
    assert_eq!(near.rx.recv().await, Some(Ok(frame(2))));
    assert_eq!(near.rx.recv().await, Some(Ok(frame(3))));
    assert_eq!(near.rx.recv().await, None);
    assert_eq!(near.rx.recv().await, None);
}

#[tokio::test]
async fn refusals_are_typed_and_come_before_any_data() {
    let setup = setup();
    let fault = Fault::new(FaultKind::Overloaded, "full").retry_after_ms(5);
    assert_eq!(setup.open("t/t/no", context()).await.unwrap_err(), StreamError::Rejected(fault));
    let kind = |error| match error {
        StreamError::Rejected(fault) => fault.kind,
        other => panic!("{other}"),
    };
    assert_eq!(kind(setup.open("t/t/nobody", context()).await.unwrap_err()), FaultKind::NotFound);
    assert_eq!(kind(setup.open("t/t/forget", context()).await.unwrap_err()), FaultKind::Internal);
}

#[tokio::test]
async fn a_stream_without_an_end_is_broken_and_a_failure_keeps_its_kind() {
    let mut setup = setup();
    let (mut near, (tx, _rx)) = setup.pair(context()).await;
    tx.send(frame(1)).await.unwrap();
    drop(tx);
    assert_eq!(near.rx.recv().await, Some(Ok(frame(1))), "what was sent before still arrives");
    assert!(matches!(near.rx.recv().await, Some(Err(StreamError::Broken(_)))));
    assert_eq!(near.rx.recv().await, None);

    let (mut near, (tx, _rx)) = setup.pair(context()).await;
    let fault = Fault::new(FaultKind::Internal, "out of blocks");
    tx.fail(fault.clone());
    assert_eq!(near.rx.recv().await, Some(Err(StreamError::Failed(fault))));
}

#[tokio::test]
async fn a_reader_that_leaves_cancels_the_sender_and_only_its_direction() {
    let mut setup = setup();
    let (near, (tx, mut rx)) = setup.pair(context()).await;
    drop(near.rx);
    assert_eq!(tx.cancelled().await, StreamError::Cancelled);
    assert_eq!(tx.send(frame(1)).await, Err(StreamError::Cancelled));
    near.tx.send(frame(2)).await.unwrap();
    assert_eq!(rx.recv().await, Some(Ok(frame(2))));
}

#[tokio::test]
async fn a_reader_that_leaves_after_the_end_cancels_nobody() {
    let mut setup = setup();
    let (mut near, (tx, rx)) = setup.pair(context()).await;
    near.tx.end();
    drop(rx);
    tx.send(frame(1)).await.unwrap();
    tx.end();
    assert_eq!(near.rx.recv().await, Some(Ok(frame(1))));
    assert_eq!(near.rx.recv().await, None);
}

#[tokio::test]
async fn credits_stop_the_sender_until_the_reader_has_taken_a_quarter_of_its_window() {
    let mut setup = setup();
    let (mut near, (tx, _rx)) = setup.pair(context()).await;
    for _ in 0..STREAM_WINDOW_FRAMES {
        tx.try_send(frame(0)).unwrap();
    }
    assert_eq!(tx.try_send(frame(1)), Err(TrySendError::Full(frame(1))));
    let mut waiting = Box::pin(tx.send(frame(9)));
    assert!(futures::poll!(&mut waiting).is_pending());
    for _ in 0..STREAM_WINDOW_FRAMES / 4 {
        near.rx.recv().await.unwrap().unwrap();
    }
    waiting.await.unwrap();
    for _ in 0..STREAM_WINDOW_FRAMES * 3 / 4 {
        assert_eq!(near.rx.recv().await, Some(Ok(frame(0))));
    }
    assert_eq!(near.rx.recv().await, Some(Ok(frame(9))));
    tx.end();
    assert_eq!(near.rx.recv().await, None);
}

#[tokio::test]
async fn a_stuck_reader_holds_at_most_its_window_of_bytes() {
    let mut setup = setup();
    for len in [17_000, 100_000, STREAM_WINDOW_BYTES - 1] {
        let (_near, (tx, _rx)) = setup.pair(context()).await;
        let sent = (0..100).take_while(|_| tx.try_send(Bytes::from(vec![0; len])).is_ok()).count();
        assert!(sent > 0 && sent * len <= STREAM_WINDOW_BYTES, "{sent} frames of {len} bytes");
    }
}

#[tokio::test]
async fn a_frame_larger_than_the_window_passes_when_little_lies_unread() {
    let mut setup = setup();
    let (mut near, (tx, _rx)) = setup.pair(context()).await;
    let large = Bytes::from(vec![0; 4 * STREAM_WINDOW_BYTES]);
    for _ in 0..5 {
        tx.send(frame(1)).await.unwrap();
        tx.send(large.clone()).await.unwrap();
        assert!(tx.try_send(large.clone()).is_err(), "but only one");
        assert_eq!(near.rx.recv().await, Some(Ok(frame(1))));
        assert_eq!(near.rx.recv().await, Some(Ok(large.clone())));
    }
}

#[tokio::test]
async fn each_direction_may_end_long_before_the_other() {
    for far_first in [false, true] {
        let mut setup = setup();
        let (near, far) = setup.pair(context()).await;
        let near = (near.tx, near.rx);
        let ((first, mut first_rx), (second, mut second_rx)) = if far_first { (far, near) } else { (near, far) };
        first.end();
        assert_eq!(second_rx.recv().await, None);
        for n in 0..100 {
            second.send(frame(n)).await.unwrap();
            assert_eq!(first_rx.recv().await, Some(Ok(frame(n))));
        }
        second.end();
        assert_eq!(first_rx.recv().await, None);
    }
}

#[tokio::test]
async fn a_cancelled_wait_for_a_credit_sends_nothing_and_loses_no_credit() {
    let mut setup = setup();
    let (mut near, (tx, _rx)) = setup.pair(context()).await;
    while tx.try_send(frame(0)).is_ok() {}
    let mut waiting = Box::pin(tx.send(frame(9)));
    assert!(futures::poll!(&mut waiting).is_pending());
    drop(waiting);
    for _ in 0..STREAM_WINDOW_FRAMES {
        assert_eq!(near.rx.recv().await, Some(Ok(frame(0))));
    }
    for _ in 0..STREAM_WINDOW_FRAMES {
        tx.try_send(frame(1)).unwrap();
    }
    assert!(tx.try_send(frame(1)).is_err());
}

#[tokio::test]
async fn silence_and_deadlines_end_a_stream() {
    let mut setup = setup();
    let (mut near, (tx, _rx)) = setup.pair(context()).await;
    near.rx.set_inactivity(Some(Duration::from_millis(3)));
    assert_eq!(near.rx.recv().await, Some(Err(StreamError::Inactive(3))));
    assert_eq!(near.rx.recv().await, None);
    assert_eq!(tx.cancelled().await, StreamError::Cancelled);

    let short = Context::new(RequestId(1), Duration::from_millis(200));
    let (mut near, (tx, mut rx)) = setup.pair(short.clone()).await;
    assert_eq!(near.rx.recv().await, Some(Err(StreamError::Deadline)));
    assert_eq!(rx.recv().await, Some(Err(StreamError::Deadline)), "both sides hold the deadline");
    drop(tx);

    let (_near, (tx, _rx)) = setup.pair(short).await;
    while tx.try_send(frame(0)).is_ok() {}
    assert_eq!(tx.send(frame(0)).await, Err(StreamError::Deadline));

    let context = Context::subscription(RequestId(1));
    assert_eq!(context.deadline(), None);
    let (mut near, (tx, _rx)) = setup.pair(context).await;
    assert!(futures::poll!(Box::pin(near.rx.recv())).is_pending());
    tx.end();
    assert_eq!(near.rx.recv().await, None);
}

#[tokio::test]
async fn a_frame_over_the_limit_is_refused_before_it_is_sent() {
    let mut setup = setup();
    let (_near, (tx, _rx)) = setup.pair(context()).await;
    let large = Bytes::from(vec![0; crate::wire::limits::FRAME_PAYLOAD_MAX + 1]);
    assert!(matches!(tx.send(large).await, Err(StreamError::TooLarge { .. })));
}
