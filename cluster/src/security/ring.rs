//! The keys that a node accepts now, one of them for what it sends; and the rules of a change.
//!
//! A ring is a value: each change makes a new one with a higher version, and of two rings the same one outranks the
//! other wherever they meet. Pure. Bounds: [`KEYS_MAX`] keys.
//!
//! As text, in a file or inside TLS, it is one of
//!
//! ```text
//! starling cluster key v1             starling cluster key ring v1
//! <64 hex digits>                     version <number>
//!                                     primary <64 hex digits>
//!                                     key <64 hex digits>
//! ```

use std::{fmt, path::Path, sync::Arc};

use thiserror::Error;

use super::{ClusterKey, KeyId, SealKey, key::SecretText};

/// Keys in one ring. A roll needs two.
pub const KEYS_MAX: usize = 8;

/// First line of a file with one key.
const HEADER_KEY: &str = "starling cluster key v1";
/// First line of a file with a ring.
const HEADER_RING: &str = "starling cluster key ring v1";

/// Why a ring cannot change so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RingError {
    /// It is in it.
    #[error("key {0} is in the ring already")]
    Known(KeyId),
    /// It is not in it.
    #[error("key {0} is not in the ring; `starling keys list` shows what is")]
    Unknown(KeyId),
    /// What is sent is sealed with it.
    #[error("key {0} is the one in use; `starling keys use` another one first")]
    Primary(KeyId),
    /// Nothing would change.
    #[error("key {0} is in use already")]
    InUse(KeyId),
    /// Too many.
    #[error("a ring holds at most {KEYS_MAX} keys; remove one first")]
    Full,
}

/// The text is no key and no ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not a cluster key: expected the line \"starling cluster key v1\" and then 64 hex digits, or a key ring")]
pub struct NotARing;

/// The keys of one node. Cheap to clone.
#[derive(Clone)]
pub struct KeyRing {
    version: u64,
    /// The primary first, the others in the order in which they came.
    keys: Vec<ClusterKey>,
    /// Where it is kept.
    pub(super) file: Option<Arc<Path>>,
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyRing({self})")
    }
}

/// `v3 1a2b3c4d* 9f8e7d6c`: version, ids, the primary marked.
impl fmt::Display for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{} {}*", self.version, self.primary().id())?;
        self.keys.iter().skip(1).try_for_each(|key| write!(f, " {}", key.id()))
    }
}

impl From<ClusterKey> for KeyRing {
    fn from(key: ClusterKey) -> Self {
        Self { version: 0, keys: vec![key], file: None }
    }
}

impl From<&ClusterKey> for KeyRing {
    fn from(key: &ClusterKey) -> Self {
        key.clone().into()
    }
}

impl From<&KeyRing> for KeyRing {
    fn from(ring: &KeyRing) -> Self {
        ring.clone()
    }
}

impl KeyRing {
    /// Rises with each change. 0: one key that was never rolled.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The key that seals and signs.
    #[must_use]
    pub fn primary(&self) -> &ClusterKey {
        // A ring is never empty: it is made of one key, read with one, and the primary is never removed.
        &self.keys[0]
    }

    /// All keys that are accepted, the primary first.
    #[must_use]
    pub fn keys(&self) -> &[ClusterKey] {
        &self.keys
    }

    /// Their names, the primary first.
    #[must_use]
    pub fn ids(&self) -> Vec<KeyId> {
        self.keys.iter().map(ClusterKey::id).collect()
    }

    /// Whether it accepts this key.
    #[must_use]
    pub fn holds(&self, id: KeyId) -> bool {
        self.keys.iter().any(|key| key.id() == id)
    }

    /// Whether it accepts every key that `older` accepts.
    #[must_use]
    pub fn covers(&self, older: &Self) -> bool {
        older.keys.iter().all(|key| self.holds(key.id()))
    }

    /// Whether this ring replaces `other` wherever they meet: the higher version does. Of two changes made at the same
    /// time the ids decide, everywhere alike.
    #[must_use]
    pub fn outranks(&self, other: &Self) -> bool {
        (self.version, self.ids()) > (other.version, other.ids())
    }

    /// With one more key, which is accepted and does not seal yet.
    pub fn add(&self, key: ClusterKey) -> Result<Self, RingError> {
        if self.holds(key.id()) {
            return Err(RingError::Known(key.id()));
        }
        if self.keys.len() >= KEYS_MAX {
            return Err(RingError::Full);
        }
        let mut next = self.next();
        next.keys.push(key);
        Ok(next)
    }

