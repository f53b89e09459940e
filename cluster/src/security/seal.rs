//! Seals and opens gossip datagrams: nobody without the cluster key reads, forges or replays one.
//!
//! Called by the gossip thread for each packet; calls nothing but the cipher. Pure: no socket, no clock.
//!
//! ```text
//! version 1 | key id 4 | sender 8 | counter 8 | ciphertext | tag 16
//! ```
//!
//! The cipher is ChaCha20-Poly1305 under a key of its own for each sender, HKDF-SHA256(gossip key, sender),
//! with the counter as nonce; the header and the cluster's name are authenticated with it. A sender number
//! holds random salt of its process, so two lives of a node never share a key, not even without a data
//! directory. Bounds: `SENDERS_MAX` senders are remembered, the one unheard for longest is forgotten first.
//!
//! What it does not do: a receiver that has just started knows no counters yet, so a packet recorded before
//! is new to it once. Gossip bears that: what the packet says loses to every later incarnation.

use std::collections::HashMap;

use aws_lc_rs::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use hkdf::Hkdf;
use sha2::Sha256;
use starling_ids::{Incarnation, NodeId};
use thiserror::Error;
use twox_hash::XxHash3_64;

/// Bytes added to each payload.
pub const OVERHEAD: usize = HEADER + TAG;
/// Largest datagram, sealed: below the smallest common path MTU for UDP over IPv6 tunnels.
pub const DATAGRAM_MAX: usize = 1400;
/// Senders whose counters are remembered.
const SENDERS_MAX: usize = 16_384;
/// Counters behind the newest one that are still accepted, each once.
const REPLAY_WINDOW: u64 = 1024;

const VERSION: u8 = 1;
const HEADER: usize = 1 + 4 + 8 + 8;
const TAG: usize = 16;

/// Why a datagram was dropped. The label is that of `starling_gossip_packets_dropped_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum Dropped {
    /// Shorter than header and tag.
    #[error("shorter than a header")]
    Short,
    /// Longer than [`DATAGRAM_MAX`].
    #[error("longer than a datagram may be")]
    Oversized,
    /// Of another version of this format.
    #[error("of an unknown version")]
    Version,
    /// Sealed under a key that this node does not hold.
    #[error("sealed under an unknown key")]
    UnknownKey,
    /// The tag does not fit: altered, or of another cluster.
    #[error("not authentic")]
    Forged,
    /// Seen before, or older than the window.
    #[error("seen before")]
    Replayed,
    /// Authentic, but not a gossip message.
    #[error("not a gossip message")]
    Malformed,
}

impl Dropped {
    /// A fixed word for labels.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Oversized => "oversized",
            Self::Version => "version",
            Self::UnknownKey => "unknown_key",
            Self::Forged => "forged",
            Self::Replayed => "replayed",
            Self::Malformed => "malformed",
        }
    }
}

/// Names one process among all that ever gossiped under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SenderId(u64);

impl SenderId {
    /// `salt` is drawn at random at each start of the process.
    #[must_use]
    pub fn new(node: &NodeId, incarnation: Incarnation, salt: u64) -> Self {
        let mut named = node.as_str().as_bytes().to_vec();
        named.extend_from_slice(&incarnation.0.to_be_bytes());
        Self(XxHash3_64::oneshot_with_seed(salt, &named))
    }
}

/// One gossip key: 32 secret bytes and the number that packets name it by.
#[derive(Clone)]
pub struct SealKey {
    id: u32,
    secret: [u8; 32],
}

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SealKey({:08x})", self.id)
    }
}

impl Drop for SealKey {
    fn drop(&mut self) {
        super::key::wipe(&mut self.secret);
    }
}

impl SealKey {
    /// `secret` is derived from the cluster key for gossip alone. The key's number is derived from it too.
    #[must_use]
    pub fn new(secret: [u8; 32]) -> Self {
        let mut id = [0u8; 4];
        expand(&secret, &[b"starling gossip key id"], &mut id);
        Self { id: u32::from_be_bytes(id), secret }
    }

    fn cipher(&self, sender: SenderId) -> Cipher {
        let mut key = [0u8; 32];
        expand(&self.secret, &[b"starling gossip sender", &sender.0.to_be_bytes()], &mut key);
        let made = UnboundKey::new(&CHACHA20_POLY1305, &key).map(LessSafeKey::new);
        super::key::wipe(&mut key);
        debug_assert!(made.is_ok(), "the cipher takes every key of 32 bytes");
        Cipher(made.ok())
    }
}

/// The cipher under one sender's key. It holds a key always; without one it would open and seal nothing.
struct Cipher(Option<LessSafeKey>);

