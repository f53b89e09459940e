//! KV blocks as data: hashes, events, the prefix index, the block pool, layouts.
//!
//! Everything here is pure: no I/O, no clock, no threads of its own. A block's life is decided here and
//! carried out elsewhere.

pub mod events;
pub mod hash;
pub mod index;
pub mod layout;
pub mod pool;
