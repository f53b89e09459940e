//! Benchmarks and trace replay.