impl Cipher {
    /// Encrypts `message` where it lies and puts the tag behind it.
    fn seal(&self, counter: u64, aad: &[u8], message: &mut Vec<u8>) -> Result<(), Dropped> {
        let key = self.0.as_ref().ok_or(Dropped::Oversized)?;
        key.seal_in_place_append_tag(nonce(counter), Aad::from(aad), message).map_err(|_| Dropped::Oversized)
    }

    /// The payload of ciphertext and tag, if it is authentic.
    fn open(&self, counter: u64, aad: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Dropped> {
        let key = self.0.as_ref().ok_or(Dropped::Forged)?;
        let mut message = sealed.to_vec();
        let opened =
            key.open_in_place(nonce(counter), Aad::from(aad), &mut message).map_err(|_| Dropped::Forged)?.len();
        message.truncate(opened);
        Ok(message)
    }
}

/// HKDF-SHA256 into at most 32 bytes, a length it always gives.
fn expand(secret: &[u8; 32], info: &[&[u8]], out: &mut [u8]) {
    let filled = Hkdf::<Sha256>::new(None, secret).expand_multi_info(info, out);
    debug_assert!(filled.is_ok(), "HKDF gives up to 8160 bytes");
}

/// Seals what this process sends.
pub struct Sealer {
    key_id: u32,
    cipher: Cipher,
    sender: SenderId,
    counter: u64,
    cluster: Vec<u8>,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealer({:08x}, {:?}, {})", self.key_id, self.sender, self.counter)
    }
}

impl Sealer {
    /// Seals under `key`, the newest one, for the cluster of this name.
    #[must_use]
    pub fn new(key: &SealKey, cluster: &str, sender: SenderId) -> Self {
        Self { key_id: key.id, cipher: key.cipher(sender), sender, counter: 0, cluster: cluster.as_bytes().to_vec() }
    }

    /// Seals under another key from now on. The counter goes on: under a key that comes back it must not repeat.
    pub fn switch(&mut self, key: &SealKey) {
        if key.id != self.key_id {
            self.key_id = key.id;
            self.cipher = key.cipher(self.sender);
        }
    }

    /// The datagram for `payload`, [`OVERHEAD`] bytes longer. `Err` for one over [`DATAGRAM_MAX`].
    pub fn seal(&mut self, payload: &[u8]) -> Result<Vec<u8>, Dropped> {
        if payload.len() + OVERHEAD > DATAGRAM_MAX {
            return Err(Dropped::Oversized);
        }
        self.counter += 1;
        let mut datagram = Vec::with_capacity(payload.len() + OVERHEAD);
        let mut sealed = payload.to_vec();
        datagram.push(VERSION);
        datagram.extend_from_slice(&self.key_id.to_be_bytes());
        datagram.extend_from_slice(&self.sender.0.to_be_bytes());
        datagram.extend_from_slice(&self.counter.to_be_bytes());
        let aad = aad(&datagram, &self.cluster);
        self.cipher.seal(self.counter, &aad, &mut sealed)?;
        datagram.extend_from_slice(&sealed);
        Ok(datagram)
    }
}

/// Opens what arrives under any key of the ring.
pub struct Opener {
    keys: Vec<SealKey>,
    cluster: Vec<u8>,
    senders: HashMap<(u32, SenderId), Sender>,
    /// Rises with each accepted packet; orders senders by when they were last heard.
    heard: u64,
    senders_max: usize,
}

struct Sender {
    cipher: Cipher,
    window: Window,
    heard: u64,
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Opener({:?}, {} senders)", self.keys, self.senders.len())
    }
}

impl Opener {
    /// Accepts packets under any of `keys`.
    #[must_use]
    pub fn new(keys: Vec<SealKey>, cluster: &str) -> Self {
        Self { keys, cluster: cluster.as_bytes().to_vec(), senders: HashMap::new(), heard: 0, senders_max: SENDERS_MAX }
    }

    /// Accepts packets under these keys from now on. What was heard under a key that stays is not forgotten.
    pub fn switch(&mut self, keys: Vec<SealKey>) {
        self.senders.retain(|(key_id, _), _| keys.iter().any(|key| key.id == *key_id));
        self.keys = keys;
    }

