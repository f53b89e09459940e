//! What a caller holds while answers come: a stream of values, or both directions.
//!
//! Made by [`super::Client`]. Dropping one cancels the call. Bounds: those of the stream below.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures::{Stream, StreamExt, stream::BoxStream};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    error::CallError,
    halves::{Receiver, Sender},
    instances::InstanceId,
    tries::InFlight,
};

/// Answers as they come; a [`Stream`] that ends after a clean end or the first error.
pub struct Answers<T> {
    /// None after the first error: the same for streams that would go on, local ones say.
    inner: Option<BoxStream<'static, Result<T, CallError>>>,
}

impl<T> std::fmt::Debug for Answers<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Answers")
    }
}

impl<T: Send + 'static> Answers<T> {
    /// Answers made by this program, for operators and local services.
    pub fn new(stream: impl Stream<Item = Result<T, CallError>> + Send + 'static) -> Self {
        Self { inner: Some(stream.boxed()) }
    }

    /// One answer.
    pub fn once(value: T) -> Self {
        Self::new(futures::stream::iter([Ok(value)]))
    }

    /// The next answer; `None` after the end.
    pub async fn next(&mut self) -> Option<Result<T, CallError>> {
        StreamExt::next(self).await
    }

    /// All answers, or the first error.
    pub async fn all(mut self) -> Result<Vec<T>, CallError> {
        let mut all = Vec::new();
        while let Some(answer) = self.next().await {
            all.push(answer?);
        }
        Ok(all)
    }
}

impl<T> Stream for Answers<T> {
    type Item = Result<T, CallError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(inner) = self.inner.as_mut() else { return Poll::Ready(None) };
        let next = std::task::ready!(inner.poll_next_unpin(cx));
        if !matches!(next, Some(Ok(_))) {
            self.inner = None;
        }
        Poll::Ready(next)
    }
}

/// Answers from a receiver; `kept` is dropped with the last of them.
pub(super) fn from_receiver<T, K>(receiver: Receiver<T>, kept: K) -> Answers<T>
where
    T: DeserializeOwned + Send + 'static,
    K: Send + 'static,
{
    Answers::new(futures::stream::unfold(Some((receiver, kept)), |state| async move {
        let (mut receiver, kept) = state?;
        let next = receiver.next().await?;
        let over = next.is_err();
        Some((next, (!over).then_some((receiver, kept))))
    }))
}

/// Both directions of one call.
#[derive(Debug)]
pub struct Duplex<Req, Resp> {
    instance: InstanceId,
    sender: Sender<Req>,
    receiver: Receiver<Resp>,
    in_flight: InFlight,
}

impl<Req, Resp> Duplex<Req, Resp>
where
    Req: Serialize,
    Resp: DeserializeOwned + Send + 'static,
{
    pub(super) fn new(
        instance: InstanceId,
        sender: Sender<Req>,
        receiver: Receiver<Resp>,
        in_flight: InFlight,
    ) -> Self {
        Self { instance, sender, receiver, in_flight }
    }

    /// Who answers.
    #[must_use]
    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// Sends one value; waits while the other side is behind. [`super::RequestFault::Cancelled`] says that the other side
    /// reads no more; [`Self::next`] then tells how it ended.
    pub async fn send(&self, value: &Req) -> Result<(), CallError> {
        self.sender.send(value).await
    }

    /// The next answer; `None` after a clean end.
    pub async fn next(&mut self) -> Option<Result<Resp, CallError>> {
        self.receiver.next().await
    }

    /// Says that no value will follow; the answers go on.
    #[must_use]
    pub fn end(self) -> Answers<Resp> {
        self.sender.end();
        from_receiver(self.receiver, self.in_flight)
    }

    /// Both directions on their own, for two tasks.
    #[must_use]
    pub fn split(self) -> (Sender<Req>, Answers<Resp>) {
        (self.sender, from_receiver(self.receiver, self.in_flight))
    }
}
