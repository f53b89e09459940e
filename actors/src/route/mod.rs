//! What a router shard thinks, without I/O and without a clock.
//!
//! Read in the order of a decision: [`catalog`] says which workers there are, [`slots`] who decides, [`desks`] keeps one
//! [`desk`] a model, which knows its workers in the columns of a [`fleet`] and asks a [`policy`] what the request would cost on
//! each; [`rates`] are how fast they are, [`receipt`] remembers why. [`fallback`] is for times without a shard.

pub mod catalog;
pub mod desk;
pub mod desks;
pub mod fallback;
pub mod fleet;
pub mod policy;
pub mod rates;
pub mod receipt;
pub mod slots;
