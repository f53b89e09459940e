//! Rolls the key ring through the cluster: which change may be made now, who has taken it, and who is behind.
//!
//! A roll takes three steps, each asked of any one node: add a key, which then everybody accepts; use it, once everybody
//! holds it; remove the old one, once nobody seals with it. The node that is asked makes the change, and offers the
//! new ring to each member over an actor session. Of two rings the same one outranks the other everywhere, so a member
//! that was away is brought up to date by whoever it meets next, as long as it shares one key with them.
//!
//! Reading order: `view` (what nodes tell of their rings), `rules` (what may be done), `exchange` (one node asks
//! another), `roller` (a change, from all sides), `keeper` (who is behind, and who is refused).
//!
//! What it is not: a cure for a key that was stolen. Whoever holds a key that is still accepted can take the new ring
//! too. Then make a new key, copy it to every node by hand, and start them again.

mod exchange;
mod keeper;
mod roller;
mod rules;
mod view;

#[cfg(test)]
mod tests;

pub(crate) use keeper::{KeeperArgs, catch_up, keeper_child};
pub use roller::{KeyRoller, Rolled};
pub use rules::RollError;
pub use view::{NodeRing, RingView};
