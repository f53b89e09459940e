//! The cluster key and what it protects: sealed gossip datagrams, TLS for links and sessions.
//!
//! Called by membership and links. A node without the key learns nothing and changes nothing; the key itself is
//! never printed, logged or sent.

mod key;
mod seal;
mod socket;
mod tls;

pub use key::{ClusterKey, KeyError};
pub use seal::{DATAGRAM_MAX, Dropped, OVERHEAD as SEAL_OVERHEAD, Opener, SealKey, Sealer, SenderId};
pub use socket::Socket;
pub use tls::{Alpn, Connection, Tls, TlsError, is_node};
