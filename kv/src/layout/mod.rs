//! How the bytes of a KV block are laid out, and whether two layouts are one.
//!
//! Called where blocks cross an engine's border. Blocks move between equal layouts; a difference is converted
//! ([`convert()`]) or refused by name.

mod convert;

use std::fmt;

pub use convert::{Piece, Verdict, convert};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use twox_hash::XxHash3_64;

/// The number format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of an F32.
    Bf16,
    /// 8 bits: 4 of exponent, 3 of mantissa.
    F8E4m3,
}

impl KvDtype {
    /// Bytes of one number.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 => 1,
        }
    }
}

/// The order of the numbers in a block, slowest dimension first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvOrder {
    /// layer, K or V, token, head, dim.
    LayerKvTokenHeadDim,
    /// layer, K or V, head, token, dim.
    LayerKvHeadTokenDim,
    /// layer, head; then all keys as dim, token and all values as token, dim.
    LayerHeadKeysTransposed,
}

/// One layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Layers.
    pub layers: u32,
    /// Heads of keys and of values in one layer, on this shard.
    pub kv_heads: u32,
    /// Numbers in one head.
    pub head_dim: u32,
    /// Number format.
    pub dtype: KvDtype,
    /// Tokens in one block.
    pub block_tokens: u32,
    /// Order of the numbers.
    pub order: KvOrder,
    /// Which of `tp_size` shards of the heads this is, below it.
    #[serde(default)]
    pub tp_rank: u32,
    /// Shards that the heads of a layer are divided among, in order; at least 1.
    #[serde(default = "one")]
    pub tp_size: u32,
}

fn one() -> u32 {
    1
}

/// One difference between two layouts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The field that differs.
    pub field: &'static str,
    /// Its value here.
    pub ours: String,
    /// Its value there.
    pub theirs: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} here, {} there", self.field, self.ours, self.theirs)
    }
}

/// Why blocks cannot move between two layouts, or why one is none.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// They differ; at least one difference.
    #[error("KV layouts differ: {}", .0.iter().map(Mismatch::to_string).collect::<Vec<_>>().join("; "))]
    Differs(Vec<Mismatch>),
    /// A dimension of zero, or a block beyond 2^32 bytes.
    #[error("KV layout {0} must be at least 1 and give a block below 4 GiB, and tp_rank is below tp_size")]
    Impossible(&'static str),
    /// Bytes that are not one block of their layout, or fewer tokens in it than were asked for.
    #[error("a piece is not one block of its layout or has too few tokens")]
    Piece,
}

impl KvLayout {
    /// The same layout, if its dimensions make sense.
    pub fn validated(self) -> Result<Self, LayoutError> {
        let dimensions = [
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("block_tokens", self.block_tokens),
        ];
        let mut bytes = 2 * self.dtype.bytes() as u64;
        for (name, size) in dimensions {
            bytes = bytes.saturating_mul(u64::from(size));
            if size == 0 || bytes > u64::from(u32::MAX) {
                return Err(LayoutError::Impossible(name));
            }
        }
        if self.tp_rank >= self.tp_size {
            return Err(LayoutError::Impossible("tp_rank"));
        }
        Ok(self)
    }

