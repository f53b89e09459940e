//! Whole-system tests: real processes of the built program, real sockets, real signals.
//!
//! Each test makes its own cluster in a temporary folder on free ports, and waits for states with a deadline, never
//! for a time. `STARLING_TEST_BINARY` names the program to start (default: the one cargo built beside the tests),
//! `STARLING_TEST_MODEL` the model (default: the one `make model` brings). Tests called `mesh_` put each node on a
//! machine of its own, see [`net`]. A failed test prints the logs of its nodes; `STARLING_TEST_KEEP` keeps their folder,
//! `STARLING_TEST_LOG_LEVEL` makes them say more. `STARLING_LONG=1` makes faults last as long as the bars ask.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails right there")]

mod bad_input;
mod balance;
mod budget;
mod churn;
mod cli;
mod commanded;
mod console;
mod failover;
mod faults;
mod foreign;
mod harness;
mod join;
mod keys;
mod leave;
mod mesh_freeze;
mod mesh_names;
mod mesh_restart;
mod mesh_secret;
mod mesh_split;
mod mesh_weather;
mod moves;
mod net;
mod net_edge;
mod planner;
mod rest;
mod serve;
mod sidecar;
mod supervision;
mod tiers;
mod transfer_faults;
