//! security.

mod key;
mod seal;

pub use key::{ClusterKey, KeyError};
pub use seal::{DATAGRAM_MAX, Dropped, OVERHEAD as SEAL_OVERHEAD, Opener, SealKey, Sealer, SenderId};
