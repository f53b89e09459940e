//! A whole cluster on a virtual clock: the product's decisions, index, scheduler and block pool serve recorded or made-up traffic.
//!
//! `trace` and `workload` say what is asked and when, `worker` runs an engine, `cluster` moves time, `sweep` runs a
//! cluster under several policies and loads, `report` sums up, `plot` draws. What is simulated is time, the wires and the
//! computation; what decides is the product's own code. One seed gives one run.
//! Called by `starling bench replay`. Never: prints, opens a socket.

pub mod cluster;
pub mod plot;
pub mod report;
pub mod setup;
pub mod sweep;
#[cfg(test)]
mod tests;
pub mod trace;
pub mod worker;
pub mod workload;
