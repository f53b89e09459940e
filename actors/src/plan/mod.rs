//! How many workers a model needs and what they should be for: decided from what was seen, without I/O and without a clock.
//!
//! [`window`] turns counters of routers and workers into an [`Observation`] of one interval, [`predict`] says what the next one
//! brings, [`need`] how many workers that takes, [`fleet`] how far those that are there suffice, and [`decide`] what follows: a
//! worker gets another role, another number of workers is wanted, one is drained before it goes, or nothing. Each decision has
//! its reason in words. Called by the actor in [`crate::planner`]. Never: acts; time is an argument.

pub mod decide;
pub mod fleet;
pub mod need;
pub mod predict;
pub mod rules;
pub mod seen;
#[cfg(test)]
mod tests;
pub mod times;
pub mod window;
pub mod words;

pub use decide::Plan;
pub use fleet::Fleet;
pub use rules::{Mode, Rules};
pub use seen::{Seen, SeenAll};
pub use window::{Baseline, Observation, Raw, WorkerSeen};
pub use words::{Action, Decision, Figures, Outlook};
