//! Starling.
