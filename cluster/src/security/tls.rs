//! TLS 1.3 between the processes of a cluster: mutual, against an authority that only the key's holders have.
//!
//! The authority's Ed25519 key is derived from the cluster key, so every process can make its own leaf
//! certificate at start and nothing is ever distributed or renewed: leaves live in memory and die with their
//! process, and validity is so wide that no clock matters. Both sides prove that they hold the cluster key.
//!
//! A leaf carries two names: `node.starling`, which says "a process of this cluster", and
//! `<digest of its node name>.node.starling`. A dialer that knows whom it dials asks for the second, and an
//! acceptor checks the name claimed in a hello with [`is_node`]. Any holder of the key could make a
//! certificate for any name: names keep nodes from mistaking one another, the key keeps strangers out.
//!
//! A second connection between two processes resumes the session of the first (TLS 1.3 tickets, with a fresh key
//! exchange): it costs no signatures, and proves that both are the processes that proved their names before, whose
//! certificates it keeps. A dialler keeps tickets under the name that it dialled. An acceptor's tickets are numbers of
//! sessions in its own memory. So tickets die with the process on either side, and with the configurations made here:
//! whoever takes a key away makes new ones, and no session under the old key is resumed.
//!
//! Called by the listener, by links and by the sessions' dialer. Never installs a process-wide provider.
//! Bounds: a handshake takes at most [`limits::HANDSHAKE_TIME_MAX`], a connect at most what the caller says.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::{Resumption, verify_server_name},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
    server::{ParsedCertificate, ServerSessionMemoryCache, WebPkiClientVerifier},
    version::TLS13,
};
use sha2::{Digest, Sha256};
use socket2::{SockRef, TcpKeepalive};
use starling_ids::NodeId;
use thiserror::Error;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::{ClusterKey, Socket};
use crate::wire::limits;

/// An encrypted connection between two processes of the cluster.
pub type Connection = TlsStream<Socket>;

/// Peers whose last sessions are remembered, on either side.
const TICKETS: usize = 1024;

/// The name that every process of a cluster has.
const ANY_NODE: &str = "node.starling";

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
    /// The handshake failed: mostly another key, or another node than was dialled.
    #[error("TLS handshake failed (another cluster key, or another node at this address?): {0}")]
    Handshake(io::Error),
    /// It took too long.
    #[error("no {0} within {1:?}")]
    Timeout(&'static str, Duration),
    /// The other side speaks none of our protocols.
    #[error("the other side asked for none of the protocols of this port")]
    Protocol,
}

/// Makes and accepts connections in the name of one process. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    clients: [Arc<ClientConfig>; 2],
    server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Certificates and configurations for the process that calls itself `node`.
    pub fn new(key: &ClusterKey, node: &NodeId) -> Result<Self, TlsError> {
        let setup = |error: &dyn std::fmt::Display| TlsError::Setup(error.to_string());
        let (authority, chain, leaf_key) = certificates(key, node).map_err(|e| setup(&e))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(|e| setup(&e))?;
        let roots = Arc::new(roots);
        let client = |alpn: Alpn| client_config(&provider, &roots, (chain.clone(), leaf_key.clone_key()), alpn);
        let clients = [client(Alpn::Link).map_err(|e| setup(&e))?, client(Alpn::Session).map_err(|e| setup(&e))?];
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let verifier = verifier.build().map_err(|e| setup(&e))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| setup(&e))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, leaf_key)
            .map_err(|e| setup(&e))?;
        server.alpn_protocols = Alpn::ALL.map(|alpn| alpn.name().to_vec()).to_vec();
        server.send_tls13_tickets = 2;
        server.session_storage = ServerSessionMemoryCache::new(TICKETS);
        Ok(Self { clients, server: Arc::new(server) })
    }

    /// Dials `address`. `node` says who must answer; without it any process of the cluster may.
    pub async fn connect(
        &self,
        address: SocketAddr,
        node: Option<&NodeId>,
        alpn: Alpn,
        connect_max: Duration,
    ) -> Result<Connection, TlsError> {
        let stream = match timeout(connect_max, TcpStream::connect(address)).await {
            Ok(connected) => connected.map_err(|error| TlsError::Connect(address, error))?,
            Err(_) => return Err(TlsError::Timeout("TCP connection", connect_max)),
        };
        tune(&stream).map_err(|error| TlsError::Connect(address, error))?;
        let name = node.map_or_else(|| ANY_NODE.to_owned(), dns_name);
        let name = ServerName::try_from(name).map_err(|error| TlsError::Setup(error.to_string()))?;
        let connector = TlsConnector::from(self.clients[alpn as usize].clone());
        let handshake = Box::pin(connector.connect(name, Socket::new(stream)));
        let stream = within(handshake).await?;
        // The other side may have no such protocol; then it chose none.
        if stream.get_ref().1.alpn_protocol() != Some(alpn.name()) {
            return Err(TlsError::Protocol);
        }
        Ok(stream.into())
    }

    /// Takes an accepted TCP connection through the handshake.
    pub async fn accept(&self, stream: TcpStream) -> Result<(Connection, Alpn), TlsError> {
        tune(&stream).map_err(TlsError::Handshake)?;
        let handshake = Box::pin(TlsAcceptor::from(self.server.clone()).accept(Socket::new(stream)));
        let stream = within(handshake).await?;
        let chosen = stream.get_ref().1.alpn_protocol();
        let alpn = Alpn::ALL.into_iter().find(|alpn| Some(alpn.name()) == chosen).ok_or(TlsError::Protocol)?;
        Ok((stream.into(), alpn))
    }
}

