//! A connection that ends by itself some time after the key that its other end has proved was removed.
//!
//! For connections whose owner cannot close them in good order: actor sessions. It ends as if the other side had closed
//! it, once nothing has moved for [`QUIET`], and after [`LOOKS`] times that in any case.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Connection, Tls};

/// Answers under way arrive within this time of one another.
const QUIET: Duration = Duration::from_secs(1);
/// Longest life after the removal, in such times.
const LOOKS: u32 = 10;

/// A connection that fades with its key.
pub struct Fading<S = Connection> {
    stream: S,
    /// Bytes have moved since the last look.
    moved: Arc<AtomicBool>,
    /// Resolves when it is over; none afterwards.
    over: Option<BoxFuture<'static, ()>>,
}

impl Tls {
    /// Ties a connection to the key that its other end has proved.
    #[must_use]
    pub fn fading(&self, connection: Connection) -> Fading {
        let removed = self.removed(&connection);
        Fading::new(connection, removed, (QUIET, LOOKS))
    }
}

impl<S> Fading<S> {
    /// Looks every `quiet` whether bytes have moved, at most `looks` times.
    fn new(stream: S, removed: impl Future<Output = ()> + Send + 'static, (quiet, looks): (Duration, u32)) -> Self {
        let moved = Arc::new(AtomicBool::new(false));
        let seen = moved.clone();
        let over = async move {
            removed.await;
            for _ in 0..looks {
                seen.store(false, Ordering::Relaxed);
                tokio::time::sleep(quiet).await;
                if !seen.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        Self { stream, moved, over: Some(over.boxed()) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Fading<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.over {
            Some(over) => {
                if over.poll_unpin(cx).is_ready() {
                    self.over = None;
                    return Poll::Ready(Ok(()));
                }
            }
            None => return Poll::Ready(Ok(())),
        }
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.moved.store(true, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Fading<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.moved.store(true, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn it_lives_as_long_as_its_key_and_then_ends_even_if_somebody_talks_on() {
        for (chatty, quiet, looks) in [(false, 1, u32::MAX), (true, 20, 2)] {
            let (mut near, far) = tokio::io::duplex(64);
            let (remove, removed) = tokio::sync::oneshot::channel::<()>();
            let removed = async move { assert!(removed.await.is_ok()) };
            let mut far = Fading::new(far, removed, (Duration::from_millis(quiet), looks));
            let mut bytes = [0; 6];
            for _ in 0..50 {
                near.write_all(b"before").await.unwrap();
                far.read_exact(&mut bytes).await.unwrap();
            }
            remove.send(()).unwrap();
            let talk = async {
                while chatty && near.write_all(b"x").await.is_ok() {
                    tokio::task::yield_now().await;
                }
                std::future::pending::<()>().await;
            };
            let read = async { while far.read(&mut bytes).await.unwrap() > 0 {} };
            let ended = async {
                tokio::select! {
                    () = talk => {}
                    () = read => {}
                }
            };
            assert!(tokio::time::timeout(Duration::from_secs(20), ended).await.is_ok(), "chatty: {chatty}");
            assert_eq!(far.read(&mut bytes).await.unwrap(), 0, "over stays over");
        }
    }
}
