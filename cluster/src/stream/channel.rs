//! The two halves of a stream, the same for local streams and for those on a link.
//!
//! A stream has two independent directions. In each, data flows forward under credits until `end` or a
//! failure, and a cancel flows back when the reader stops reading. A half that is dropped early says so: a
//! sender without an end breaks its direction, a receiver before the end cancels the other side's sender.
//! Called by handlers and openers; built by [`super::local`] and by links. Bounds: at most
//! [`STREAM_WINDOW_FRAMES`] frames a direction between sender and reader, wherever they wait.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use starling_ids::Metric;
use tokio::{
    sync::{Semaphore, TryAcquireError, mpsc, watch},
    time::Instant,
};

use super::{
    Context, Fault, StreamError,
    gauges::{CreditCount, OpenGuard},
};
use crate::wire::limits::STREAM_INACTIVITY;
pub use crate::wire::limits::STREAM_WINDOW_FRAMES;

/// What a reader finds in its queue. After anything but data the direction is over.
#[derive(Debug)]
pub(crate) enum Item {
    Data(Bytes),
    End,
    Fail(Fault),
    Broken(Arc<str>),
}

/// The sender's side of one direction: credits, and why to stop. Shared with whoever grants credits.
#[derive(Debug)]
pub(crate) struct Lane {
    credits: Semaphore,
    window: usize,
    stop: watch::Sender<Option<StreamError>>,
    count: CreditCount,
}

impl Lane {
    /// A lane whose reader takes `window` frames before it gives credits back.
    pub(crate) fn new(context: &Context, window: usize) -> Arc<Self> {
        let count = CreditCount::new(context);
        Arc::new(Self { credits: Semaphore::new(window), window, stop: watch::channel(None).0, count })
    }

    /// The reader took `frames`. More than are outstanding would let a peer grow our queues, so they are cut.
    pub(crate) fn grant(&self, frames: usize) {
        let room = self.window.saturating_sub(self.credits.available_permits());
        let frames = frames.min(room);
        self.count.credited(frames);
        self.credits.add_permits(frames);
    }

    /// Nothing more may be sent; the first reason stays.
    pub(crate) fn stop(&self, reason: StreamError) {
        self.stop.send_if_modified(|stop| stop.is_none() && stop.replace(reason).is_none());
        self.credits.close();
    }

    fn stopped(&self) -> StreamError {
        self.stop.borrow().clone().unwrap_or(StreamError::Cancelled)
    }
}

/// Where a sender's frames go.
pub(crate) trait Outlet: Send + Sync + std::fmt::Debug {
    /// Largest frame that the other side takes, bytes.
    fn frame_max(&self) -> usize;
    /// Waits until the carrier takes `len` more bytes; at once where it takes any number.
    fn reserve(&self, len: usize) -> futures::future::BoxFuture<'_, Result<(), StreamError>>;
    /// The same without waiting; false when it would have to wait.
    fn try_reserve(&self, len: usize) -> bool;
    /// Takes one item, in order. Never waits: credits and reservations bound what lies there.
    fn push(&self, item: Item);
}

/// What a reader tells the other side.
pub(crate) trait Feedback: Send + Sync + std::fmt::Debug {
    /// One frame was taken from the queue.
    fn taken(&self);
    /// Nothing more will be read. Not called after the direction's end was seen.
    fn cancel(&self);
    /// The direction is over on this side, by whatever way. Called exactly once.
    fn closed(&self);
}

/// The sending half.
#[derive(Debug)]
pub struct StreamTx {
    outlet: Arc<dyn Outlet>,
    lane: Arc<Lane>,
    deadline: Option<Instant>,
    ended: bool,
    _open: Arc<OpenGuard>,
}

impl StreamTx {
    pub(crate) fn new(
        outlet: Arc<dyn Outlet>,
        lane: Arc<Lane>,
        deadline: Option<Instant>,
        open: Arc<OpenGuard>,
    ) -> Self {
        Self { outlet, lane, deadline, ended: false, _open: open }
    }

    /// Sends one frame of at most [`crate::wire::limits::FRAME_PAYLOAD_MAX`] bytes, waiting for a credit first.
    ///
    /// Cancelling the wait sends nothing. Fails with the reason once the other side cancelled, the link broke
    /// or the context's time is over.
    pub async fn send(&self, frame: Bytes) -> Result<(), StreamError> {
        match self.try_send(frame) {
            Ok(()) => Ok(()),
            Err(TrySendError::Failed(error)) => Err(error),
            Err(TrySendError::Full(frame)) => {
                let waiting = self.send_waiting(frame);
                match self.deadline {
                    Some(at) => tokio::time::timeout_at(at, waiting).await.unwrap_or(Err(StreamError::Deadline)),
                    None => waiting.await,
                }
            }
        }
    }

    /// Sends one frame if there is a credit for it now.
    pub fn try_send(&self, frame: Bytes) -> Result<(), TrySendError> {
        let limit = self.outlet.frame_max();
        if frame.len() > limit {
            return Err(TrySendError::Failed(StreamError::TooLarge { len: frame.len(), limit }));
        }
        match self.lane.credits.try_acquire() {
            Ok(credit) => {
                if !self.outlet.try_reserve(frame.len()) {
                    return Err(TrySendError::Full(frame));
                }
                credit.forget();
                self.lane.count.sent();
                self.outlet.push(Item::Data(frame));
                Ok(())
            }
            Err(TryAcquireError::NoPermits) => Err(TrySendError::Full(frame)),
            Err(TryAcquireError::Closed) => Err(TrySendError::Failed(self.lane.stopped())),
        }
    }

