//! The byte stream under a session, handed to ractor_cluster.
//!
//! Called by the Sessions actor. Bounds: one read buffer of [`READ_BUFFER`] for each session.

use ractor_cluster::{BoxRead, BoxWrite, ClusterBidiStream};
use tokio::io::{AsyncRead, AsyncWrite, BufReader};

/// ractor_cluster reads each message in two calls; the buffer makes most of them cheap.
const READ_BUFFER: usize = 64 << 10;

/// Anything that reads and writes: a TLS stream, or a pipe in tests.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Duplex for T {}

/// A connected stream that a session may use.
pub type SessionStream = Box<dyn Duplex>;

/// What ractor_cluster is given.
pub(super) struct Transport {
    pub(super) stream: SessionStream,
    pub(super) peer: String,
}

impl ClusterBidiStream for Transport {
    fn split(self: Box<Self>) -> (BoxRead, BoxWrite) {
        let (read, write) = tokio::io::split(self.stream);
        (Box::new(BufReader::with_capacity(READ_BUFFER, read)), Box::new(write))
    }

    fn peer_label(&self) -> Option<String> {
        Some(self.peer.clone())
    }
}
