//! security.

mod key;
mod seal;
mod tls;

pub use key::{ClusterKey, KeyError};
pub use seal::{DATAGRAM_MAX, Dropped, OVERHEAD as SEAL_OVERHEAD, Opener, SealKey, Sealer, SenderId};
pub use tls::{Alpn, Connection, Tls, TlsError, is_node};
