//! TLS 1.3 between the processes of a cluster: mutual, against authorities that only the holders of its keys have.
//!
//! Each key of the ring has an authority, see [`super::certificates`]; both sides prove that they hold a key that the
//! other accepts. Any holder of a key could make a certificate for any node: names keep nodes from mistaking one
//! another, keys keep strangers out. A dialer that knows whom it dials asks for that node, and an acceptor checks the
//! name claimed in a hello with [`Tls::is_node`]. Nothing that is sent in the clear holds a name.
//!
//! A second connection between two processes resumes the session of the first (TLS 1.3 tickets, with a fresh key
//! exchange): it costs no signatures, and proves that both are the processes that proved their names before, whose
//! certificates it keeps. A dialler keeps tickets under the name that it dialled. An acceptor's tickets are numbers of
//! sessions in its own memory. So tickets die with the process on either side, and with each change of the ring: no
//! session under a removed key is resumed.
//!
//! When the ring changes, new handshakes use the new one; connections that exist go on. Whoever owns one closes it when
//! [`Tls::removed`] resolves.
//!
//! Called by the listener, by links and by the sessions' dialer. Never installs a process-wide provider.
//! Bounds: a handshake takes at most [`limits::HANDSHAKE_TIME_MAX`], a connect at most what the caller says.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use rustls::{
    AlertDescription, ClientConfig, ServerConfig,
    client::Resumption,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName},
    server::ServerSessionMemoryCache,
    version::TLS13,
};
use socket2::{SockRef, TcpKeepalive};
use starling_ids::NodeId;
use thiserror::Error;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::{
    KeyId, KeyRing, Keys, Socket,
    certificates::{ANY_NODE, Authority, local_name},
    reach::reach,
    trust::{Leaves, Trust},
};
use crate::wire::limits;

/// An encrypted connection between two processes of the cluster.
pub type Connection = TlsStream<Socket>;

/// Peers whose last sessions are remembered, on either side.
const TICKETS: usize = 1024;

/// What a connection is for. One port serves both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alpn {
    /// Streams: `starling-link/1`.
    Link,
    /// Actor messages: `starling-session/1`.
    Session,
}

impl Alpn {
    const ALL: [Self; 2] = [Self::Link, Self::Session];

    /// The protocol's name in the handshake.
    #[must_use]
    pub const fn name(self) -> &'static [u8] {
        match self {
            Self::Link => b"starling-link/1",
            Self::Session => b"starling-session/1",
        }
    }
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum TlsError {
    /// The certificates of this process could not be made.
    #[error("cannot make this process's certificate: {0}")]
    Setup(String),
    /// No TCP connection.
    #[error("cannot connect to {0}: {1}")]
    Connect(SocketAddr, io::Error),
    /// The other side accepts none of this side's keys: they were removed, or are of another cluster.
    #[error(
        "the other side accepts none of this node's cluster keys ({0}); they were removed, or it is of another cluster"
    )]
    NoSharedKey(String),
    /// The handshake failed: mostly another node than was dialled.
    #[error("TLS handshake failed (another node, or none of ours, at this address?): {0}")]
    Handshake(io::Error),
    /// It took too long.
    #[error("no {0} within {1:?}")]
    Timeout(&'static str, Duration),
    /// The other side speaks none of our protocols.
    #[error("the other side asked for none of the protocols of this port")]
    Protocol,
}

impl TlsError {
    pub(super) fn setup(error: impl std::fmt::Display) -> Self {
        Self::Setup(error.to_string())
    }
}

/// Makes and accepts connections in the name of one process. Cheap to clone.
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    node: NodeId,
    keys: Keys,
    material: ArcSwap<Material>,
    making: Mutex<()>,
}

/// All that is made from one ring.
struct Material {
    ring: Arc<KeyRing>,
    /// Rises when a key was removed: nothing that a connection proved before counts after that.
    generation: u64,
    trust: Arc<Trust>,
    clients: [Arc<ClientConfig>; 2],
    server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tls({})", self.0.node)
    }
}

impl Tls {
    /// For the process that calls itself `node`. Follows the keys when they are rolled.
    pub fn new(keys: impl Into<Keys>, node: &NodeId) -> Result<Self, TlsError> {
        let keys = keys.into();
        let material = Material::make(keys.ring(), node, None)?;
        let material = ArcSwap::from_pointee(material);
        Ok(Self(Arc::new(Shared { node: node.clone(), keys, material, making: Mutex::new(()) })))
    }

    /// What belongs to the ring of this moment.
    fn material(&self) -> Result<Arc<Material>, TlsError> {
        let made = self.0.material.load_full();
        let ring = self.0.keys.ring();
        if Arc::ptr_eq(&made.ring, &ring) {
            return Ok(made);
        }
        let _one = self.0.making.lock().unwrap_or_else(PoisonError::into_inner);
        let (made, ring) = (self.0.material.load_full(), self.0.keys.ring());
        if Arc::ptr_eq(&made.ring, &ring) {
            return Ok(made);
        }
        let next = Arc::new(Material::make(ring, &self.0.node, Some(&made))?);
        self.0.material.store(next.clone());
        Ok(next)
    }

    /// Rises whenever a key was removed from the ring. What was agreed under an earlier generation, a session ticket
    /// say, must not be used under a later one.
    pub fn generation(&self) -> Result<u64, TlsError> {
        self.material().map(|material| material.generation)
    }

    /// The keys that certificates are made of.
    #[must_use]
    pub fn keys(&self) -> &Keys {
        &self.0.keys
    }

    /// The key with which the other side has proved that it belongs here; `None` once that key was removed.
    #[must_use]
    pub fn key_of(&self, connection: &Connection) -> Option<KeyId> {
        self.material().ok()?.trust.key_of(peer_leaf(connection)?)
    }

