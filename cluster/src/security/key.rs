//! The one secret of a cluster, and the keys derived from it.
//!
//! Every node of a cluster holds the same 32 random bytes. Gossip sealing, link certificates and session
//! cookies each use a key derived under their own label, so that none of them says anything about another.
//! Never prints the secret; its memory is wiped when the last copy is dropped.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    sync::atomic::{Ordering, compiler_fence},
};

use hkdf::Hkdf;
use sha2::Sha256;
use thiserror::Error;

/// First line of a key file.
const HEADER: &str = "starling cluster key v1";

/// Why a key file was refused. Every message says what would be right.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The file could not be read or written.
    #[error("key file {path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What failed.
        source: io::Error,
    },
    /// Others may read it.
    #[error("key file {path} is readable by others (mode {mode:03o}); run: chmod 600 {path}")]
    Readable {
        /// Which file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It holds no key.
    #[error(
        "key file {path} is not a cluster key: expected the line \"starling cluster key v1\" and then 64 hex digits"
    )]
    Malformed {
        /// Which file.
        path: PathBuf,
    },
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

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterKey(secret)")
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

    /// Reads a key file. Refuses one that group or others can read.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let io_error = |source| KeyError::Io { path: path.to_owned(), source };
        let metadata = fs::metadata(path).map_err(io_error)?;
        refuse_if_readable(path, &metadata)?;
        let mut text = fs::read_to_string(path).map_err(io_error)?;
        let key = parse(&text).ok_or_else(|| KeyError::Malformed { path: path.to_owned() });
        wipe_text(&mut text);
        key
    }

    /// Writes the key to a new file that only its owner can read. An existing file is never overwritten, and
    /// a file of this name never holds half a key.
    pub fn store(&self, path: &Path) -> Result<(), KeyError> {
        let io_error = |source| KeyError::Io { path: path.to_owned(), source };
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}.partial", std::process::id()));
        let partial = PathBuf::from(partial);
        let written = self.write_private(&partial).and_then(|()| fs::hard_link(&partial, path));
        // The link, if it was made, holds the file; a leftover would only hold the same secret.
        let removed = fs::remove_file(&partial);
        written.and(removed).map_err(io_error)
    }

    /// A 32-byte key for one purpose (HKDF-SHA256 with the label as info).
    #[must_use]
    pub fn derive(&self, label: &str) -> [u8; 32] {
        let mut derived = [0; 32];
        let expanded = Hkdf::<Sha256>::new(Some(b"starling/1"), &self.0.0).expand(label.as_bytes(), &mut derived);
        debug_assert!(expanded.is_ok(), "32 bytes are within what HKDF-SHA256 yields");
        derived
    }

    fn write_private(&self, path: &Path) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path)?;
        let mut text = format!("{HEADER}\n");
        for byte in &self.0.0 {
            text.push_str(&format!("{byte:02x}"));
        }
        text.push('\n');
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        wipe_text(&mut text);
        written
    }
}

#[cfg(unix)]
fn refuse_if_readable(path: &Path, metadata: &fs::Metadata) -> Result<(), KeyError> {
    let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777;
    if mode & 0o077 == 0 { Ok(()) } else { Err(KeyError::Readable { path: path.to_owned(), mode }) }
}

#[cfg(not(unix))]
fn refuse_if_readable(_path: &Path, _metadata: &fs::Metadata) -> Result<(), KeyError> {
    Ok(())
}

fn parse(text: &str) -> Option<ClusterKey> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let (header, digits) = (lines.next()?, lines.next()?);
    if header != HEADER
        || lines.next().is_some()
        || digits.len() != 64
        || !digits.bytes().all(|b| b.is_ascii_hexdigit())
    {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(ClusterKey::from_bytes(bytes))
}

fn wipe_text(text: &mut String) {
    let mut bytes = std::mem::take(text).into_bytes();
    wipe(&mut bytes);
}

/// Overwrites secret bytes in a way that the compiler keeps.
fn wipe(bytes: &mut [u8]) {
    for byte in bytes.iter_mut() {
        *std::hint::black_box(byte) = 0;
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_key_is_private_and_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        let key = ClusterKey::generate();
        key.store(&path).unwrap();
        assert_eq!(ClusterKey::load(&path).unwrap().derive("x"), key.derive("x"));
        assert!(ClusterKey::generate().store(&path).is_err(), "a key file is never overwritten");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(!format!("{key:?}").contains(&format!("{:02x}", key.0.0[0]).repeat(2)));
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_others_can_read_is_refused_with_the_cure() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        ClusterKey::generate().store(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = ClusterKey::load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600") && error.contains("644"), "{error}");
    }

    #[test]
    fn anything_else_is_not_a_key() {
        let hex = "ab".repeat(32);
        assert!(parse(&format!("{HEADER}\n{hex}\n")).is_some());
        for bad in [
            String::new(),
            hex.clone(),
            format!("{HEADER}\n{}", &hex[2..]),
            format!("{HEADER}\n{hex}\n{hex}"),
            format!("{HEADER}\n{}", "zz".repeat(32)),
            format!("{HEADER}\n+{}", &hex[1..]),
        ] {
            assert!(parse(&bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn labels_give_unrelated_keys() {
        let key = ClusterKey::from_bytes([7; 32]);
        assert_ne!(key.derive("gossip"), key.derive("link"));
        assert_eq!(key.derive("gossip"), ClusterKey::from_bytes([7; 32]).derive("gossip"));
    }
}
