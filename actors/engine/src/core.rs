//! The engine that drives a backend.