    /// With another primary.
    pub fn promote(&self, id: KeyId) -> Result<Self, RingError> {
        let at = self.keys.iter().position(|key| key.id() == id).ok_or(RingError::Unknown(id))?;
        if at == 0 {
            return Err(RingError::InUse(id));
        }
        let mut next = self.next();
        let key = next.keys.remove(at);
        next.keys.insert(0, key);
        Ok(next)
    }

    /// Without a key.
    pub fn remove(&self, id: KeyId) -> Result<Self, RingError> {
        let at = self.keys.iter().position(|key| key.id() == id).ok_or(RingError::Unknown(id))?;
        if at == 0 {
            return Err(RingError::Primary(id));
        }
        let mut next = self.next();
        next.keys.remove(at);
        Ok(next)
    }

    /// The same ring, kept in this file from now on.
    pub(super) fn kept_in(self, file: Option<Arc<Path>>) -> Self {
        Self { file, ..self }
    }

    fn next(&self) -> Self {
        Self { version: self.version.saturating_add(1), ..self.clone() }
    }

    /// Reads the text of a key file; the text is wiped.
    pub fn from_text(text: String) -> Result<Self, NotARing> {
        Self::parse(SecretText(text).as_str())
    }

    /// The text that a key file would hold, secrets included. Whoever asks for it sends it inside TLS alone, and wipes
    /// what it can.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.text().as_str().to_owned()
    }

    /// What gossip seals and opens with, the primary first.
    #[must_use]
    pub fn seal_keys(&self) -> Vec<SealKey> {
        self.keys.iter().map(|key| SealKey::new(key.derive("gossip"))).collect()
    }

    /// The ring as text, secrets included: for its file and for members, inside TLS.
    pub(crate) fn text(&self) -> SecretText {
        // Room for all of it at once: text that grows leaves copies of itself behind.
        let mut text = String::with_capacity(64 + self.keys.len() * 80);
        if self.version == 0 && self.keys.len() == 1 {
            text.push_str(HEADER_KEY);
            text.push('\n');
        } else {
            text.push_str(&format!("{HEADER_RING}\nversion {}\n", self.version));
        }
        for (at, key) in self.keys.iter().enumerate() {
            let single = self.version == 0 && self.keys.len() == 1;
            text.push_str(if single {
                ""
            } else if at == 0 {
                "primary "
            } else {
                "key "
            });
            key.write_hex(&mut text);
            text.push('\n');
        }
        SecretText(text)
    }

    /// Reads what [`Self::text`] wrote.
    pub(crate) fn parse(text: &str) -> Result<Self, NotARing> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let ring = match lines.next() {
            Some(HEADER_KEY) => lines.next().and_then(ClusterKey::from_hex).map(Self::from),
            Some(HEADER_RING) => Self::parse_ring(&mut lines),
            _ => None,
        };
        if lines.next().is_some() { Err(NotARing) } else { ring.ok_or(NotARing) }
    }

    fn parse_ring<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Option<Self> {
        let version = lines.next()?.strip_prefix("version ")?.parse().ok()?;
        let primary = ClusterKey::from_hex(lines.next()?.strip_prefix("primary ")?)?;
        let mut ring = Self { version, keys: vec![primary], file: None };
        for line in lines {
            let key = ClusterKey::from_hex(line.strip_prefix("key ")?)?;
            if ring.holds(key.id()) || ring.keys.len() >= KEYS_MAX {
                return None;
            }
            ring.keys.push(key);
        }
        Some(ring)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(n: u8) -> ClusterKey {
        ClusterKey::from_bytes([n; 32])
    }

    #[test]
    fn a_roll_adds_promotes_and_removes() {
        let (old, new) = (key(1), key(2));
        let ring = KeyRing::from(&old);
        assert_eq!((ring.version(), ring.ids()), (0, vec![old.id()]));
        assert_eq!(ring.promote(new.id()).unwrap_err(), RingError::Unknown(new.id()));
        assert_eq!(ring.promote(old.id()).unwrap_err(), RingError::InUse(old.id()));
        assert_eq!(ring.remove(old.id()).unwrap_err(), RingError::Primary(old.id()));
        let added = ring.add(new.clone()).unwrap();
        assert_eq!((added.version(), added.ids()), (1, vec![old.id(), new.id()]));
        assert_eq!(added.add(new.clone()).unwrap_err(), RingError::Known(new.id()));
        assert!(added.covers(&ring) && !ring.covers(&added) && added.outranks(&ring) && !ring.outranks(&added));
        let used = added.promote(new.id()).unwrap();
        assert_eq!(used.ids(), [new.id(), old.id()]);
        assert_eq!(used.primary().id(), new.id());
        let removed = used.remove(old.id()).unwrap();
        assert_eq!((removed.version(), removed.ids()), (3, vec![new.id()]));
        assert!(!removed.covers(&used) && !removed.holds(old.id()));
        assert_eq!(format!("{used}"), format!("v2 {}* {}", new.id(), old.id()));
    }

    #[test]
    fn a_ring_has_a_last_place() {
        let full = (1..KEYS_MAX).fold(KeyRing::from(key(0)), |ring, n| ring.add(key(n as u8)).unwrap());
        assert_eq!(full.add(key(200)).unwrap_err(), RingError::Full);
        assert_eq!(KeyRing::parse(full.text().as_str()).unwrap().ids(), full.ids());
    }

    #[test]
    fn of_two_changes_at_the_same_time_one_wins_everywhere() {
        let ring = KeyRing::from(key(1));
        let (a, b) = (ring.add(key(2)).unwrap(), ring.add(key(3)).unwrap());
        assert_ne!(a.outranks(&b), b.outranks(&a));
        assert!(!a.outranks(&a.clone()));
    }

    #[test]
    fn text_reads_back_and_a_single_key_keeps_the_old_form() {
        let single = KeyRing::from(key(0xab));
        assert_eq!(single.text().as_str(), format!("{HEADER_KEY}\n{}\n", "ab".repeat(32)));
        let ring = single.add(key(2)).unwrap().promote(key(2).id()).unwrap();
        assert!(ring.text().as_str().starts_with("starling cluster key ring v1\nversion 2\nprimary 0202"));
        let back = KeyRing::parse(ring.text().as_str()).unwrap();
        assert_eq!((back.version(), back.ids()), (ring.version(), ring.ids()));
        assert!(!format!("{ring:?}").contains("abab") && !format!("{ring:?}").contains("0202"));
        // A ring that came back to one key stays a ring: its version must not be lost.
        let one = ring.remove(key(0xab).id()).unwrap();
        assert_eq!(KeyRing::parse(one.text().as_str()).unwrap().version(), 3);
    }

    #[test]
    fn anything_else_is_no_ring() {
        let (a, b) = ("ab".repeat(32), "cd".repeat(32));
        for bad in [
            String::new(),
            a.clone(),
            format!("{HEADER_KEY}\n{}", &a[2..]),
            format!("{HEADER_KEY}\n{a}\n{a}"),
            format!("{HEADER_KEY}\n{}", "zz".repeat(32)),
            format!("{HEADER_KEY}\n+{}", &a[1..]),
            HEADER_RING.to_owned(),
            format!("{HEADER_RING}\nprimary {a}"),
            format!("{HEADER_RING}\nversion x\nprimary {a}"),
            format!("{HEADER_RING}\nversion 1\nkey {a}"),
            format!("{HEADER_RING}\nversion 1\nprimary {a}\nkey {a}"),
            format!("{HEADER_RING}\nversion 1\nprimary {a}\nprimary {b}"),
            format!("{HEADER_RING}\nversion 1\nprimary {a}\nkey {b}\nmore"),
        ] {
            assert_eq!(KeyRing::parse(&bad).unwrap_err(), NotARing, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in "(starling cluster key( ring)? v1\n)?(version [0-9]{0,30}\n)?((primary |key )?[0-9a-f]{0,70}\n){0,12}") {
            if let Ok(ring) = KeyRing::parse(&text) {
                prop_assert!(ring.keys().len() <= KEYS_MAX);
            }
        }

        #[test]
        fn every_reachable_ring_has_one_primary_and_reads_back(steps in proptest::collection::vec((0..3u8, 0..12u8), 0..40)) {
            let mut ring = KeyRing::from(key(0));
            for (step, n) in steps {
                let next = match step {
                    0 => ring.add(key(n)),
                    1 => ring.promote(key(n).id()),
                    _ => ring.remove(key(n).id()),
                };
                if let Ok(next) = next {
                    prop_assert!(next.outranks(&ring) && !ring.outranks(&next));
                    ring = next;
                }
                let mut ids = ring.ids();
                prop_assert_eq!(ids[0], ring.primary().id());
                ids.sort_unstable();
                ids.dedup();
                prop_assert_eq!(ids.len(), ring.keys().len());
                prop_assert_eq!(KeyRing::parse(ring.text().as_str()).unwrap().ids(), ring.ids());
            }
        }
    }
}
