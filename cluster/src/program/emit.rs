//! An answer stream written like a loop: an async block that sends into an [`Emitter`].
//!
//! Called by handlers of [`super::Endpoint::serve_stream`]. The block runs only while its stream is read, so a slow
//! reader slows it; it is dropped with the stream. Bounds: one value between block and reader.

use std::pin::Pin;

use futures::Stream;
use tokio::sync::mpsc;

use crate::stream::{Fault, FaultKind};

/// Where the block of [`emit`] sends its values.
#[derive(Debug, Clone)]
pub struct Emitter<T> {
    queue: mpsc::Sender<T>,
}

impl<T> Emitter<T> {
    /// Sends one value; waits until the reader has taken the one before. Fails when nobody reads any more.
    pub async fn send(&self, value: T) -> Result<(), Fault> {
        self.queue.send(value).await.map_err(|_| Fault::new(FaultKind::Unavailable, "nobody reads this any more"))
    }
}

struct Running<T, F> {
    block: Option<Pin<Box<F>>>,
    queue: mpsc::Receiver<T>,
    failed: Option<Fault>,
}

/// The stream of what `block` sends. It ends when the block returns, with its fault if it returns one.
///
/// ```
/// use starling_cluster::program::emit;
/// let numbers = emit(|out| async move {
///     for n in 0..10u32 {
///         out.send(n).await?;
///     }
///     Ok(())
/// });
/// ```
pub fn emit<T, F>(block: impl FnOnce(Emitter<T>) -> F) -> impl Stream<Item = Result<T, Fault>> + Send + 'static
where
    T: Send + 'static,
    F: Future<Output = Result<(), Fault>> + Send + 'static,
{
    let (sender, queue) = mpsc::channel(1);
    let running = Running { block: Some(Box::pin(block(Emitter { queue: sender }))), queue, failed: None };
    futures::stream::unfold(running, |mut running| async move {
        while let Some(block) = running.block.as_mut() {
            tokio::select! {
                biased;
                Some(value) = running.queue.recv() => return Some((Ok(value), running)),
                outcome = block => {
                    running.block = None;
                    running.failed = outcome.err();
                }
            }
        }
        if let Ok(value) = running.queue.try_recv() {
            return Some((Ok(value), running));
        }
        running.failed.take().map(|fault| (Err(fault), running))
    })
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;

    #[tokio::test]
    async fn values_come_in_order_and_the_fault_last() {
        let fault = Fault::new(FaultKind::Internal, "out of words");
        let told = fault.clone();
        let stream = emit(|out| async move {
            for n in 0..5u8 {
                out.send(n).await?;
            }
            Err(told)
        });
        let all: Vec<_> = stream.collect().await;
        let expected: Vec<_> = (0..5u8).map(Ok).chain([Err(fault)]).collect();
        assert_eq!(all, expected);
    }

    #[tokio::test]
    async fn a_block_runs_no_further_than_it_is_read() {
        let sent = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let count = sent.clone();
        let stream = emit(|out| async move {
            for n in 0..100u32 {
                count.store(n, std::sync::atomic::Ordering::Relaxed);
                out.send(n).await?;
            }
            Ok(())
        });
        let mut stream = Box::pin(stream);
        assert_eq!(stream.next().await, Some(Ok(0)));
        assert!(sent.load(std::sync::atomic::Ordering::Relaxed) <= 2);
    }
}