    /// Bytes of keys and values of one token, all layers.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        2 * self.layers as usize * self.kv_heads as usize * self.head_dim as usize * self.dtype.bytes()
    }

    /// Bytes of one block, all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.token_bytes() * self.block_tokens as usize
    }

    /// Names the layout in a handshake: xxh3-64 over a version, the four dimensions as little-endian u32, and the number
    /// format and order by name; the shard only where there are several.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut bytes = b"kv-layout-1".to_vec();
        for size in [self.layers, self.kv_heads, self.head_dim, self.block_tokens] {
            bytes.extend_from_slice(&size.to_le_bytes());
        }
        bytes.extend_from_slice(format!("{:?}/{:?}", self.dtype, self.order).as_bytes());
        if self.tp_size != 1 {
            bytes.extend_from_slice(format!("/{} of {}", self.tp_rank, self.tp_size).as_bytes());
        }
        XxHash3_64::oneshot(&bytes)
    }

    /// Whether blocks of `theirs` can be used here as they are; else every difference by name.
    pub fn accepts(&self, theirs: &Self) -> Result<(), LayoutError> {
        let pairs = [
            ("layers", self.layers.to_string(), theirs.layers.to_string()),
            ("kv_heads", self.kv_heads.to_string(), theirs.kv_heads.to_string()),
            ("head_dim", self.head_dim.to_string(), theirs.head_dim.to_string()),
            ("dtype", format!("{:?}", self.dtype), format!("{:?}", theirs.dtype)),
            ("block_tokens", self.block_tokens.to_string(), theirs.block_tokens.to_string()),
            ("order", format!("{:?}", self.order), format!("{:?}", theirs.order)),
            ("tp_rank", self.tp_rank.to_string(), theirs.tp_rank.to_string()),
            ("tp_size", self.tp_size.to_string(), theirs.tp_size.to_string()),
        ];
        let differ = pairs.into_iter().filter(|(_, ours, theirs)| ours != theirs);
        let differ: Vec<Mismatch> = differ.map(|(field, ours, theirs)| Mismatch { field, ours, theirs }).collect();
        if differ.is_empty() { Ok(()) } else { Err(LayoutError::Differs(differ)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: KvLayout = KvLayout {
        layers: 30,
        kv_heads: 3,
        head_dim: 64,
        dtype: KvDtype::F16,
        block_tokens: 16,
        order: KvOrder::LayerKvTokenHeadDim,
        tp_rank: 0,
        tp_size: 1,
    };

    #[test]
    fn sizes_are_those_of_the_model_card() {
        assert_eq!((SMALL.token_bytes(), SMALL.block_bytes()), (23_040, 368_640));
        assert_eq!(SMALL.digest(), 11_939_699_019_509_216_938, "a change makes old and new nodes refuse each other");
    }

    #[test]
    fn every_difference_is_named_and_changes_the_digest() {
        let others = [
            ("layers", KvLayout { layers: 31, ..SMALL }),
            ("kv_heads", KvLayout { kv_heads: 6, ..SMALL }),
            ("head_dim", KvLayout { head_dim: 128, ..SMALL }),
            ("dtype", KvLayout { dtype: KvDtype::Bf16, ..SMALL }),
            ("block_tokens", KvLayout { block_tokens: 32, ..SMALL }),
            ("order", KvLayout { order: KvOrder::LayerKvHeadTokenDim, ..SMALL }),
            ("tp_size", KvLayout { tp_size: 2, ..SMALL }),
        ];
        assert_eq!(SMALL.accepts(&SMALL), Ok(()));
        for (field, other) in others {
            let error = SMALL.accepts(&other).expect_err(field);
            assert!(error.to_string().contains(field), "{error}");
            assert_ne!(SMALL.digest(), other.digest());
        }
        let error = SMALL.accepts(&KvLayout { layers: 1, dtype: KvDtype::F32, ..SMALL }).expect_err("differs");
        assert_eq!(error.to_string(), "KV layouts differ: layers 30 here, 1 there; dtype F16 here, F32 there");
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(KvLayout { kv_heads: 0, ..SMALL }.validated(), Err(LayoutError::Impossible("kv_heads")));
        assert!(KvLayout { layers: u32::MAX, ..SMALL }.validated().is_err());
        assert_eq!(KvLayout { tp_rank: 1, ..SMALL }.validated(), Err(LayoutError::Impossible("tp_rank")));
        assert_eq!(SMALL.validated(), Ok(SMALL));
        let json = serde_json::to_string(&SMALL).expect("encodes").replace(r#","tp_rank":0,"tp_size":1"#, "");
        assert_eq!(serde_json::from_str::<KvLayout>(&json).expect("an older node's layout"), SMALL);
    }
}
