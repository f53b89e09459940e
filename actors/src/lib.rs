//! The cast: one actor a file, and the pure decisions they take.
//!
//! The actors are [`worker`], [`indexer`], [`router_shard`] and [`planner`]; [`tree`] builds them. What they exchange is in
//! [`generate`] (a request) and [`report`] (a worker about itself), under the endpoints of [`names`]. What they
//! decide is in [`route`], in [`plan`] and in the engine crate, without I/O and without a clock. [`client`] is how everybody else
//! asks for tokens.

mod announce;
mod budgets;
pub mod cache_report;
mod cards;
pub mod client;
pub mod generate;
pub mod indexer;
pub mod names;
pub mod plan;
pub mod planner;
pub mod report;
pub mod route;
pub mod router_shard;
mod seat;
#[cfg(test)]
mod testing;
pub mod transfer;
mod transfer_agent;
pub mod tree;
pub mod view;
pub mod worker;

pub use starling_engine as engine;
