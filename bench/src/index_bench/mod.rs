//! The prefix index measured: a recorded operation log, replayed alike on ours and on a peer's.
//!
//! `command`, `cpu`, `drive`, `heap`, `log` and `oracle` use the standard library alone: the peer's replay program, a workspace of its
//! own, takes the same files in, so that both are timed by the same code.

pub mod command;
pub mod cpu;
pub mod drive;
pub mod heap;
pub mod log;
pub mod oracle;
pub mod ours;
pub mod record;
