//! A TCP connection that is read in large portions, for the TLS on top of it.
//!
//! The TLS library asks for 4 KiB at a time; without this each of them would be a call into the kernel. Writes pass
//! through. Bounds: one read buffer of [`PORTION`] for each connection, of which only what arrives becomes resident.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// Bytes taken from the kernel at one time.
const PORTION: usize = 64 << 10;

/// A TCP connection with a read buffer.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    buffer: Box<[u8]>,
    /// Where what is not handed on yet begins and ends.
    from: usize,
    to: usize,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: vec![0; PORTION].into_boxed_slice(), from: 0, to: 0 }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.from == this.to {
            let mut portion = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut portion))?;
            (this.from, this.to) = (0, portion.filled().len());
        }
        let taken = (this.to - this.from).min(into.remaining());
        into.put_slice(&this.buffer[this.from..this.from + taken]);
        this.from += taken;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
