//! The name of a blob.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// sha256 of a blob. Written as 64 hex digits; 34 bytes in MessagePack.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlobDigest(#[serde(with = "serde_bytes")] pub [u8; 32]);

impl BlobDigest {
    /// The name of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(4).try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_names_its_bytes_and_takes_34_bytes_to_tell() {
        let digest = BlobDigest::of(b"abc");
        assert!(digest.to_string().starts_with("ba7816bf8f01cfea"), "{digest}");
        let told = rmp_serde::to_vec(&digest).expect("encodes");
        assert_eq!((told.len(), rmp_serde::from_slice(&told).ok()), (34, Some(digest)));
        assert!(rmp_serde::from_slice::<BlobDigest>(&rmp_serde::to_vec(&[1u8; 31]).expect("encodes")).is_err());
    }
}
