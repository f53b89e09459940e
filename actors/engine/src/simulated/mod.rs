//! simulated.
