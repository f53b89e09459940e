//! The block pool.
