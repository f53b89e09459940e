//! embedded.
