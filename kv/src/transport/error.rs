//! What can end a transfer early, typed by who must act.
//!
//! Called by all transports. Never: carries bytes of a block or a token.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why the serving side did not do what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum Refusal {
    /// No grant has this token: it never existed, or it was revoked.
    #[error("unknown grant")]
    UnknownGrant,
    /// The grant's lease ended before the transfer did; what arrived must not be used.
    #[error("the grant has expired")]
    Expired,
    /// A push was asked for and a pull was granted, or the other way round.
    #[error("the grant is for the other direction")]
    WrongDirection,
    /// A page lies outside what was granted; counted from 0 in the batch.
    #[error("page {page} is outside what was granted")]
    NotGranted {
        /// Index of the first such page.
        page: u32,
    },
    /// The host has no such region.
    #[error("no such region")]
    NoRegion,
    /// A queue or a table is full; the same request may succeed later.
    #[error("busy")]
    Busy,
    /// The two sides speak different versions of the data plane.
    #[error("other version of the data plane")]
    Version,
    /// The request cannot be read.
    #[error("malformed request")]
    Malformed,
    /// The way asked for (fd passing, UCX) is not offered on this connection.
    #[error("not offered here")]
    NotOffered,
}

/// Why a transfer ended without its bytes. After any of them nothing touches the batch's pages any more, and the
/// session takes the next batch.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TransferError {
    /// No connection to the peer could be made.
    #[error("peer unreachable: {0}")]
    Unreachable(String),
    /// The peer's process ended, or the connection to it broke.
    #[error("peer gone")]
    PeerGone,
    /// The batch's own deadline passed; the peer may be frozen.
    #[error("transfer timed out")]
    Timeout,
    /// The caller cancelled it or dropped it.
    #[error("transfer cancelled")]
    Cancelled,
    /// Bytes arrived that are not those that were promised.
    #[error("checksum of page {page} differs")]
    Checksum {
        /// Index of the page, or of the first page of its group, in the batch.
        page: usize,
    },
    /// A page lies outside the local or the remote region.
    #[error("page {page} is out of bounds")]
    OutOfBounds {
        /// Index of the page in the batch.
        page: usize,
    },
    /// The serving side said no.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// This machine, or this region, cannot take part in this kind of transfer.
    #[error("not possible here: {0}")]
    Unsupported(String),
    /// The operating system failed a call on this side.
    #[error("local failure: {0}")]
    Local(String),
}

impl From<std::io::Error> for TransferError {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind as Kind;
        match error.kind() {
            Kind::ConnectionReset | Kind::BrokenPipe | Kind::UnexpectedEof | Kind::ConnectionAborted => Self::PeerGone,
            Kind::ConnectionRefused | Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::NotFound => {
                Self::Unreachable(error.to_string())
            }
            Kind::TimedOut => Self::Timeout,
            _ => Self::Local(error.to_string()),
        }
    }
}

impl From<rustix::io::Errno> for TransferError {
    fn from(error: rustix::io::Errno) -> Self {
        std::io::Error::from(error).into()
    }
}
