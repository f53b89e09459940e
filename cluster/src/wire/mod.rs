//! What stands on a link, byte by byte: frames, their codec, the limits, and the version handshake.
//!
//! All of it is pure; [`crate::link`] feeds it from sockets.

mod codec;
mod frame;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod limits;

pub use codec::{Decoder, WireError, encode, encode_data_head, encode_head};
pub use frame::{Closing, FailWhy, Frame, Hello, OpenHead, PROTOCOL, Party, StreamId, settle};
