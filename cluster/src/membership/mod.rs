//! Who is a member: SWIM gossip over sealed datagrams, on a thread of its own.
//!
//! Pure parts: [`Identity`] (which claim to a name wins), `sizing` (how fast), `message` (what a datagram says),
//! `driver` (foca and the habits around it), [`boot`] (the incarnation).

pub mod boot;
mod driver;
mod identity;
mod message;
mod rumours;
mod runtime;
mod sizing;

pub use driver::{Driver, Effect, MemberView, Outranked};
pub use identity::Identity;
pub use message::Rumour;
