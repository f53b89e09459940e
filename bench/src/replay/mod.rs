//! A cluster on a virtual clock: the product's decisions, index and engines serve a recorded trace.
//!
//! `trace` says what is asked and when, `worker` runs an engine, `cluster` moves time, `report` sums up. What is
//! simulated is time, the wires and the computation; what decides is the product's own code.

pub mod cluster;
pub mod report;
pub mod trace;
pub mod worker;
