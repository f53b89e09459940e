//! The driver's rules about names: who may speak under one, who is told that it is taken, who falls silent.
//!
//! Called by the driver for each packet. Pure.

use std::{net::SocketAddr, time::Duration};

use foca::Member;
use starling_ids::NodeId;

use super::{Driver, Effect, Outranked};
use crate::membership::{
    Identity,
    message::{self, Word, present},
};

/// This many rejoins within [`CLASH_WINDOW`] are no network trouble: somebody else holds the name.
const CLASH_REJOINS: usize = 6;
const CLASH_WINDOW: Duration = Duration::from_secs(10);

impl Driver {
    /// Answers a question about a name, or learns that the own one is taken.
    pub(super) fn hear(&mut self, from: SocketAddr, word: Word) {
        match word {
            Word::WhoIs(node) => {
                let holder = self.holder(&node);
                self.say(from, &Word::Holder(node, holder));
            }
            Word::Outranked(holder, down) => self.defer_to(&holder, down),
            Word::Leaving(who) => self.left(&who),
            // Answers are for a node that has not joined yet.
            Word::Holder(..) => {}
        }
    }

    pub(super) fn say(&mut self, to: SocketAddr, word: &Word) {
        match message::word(word) {
            Ok(payload) => self.outbox.send(to, payload),
            Err(error) => tracing::error!(%error, "a gossip word does not encode"),
        }
    }

    /// The identity that holds a name, and whether it is down.
    pub(super) fn holder(&self, node: &NodeId) -> Option<(Identity, bool)> {
        let own = self.foca.identity();
        if own.node.as_ref() == Some(node) {
            return Some((own.clone(), false));
        }
        let known = self.foca.iter_membership_state().find(|member| member.id().node.as_ref() == Some(node))?;
        Some((known.id().clone(), !present(known.state())))
    }

    /// Whether nobody in this packet speaks under, or about, a name that another process holds with better right.
    pub(super) fn name_is_clear(&mut self, from: SocketAddr, src: &Identity, updates: &[Member<Identity>]) -> bool {
        let own = self.foca.identity().clone();
        let claims = std::iter::once((src, false)).chain(updates.iter().map(|m| (m.id(), !present(m.state()))));
        for (claim, down) in claims {
            if claim.node == own.node && !claim.same_process(&own) && claim.beats(&own) {
                self.defer_to(claim, down);
                return false;
            }
        }
        if src.same_process(&own) {
            return false;
        }
        let holder = src.node.as_ref().and_then(|node| self.holder(node));
        match holder {
            Some((holder, down)) if !holder.same_process(src) && holder.beats(src) => {
                self.say(from, &Word::Outranked(holder, down));
                false
            }
            _ => true,
        }
    }

    /// Falls silent if `holder` has the better right to this node's name.
    fn defer_to(&mut self, holder: &Identity, down: bool) {
        let own = self.foca.identity();
        if holder.node == own.node && !holder.same_process(own) && holder.beats(own) {
            self.fall_silent(Outranked { holder: Some(holder.clone()), down });
        }
    }

    fn fall_silent(&mut self, why: Outranked) {
        if !self.silent {
            self.silent = true;
            self.effects.push(Effect::Outranked(why));
        }
    }

    /// The cluster thought this node dead and it came back under the next generation.
    pub(super) fn rejoined(&mut self) {
        self.next_seeds = self.now;
        self.rejoins.push_back(self.now);
        while self.rejoins.front().is_some_and(|at| self.now.saturating_sub(*at) > CLASH_WINDOW) {
            self.rejoins.pop_front();
        }
        if self.rejoins.len() >= CLASH_REJOINS {
            self.fall_silent(Outranked { holder: None, down: false });
        }
    }
}
