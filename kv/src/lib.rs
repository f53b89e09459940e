//! KV blocks as data: hashes, the prefix index, the block pool, layouts, events.
