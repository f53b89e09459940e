//! Key files: read only when private, made once, replaced whole.
//!
//! Called at start, by `starling keys`, and when a ring changes. Never overwrites a file with an older ring, and a
//! file of this name never holds half a ring. Bounds: [`FILE_MAX`] bytes are read.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::{ClusterKey, KeyRing, key::SecretText, ring::NotARing};

/// Longest key file.
const FILE_MAX: u64 = 16 << 10;

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
    #[error("key file {path} is {reason}")]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What was expected.
        reason: NotARing,
    },
}

impl ClusterKey {
    /// Writes the key to a new file that only its owner can read. An existing file is never overwritten.
    pub fn store(&self, path: &Path) -> Result<(), KeyError> {
        let failed = failed(path);
        let partial = beside(path);
        let written = write_private(&partial, &KeyRing::from(self).text()).and_then(|()| fs::hard_link(&partial, path));
        // The link, if it was made, holds the file; a leftover would only hold the same secret.
        let removed = fs::remove_file(&partial);
        written.and(removed).map_err(failed)
    }
}

impl KeyRing {
    /// Reads a file with one key or with a ring. Refuses one that group or others can read. Changes of the ring will
    /// be kept in this file.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let (ring, real) = Self::read(path)?;
        Ok(ring.kept_in(Some(real.into())))
    }

    /// Reads a key file, or makes it with one new key when there is none. Of several processes that start together, one
    /// makes it.
    pub fn load_or_make(path: &Path) -> Result<Self, KeyError> {
        if !path.exists() {
            match ClusterKey::generate().store(path) {
                Ok(()) => {}
                Err(_) if path.exists() => tracing::debug!("another process made the key file"),
                Err(error) => return Err(error),
            }
        }
        Self::load(path)
    }

    /// Where changes are kept, if anywhere.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Puts this ring into its file, unless the file holds this one or a newer one: nodes on one machine share a file.
    pub(super) fn keep(&self) -> Result<(), KeyError> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        if Self::read(path).is_ok_and(|(kept, _)| !self.outranks(&kept)) {
            return Ok(());
        }
        let partial = beside(path);
        let replaced = write_private(&partial, &self.text()).and_then(|()| fs::rename(&partial, path));
        if replaced.is_err()
            && let Err(error) = fs::remove_file(&partial)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %partial.display(), %error, "a partial key file stays behind; delete it");
        }
        replaced.and_then(|()| sync_folder(path)).map_err(failed(path))
    }

    /// The ring and the file behind all symbolic links.
    fn read(path: &Path) -> Result<(Self, PathBuf), KeyError> {
        let real = fs::canonicalize(path).map_err(failed(path))?;
        let file = File::open(&real).map_err(failed(path))?;
        refuse_if_readable(path, &file.metadata().map_err(failed(path))?)?;
        let mut text = SecretText(String::with_capacity(4096));
        file.take(FILE_MAX).read_to_string(&mut text.0).map_err(failed(path))?;
        let ring =
            Self::parse(text.as_str()).map_err(|reason| KeyError::Malformed { path: path.to_owned(), reason })?;
        Ok((ring, real))
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> KeyError + '_ {
    |source| KeyError::Io { path: path.to_owned(), source }
}

/// A name in the same folder that nobody else uses.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}-{:08x}.partial", std::process::id(), rand::random::<u32>()));
    name.into()
}

fn write_private(path: &Path, text: &SecretText) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(text.as_str().as_bytes())?;
    file.sync_all()
}

/// A rename outlives a power failure once its folder is on the disk.
#[cfg(unix)]
fn sync_folder(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

#[cfg(not(unix))]
fn sync_folder(_path: &Path) -> io::Result<()> {
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_key_is_private_and_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        let key = ClusterKey::generate();
        key.store(&path).unwrap();
        assert_eq!(KeyRing::load(&path).unwrap().ids(), [key.id()]);
        assert!(ClusterKey::generate().store(&path).is_err(), "a key file is never overwritten");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_changed_ring_replaces_its_file_whole_and_never_a_newer_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        let first = KeyRing::load_or_make(&path).unwrap();
        let second = first.add(ClusterKey::generate()).unwrap();
        second.keep().unwrap();
        let kept = KeyRing::load(&path).unwrap();
        assert_eq!((kept.version(), kept.ids()), (1, second.ids()));
        // The other node on this machine is behind.
        first.keep().unwrap();
        assert_eq!(KeyRing::load(&path).unwrap().version(), 1);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(KeyRing::from(ClusterKey::generate()).keep().is_ok(), "a ring without a file is kept nowhere");
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_others_can_read_is_refused_with_the_cure() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        let ring = KeyRing::load_or_make(&path).unwrap();
        ring.add(ClusterKey::generate()).unwrap().keep().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = KeyRing::load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600") && error.contains("644"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_stays_one() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.key"), folder.path().join("cluster.key"));
        ClusterKey::generate().store(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let ring = KeyRing::load(&link).unwrap().add(ClusterKey::generate()).unwrap();
        ring.keep().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(KeyRing::load(&real).unwrap().version(), 1);
    }

    #[test]
    fn a_file_of_something_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        write_private(&path, &SecretText("hello".into())).unwrap();
        let error = KeyRing::load(&path).unwrap_err().to_string();
        assert!(error.contains("not a cluster key") && error.contains("cluster.key"), "{error}");
    }
}
