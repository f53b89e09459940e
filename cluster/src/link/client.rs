//! A tool's way into a cluster: one link to any node, without being a member.
//!
//! Called by the command line. The link's tasks are owned by the [`ControlClient`] and end with it.
//! [`ControlEndpoint`] is the node's side: it answers the same operations as actor sessions do.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use futures::future::BoxFuture;
use starling_ids::{EndpointName, Incarnation, NameError, NodeId, RequestId};
use thiserror::Error;
use tokio::task::JoinSet;

use super::{
    handshake::{Established, greet},
    io,
    mux::{Ended, Mux, OpenError},
};
use crate::{
    config::Timings,
    security::{Alpn, Keys, Tls, TlsError},
    session::Ops,
    stream::{Context, Endpoints, Fault, FaultKind, Incoming, Opened, StreamError, StreamHandler},
    supervise::Tasks,
    wire::{Hello, OpenHead, Party, limits},
};

/// The endpoint that answers control operations on every node.
pub const CONTROL_ENDPOINT: &str = "starling/node/control";

/// Why a tool could not talk to a node.
#[derive(Debug, Error)]
pub enum ClientError {
    /// A fixed name was refused; cannot happen.
    #[error(transparent)]
    Name(#[from] NameError),
    /// No encrypted connection.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A connection, but no link on it.
    #[error("{0}")]
    Hello(String),
}

/// A link to one node. Dropping it closes the link.
#[derive(Debug)]
pub struct ControlClient {
    mux: Arc<Mux>,
    control: EndpointName,
    _tasks: JoinSet<()>,
}

impl ControlClient {
    /// Connects to any node at `address` that holds one of the same keys.
    pub async fn connect(address: SocketAddr, keys: impl Into<Keys>) -> Result<Self, ClientError> {
        let name = NodeId::new("client")?;
        let tls = Tls::new(keys, &name)?;
        let connection = tls.connect(address, None, Alpn::Link, limits::DIAL_TIME_MAX).await?;
        let hello = Hello::new(Party::Client, name, Incarnation(0), "starling client".to_owned());
        let established = greet(connection, &hello).await.map_err(|error| ClientError::Hello(error.to_string()))?;
        Ok(Self::over(established, EndpointName::new(CONTROL_ENDPOINT)?))
    }

    fn over(established: Established, control: EndpointName) -> Self {
        let Established { connection, decoder, peer, dialled } = established;
        let mux = Mux::new(&peer, dialled, Endpoints::default(), Tasks::closed(0));
        let (from, to) = tokio::io::split(connection);
        let mut tasks = JoinSet::new();
        let ends = |mux: Arc<Mux>| move |ended: Ended| mux.end(&ended);
        let (end, reading) = (ends(mux.clone()), io::read(mux.clone(), from, decoder));
        tasks.spawn(async move { end(reading.await) });
        let (end, writing) = (ends(mux.clone()), io::write(mux.clone(), to));
        tasks.spawn(async move { end(writing.await) });
        // A tool closes when it is done, not when it is idle.
        let timings = Timings { link_idle: Duration::from_secs(u64::from(u32::MAX)), ..Timings::default() };
        let (end, watching) = (ends(mux.clone()), io::watch(mux.clone(), timings));
        tasks.spawn(async move { end(watching.await) });
        Self { mux, control, _tasks: tasks }
    }

    /// The node that answers.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.mux.peer
    }

    /// Its life.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.mux.incarnation
    }

    /// Asks the node to do a control operation and waits for its answer, at most `limit`.
    pub async fn call(&self, op: &str, body: Bytes, limit: Duration) -> Result<Bytes, Fault> {
        let context = Context::new(RequestId(rand::random()), limit);
        match self.open(&self.control, context, pack(op, &body)?).await {
            Ok(opened) => Ok(opened.reply),
            Err(StreamError::Rejected(fault)) => Err(fault),
            Err(StreamError::Deadline) => Err(Fault::new(FaultKind::DeadlineExceeded, format!("no answer to {op}"))),
            Err(error) => Err(Fault::new(FaultKind::Unavailable, error.to_string())),
        }
    }

    /// Opens a stream to an endpoint of the node.
    pub async fn open(&self, endpoint: &EndpointName, context: Context, body: Bytes) -> Result<Opened, StreamError> {
        match self.mux.open(OpenHead { endpoint: endpoint.clone(), context }, body).await {
            Ok(opened) => Ok(opened),
            Err(OpenError::Stream(error)) => Err(error),
            Err(OpenError::Closed) => Err(StreamError::Broken("the node closed the link".to_owned())),
        }
    }
}

/// `length of the name u8 | name | body`.
fn pack(op: &str, body: &[u8]) -> Result<Bytes, Fault> {
    let Ok(length) = u8::try_from(op.len()) else {
        return Err(Fault::new(FaultKind::Invalid, "an operation's name has at most 255 bytes"));
    };
    let mut packed = BytesMut::with_capacity(1 + op.len() + body.len());
    packed.put_u8(length);
    packed.put_slice(op.as_bytes());
    packed.put_slice(body);
    Ok(packed.freeze())
}

fn unpack(packed: &Bytes) -> Option<(&str, Bytes)> {
    let end = 1 + usize::from(*packed.first()?);
    let op = std::str::from_utf8(packed.get(1..end)?).ok()?;
    Some((op, packed.slice(end..)))
}

/// Answers control operations that come as streams: the accept carries the answer, a reject the fault.
#[derive(Debug)]
pub struct ControlEndpoint(pub Ops);

impl StreamHandler for ControlEndpoint {
    fn open(&self, incoming: Incoming) -> BoxFuture<'static, ()> {
        let ops = self.0.clone();
        Box::pin(async move {
            let Some((op, body)) = unpack(&incoming.body) else {
                incoming.acceptor.reject(Fault::new(FaultKind::Invalid, "not a control operation"));
                return;
            };
            match ops.answer(incoming.peer, op, body).await {
                Ok(reply) => {
                    if let Some((tx, _rx)) = incoming.acceptor.accept(reply) {
                        tx.end();
                    }
                }
                Err(fault) => incoming.acceptor.reject(fault),
            }
        })
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn an_operation_is_packed_with_its_name() {
        let packed = pack("a/b", b"body").unwrap();
        assert_eq!(unpack(&packed), Some(("a/b", Bytes::from_static(b"body"))));
        for bad in [&b""[..], &[5, b'a'], &[1, 0xff]] {
            assert_eq!(unpack(&Bytes::copy_from_slice(bad)), None);
        }
        assert!(pack(&"x".repeat(256), b"").is_err());
    }
}
