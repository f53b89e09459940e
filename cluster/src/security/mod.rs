//! The cluster's keys and what they protect: sealed gossip datagrams, TLS for links and sessions.
//!
//! Called by membership and links. A node without a key that the others accept learns nothing and changes nothing. A
//! key is never printed or logged, and leaves the process only in its file and inside TLS. Reading order: `key` (one
//! secret), `ring` (those in force), `key_file`, `live` (the ring of a running node), `seal` (gossip), `certificates`,
//! `trust`, `tls`, `fading` (sessions end with their key).

mod certificates;
mod fading;
mod key;
mod key_file;
mod live;
mod reach;
mod ring;
mod seal;
mod socket;
mod tls;
mod trust;

#[cfg(test)]
mod hostile;

pub use fading::Fading;
pub(crate) use key::SecretText;
pub use key::{ClusterKey, KeyId, KeyIdError};
pub use key_file::KeyError;
pub use live::{Changed, Keys};
pub use ring::{KEYS_MAX, KeyRing, NotARing, RingError};
pub use seal::{DATAGRAM_MAX, Dropped, OVERHEAD as SEAL_OVERHEAD, Opener, SealKey, Sealer, SenderId};
pub use socket::Socket;
pub use tls::{Alpn, Connection, Tls, TlsError};
