//! Which certificates a node takes, and which of its own it shows: those of any key in the ring.
//!
//! Both sides of a handshake say which keys they accept, by their public ids. Each shows the leaf of its primary key if
//! the other side takes that, else one that it does take; so two nodes meet when their rings share any key. A side
//! that shares none is refused before a certificate is sent. Called by rustls during handshakes.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::{
        ResolvesClientCert, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ClientHello, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};

use super::{
    KeyId, TlsError,
    certificates::{ANY_NODE, Authority, NodeNames},
};

/// The authorities of a ring, the primary first.
pub(super) struct Trust {
    keys: Vec<Trusted>,
    subjects: Vec<DistinguishedName>,
    provider: Arc<CryptoProvider>,
}

struct Trusted {
    id: KeyId,
    key_name: ServerName<'static>,
    names: NodeNames,
    servers: Arc<WebPkiServerVerifier>,
    clients: Arc<dyn ClientCertVerifier>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| key.id.to_string())).finish()
    }
}

impl Trust {
    pub(super) fn new(authorities: &[Authority], provider: &Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let trusted = |authority: &Authority| {
            let roots = Arc::new(authority.roots.clone());
            let servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
            let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
            Ok(Trusted {
                id: authority.id,
                key_name: authority.key_name.clone(),
                names: authority.names.clone(),
                servers: servers.map_err(TlsError::setup)?,
                clients: clients.map_err(TlsError::setup)?,
            })
        };
        Ok(Self {
            keys: authorities.iter().map(trusted).collect::<Result<_, TlsError>>()?,
            subjects: authorities.iter().map(|authority| authority.subject.clone()).collect(),
            provider: provider.clone(),
        })
    }

    /// The key under which a leaf that was verified before is certified.
    pub(super) fn key_of(&self, leaf: &CertificateDer<'_>) -> Option<KeyId> {
        self.trusted(leaf).map(|trusted| trusted.id)
    }

    /// Whether a leaf that was verified before is of the node that has this local name.
    pub(super) fn is_node(&self, leaf: &CertificateDer<'_>, local_name: &str) -> bool {
        self.trusted(leaf).is_some_and(|trusted| trusted.is_node(leaf, local_name).is_ok())
    }

    fn trusted(&self, leaf: &CertificateDer<'_>) -> Option<&Trusted> {
        let leaf = ParsedCertificate::try_from(leaf).ok()?;
        self.keys.iter().find(|trusted| verify_server_name(&leaf, &trusted.key_name).is_ok())
    }
}

impl Trusted {
    fn is_node(&self, leaf: &CertificateDer<'_>, local_name: &str) -> Result<(), Error> {
        let name = ServerName::try_from(self.names.hidden(local_name));
        let name = name.map_err(|_| Error::InvalidCertificate(CertificateError::NotValidForName))?;
        verify_server_name(&ParsedCertificate::try_from(leaf)?, &name)
    }
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let mut refused = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        for trusted in &self.keys {
            // The name of the key is asked for as well: a leaf says truly under which key it is.
            match trusted.servers.verify_server_cert(leaf, intermediates, &trusted.key_name, ocsp, now) {
                Ok(verified) if server_name.to_str() == ANY_NODE => return Ok(verified),
                Ok(verified) => return trusted.is_node(leaf, &server_name.to_str()).map(|()| verified),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        Some(&self.subjects)
    }
}

impl ClientCertVerifier for Trust {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.subjects
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let mut refused = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        for trusted in &self.keys {
            match trusted.clients.verify_client_cert(leaf, intermediates, now) {
                Ok(verified) => {
                    return verify_server_name(&ParsedCertificate::try_from(leaf)?, &trusted.key_name)
                        .map(|()| verified);
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The leaves of this process, that of the primary key first.
pub(super) struct Leaves(pub(super) Vec<(DistinguishedName, Arc<CertifiedKey>)>);

impl std::fmt::Debug for Leaves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Leaves({})", self.0.len())
    }
}

impl Leaves {
    fn taken_by(&self, accepts: impl Fn(&[u8]) -> bool) -> Option<Arc<CertifiedKey>> {
        self.0.iter().find(|(subject, _)| accepts(subject.as_ref())).map(|(_, leaf)| leaf.clone())
    }
}

impl ResolvesServerCert for Leaves {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let accepted = hello.certificate_authorities()?;
        self.taken_by(|subject| accepted.iter().any(|name| name.as_ref() == subject))
    }
}

impl ResolvesClientCert for Leaves {
    fn resolve(&self, accepted: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.taken_by(|subject| accepted.contains(&subject))
    }

    fn has_certs(&self) -> bool {
        true
    }
}
