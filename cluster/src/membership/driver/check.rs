//! How the driver finds out whether a member that does not answer is dead.
//!
//! Called by the driver's owner. Pure.

use std::time::Duration;

use starling_ids::{Incarnation, NodeId};

use super::{Driver, Proof};

impl Driver {
    /// Something else than gossip has reason to doubt this member (a broken link, a failed dial): it is looked at now.
    pub fn suspect_hint(&mut self, node: &NodeId, incarnation: Incarnation, now: Duration) {
        self.observe(now);
        tracing::debug!(%node, %incarnation, "a member is doubted");
        self.settle();
    }

    /// The answer to [`super::Effect::Verify`].
    pub fn verified(&mut self, node: &NodeId, incarnation: Incarnation, proof: Proof, now: Duration) {
        self.observe(now);
        tracing::debug!(%node, %incarnation, ?proof, "a member was looked at");
        self.settle();
    }
}
