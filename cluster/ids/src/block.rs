//! Which cache block.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A token id of a model's vocabulary.
pub type TokenId = u32;

/// The chained 128-bit hash of a full block of tokens and all that stands before it.
///
/// Equal hashes mean an equal prefix under the same seed; who reuses a block still compares token ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u128);

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}…", self.0 >> 96)
    }
}
