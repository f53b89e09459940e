//! What stands on a link, byte by byte: frames, their codec, the limits, and the version handshake.
//!
//! All of it is pure; [`crate::link`] feeds it from sockets.

pub mod limits;
