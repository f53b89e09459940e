//! The cast: one actor a file, and the pure decisions they take.
