//! The gossip socket: sealed datagrams out, opened payloads in, every drop counted by reason.
//!
//! Called by the gossip thread and the claim of a name. Never blocks: a full send buffer drops the packet, which
//! gossip repeats. Bounds: one datagram buffer.

use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket as StdSocket},
    time::{Duration, Instant},
};

use starling_ids::{Incarnation, Metric, NodeId};
use tokio::net::UdpSocket;

use crate::security::{DATAGRAM_MAX, Dropped, Opener, SealKey, Sealer, SenderId};

/// Tries at finding one port that is free for both protocols.
const PORT_TRIES: usize = 16;

/// Between two warnings about packets under an unknown key.
const WARN_AGAIN: Duration = Duration::from_secs(60);

/// Binds a TCP listener and the gossip socket to one port; port 0 picks one that is free for both.
pub fn bind_pair(bind: SocketAddr) -> io::Result<(TcpListener, StdSocket)> {
    let mut tries = 0;
    loop {
        tries += 1;
        let listener = TcpListener::bind(bind)?;
        let address = SocketAddr::new(bind.ip(), listener.local_addr()?.port());
        match StdSocket::bind(address) {
            Ok(socket) => {
                listener.set_nonblocking(true)?;
                socket.set_nonblocking(true)?;
                return Ok((listener, socket));
            }
            Err(error) if bind.port() != 0 || tries == PORT_TRIES => return Err(error),
            Err(_) => {}
        }
    }
}

/// What seals and opens on one socket. Newest key first.
pub(super) struct SealedSocket {
    socket: UdpSocket,
    sealer: Sealer,
    opener: Opener,
    buffer: Box<[u8; DATAGRAM_MAX + 1]>,
    next_warning: Instant,
}

impl SealedSocket {
    /// Takes a second handle of `socket`. Called on the runtime that will poll it.
    pub(super) fn new(
        socket: &StdSocket,
        keys: &[SealKey],
        cluster: &str,
        (node, incarnation): (&NodeId, Incarnation),
    ) -> io::Result<Self> {
        let newest = keys.first().ok_or_else(|| io::Error::other("gossip needs a key"))?;
        let socket = socket.try_clone()?;
        socket.set_nonblocking(true)?;
        let sender = SenderId::new(node, incarnation, rand::random());
        Ok(Self {
            socket: UdpSocket::from_std(socket)?,
            sealer: Sealer::new(newest, cluster, sender),
            opener: Opener::new(keys.to_vec(), cluster),
            buffer: Box::new([0; DATAGRAM_MAX + 1]),
            next_warning: Instant::now(),
        })
    }

    pub(super) fn send(&mut self, to: SocketAddr, payload: &[u8]) {
        let datagram = match self.sealer.seal(payload) {
            Ok(datagram) => datagram,
            Err(dropped) => return count_dropped(dropped),
        };
        match self.socket.try_send_to(&datagram, to) {
            Ok(_) => metrics::counter!(Metric::GossipPackets.name(), "direction" => "out").increment(1),
            Err(error) => {
                metrics::counter!(Metric::GossipDropped.name(), "reason" => "send").increment(1);
                tracing::debug!(%to, %error, "a gossip packet was not sent");
            }
        }
    }

    /// Waits for the next authentic payload. Can be dropped at any time without losing one.
    pub(super) async fn receive(&mut self) -> (SocketAddr, Vec<u8>) {
        loop {
            let (length, from) = match self.socket.recv_from(&mut self.buffer[..]).await {
                Ok(received) => received,
                Err(error) => {
                    // An earlier packet of ours was refused somewhere; the socket itself is well.
                    tracing::debug!(%error, "gossip socket");
                    tokio::task::yield_now().await;
                    continue;
                }
            };
            match self.opener.open(&self.buffer[..length]) {
                Ok(payload) => {
                    metrics::counter!(Metric::GossipPackets.name(), "direction" => "in").increment(1);
                    return (from, payload);
                }
                Err(dropped) => {
                    count_dropped(dropped);
                    self.warn_of_a_stranger(from, dropped);
                }
            }
        }
    }

    /// The other side's operator sees nothing: who has another key gets no answer. At most once in a while.
    fn warn_of_a_stranger(&mut self, from: SocketAddr, dropped: Dropped) {
        let now = Instant::now();
        if dropped == Dropped::UnknownKey && now >= self.next_warning {
            self.next_warning = now + WARN_AGAIN;
            tracing::warn!(%from, "somebody gossips with another cluster key; further ones are only counted for a while");
        }
    }
}

pub(super) fn count_dropped(dropped: Dropped) {
    metrics::counter!(Metric::GossipDropped.name(), "reason" => dropped.label()).increment(1);
}
