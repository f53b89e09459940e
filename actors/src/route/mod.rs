//! What a router shard thinks, without I/O and without a clock.
//!
//! Read in the order of a decision: [`catalog`] says which workers there are, [`slots`] who decides, [`desks`] keeps one
//! [`desk`] a model, which knows its workers in the columns of a [`fleet`] and asks a [`policy`] what the request would cost on
//! each; [`breaker`] keeps those away that fail, [`queue`] says who goes next when all are taken. [`rates`] are how fast they are, [`below`]
//! how fast their own slower tiers, [`receipt`] remembers why. [`fallback`] is for times without a shard, [`retries`] bounds what failures cost.

pub mod ask;
pub mod below;
pub mod breaker;
pub mod budget;
pub mod catalog;
mod columns;
pub mod desk;
pub mod desks;
pub mod fallback;
pub mod fleet;
mod gate;
mod given;
mod overlay;
pub mod policy;
pub mod queue;
pub mod rates;
pub mod rebalance;
pub mod receipt;
pub mod regret;
pub mod retries;
pub mod slots;
pub mod split;
pub mod spread;
pub mod wishes;
