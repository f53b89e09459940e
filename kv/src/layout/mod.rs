//! KV layouts.
