//! The ring of a running node: one value that gossip, certificates and links read, and that a roll replaces.
//!
//! Called by everything that seals, opens, dials or accepts. Never goes back to an older ring. Bounds: one change at a
//! time; a change writes one small file, so it is made on a thread that may block.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::watch;

use super::{ClusterKey, KeyError, KeyId, KeyRing, RingError};

/// Keys of a running node. Cheap to clone; all clones are one ring.
#[derive(Clone)]
pub struct Keys(Arc<Inner>);

struct Inner {
    ring: watch::Sender<Arc<KeyRing>>,
    changing: Mutex<()>,
    strangers: watch::Sender<Option<SocketAddr>>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.ring())
    }
}

impl From<KeyRing> for Keys {
    fn from(ring: KeyRing) -> Self {
        let ring = watch::Sender::new(Arc::new(ring));
        Self(Arc::new(Inner { ring, changing: Mutex::new(()), strangers: watch::Sender::new(None) }))
    }
}

impl From<&KeyRing> for Keys {
    fn from(ring: &KeyRing) -> Self {
        ring.clone().into()
    }
}

impl From<&ClusterKey> for Keys {
    fn from(key: &ClusterKey) -> Self {
        KeyRing::from(key).into()
    }
}

impl From<&Keys> for Keys {
    fn from(keys: &Keys) -> Self {
        keys.clone()
    }
}

impl Keys {
    /// The ring as of now.
    #[must_use]
    pub fn ring(&self) -> Arc<KeyRing> {
        self.0.ring.borrow().clone()
    }

    /// Follows the ring.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<KeyRing>> {
        self.0.ring.subscribe()
    }

    /// Resolves once this key is accepted no more.
    pub async fn removed(&self, key: KeyId) {
        // The sender lives as long as `self`.
        self.watch().wait_for(|ring| !ring.holds(key)).await.ok();
    }

    /// Takes a ring that a member offers, if it outranks the one held: in force at once, then kept in the file. Whether
    /// it was taken. An error: it is in force, and the file still holds the older one.
    pub fn adopt(&self, offered: KeyRing) -> Result<bool, KeyError> {
        let _one = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let held = self.ring();
        if !offered.outranks(&held) {
            return Ok(false);
        }
        self.put(&held, offered).map(|()| true)
    }

    /// Makes a change of this node's own.
    pub fn change(&self, make: impl FnOnce(&KeyRing) -> Result<KeyRing, RingError>) -> Result<Changed, RingError> {
        let _one = self.0.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let held = self.ring();
        let kept = self.put(&held, make(&held)?);
        Ok(Changed { before: held, after: self.ring(), kept })
    }

    fn put(&self, held: &KeyRing, next: KeyRing) -> Result<(), KeyError> {
        let next = Arc::new(next.kept_in(held.file.clone()));
        self.0.ring.send_replace(next.clone());
        tracing::info!(before = %held, after = %next, "the key ring has changed");
        next.keep().inspect_err(|error| tracing::error!(%error, "the key ring is in force but was not kept"))
    }

    /// Somebody gossips from this address under a key that is not in the ring.
    pub(crate) fn stranger(&self, from: SocketAddr) {
        self.0.strangers.send_replace(Some(from));
    }

    /// Follows those that gossip under another key; only the latest one counts.
    pub(crate) fn strangers(&self) -> watch::Receiver<Option<SocketAddr>> {
        self.0.strangers.subscribe()
    }
}

/// A change that was made.
#[derive(Debug)]
pub struct Changed {
    /// What was held.
    pub before: Arc<KeyRing>,
    /// What is in force.
    pub after: Arc<KeyRing>,
    /// Whether the file holds it too.
    pub kept: Result<(), KeyError>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_newer_ring_is_taken_and_kept_and_an_older_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        let keys = Keys::from(KeyRing::load_or_make(&path).unwrap());
        let (first, old) = (keys.ring(), keys.ring().primary().id());
        let new = ClusterKey::generate();
        let changed = keys.change(|ring| ring.add(new.clone())).unwrap();
        assert!(changed.kept.is_ok() && changed.before.version() == 0 && changed.after.version() == 1);
        assert_eq!(KeyRing::load(&path).unwrap().version(), 1);
        assert!(!keys.adopt(KeyRing::clone(&first)).unwrap());
        let last = changed.after.promote(new.id()).and_then(|ring| ring.remove(old)).unwrap();
        let removed = keys.removed(old);
        assert!(keys.adopt(last).unwrap());
        removed.await;
        assert_eq!(KeyRing::load(&path).unwrap().ids(), [new.id()]);
        assert!(keys.change(|ring| ring.remove(new.id())).is_err());
    }

    #[tokio::test]
    async fn a_ring_that_cannot_be_kept_is_in_force_and_said_to_be_so() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("gone");
        std::fs::create_dir(&inner).unwrap();
        let keys = Keys::from(KeyRing::load_or_make(&inner.join("cluster.key")).unwrap());
        std::fs::remove_dir_all(&inner).unwrap();
        let changed = keys.change(|ring| ring.add(ClusterKey::generate())).unwrap();
        assert!(changed.kept.is_err());
        assert_eq!(keys.ring().version(), 1);
    }
}
