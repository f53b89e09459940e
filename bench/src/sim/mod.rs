//! The product's membership and directory on a virtual clock: whole clusters of 3 to 10,000 nodes in one process.
//!
//! What runs is `starling_cluster::membership::Driver` and `starling_cluster::discovery::DirectoryCore`, unchanged. What is
//! simulated is what surrounds them: time, the network between the nodes, their processes and clocks. One seed
//! decides everything that happens; the same seed gives the same run.
//!
//! In reading order: `queue` (what happens next), [`network`](Network) (the fate of a packet), `views` (who lists whom, and whether that is
//! true), `node` (one process), [`world`](World) (all of it, and what can be done to it), `invariants` (what must hold at any
//! moment), `scenario` (what is tried and measured), `bars` (what is expected), `report` (the table), `fuzz`.

mod bars;
mod fuzz;
mod invariants;
mod network;
mod node;
mod queue;
mod report;
mod scenario;
mod views;
mod world;

#[cfg(test)]
mod tests;

pub use bars::{BARS, Row};
pub use fuzz::fuzz;
pub use invariants::Invariants;
pub use network::{Delay, Network};
pub use report::{HEAD, Summary, table};
pub use scenario::{Figure, Options, Outcome, SCENARIOS, Scenario};
pub use views::Views;
pub use world::{Setup, World};

/// Virtual time in microseconds since the run began.
pub type Micros = u64;

/// A millisecond of virtual time.
pub const MS: Micros = 1_000;
/// A second of virtual time.
pub const SECOND: Micros = 1_000 * MS;

/// As seconds, for people.
#[must_use]
pub fn seconds(time: Micros) -> f64 {
    time as f64 / SECOND as f64
}
