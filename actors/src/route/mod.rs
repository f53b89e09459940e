//! What a router shard thinks, without I/O and without a clock.
//!
//! Read in the order of a decision: [`catalog`] says which workers there are, [`slots`] who decides,
//! [`load_book`] what each worker has in flight, [`score`] what the request would cost there, [`tie`] which of
//! the nearly equal ones gets it, [`decide`] puts these together in one step, [`receipt`] remembers why. [`fallback`] is for times without a shard.

pub mod catalog;
pub mod decide;
pub mod desk;
pub mod fallback;
pub mod fleet;
pub mod load_book;
pub mod policy;
pub mod receipt;
pub mod score;
pub mod slots;
pub mod tie;