    /// The payload of an authentic, new datagram.
    pub fn open(&mut self, datagram: &[u8]) -> Result<Vec<u8>, Dropped> {
        let (key_id, sender, counter) = parse(datagram)?;
        let aad = aad(&datagram[..HEADER], &self.cluster);
        let sealed = &datagram[HEADER..];
        self.heard += 1;
        if let Some(known) = self.senders.get_mut(&(key_id, sender)) {
            known.window.check(counter)?;
            let payload = known.cipher.open(counter, &aad, sealed)?;
            known.window.take(counter);
            known.heard = self.heard;
            return Ok(payload);
        }
        // Nothing is remembered of a sender until one packet of it was authentic.
        let key = self.keys.iter().find(|key| key.id == key_id).ok_or(Dropped::UnknownKey)?;
        let cipher = key.cipher(sender);
        let payload = cipher.open(counter, &aad, sealed)?;
        let mut window = Window::default();
        window.take(counter);
        self.make_room();
        self.senders.insert((key_id, sender), Sender { cipher, window, heard: self.heard });
        Ok(payload)
    }

    /// Forgets the eighth of the senders that was unheard for longest, when full.
    fn make_room(&mut self) {
        if self.senders.len() < self.senders_max {
            return;
        }
        let mut heard: Vec<u64> = self.senders.values().map(|sender| sender.heard).collect();
        heard.sort_unstable();
        let oldest_kept = heard[(heard.len() / 8).max(1).min(heard.len() - 1)];
        self.senders.retain(|_, sender| sender.heard >= oldest_kept);
    }
}

fn parse(datagram: &[u8]) -> Result<(u32, SenderId, u64), Dropped> {
    if datagram.len() > DATAGRAM_MAX {
        return Err(Dropped::Oversized);
    }
    let Some((header, rest)) = datagram.split_first_chunk::<HEADER>() else { return Err(Dropped::Short) };
    if rest.len() < TAG {
        return Err(Dropped::Short);
    }
    if header[0] != VERSION {
        return Err(Dropped::Version);
    }
    let key_id = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
    Ok((key_id, SenderId(be_u64(&header[5..13])), be_u64(&header[13..21])))
}

