//! A TCP connection over a network that loses packets: another attempt begins beside one that takes long.
//!
//! A kernel sends a lost SYN again only after one second, then after two more, then after four. Attempts side by side
//! are lost independently, so a fifth of all packets may be. The first one that is through counts; the others are closed.
//! Called by [`super::Tls::connect`], which bounds the time. Bounds: [`ATTEMPTS_MAX`] sockets.

use std::{io, net::SocketAddr, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use tokio::{net::TcpStream, time::sleep};

const ATTEMPTS_MAX: u32 = 4;
/// Between the beginnings of two attempts: as long as a first SYN has before it is sent again.
const APART: Duration = Duration::from_secs(1);

/// Connects. A host that says that nobody listens is believed at once.
pub(super) async fn reach(address: SocketAddr) -> io::Result<TcpStream> {
    let mut attempts = FuturesUnordered::new();
    attempts.push(TcpStream::connect(address));
    let mut begun = 1;
    loop {
        tokio::select! {
            Some(outcome) = attempts.next() => match outcome {
                Ok(stream) => return Ok(stream),
                Err(error) if attempts.is_empty() || error.kind() == io::ErrorKind::ConnectionRefused => return Err(error),
                Err(error) => tracing::debug!(%address, %error, "one of several attempts to connect failed"),
            },
            () = sleep(APART), if begun < ATTEMPTS_MAX => {
                attempts.push(TcpStream::connect(address));
                begun += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_listener_is_reached_and_an_empty_port_refuses_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = listener.local_addr().expect("address");
        assert!(reach(address).await.is_ok());
        drop(listener);
        assert_eq!(reach(address).await.expect_err("nobody listens").kind(), io::ErrorKind::ConnectionRefused);
    }
}
