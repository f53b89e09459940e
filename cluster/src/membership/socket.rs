//! The gossip socket: sealed datagrams out, opened payloads in, every drop counted by reason.
//!
//! Called by the gossip thread and the claim of a name. Never blocks: a full send buffer drops the packet, which
//! gossip repeats. Bounds: one datagram buffer.

use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket as StdSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use starling_ids::{Incarnation, Metric, NodeId};
use tokio::{net::UdpSocket, sync::watch};

use crate::security::{DATAGRAM_MAX, Dropped, KeyRing, Keys, Opener, Sealer, SenderId};

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

/// What seals and opens on one socket: seals with the primary key of the ring, opens with any.
pub(super) struct SealedSocket {
    socket: UdpSocket,
    /// The same socket for sending, which never waits: a runtime would refuse what is sent before its first poll.
    out: StdSocket,
    /// Whether the socket takes IPv4 addresses only in the form that IPv6 has for them.
    mapped: bool,
    keys: Keys,
    ring: watch::Receiver<Arc<KeyRing>>,
    sealer: Sealer,
    opener: Opener,
    buffer: Box<[u8; DATAGRAM_MAX + 1]>,
    next_warning: Instant,
}

impl SealedSocket {
    /// Takes a second handle of `socket`. Called on the runtime that will poll it.
    pub(super) fn new(
        socket: &StdSocket,
        keys: &Keys,
        cluster: &str,
        (node, incarnation): (&NodeId, Incarnation),
    ) -> io::Result<Self> {
        let mut ring = keys.watch();
        let seal_keys = ring.borrow_and_update().seal_keys();
        let primary = seal_keys.first().ok_or_else(|| io::Error::other("gossip needs a key"))?;
        let (socket, out) = (socket.try_clone()?, socket.try_clone()?);
        socket.set_nonblocking(true)?;
        let mapped = socket.local_addr()?.is_ipv6();
        let sender = SenderId::new(node, incarnation, rand::random());
        Ok(Self {
            socket: UdpSocket::from_std(socket)?,
            out,
            mapped,
            sealer: Sealer::new(primary, cluster, sender),
            opener: Opener::new(seal_keys, cluster),
            keys: keys.clone(),
            ring,
            buffer: Box::new([0; DATAGRAM_MAX + 1]),
            next_warning: Instant::now(),
        })
    }

    /// Takes over a ring that has changed since the last packet.
    fn follow_the_ring(&mut self) {
        if !self.ring.has_changed().unwrap_or(false) {
            return;
        }
        let keys = self.ring.borrow_and_update().seal_keys();
        if let Some(primary) = keys.first() {
            self.sealer.switch(primary);
        }
        self.opener.switch(keys);
    }

    pub(super) fn send(&mut self, to: SocketAddr, payload: &[u8]) {
        self.follow_the_ring();
        let datagram = match self.sealer.seal(payload) {
            Ok(datagram) => datagram,
            Err(dropped) => return count_dropped(dropped),
        };
        let to = if self.mapped { mapped(to) } else { to };
        match self.out.send_to(&datagram, to) {
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
            self.follow_the_ring();
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
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
        if dropped != Dropped::UnknownKey {
            return;
        }
        // It may be a member that has a newer ring than this node.
        self.keys.stranger(from);
        let now = Instant::now();
        if now >= self.next_warning {
            self.next_warning = now + WARN_AGAIN;
            tracing::warn!(%from, "somebody gossips with another cluster key; further ones are only counted for a while");
        }
    }
}

/// An IPv4 address as a socket bound to `[::]` takes it everywhere.
fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        SocketAddr::V6(_) => address,
    }
}

pub(super) fn count_dropped(dropped: Dropped) {
    metrics::counter!(Metric::GossipDropped.name(), "reason" => dropped.label()).increment(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security::ClusterKey;

    async fn socket(bind: &str, keys: &Keys, name: &str) -> (SealedSocket, SocketAddr) {
        let socket = StdSocket::bind(bind).expect("binds");
        let address = socket.local_addr().expect("address");
        let node = NodeId::new(name).expect("name");
        (SealedSocket::new(&socket, keys, "c", (&node, Incarnation(1))).expect("opens"), address)
    }

    async fn heard(socket: &mut SealedSocket) -> (SocketAddr, Vec<u8>) {
        tokio::time::timeout(Duration::from_secs(20), socket.receive()).await.expect("within 20 s")
    }

    #[tokio::test]
    async fn a_socket_follows_the_ring_while_it_runs() {
        let (old, new) = (ClusterKey::generate(), ClusterKey::generate());
        let (for_a, for_b) = (Keys::from(&old), Keys::from(&old));
        let ((mut a, _), (mut b, to)) =
            (socket("127.0.0.1:0", &for_a, "a").await, socket("127.0.0.1:0", &for_b, "b").await);
        let mut said = 0u8;
        let mut say = async |a: &mut SealedSocket, b: &mut SealedSocket| {
            said += 1;
            a.send(to, &[said]);
            assert_eq!(heard(b).await.1, [said]);
        };
        say(&mut a, &mut b).await;
        for keys in [&for_b, &for_a] {
            keys.change(|ring| ring.add(new.clone())).expect("added");
            say(&mut a, &mut b).await;
        }
        for keys in [&for_a, &for_b] {
            keys.change(|ring| ring.promote(new.id())).expect("used");
            say(&mut a, &mut b).await;
        }
        for_b.change(|ring| ring.remove(old.id())).expect("removed");
        say(&mut a, &mut b).await;
        // A node that has missed the whole roll is a stranger, and its address is passed on.
        let (mut late, _) = socket("127.0.0.1:0", &Keys::from(&old), "c").await;
        let mut strangers = for_b.strangers();
        late.send(to, b"late");
        a.send(to, b"after");
        assert_eq!(heard(&mut b).await.1, b"after");
        assert!(strangers.borrow_and_update().is_some());
    }

    #[tokio::test]
    async fn mem_13_a_socket_on_all_addresses_talks_ipv4_too() {
        let keys = Keys::from(&ClusterKey::generate());
        let (mut four, to_four) = socket("127.0.0.1:0", &keys, "four").await;
        let Ok(probe) = StdSocket::bind("[::]:0") else {
            println!("skipped: this machine has no IPv6");
            return;
        };
        drop(probe);
        let (mut all, at) = socket("[::]:0", &keys, "all").await;
        four.send(SocketAddr::from(([127, 0, 0, 1], at.port())), b"to all");
        assert_eq!(heard(&mut all).await, (to_four, b"to all".to_vec()), "as an IPv4 address");
        all.send(to_four, b"back");
        assert_eq!(heard(&mut four).await.1, b"back");
    }
}
