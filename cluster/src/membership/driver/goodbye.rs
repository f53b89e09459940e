//! How a node leaves: it tells the members itself, each of them.
//!
//! foca spreads a goodbye a dozen times to members drawn at random. When many of those have just died nobody may be
//! left who heard it, and the node would be taken for dead, slowly. Called by the gossip thread (the one who leaves) and
//! for each goodbye that arrives. Pure. Bounds: [`TOLD_MAX`] members are told; gossip brings it to the others.

use std::time::Duration;

use foca::{Member, State};

use super::{Driver, learn::PassOn};
use crate::membership::{
    Identity,
    message::{Word, present},
};

/// Members that hear it at first hand.
const TOLD_MAX: usize = 256;
/// Rounds of three packets each, for the rest.
const ROUNDS: usize = 3;

impl Driver {
    /// Says goodbye. The driver is of no use afterwards.
    pub fn leave(&mut self, now: Duration) {
        self.observe(now);
        let members = self.foca.iter_members();
        let mut told: Vec<_> =
            members.map(|member| (member.state() == State::Suspect, member.id().address())).collect();
        // Those that look alive first.
        told.sort_by_key(|(suspect, _)| *suspect);
        let goodbye = Word::Leaving(self.foca.identity().clone());
        for (_, address) in told.into_iter().take(TOLD_MAX) {
            self.say(address, &goodbye);
        }
        let outcome = self.foca.leave_cluster(&mut self.outbox);
        Self::note("goodbye", outcome);
        for _ in 0..ROUNDS {
            let outcome = self.foca.gossip(&mut self.outbox);
            Self::note("goodbye", outcome);
        }
        self.settle();
        self.silent = true;
    }

    /// A member has said goodbye. A word about another life than the one known here changes nothing.
    pub(super) fn left(&mut self, who: &Identity) {
        let known = self.find(who.key()).filter(|member| member.id().same_process(who));
        let Some(known) = known.filter(|known| present(known.state()) && !known.id().beats(who)) else { return };
        let down = Member::new(known.id().clone(), known.incarnation(), State::Down);
        self.learn(vec![down], PassOn::Yes);
    }
}