    /// Whether the other side's certificate is one of this node name.
    #[must_use]
    pub fn is_node(&self, connection: &Connection, node: &NodeId) -> bool {
        let (Some(leaf), Ok(material)) = (peer_leaf(connection), self.material()) else { return false };
        material.trust.is_node(leaf, &local_name(node))
    }

    /// Resolves once the key that the other side has proved is accepted no more. Holds nothing of the connection.
    pub fn removed(&self, connection: &Connection) -> impl Future<Output = ()> + Send + 'static {
        let (key, keys) = (self.key_of(connection), self.0.keys.clone());
        async move {
            if let Some(key) = key {
                keys.removed(key).await;
            }
        }
    }

    /// Dials `address`. `node` says who must answer; without it any process of the cluster may.
    pub async fn connect(
        &self,
        address: SocketAddr,
        node: Option<&NodeId>,
        alpn: Alpn,
        connect_max: Duration,
    ) -> Result<Connection, TlsError> {
        let stream = match timeout(connect_max, reach(address)).await {
            Ok(connected) => connected.map_err(|error| TlsError::Connect(address, error))?,
            Err(_) => return Err(TlsError::Timeout("TCP connection", connect_max)),
        };
        tune(&stream).map_err(|error| TlsError::Connect(address, error))?;
        let name = node.map_or_else(|| ANY_NODE.to_owned(), local_name);
        let name = ServerName::try_from(name).map_err(TlsError::setup)?;
        let material = self.material()?;
        let connector = TlsConnector::from(material.clients[alpn as usize].clone());
        let handshake = Box::pin(connector.connect(name, Socket::new(stream)));
        let stream = within(handshake).await.map_err(|error| material.explain(error))?;
        // The other side may have no such protocol; then it chose none.
        if stream.get_ref().1.alpn_protocol() != Some(alpn.name()) {
            return Err(TlsError::Protocol);
        }
        Ok(stream.into())
    }

    /// Takes an accepted TCP connection through the handshake.
    pub async fn accept(&self, stream: TcpStream) -> Result<(Connection, Alpn), TlsError> {
        tune(&stream).map_err(TlsError::Handshake)?;
        let handshake = Box::pin(TlsAcceptor::from(self.material()?.server.clone()).accept(Socket::new(stream)));
        let stream = within(handshake).await?;
        let chosen = stream.get_ref().1.alpn_protocol();
        let alpn = Alpn::ALL.into_iter().find(|alpn| Some(alpn.name()) == chosen).ok_or(TlsError::Protocol)?;
        Ok((stream.into(), alpn))
    }
}

impl Material {
    /// `before` is what was in use. The sessions that may be resumed are not taken over: they end with each change.
    fn make(ring: Arc<KeyRing>, node: &NodeId, before: Option<&Self>) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let authorities = ring.keys().iter().map(Authority::of).collect::<Result<Vec<_>, _>>()?;
        let trust = Arc::new(Trust::new(&authorities, &provider)?);
        let leaf = |authority: &Authority| {
            Ok::<_, TlsError>((authority.subject.clone(), Arc::new(authority.leaf(node, &provider)?)))
        };
        let leaves = Arc::new(Leaves(authorities.iter().map(leaf).collect::<Result<_, _>>()?));
        let client = |alpn| client_config(&provider, &trust, &leaves, alpn).map(Arc::new);
        let clients = [client(Alpn::Link)?, client(Alpn::Session)?];
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(TlsError::setup)?
            .with_client_cert_verifier(trust.clone())
            .with_cert_resolver(leaves);
        server.alpn_protocols = Alpn::ALL.map(|alpn| alpn.name().to_vec()).to_vec();
        server.send_tls13_tickets = 2;
        server.session_storage = ServerSessionMemoryCache::new(TICKETS);
        let generation = before.map_or(0, |before| before.generation + u64::from(!ring.covers(&before.ring)));
        Ok(Self { ring, generation, trust, clients, server: Arc::new(server) })
    }

    /// Says it when the other side accepts none of our keys: it tells us so by an alert of its own.
    fn explain(&self, error: TlsError) -> TlsError {
        let TlsError::Handshake(io) = &error else { return error };
        let tls = io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match tls {
            Some(rustls::Error::AlertReceived(AlertDescription::AccessDenied)) => {
                TlsError::NoSharedKey(self.ring.to_string())
            }
            _ => error,
        }
    }
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    trust: &Arc<Trust>,
    leaves: &Arc<Leaves>,
    alpn: Alpn,
) -> Result<ClientConfig, TlsError> {
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::setup)?
        .dangerous()
        .with_custom_certificate_verifier(trust.clone())
        .with_client_cert_resolver(leaves.clone());
    config.alpn_protocols = vec![alpn.name().to_vec()];
    // The name of the dialled node would be readable.
    config.enable_sni = false;
    config.resumption = Resumption::in_memory_sessions(TICKETS);
    Ok(config)
}

fn peer_leaf(connection: &Connection) -> Option<&CertificateDer<'static>> {
    connection.get_ref().1.peer_certificates()?.first()
}

async fn within<T>(handshake: impl Future<Output = io::Result<T>>) -> Result<T, TlsError> {
    match timeout(limits::HANDSHAKE_TIME_MAX, handshake).await {
        Ok(done) => done.map_err(TlsError::Handshake),
        Err(_) => Err(TlsError::Timeout("TLS handshake", limits::HANDSHAKE_TIME_MAX)),
    }
}

/// Small frames leave at once, and a connection whose other end is gone is noticed by the kernel.
fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(limits::TCP_USER_TIMEOUT))?;
    Ok(())
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
