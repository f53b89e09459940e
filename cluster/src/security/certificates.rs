//! Certificates of one process: an authority for each key of the ring, and a leaf under each.
//!
//! The authority's Ed25519 key is derived from the cluster key, so every process makes its own leaves at start and
//! after each change of the ring; nothing is distributed or renewed. Leaves live in memory and die with their
//! process, and validity is so wide that no clock matters.
//!
//! A certificate holds no name that says anything to a stranger: the authority is called after the key's public id,
//! and a leaf carries the name of the key, the name of any node, and its node's name hashed under the key.
//! Called by [`super::tls`]. Never: writes a certificate anywhere.

use hkdf::Hkdf;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::{
    DistinguishedName, RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
    sign::CertifiedKey,
};
use sha2::{Digest, Sha256};
use starling_ids::NodeId;

use super::{ClusterKey, KeyId, TlsError};

/// The name that every leaf has. Whoever dials it takes any node.
pub(super) const ANY_NODE: &str = "node.starling";

/// A name for `node` inside this process: what a dialer asks for. It never leaves the process.
pub(super) fn local_name(node: &NodeId) -> String {
    let digest = Sha256::digest(node.as_str().as_bytes());
    format!("{}.{ANY_NODE}", hex(&digest[..16]))
}

/// Hashes names under one key: only its holders can tell whose certificate they see.
#[derive(Clone)]
pub(super) struct NodeNames([u8; 32]);

impl NodeNames {
    /// The name in a certificate for what [`local_name`] gives.
    pub(super) fn hidden(&self, local_name: &str) -> String {
        let mut hidden = [0; 16];
        let filled = Hkdf::<Sha256>::new(None, &self.0).expand(local_name.as_bytes(), &mut hidden);
        debug_assert!(filled.is_ok(), "16 bytes are within what HKDF-SHA256 yields");
        format!("{}.{ANY_NODE}", hex(&hidden))
    }
}

/// What is derived from one cluster key.
pub(super) struct Authority {
    pub(super) id: KeyId,
    /// Its certificate alone.
    pub(super) roots: RootCertStore,
    /// What the other side of a handshake is told that this side accepts.
    pub(super) subject: DistinguishedName,
    /// In every leaf under it.
    pub(super) key_name: ServerName<'static>,
    pub(super) names: NodeNames,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn of(key: &ClusterKey) -> Result<Self, TlsError> {
        let id = key.id();
        let mut authority = CertificateParams::new(Vec::<String>::new()).map_err(TlsError::setup)?;
        authority.distinguished_name.push(DnType::CommonName, format!("starling {id}"));
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let seed = key.derive("tls-authority-ed25519");
        let authority_key = KeyPair::try_from(pkcs8(&seed)).map_err(TlsError::setup)?;
        let certificate = authority.self_signed(&authority_key).map_err(TlsError::setup)?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).map_err(TlsError::setup)?;
        let subject = roots.subjects().pop().ok_or_else(|| TlsError::setup("the authority has no name"))?;
        Ok(Self {
            id,
            roots,
            subject,
            key_name: ServerName::try_from(format!("{id}.key.starling")).map_err(TlsError::setup)?,
            names: NodeNames(key.derive("tls-node-names")),
            issuer: Issuer::new(authority, authority_key),
        })
    }

    /// A new certificate and key for this process.
    pub(super) fn leaf(&self, node: &NodeId, provider: &CryptoProvider) -> Result<CertifiedKey, TlsError> {
        let names =
            vec![ANY_NODE.to_owned(), self.names.hidden(&local_name(node)), self.key_name.to_str().into_owned()];
        let mut leaf = CertificateParams::new(names).map_err(TlsError::setup)?;
        leaf.distinguished_name.push(DnType::CommonName, "starling node");
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        leaf.use_authority_key_identifier_extension = true;
        let leaf_key = KeyPair::generate_for(&rcgen::PKCS_ED25519).map_err(TlsError::setup)?;
        let leaf = leaf.signed_by(&leaf_key, &self.issuer).map_err(TlsError::setup)?;
        let chain: Vec<CertificateDer<'static>> = vec![leaf.der().clone()];
        let key: PrivateKeyDer<'static> = PrivatePkcs8KeyDer::from(leaf_key.serialize_der()).into();
        CertifiedKey::from_der(chain, key, provider).map_err(TlsError::setup)
    }
}

/// An Ed25519 seed as a PKCS#8 version 1 document (RFC 8410, section 7).
fn pkcs8(seed: &[u8; 32]) -> Vec<u8> {
    const PREFIX: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    [PREFIX.as_slice(), seed].concat()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_names_no_node_that_a_stranger_could_read_or_guess() {
        let (key, other) = (ClusterKey::from_bytes([1; 32]), ClusterKey::from_bytes([2; 32]));
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let node = NodeId::new("worker-with-a-name").unwrap();
        let leaf = Authority::of(&key).unwrap().leaf(&node, &provider).unwrap();
        let bytes = leaf.cert[0].as_ref();
        let within = |what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
        assert!(within(b"starling node") && within(ANY_NODE.as_bytes()));
        assert!(!within(b"worker"));
        assert!(!within(local_name(&node).split('.').next().unwrap().as_bytes()), "a hash that anybody can make");
        let names = |key: &ClusterKey| Authority::of(key).unwrap().names.hidden(&local_name(&node));
        assert!(within(names(&key).as_bytes()) && names(&key) != names(&other));
    }
}
