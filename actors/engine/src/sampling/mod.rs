//! sampling.
