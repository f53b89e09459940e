//! Typed halves of a stream: values instead of frames.
//!
//! Handed to duplex handlers and to callers. A [`Sender`] that is dropped without [`Sender::end`] breaks its
//! direction, except in a handler, whose return ends it. Bounds: those of the stream below.

use std::marker::PhantomData;

use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::oneshot;

use super::{
    codec::{decode, encode},
    error::CallError,
};
use crate::stream::{Fault, StreamRx, StreamTx};

/// Sends values of one type.
#[derive(Debug)]
pub struct Sender<T> {
    tx: Option<StreamTx>,
    /// Where the stream's half goes when a handler is done with it; none on the caller's side.
    home: Option<oneshot::Sender<StreamTx>>,
    _of: PhantomData<fn(T)>,
}

impl<T: Serialize> Sender<T> {
    pub(super) fn new(tx: StreamTx) -> Self {
        Self { tx: Some(tx), home: None, _of: PhantomData }
    }

    /// One whose half comes back when it is dropped, so that the handler's outcome decides how the direction ends.
    pub(super) fn on_loan(tx: StreamTx) -> (Self, oneshot::Receiver<StreamTx>) {
        let (home, back) = oneshot::channel();
        (Self { tx: Some(tx), home: Some(home), _of: PhantomData }, back)
    }

    /// Sends one value; waits while the reader is behind.
    pub async fn send(&self, value: &T) -> Result<(), CallError> {
        let frame = encode(value)?;
        match &self.tx {
            Some(tx) => Ok(tx.send(frame).await?),
            None => Err(super::RequestFault::Cancelled.into()),
        }
    }

    /// No value will follow.
    pub fn end(mut self) {
        if let Some(tx) = self.tx.take() {
            tx.end();
        }
    }

    /// Ends with a failure that the other side reads.
    pub fn fail(mut self, fault: Fault) {
        if let Some(tx) = self.tx.take() {
            tx.fail(fault);
        }
    }

    /// Resolves when the other side reads no more.
    pub async fn closed(&self) {
        if let Some(tx) = &self.tx {
            tx.cancelled().await;
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if let (Some(tx), Some(home)) = (self.tx.take(), self.home.take()) {
            // A handler that was itself dropped waits for nothing: the half breaks its direction.
            drop(home.send(tx));
        }
    }
}

/// Receives values of one type.
#[derive(Debug)]
pub struct Receiver<T> {
    rx: StreamRx,
    _of: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Receiver<T> {
    pub(super) fn new(rx: StreamRx) -> Self {
        Self { rx, _of: PhantomData }
    }

    /// The next value; `None` after a clean end. After an error there is nothing more.
    pub async fn next(&mut self) -> Option<Result<T, CallError>> {
        let frame = match self.rx.recv().await? {
            Ok(frame) => frame,
            Err(error) => return Some(Err(error.into())),
        };
        Some(decode(&frame).map_err(CallError::from))
    }
}