/// Big-endian; `bytes` holds at most eight.
fn be_u64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0u8; 12];
    nonce[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

fn aad(header: &[u8], cluster: &[u8]) -> Vec<u8> {
    [header, cluster].concat()
}

/// Which of the last `REPLAY_WINDOW` counters were seen. Bit `counter % REPLAY_WINDOW` stands for `counter`.
struct Window {
    newest: u64,
    seen: [u64; WORDS],
}

const WORDS: usize = (REPLAY_WINDOW / 64) as usize;

impl Default for Window {
    fn default() -> Self {
        Self { newest: 0, seen: [0; WORDS] }
    }
}

impl Window {
    fn check(&self, counter: u64) -> Result<(), Dropped> {
        let old = counter == 0 || counter.saturating_add(REPLAY_WINDOW) <= self.newest;
        if old || (counter <= self.newest && self.bit(counter)) {
            return Err(Dropped::Replayed);
        }
        Ok(())
    }

    fn take(&mut self, counter: u64) {
        if counter > self.newest {
            if counter - self.newest >= REPLAY_WINDOW {
                self.seen = [0; WORDS];
            } else {
                for skipped in self.newest + 1..counter {
                    let (word, bit) = Self::place(skipped);
                    self.seen[word] &= !(1 << bit);
                }
            }
            self.newest = counter;
        }
        let (word, bit) = Self::place(counter);
        self.seen[word] |= 1 << bit;
    }

    fn bit(&self, counter: u64) -> bool {
        let (word, bit) = Self::place(counter);
        self.seen[word] >> bit & 1 == 1
    }

    fn place(counter: u64) -> (usize, u64) {
        let at = counter % REPLAY_WINDOW;
        ((at / 64) as usize, at % 64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(sender: u64) -> (Sealer, Opener) {
        let key = SealKey::new([7; 32]);
        (Sealer::new(&key, "c", SenderId(sender)), Opener::new(vec![key], "c"))
    }

    #[test]
    fn opens_what_was_sealed_once() {
        let (mut sealer, mut opener) = pair(1);
        for length in [0, 1, 1000, DATAGRAM_MAX - OVERHEAD] {
            let payload = vec![length as u8; length];
            let datagram = sealer.seal(&payload).expect("seals");
            assert_eq!(datagram.len(), length + OVERHEAD);
            assert_eq!(opener.open(&datagram).expect("opens"), payload);
            assert_eq!(opener.open(&datagram), Err(Dropped::Replayed));
        }
        assert_eq!(sealer.seal(&[0; DATAGRAM_MAX]), Err(Dropped::Oversized));
    }

    /// What other versions of this program send; it must not change with the library.
    #[test]
    fn a_datagram_has_the_bytes_of_the_format() {
        let (mut sealer, _) = pair(0x0102_0304_0506_0708);
        let hex: String = sealer.seal(b"hello").expect("seals").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "0182d6eb7101020304050607080000000000000001bc90fb74b680cba39f3ecbb3cf52a853702074da3c");
    }

    #[test]
    fn wrong_key_cluster_version_and_length_are_told_apart() {
        let (mut sealer, mut opener) = pair(1);
        let datagram = sealer.seal(b"hello").expect("seals");
        let mut other_key = Opener::new(vec![SealKey::new([8; 32])], "c");
        assert_eq!(other_key.open(&datagram), Err(Dropped::UnknownKey));
        let mut other_cluster = Opener::new(vec![SealKey::new([7; 32])], "d");
        assert_eq!(other_cluster.open(&datagram), Err(Dropped::Forged));
        let mut versioned = datagram.clone();
        versioned[0] = 9;
        assert_eq!(opener.open(&versioned), Err(Dropped::Version));
        assert_eq!(opener.open(&datagram[..OVERHEAD - 1]), Err(Dropped::Short));
        assert_eq!(opener.open(&[1; DATAGRAM_MAX + 1]), Err(Dropped::Oversized));
        assert!(opener.open(&datagram).is_ok(), "refusals leave no trace");
    }

    #[test]
    fn both_keys_are_accepted_during_a_rotation() {
        let (old, new) = (SealKey::new([1; 32]), SealKey::new([2; 32]));
        let mut opener = Opener::new(vec![new.clone(), old.clone()], "c");
        for key in [&old, &new] {
            let mut sealer = Sealer::new(key, "c", SenderId(5));
            let datagram = sealer.seal(b"x").expect("seals");
            assert_eq!(opener.open(&datagram).expect("opens"), b"x");
        }
    }

    #[test]
    fn packets_may_overtake_within_the_window_only() {
        let (mut sealer, mut opener) = pair(1);
        let datagrams: Vec<_> = (0..REPLAY_WINDOW + 10).map(|_| sealer.seal(b"x").expect("seals")).collect();
        let last = datagrams.len() - 1;
        assert!(opener.open(&datagrams[last]).is_ok());
        assert_eq!(opener.open(&datagrams[0]), Err(Dropped::Replayed), "older than the window");
        let inside = last - REPLAY_WINDOW as usize + 1;
        assert!(opener.open(&datagrams[inside]).is_ok());
        assert_eq!(opener.open(&datagrams[inside]), Err(Dropped::Replayed));
        assert!(opener.open(&datagrams[inside + 1]).is_ok());
    }

    #[test]
    fn senders_are_bounded_and_the_silent_ones_go_first() {
        let key = SealKey::new([7; 32]);
        let mut opener = Opener::new(vec![key.clone()], "c");
        opener.senders_max = 64;
        let mut loud = Sealer::new(&key, "c", SenderId(0));
        for sender in 1..1000 {
            let mut sealer = Sealer::new(&key, "c", SenderId(sender));
            assert!(opener.open(&sealer.seal(b"x").expect("seals")).is_ok());
            assert!(opener.open(&loud.seal(b"x").expect("seals")).is_ok());
            assert!(opener.senders.len() <= 64);
        }
        assert!(opener.senders.contains_key(&(key.id, SenderId(0))));
    }

    #[test]
    fn two_lives_of_a_node_are_two_senders() {
        let node = NodeId::new("w1").expect("name");
        let one = SenderId::new(&node, Incarnation(1), 11);
        assert_ne!(one, SenderId::new(&node, Incarnation(1), 12));
        assert_ne!(one, SenderId::new(&node, Incarnation(2), 11));
    }

    proptest! {
        #[test]
        fn noise_is_dropped_and_never_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..1600)) {
            let (_, mut opener) = pair(1);
            prop_assert!(opener.open(&noise).is_err());
            prop_assert_eq!(opener.senders.len(), 0);
        }

        #[test]
        fn one_altered_bit_is_enough(payload in proptest::collection::vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let (mut sealer, mut opener) = pair(3);
            let mut datagram = sealer.seal(&payload).expect("seals");
            let at = at.index(datagram.len());
            datagram[at] ^= 1 << bit;
            prop_assert!(opener.open(&datagram).is_err());
            datagram[at] ^= 1 << bit;
            prop_assert_eq!(opener.open(&datagram).expect("opens"), payload);
        }

        #[test]
        fn each_counter_passes_at_most_once(counters in proptest::collection::vec(1..3000u64, 1..400)) {
            let mut window = Window::default();
            let mut taken = std::collections::BTreeSet::new();
            for counter in counters {
                if window.check(counter).is_ok() {
                    prop_assert!(taken.insert(counter));
                    window.take(counter);
                } else {
                    let newest = taken.last().copied().unwrap_or(0);
                    prop_assert!(taken.contains(&counter) || counter + REPLAY_WINDOW <= newest);
                }
            }
        }
    }
}
