//! One secret of a cluster, and the keys derived from it.
//!
//! Every node of a cluster holds the same 32 random bytes, or a few such secrets while one takes over from another:
//! see [`super::KeyRing`]. Gossip sealing, certificates and the names in them each use a key derived under their own
//! label, so that none of them says anything about another. Pure. Never prints the secret; its memory is wiped when
//! the last copy is dropped.

use std::{
    fmt,
    str::FromStr,
    sync::Arc,
    sync::atomic::{Ordering, compiler_fence},
};

use hkdf::Hkdf;
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use thiserror::Error;

/// Names a key in tables, logs and certificates: the first bytes of a hash of it, which tell nothing about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyId(u32);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// The text is no key id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a key id is 8 hex digits; `starling keys list` shows them")]
pub struct KeyIdError;

impl FromStr for KeyId {
    type Err = KeyIdError;

    fn from_str(text: &str) -> Result<Self, KeyIdError> {
        let plain = text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = plain.then(|| u32::from_str_radix(text, 16).ok()).flatten();
        number.map(Self).ok_or(KeyIdError)
    }
}

/// 32 random bytes shared by all nodes of a cluster. Cheap to clone.
#[derive(Clone)]
pub struct ClusterKey(Arc<Secret>);

struct Secret([u8; 32]);

impl Drop for Secret {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterKey({})", self.id())
    }
}

impl ClusterKey {
    /// A new key from the operating system's randomness.
    #[must_use]
    pub fn generate() -> Self {
        Self::from_bytes(rand::random())
    }

    /// A key from bytes that the caller got elsewhere.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(Arc::new(Secret(bytes)))
    }

    /// Its public name.
    #[must_use]
    pub fn id(&self) -> KeyId {
        let derived = self.derive("key-id");
        KeyId(u32::from_be_bytes([derived[0], derived[1], derived[2], derived[3]]))
    }

    /// A 32-byte key for one purpose (HKDF-SHA256 with the label as info).
    #[must_use]
    pub fn derive(&self, label: &str) -> [u8; 32] {
        let mut derived = [0; 32];
        let expanded = Hkdf::<Sha256>::new(Some(b"starling/1"), &self.0.0).expand(label.as_bytes(), &mut derived);
        debug_assert!(expanded.is_ok(), "32 bytes are within what HKDF-SHA256 yields");
        derived
    }

    /// Appends the secret as 64 hex digits. Whoever calls it wipes the text.
    pub(super) fn write_hex(&self, text: &mut String) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        for byte in &self.0.0 {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }

    /// Reads exactly 64 hex digits.
    pub(super) fn from_hex(digits: &str) -> Option<Self> {
        if digits.len() != 64 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut secret = Secret([0; 32]);
        for (byte, pair) in secret.0.iter_mut().zip(digits.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(Arc::new(secret)))
    }
}

/// Text with secrets in it, wiped when it is dropped.
#[derive(Serialize, Deserialize)]
pub(crate) struct SecretText(pub(super) String);

impl SecretText {
    /// The text. A copy of it is not wiped.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl Drop for SecretText {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.0).into_bytes();
        wipe(&mut bytes);
    }
}

/// Overwrites secret bytes in a way that the compiler keeps.
pub(super) fn wipe(bytes: &mut [u8]) {
    for byte in bytes.iter_mut() {
        *std::hint::black_box(byte) = 0;
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_give_unrelated_keys() {
        let key = ClusterKey::from_bytes([7; 32]);
        assert_ne!(key.derive("gossip"), key.derive("link"));
        assert_eq!(key.derive("gossip"), ClusterKey::from_bytes([7; 32]).derive("gossip"));
    }

    #[test]
    fn a_key_shows_its_id_and_nothing_else() {
        let key = ClusterKey::from_bytes([0xab; 32]);
        assert_eq!(format!("{key:?}"), format!("ClusterKey({})", key.id()));
        assert!(!format!("{key:?}").contains("abab"));
        assert_eq!(key.id().to_string().parse(), Ok(key.id()));
        for bad in ["", "12", "123456789", "+1234567", "zzzzzzzz"] {
            assert_eq!(bad.parse::<KeyId>(), Err(KeyIdError), "{bad}");
        }
    }

    #[test]
    fn hex_reads_back_and_anything_else_is_no_key() {
        let mut text = String::new();
        ClusterKey::from_bytes([0x5f; 32]).write_hex(&mut text);
        assert_eq!(text, "5f".repeat(32));
        assert_eq!(ClusterKey::from_hex(&text).map(|key| key.id()), Some(ClusterKey::from_bytes([0x5f; 32]).id()));
        for bad in [text[1..].to_owned(), format!("+{}", &text[1..]), "zz".repeat(32), format!("{text}0")] {
            assert!(ClusterKey::from_hex(&bad).is_none(), "{bad}");
        }
    }
}
