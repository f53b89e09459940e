//! The blobs that a node holds in memory.
//!
//! Called by the shell under one lock. Pure. Bounds: the bytes given at the start, [`BLOB_MAX`] for each.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{BLOB_MAX, BlobDigest, BlobError};

#[derive(Debug)]
struct Held {
    bytes: Bytes,
    own: bool,
    used: u64,
}

/// Own blobs stay; of the others the longest unused make room.
#[derive(Debug)]
pub(super) struct Store {
    held: BTreeMap<BlobDigest, Held>,
    bytes: usize,
    bytes_max: usize,
    clock: u64,
}

impl Store {
    pub(super) const fn new(bytes_max: usize) -> Self {
        Self { held: BTreeMap::new(), bytes: 0, bytes_max, clock: 0 }
    }

    pub(super) fn put(&mut self, digest: BlobDigest, bytes: Bytes, own: bool) -> Result<(), BlobError> {
        if bytes.len() > BLOB_MAX {
            return Err(BlobError::TooLarge { len: bytes.len() });
        }
        self.clock += 1;
        if let Some(held) = self.held.get_mut(&digest) {
            held.own |= own;
            held.used = self.clock;
            return Ok(());
        }
        let fixed: usize = self.held.values().filter(|held| held.own).map(|held| held.bytes.len()).sum();
        if fixed + bytes.len() > self.bytes_max {
            return Err(BlobError::Full);
        }
        while self.bytes + bytes.len() > self.bytes_max {
            let oldest = self.held.iter().filter(|(_, held)| !held.own).min_by_key(|(_, held)| held.used);
            let Some(oldest) = oldest.map(|(digest, _)| *digest) else { return Err(BlobError::Full) };
            self.bytes -= self.held.remove(&oldest).map_or(0, |held| held.bytes.len());
        }
        self.bytes += bytes.len();
        self.held.insert(digest, Held { bytes, own, used: self.clock });
        Ok(())
    }

    pub(super) fn get(&mut self, digest: &BlobDigest) -> Option<Bytes> {
        self.clock += 1;
        let held = self.held.get_mut(digest)?;
        held.used = self.clock;
        Some(held.bytes.clone())
    }

    /// Bytes held.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_goes_first_and_own_blobs_stay() {
        let mut store = Store::new(10);
        let blob = |byte: u8| (BlobDigest::of(&[byte; 4]), Bytes::from(vec![byte; 4]));
        let [(a, a_bytes), (b, b_bytes), (c, c_bytes), (d, d_bytes)] = [1, 2, 3, 4].map(blob);
        store.put(a, a_bytes.clone(), true).expect("room");
        store.put(b, b_bytes, false).expect("room");
        store.put(c, c_bytes.clone(), false).expect("b makes room");
        assert_eq!((store.get(&a), store.get(&b), store.get(&c)), (Some(a_bytes), None, Some(c_bytes)));
        store.put(c, Bytes::new(), true).expect("held already, own from now on");
        assert_eq!(store.put(d, d_bytes, true), Err(BlobError::Full));
        assert_eq!(store.bytes(), 8);
        let long = Bytes::from(vec![0; BLOB_MAX + 1]);
        assert_eq!(store.put(d, long, false), Err(BlobError::TooLarge { len: BLOB_MAX + 1 }));
    }
}
