//! Choosing workers by rules of one's own: what a program needs to bring a scorer or a filter and to compose it.
//!
//! A scorer says what a request would cost on a worker, lower is better; a filter says who may not have it. Both see the
//! same [`Question`]: the request, every worker in the columns of the [`Fleet`], and which of its blocks each worker
//! holds. `examples/custom_scorer.rs` is one, started as a router of a running cluster.

pub use starling_actors::route::{
    desk::Ask,
    fleet::{Fleet, Heard, Places, Slot, Standing},
    policy::{Filter, Params, PolicyConfig, PolicyError, PolicyName, Question, Scorer, Table, Value},
    rates::Rates,
    wishes::{Labels, Selector, Wishes},
};

/// A policy from TOML, as it stands below `[policy]` in a configuration file. Names of parts are looked up when it is
/// built, so a program adds its own with [`PolicyConfig::with_scorer`] and [`PolicyConfig::with_filter`] afterwards.
///
/// # Errors
/// Names the key that is wrong, and what would be right.
pub fn policy(toml: &str) -> Result<PolicyConfig, PolicyError> {
    let table: Table = toml::from_str(toml).map_err(|error| PolicyError::new("policy", error.message()))?;
    PolicyConfig::try_from(table)
}