    /// Ends this direction. The other side has seen everything when it sees the end.
    pub fn end(mut self) {
        self.ended = true;
        self.outlet.push(Item::End);
    }

    /// Ends this direction with a failure that the other side reads as [`StreamError::Failed`].
    pub fn fail(mut self, fault: Fault) {
        self.ended = true;
        self.outlet.push(Item::Fail(fault));
    }

    /// Resolves when nothing more can be sent: the other side cancelled or the link broke. Says which.
    pub async fn cancelled(&self) -> StreamError {
        let mut stop = self.lane.stop.subscribe();
        // The sender of the watch lives in the lane that `self` holds, so waiting cannot fail.
        match stop.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(StreamError::Cancelled),
            Err(_) => StreamError::Cancelled,
        }
    }

    /// Why nothing more can be sent, if so.
    #[must_use]
    pub fn is_cancelled(&self) -> Option<StreamError> {
        self.lane.stop.borrow().clone()
    }

    async fn send_waiting(&self, frame: Bytes) -> Result<(), StreamError> {
        let credit = self.lane.credits.acquire().await.map_err(|_| self.lane.stopped())?;
        tokio::select! {
            biased;
            reason = self.cancelled() => return Err(reason),
            room = self.outlet.reserve(frame.len()) => room?,
        }
        credit.forget();
        self.lane.count.sent();
        self.outlet.push(Item::Data(frame));
        Ok(())
    }
}

impl Drop for StreamTx {
    fn drop(&mut self) {
        if !self.ended {
            self.outlet.push(Item::Broken(Arc::from("the sender was dropped without an end")));
        }
        self.lane.count.sender_gone();
    }
}

/// Why [`StreamTx::try_send`] sent nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TrySendError {
    /// No credit now; the frame comes back.
    #[error("no credit")]
    Full(Bytes),
    /// Nothing more can be sent.
    #[error(transparent)]
    Failed(StreamError),
}

/// The receiving half.
#[derive(Debug)]
pub struct StreamRx {
    queue: mpsc::Receiver<Item>,
    feedback: Arc<dyn Feedback>,
    deadline: Option<Instant>,
    inactivity: Option<Duration>,
    last: Instant,
    over: bool,
    _open: Arc<OpenGuard>,
}

impl StreamRx {
    pub(crate) fn new(
        queue: mpsc::Receiver<Item>,
        feedback: Arc<dyn Feedback>,
        deadline: Option<Instant>,
        open: Arc<OpenGuard>,
    ) -> Self {
        Self { queue, feedback, deadline, inactivity: None, last: Instant::now(), over: false, _open: open }
    }

    /// The default of the side that opened a request stream.
    pub(crate) fn with_default_inactivity(mut self, context: &Context) -> Self {
        self.inactivity = (!context.subscription).then_some(STREAM_INACTIVITY);
        self
    }

    /// Sets how long the stream may be silent; `None` for ever. The side that opened a request stream starts
    /// with 30 s, the other side and subscriptions with none.
    pub fn set_inactivity(&mut self, limit: Option<Duration>) {
        self.inactivity = limit;
        self.last = Instant::now();
    }

    /// The next frame; `None` after a clean end. After an error there is nothing more.
    ///
    /// Cancelling the wait loses nothing.
    pub async fn recv(&mut self) -> Option<Result<Bytes, StreamError>> {
        if self.over {
            return None;
        }
        let item = match self.queue.try_recv() {
            Ok(item) => item,
            Err(_) => match self.wait().await {
                Ok(item) => item,
                Err(error) => return Some(Err(self.give_up(error))),
            },
        };
        self.last = Instant::now();
        match item {
            Item::Data(frame) => {
                self.feedback.taken();
                Some(Ok(frame))
            }
            Item::End => {
                self.close();
                None
            }
            Item::Fail(fault) => {
                self.close();
                Some(Err(StreamError::Failed(fault)))
            }
            Item::Broken(reason) => {
                self.close();
                count_broken("broken");
                Some(Err(StreamError::Broken(reason.to_string())))
            }
        }
    }

    async fn wait(&mut self) -> Result<Item, StreamError> {
        let silent = self.inactivity.and_then(|limit| self.last.checked_add(limit));
        let (at, error) = match (self.deadline, silent) {
            (Some(deadline), Some(silent)) if silent < deadline => (Some(silent), self.inactive()),
            (None, Some(silent)) => (Some(silent), self.inactive()),
            (deadline, _) => (deadline, StreamError::Deadline),
        };
        let next = self.queue.recv();
        let item = match at {
            Some(at) => tokio::time::timeout_at(at, next).await.map_err(|_| error)?,
            None => next.await,
        };
        // The carrier went away without a word.
        Ok(item.unwrap_or_else(|| Item::Broken(Arc::from("the link is gone"))))
    }

    fn inactive(&self) -> StreamError {
        let limit = self.inactivity.unwrap_or_default();
        StreamError::Inactive(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX))
    }

    fn give_up(&mut self, error: StreamError) -> StreamError {
        count_broken(if error == StreamError::Deadline { "deadline" } else { "inactive" });
        self.feedback.cancel();
        self.close();
        error
    }

    fn close(&mut self) {
        self.over = true;
        self.feedback.closed();
    }
}

impl Drop for StreamRx {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        // An end that lies in the queue unread is an end: the other side has nothing to stop.
        let mut finished = false;
        while let Ok(item) = self.queue.try_recv() {
            finished |= !matches!(item, Item::Data(_));
        }
        if !finished {
            self.feedback.cancel();
        }
        self.close();
    }
}

fn count_broken(reason: &'static str) {
    metrics::counter!(Metric::StreamsBroken.name(), "reason" => reason).increment(1);
}
