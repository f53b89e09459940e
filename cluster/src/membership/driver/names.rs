//! The driver's rules about names: who may speak under one, who is told that it is taken, who falls silent.
//!
//! Called by the driver for each packet. Pure.

use std::{net::SocketAddr, time::Duration};

use foca::Member;
use starling_ids::NodeId;

use super::{Driver, Effect, Outranked};
use crate::membership::{
    Identity,
    identity::NameKey,
    message::{self, Word, present},
};

/// This many rejoins within [`CLASH_WINDOW`] are no network trouble: somebody else holds the name.
const CLASH_REJOINS: usize = 6;
const CLASH_WINDOW: Duration = Duration::from_secs(10);
/// Holders of names are told of their rivals no more often than this, by one node.
const CLASH_TELL: Duration = Duration::from_millis(200);
/// So often the one that gives a name up says so to its holder: packets get lost.
const LAST_WORDS: usize = 3;

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
            Word::Rival(rival) => self.told_of_rival(rival),
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
        let known = self.find(NameKey::of(node).number())?;
        Some((known.id().clone(), !present(known.state())))
    }

    /// Whether nobody in this packet speaks under, or about, a name that another process holds with better right.
    pub(super) fn name_is_clear(&mut self, from: SocketAddr, src: &Identity, updates: &[Member<Identity>]) -> bool {
        let own = self.foca.identity().clone();
        let claims = std::iter::once((src, false)).chain(updates.iter().map(|m| (m.id(), !present(m.state()))));
        for (claim, down) in claims {
            if claim.key() == own.key() && !claim.same_process(&own) && claim.beats(&own) {
                self.defer_to(claim, down);
                return false;
            }
        }
        if src.same_process(&own) {
            return false;
        }
        // Nearly always the sender is who it is known to be, and nobody needs to search for it.
        if self.index.get(src.key()).is_some_and(|known| known.is(src)) {
            return true;
        }
        let holder = src.node.as_ref().and_then(|node| self.holder(node));
        match holder {
            Some((holder, down)) if !holder.same_process(src) && holder.beats(src) => {
                self.tell_of_rival(&holder, down, src);
                self.say(from, &Word::Outranked(holder, down));
                false
            }
            _ => true,
        }
    }

    /// The holder of a name should know that another process tried to take it; the same address is only a late packet
    /// of an earlier life.
    fn tell_of_rival(&mut self, holder: &Identity, down: bool, rival: &Identity) {
        if down || holder.address() == rival.address() {
            return;
        }
        if holder.key() == self.foca.identity().key() {
            self.told_of_rival(rival.clone());
        } else if self.now >= self.clash_told + CLASH_TELL {
            self.clash_told = self.now;
            self.say(holder.address(), &Word::Rival(rival.clone()));
        }
    }

    /// The rival has given the name up, or will: also one that would outrank this node is refused before it joins.
    fn told_of_rival(&mut self, rival: Identity) {
        let own = self.foca.identity();
        if rival.key() == own.key() && rival.address() != own.address() {
            self.effects.push(Effect::NameClash(rival));
        }
    }

    /// Falls silent if `holder` has the better right to this node's name, and tells it so with its last words: nobody
    /// else may ever hear this node, and the operator over there should know of it too.
    pub(super) fn defer_to(&mut self, holder: &Identity, down: bool) {
        let own = self.foca.identity();
        if self.silent || holder.key() != own.key() || holder.same_process(own) || !holder.beats(own) {
            return;
        }
        if !down && holder.address() != own.address() {
            match message::word(&Word::Rival(own.clone())) {
                Ok(payload) => {
                    let said = Effect::Send { to: holder.address(), payload };
                    self.effects.extend(std::iter::repeat_n(said, LAST_WORDS));
                }
                Err(error) => tracing::error!(%error, "a gossip word does not encode"),
            }
        }
        self.fall_silent(Outranked { holder: Some(holder.clone()), down });
    }

    fn fall_silent(&mut self, why: Outranked) {
        if !self.silent {
            self.silent = true;
            self.effects.push(Effect::Outranked(why));
        }
    }

    /// Who was thought dead was cut off, or stood still: what it found out about others' deaths meanwhile is worth
    /// nothing, and nobody else should hear it.
    fn forget_accusations(&mut self) {
        self.outbox.news.forget_accusations();
        self.hearsay.clear();
        let down = self.foca.iter_membership_state().filter(|member| !present(member.state()));
        self.unshared.extend(down.map(|member| member.id().key()));
    }

    /// The cluster thought this node dead and it came back under the next generation.
    pub(super) fn rejoined(&mut self) {
        self.next_seeds = self.now;
        self.outbox.own_swim = 0;
        self.outbox.members_changed = true;
        self.forget_accusations();
        self.restart_checks();
        self.exchange_soon();
        // foca counts itself connected again only when it is told something.
        let outcome = self.foca.apply_many(std::iter::empty(), false, &mut self.outbox);
        Self::note("rejoin", outcome);
        self.rejoins.push_back(self.now);
        while self.rejoins.front().is_some_and(|at| self.now.saturating_sub(*at) > CLASH_WINDOW) {
            self.rejoins.pop_front();
        }
        if self.rejoins.len() >= CLASH_REJOINS {
            self.fall_silent(Outranked { holder: None, down: false });
        }
    }
}
