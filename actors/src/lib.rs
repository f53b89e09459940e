//! The cast: one actor a file, and the pure decisions they take.
//!
//! The files at this level are actors and nothing else, apart from [`tree`], which builds them, and
//! [`generate`], the words they exchange about a request. What an actor decides is in `route/` and in the
//! engine crate, without I/O and without a clock.

pub mod generate;
pub mod names;
pub mod report;
pub mod route;

pub use starling_engine as engine;
