//! Streams: the one way in which requests and answers travel, inside a process and between nodes.
//!
//! A stream is opened to an endpoint of a node in one incarnation, with a [`Context`] and a first body. The
//! other side accepts it with a reply body or rejects it with a typed reason, before any data flows. Then
//! both sides send frames under per-stream credits until each has ended. A stream that stops without an
//! end is broken, never finished. Local streams are channels with the same semantics and no serialization.

mod baggage;
pub(crate) mod channel;
mod context;
mod endpoints;
mod fault;
pub(crate) mod gauges;
pub(crate) mod inbox;
pub(crate) mod lane;
pub(crate) mod local;
pub(crate) mod reader;
pub(crate) mod window;

#[cfg(test)]
mod tests;

pub use baggage::{Baggage, BaggageError};
pub use channel::{StreamTx, TrySendError};
pub use context::Context;
pub use endpoints::{Acceptor, Endpoints, Incoming, StreamHandler};
pub use fault::{Advice, Fault, FaultKind, Layer, StreamError};
pub use reader::StreamRx;

pub use crate::wire::limits::{STREAM_WINDOW_BYTES, STREAM_WINDOW_FRAMES};

use bytes::Bytes;

/// An accepted stream, seen from the side that opened it.
#[derive(Debug)]
pub struct Opened {
    /// The body the other side accepted with.
    pub reply: Bytes,
    /// Towards the other side.
    pub tx: StreamTx,
    /// From the other side. Dropping it before its end cancels the stream.
    pub rx: StreamRx,
}
