//! How the driver takes in what it is told about members: news goes to foca and on to others, the rest nowhere.
//!
//! Called for each packet and each exchange of states. Pure. Bounds: what one packet or message holds.

use std::time::Duration;

use foca::{Header, Member, Message, State, Timer};

use super::Driver;
use crate::membership::{Identity, index::Verdict, message::present, sizing};

/// News from an exchange is passed on only if it is no more than this: who learns a whole cluster is the one who
/// did not know it.
const PASS_ON_MAX: usize = 32;

/// Whether news is passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassOn {
    /// In the next packets.
    Yes,
    /// Not: the others know it, or should not.
    No,
    /// If it is not much.
    IfFew,
}

impl Driver {
    /// What a packet says besides what foca makes of its message.
    pub(super) fn take_in(&mut self, header: &Header<Identity>, updates: Vec<Member<Identity>>) {
        let key = header.dst.key();
        if key != 0 && key != self.foca.identity().key() {
            return;
        }
        let src = &header.src;
        self.lifeline.hear(src.key(), self.now);
        self.checks.hear(src.key());
        self.hearsay.settle(src.key());
        self.forgive(src);
        self.learn(vec![Member::new(src.clone(), header.src_incarnation, State::Alive)], PassOn::Yes);
        // Who is down may be outdated in all it says. foca will tell it.
        if !self.index.is_active(src) {
            return;
        }
        if self.lifeline.is_connected(self.now) {
            self.believe(&updates);
        }
        let updates = self.question_deaths(src.key(), updates);
        self.learn(updates, PassOn::Yes);
        match &header.message {
            Message::Ack(_) => self.answered(src),
            Message::ForwardedAck { origin, .. } => {
                self.lifeline.answer(src.key(), self.now);
                self.answered(origin);
            }
            _ => {}
        }
    }

    /// Learns what another node has exported. It is not passed on: the others know it already.
    pub fn import(&mut self, known: Vec<Member<Identity>>, now: Duration) {
        self.observe(now);
        self.learn(known, PassOn::No);
        self.settle();
    }

    /// Gives news to foca; how much of it was news.
    pub(super) fn learn(&mut self, told: Vec<Member<Identity>>, pass_on: PassOn) -> usize {
        let mut news: Vec<Member<Identity>> = Vec::new();
        for update in told {
            let id = update.id();
            if id.node.is_none() {
                continue;
            }
            if id.key() == self.foca.identity().key() {
                self.learn_of_self(update);
                continue;
            }
            let is_news = match self.index.judge(&update) {
                Verdict::News => true,
                Verdict::Old => false,
                Verdict::Contest => self.find(id.key()).is_some_and(|known| id.beats(known.id())),
            };
            if is_news {
                self.set_known(&update);
                news.push(update);
            }
        }
        let count = news.len();
        if count == 0 {
            return 0;
        }
        let settings = sizing::settings(self.class);
        if pass_on == PassOn::Yes || (pass_on == PassOn::IfFew && count <= PASS_ON_MAX) {
            for update in &news {
                let is_join = update.state() == State::Alive && update.incarnation() == 0;
                self.outbox.news.add(update, if is_join { settings.tell_joins } else { settings.tell });
            }
        }
        let outcome = self.foca.apply_many(news.into_iter(), false, &mut self.outbox);
        Self::note("news", outcome);
        count
    }

    /// Keeps the index and the checks in step with what foca will be told.
    fn set_known(&mut self, update: &Member<Identity>) {
        let key = update.id().key();
        let was_suspect = self.index.get(key).is_some_and(|known| known.state() == State::Suspect);
        self.index.set(update);
        self.unshared.remove(&key);
        self.hearsay.settle(key);
        // Of a change of mind about a suspect foca says nothing.
        self.outbox.members_changed |= was_suspect || update.state() == State::Suspect;
        if update.state() != State::Suspect {
            self.checks.overtaken(update);
        }
    }

    /// Somebody speaks of this node: foca refutes or rejoins. Of former generations there is nothing to say.
    fn learn_of_self(&mut self, update: Member<Identity>) {
        let own = self.foca.identity();
        if update.id() == own {
            let outcome = self.foca.apply_many(std::iter::once(update), false, &mut self.outbox);
            Self::note("news about this node", outcome);
        } else {
            let down = !present(update.state());
            self.defer_to(&update.id().clone(), down);
        }
    }

    /// The entry of a name, by a search of the list.
    pub(super) fn find(&self, key: u64) -> Option<&Member<Identity>> {
        self.index.get(key)?;
        self.foca.iter_membership_state().find(|member| member.id().key() == key)
    }

    /// A member that this node took for down while it was cut off has been heard: that judgement was worth nothing.
    fn forgive(&mut self, id: &Identity) {
        if self.unshared.contains(&id.key()) && self.index.get(id.key()).is_some_and(|known| known.is(id)) {
            self.unshared.remove(&id.key());
            self.forget(id);
            let outcome = self.foca.handle_timer(Timer::RemoveDown(id.clone()), &mut self.outbox);
            Self::note("second thoughts", outcome);
        }
    }

    /// Others say that these are present: they know better than a node that was cut off.
    pub(super) fn believe(&mut self, told: &[Member<Identity>]) {
        if !self.unshared.is_empty() {
            told.iter().filter(|update| present(update.state())).for_each(|update| self.forgive(update.id()));
        }
    }

    /// foca is about to forget this one, if it is down.
    pub(super) fn forget(&mut self, id: &Identity) {
        if self.index.get(id.key()).is_some_and(|known| known.is(id) && !known.is_active()) {
            self.index.remove(id.key());
            self.outbox.news.remove(id.key());
        }
    }
}
