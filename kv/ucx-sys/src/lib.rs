//! UCX's communication library (UCP), opened at run time: checked-in bindings and safe handles over them.
//!
//! Called by the transport `ucx` of `starling-kv`; calls libucp. A program that links this crate needs no UCX: without one
//! [`Library::load`] says so. The published crate of this name binds UCP 1.4, which no living UCX speaks.
//!
//! What the handles see to:
//!
//! - Order of destruction. UCX aborts the process when a context goes before its workers, memory or keys; each handle
//!   therefore holds what it was made from.
//! - Threads. A [`Context`] and its [`Memory`] are shared by all threads. A [`Worker`] and what is made from it stay on
//!   the thread that made it, which the compiler checks: they are not `Send`.
//! - Failure. Every endpoint is made in UCX's mode `PEER` with a handler, and is closed by force: only then do its
//!   outstanding requests end when the peer is dead or stands still.
//!
//! What no handle can see to: the library is C code that reads a peer's messages, and one-sided operations have no
//! authentication. Who holds a worker's address and a key can read and write the memory behind it.
//!
//! Never: loads two copies of UCX into one process (they hang each other).

mod bindings;
mod context;
mod endpoint;
mod library;
mod worker;

pub use context::{Context, Memory};
pub use endpoint::{Endpoint, RemoteKey, Request};
pub use library::{Fault, Library, LoadError, OLDEST, Version};
pub use worker::Worker;
