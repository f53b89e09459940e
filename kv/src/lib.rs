//! KV blocks as data: hashes, events, the prefix index, the block pool, layouts, tiers below the device, and the transports
//! that move their bytes.
//!
//! What decides is pure: no I/O, no clock, no threads. A file that acts says so in its first line (`Shell:`).

pub mod adapt;
pub mod events;
pub mod hash;
pub mod index;
pub mod layout;
pub mod pool;
pub mod tier;
pub mod transport;
