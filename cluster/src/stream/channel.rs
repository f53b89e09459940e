//! The two halves of a stream.
