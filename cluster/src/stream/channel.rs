//! The sending half of a stream, the same for local streams and for those on a link.
//!
//! A stream has two independent directions. In each, data flows forward under credits until `end` or a
//! failure, and a cancel flows back when the reader stops reading. A half that is dropped early says so: a
//! sender without an end breaks its direction, a receiver ([`super::StreamRx`]) before the end cancels the other side's
//! sender. Called by handlers and openers; built by [`super::local`] and by links. Bounds: the reader's window
//! ([`super::window`]) between sender and reader, wherever the frames wait.

use std::sync::Arc;

use bytes::Bytes;
use tokio::{sync::TryAcquireError, time::Instant};

use super::{Fault, StreamError, gauges::OpenGuard, inbox::Last, lane::Lane};

/// Where a sender's frames go.
pub(crate) trait Outlet: Send + Sync + std::fmt::Debug {
    /// Largest frame that the other side takes, bytes.
    fn frame_max(&self) -> usize;
    /// Waits until the carrier takes `len` more bytes; at once where it takes any number.
    fn reserve(&self, len: usize) -> futures::future::BoxFuture<'_, Result<(), StreamError>>;
    /// The same without waiting; false when it would have to wait.
    fn try_reserve(&self, len: usize) -> bool;
    /// Takes one frame, in order. Never waits: credits and reservations bound what lies there.
    fn push(&self, frame: Bytes);
    /// Takes the last word, behind all frames. Called exactly once.
    fn finish(&self, last: Last);
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
        // A sender whose credits never run out must still let other tasks run.
        tokio::task::coop::consume_budget().await;
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
        match self.lane.try_take(self.lane.cost(frame.len())) {
            Ok(credit) => {
                if !self.outlet.try_reserve(frame.len()) {
                    return Err(TrySendError::Full(frame));
                }
                credit.spend();
                self.outlet.push(frame);
                Ok(())
            }
            Err(TryAcquireError::NoPermits) => Err(TrySendError::Full(frame)),
            Err(TryAcquireError::Closed) => Err(TrySendError::Failed(self.lane.stopped())),
        }
    }

    /// Ends this direction. The other side has seen everything when it sees the end.
    pub fn end(mut self) {
        self.ended = true;
        self.outlet.finish(Last::End);
    }

    /// Ends this direction with a failure that the other side reads as [`StreamError::Failed`].
    pub fn fail(mut self, fault: Fault) {
        self.ended = true;
        self.outlet.finish(Last::Fail(fault));
    }

    /// Resolves when nothing more can be sent: the other side cancelled or the link broke. Says which.
    pub async fn cancelled(&self) -> StreamError {
        self.lane.wait_stopped().await
    }

    /// Why nothing more can be sent, if so.
    #[must_use]
    pub fn is_cancelled(&self) -> Option<StreamError> {
        self.lane.reason().cloned()
    }

    async fn send_waiting(&self, frame: Bytes) -> Result<(), StreamError> {
        let credit = self.lane.take(self.lane.cost(frame.len())).await?;
        tokio::select! {
            biased;
            reason = self.cancelled() => return Err(reason),
            room = self.outlet.reserve(frame.len()) => room?,
        }
        credit.spend();
        self.outlet.push(frame);
        Ok(())
    }
}

impl Drop for StreamTx {
    fn drop(&mut self) {
        if !self.ended {
            self.outlet.finish(Last::Broken(Arc::from("the sender was dropped without an end")));
        }
        self.lane.sender_gone();
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
