//! Actor messages between nodes, for control: one question, one answer, always with a deadline.
//!
//! How [`crate::mesh`] puts it together:
//!
//! ```text
//! let ops = Ops::default();                                           // also given to the control endpoint of links
//! let sessions = SessionsHandle::new(node, incarnation, ops, directory.watch());
//! let cookie = cluster;                                               // a guard against mis-wiring alone
//! supervisor.add(sessions_child(&sessions, cookie, dial)).await?;     // dial: TLS, ALPN `starling-session/1`
//! supervisor.add(control_child(&sessions)).await?;
//! sessions.accept(Box::new(tls_stream), from);                        // from the listener, same ALPN
//! sessions.call(&node, "subject/verb", body, timeout).await?;
//! ```
//!
//! Nothing of ractor_cluster is visible outside of this module.

mod actor;
mod ask;
mod control;
mod envelope;
mod handle;
mod ops;
mod table;
mod transport;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tls_tests;

pub use actor::{Dial, sessions_child};
pub use control::control_child;
pub use envelope::{BODY_MAX, hex};
pub use handle::{Caller, SessionsHandle};
pub use ops::{OpHandler, Ops};
pub use transport::{Duplex, SessionStream};