/// Whether the other side's certificate is one of this node name.
#[must_use]
pub fn is_node(connection: &Connection, node: &NodeId) -> bool {
    let certificates = connection.get_ref().1.peer_certificates();
    let Some(leaf) = certificates.and_then(<[_]>::first) else { return false };
    let (Ok(leaf), Ok(name)) = (ParsedCertificate::try_from(leaf), ServerName::try_from(dns_name(node))) else {
        return false;
    };
    verify_server_name(&leaf, &name).is_ok()
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

/// Node names may hold what DNS names may not, so a certificate carries a digest of them.
fn dns_name(node: &NodeId) -> String {
    let digest = Sha256::digest(node.as_str().as_bytes());
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.{ANY_NODE}")
}

type Identity = (CertificateDer<'static>, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn certificates(key: &ClusterKey, node: &NodeId) -> Result<Identity, rcgen::Error> {
    let mut authority = CertificateParams::new(Vec::<String>::new())?;
    authority.distinguished_name.push(DnType::CommonName, "starling cluster");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority_key = KeyPair::try_from(pkcs8(&key.derive("tls-authority-ed25519")))?;
    let authority_certificate = authority.self_signed(&authority_key)?;

    let mut leaf = CertificateParams::new(vec![ANY_NODE.to_owned(), dns_name(node)])?;
    leaf.distinguished_name.push(DnType::CommonName, node.as_str());
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    leaf.use_authority_key_identifier_extension = true;
    let leaf_key = KeyPair::generate_for(&rcgen::PKCS_ED25519)?;
    let leaf = leaf.signed_by(&leaf_key, &Issuer::from_params(&authority, &authority_key))?;
    let leaf_key = PrivatePkcs8KeyDer::from(leaf_key.serialize_der());
    Ok((authority_certificate.der().clone(), vec![leaf.der().clone()], leaf_key.into()))
}

/// An Ed25519 seed as a PKCS#8 version 1 document (RFC 8410, section 7).
fn pkcs8(seed: &[u8; 32]) -> Vec<u8> {
    const PREFIX: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    [PREFIX.as_slice(), seed].concat()
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    (chain, key): (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    alpn: Alpn,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots.clone())
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![alpn.name().to_vec()];
    config.resumption = Resumption::in_memory_sessions(TICKETS);
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    fn name(text: &str) -> NodeId {
        NodeId::new(text).unwrap()
    }

    async fn meet(
        server: &Tls,
        client: &Tls,
        expected: Option<&NodeId>,
    ) -> (Result<(Connection, Alpn), TlsError>, Result<Connection, TlsError>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accept = async { server.accept(listener.accept().await.unwrap().0).await };
        let connect = async {
            let mut connection = client.connect(address, expected, Alpn::Session, Duration::from_secs(5)).await?;
            // In TLS 1.3 a refused client learns of it only when it reads.
            connection.write_all(b"x").await.map_err(TlsError::Handshake)?;
            connection.read_u8().await.map_err(TlsError::Handshake)?;
            Ok(connection)
        };
        let accept = async {
            let mut accepted = accept.await?;
            accepted.0.read_u8().await.map_err(TlsError::Handshake)?;
            accepted.0.write_all(b"y").await.map_err(TlsError::Handshake)?;
            Ok(accepted)
        };
        tokio::join!(accept, connect)
    }

    #[tokio::test]
    async fn holders_of_one_key_meet_and_know_their_names() {
        let key = ClusterKey::generate();
        let (a, b) = (name("a._-odd"), name("b"));
        let (server, client) = (Tls::new(&key, &a).unwrap(), Tls::new(&key, &b).unwrap());
        for expected in [Some(&a), None] {
            let (accepted, connected) = meet(&server, &client, expected).await;
            let (accepted, alpn) = accepted.unwrap();
            assert_eq!(alpn, Alpn::Session);
            assert!(is_node(&accepted, &b) && !is_node(&accepted, &a));
            assert!(is_node(&connected.unwrap(), &a));
        }
    }

    fn resumed(connection: &Connection) -> bool {
        connection.get_ref().1.handshake_kind() == Some(rustls::HandshakeKind::Resumed)
    }

    #[tokio::test]
    async fn a_second_connection_resumes_and_still_proves_both_names() {
        let key = ClusterKey::generate();
        let (a, b) = (name("a"), name("b"));
        let (server, client) = (Tls::new(&key, &a).unwrap(), Tls::new(&key, &b).unwrap());
        for turn in 0..4 {
            let (accepted, connected) = meet(&server, &client, Some(&a)).await;
            let (accepted, connected) = (accepted.unwrap().0, connected.unwrap());
            assert_eq!((resumed(&accepted), resumed(&connected)), (turn > 0, turn > 0), "{turn}");
            assert!(is_node(&accepted, &b) && !is_node(&accepted, &a));
            assert!(is_node(&connected, &a) && !is_node(&connected, &b));
        }
        // A ticket of one name does not help to dial another one.
        assert!(meet(&server, &client, Some(&name("c"))).await.1.is_err());
        // Nobody else has the ticket, and a process that starts again has none.
        let other = Tls::new(&key, &b).unwrap();
        let (accepted, _) = meet(&server, &other, Some(&a)).await;
        assert!(!resumed(&accepted.unwrap().0));
    }

    #[tokio::test]
    async fn tickets_die_with_the_configuration_that_gave_them() {
        let (old, new) = (ClusterKey::generate(), ClusterKey::generate());
        let (a, b) = (name("a"), name("b"));
        let client = Tls::new(&old, &b).unwrap();
        meet(&Tls::new(&old, &a).unwrap(), &client, Some(&a)).await.1.unwrap();
        // The same name and key, made anew: not resumed, but met.
        let (accepted, connected) = meet(&Tls::new(&old, &a).unwrap(), &client, Some(&a)).await;
        assert!(!resumed(&accepted.unwrap().0) && !resumed(&connected.unwrap()));
        // The key is gone: the ticket that was given under it opens nothing.
        let (accepted, connected) = meet(&Tls::new(&new, &a).unwrap(), &client, Some(&a)).await;
        assert!(accepted.is_err() && connected.is_err());
    }

    #[tokio::test]
    async fn another_key_or_another_node_is_refused_on_both_sides() {
        let key = ClusterKey::generate();
        let server = Tls::new(&key, &name("a")).unwrap();
        let stranger = Tls::new(&ClusterKey::generate(), &name("b")).unwrap();
        let (accepted, connected) = meet(&server, &stranger, None).await;
        assert!(accepted.is_err() && connected.is_err());
        let friend = Tls::new(&key, &name("b")).unwrap();
        let (accepted, connected) = meet(&server, &friend, Some(&name("c"))).await;
        assert!(accepted.is_err());
        assert!(matches!(connected, Err(TlsError::Handshake(_))));
    }
}
