//! What others say about deaths: the member itself is asked before it is believed.
//!
//! An accuser may have been cut off, or its processor busy, when it found a member silent. So the word is passed on at once,
//! but the member stays for a moment more: it is pinged with the accusation, and when it lives it comes back
//! under its next generation, which settles the matter everywhere. A goodbye of the member itself is believed at once, and
//! so is a death that this node's own check has found likely.
//!
//! Called by the driver for what packets and exchanges bring. Pure. Bounds: [`HEARSAY_MAX`] members under question, in
//! clusters of up to [`ASKERS_MAX`] members: in larger ones too many would ask at once.

use std::{collections::BTreeMap, time::Duration};

use foca::{Member, State};

use super::{Driver, learn::PassOn, probe::FAILED};
use crate::membership::{Identity, sizing};

/// Deaths under question at a time. When more are told at once, a rack has died: they are believed.
const HEARSAY_MAX: usize = 64;
/// Largest cluster in which everybody asks.
const ASKERS_MAX: usize = 200;
/// How long the member has to answer.
const ANSWER_WITHIN: Duration = Duration::from_millis(400);
/// Between two questions.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// One member that is said to be down.
#[derive(Debug)]
struct Said {
    down: Member<Identity>,
    until: Duration,
    next_ping: Duration,
}

/// All of them, by the key of their names.
#[derive(Debug, Default)]
pub(super) struct Hearsay(BTreeMap<u64, Said>);

impl Hearsay {
    pub(super) fn next(&self) -> Option<Duration> {
        self.0.values().map(|said| said.next_ping.min(said.until)).min()
    }

    /// The member was heard, or there is other news of it.
    pub(super) fn settle(&mut self, key: u64) {
        self.0.remove(&key);
    }

    /// This node stood still, and answers may be in its socket.
    pub(super) fn postpone(&mut self, by: Duration) {
        self.0.values_mut().for_each(|said| said.until += by);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Driver {
    /// Keeps back the deaths among these that `teller` should not be believed at its word.
    pub(super) fn question_deaths(&mut self, teller: u64, told: Vec<Member<Identity>>) -> Vec<Member<Identity>> {
        if self.index.active() >= ASKERS_MAX || told.iter().all(|update| update.state() != State::Down) {
            return told;
        }
        told.into_iter().filter(|update| !self.keep_back(teller, update)).collect()
    }

    fn keep_back(&mut self, teller: u64, update: &Member<Identity>) -> bool {
        let (id, key) = (update.id(), update.id().key());
        if update.state() != State::Down || key == teller || !self.index.is_active(id) {
            return false;
        }
        if self.hearsay.0.contains_key(&key) {
            return true;
        }
        let likely = self.checks.begun(key).is_some_and(|begun| begun + FAILED <= self.now);
        if likely || self.hearsay.0.len() >= HEARSAY_MAX {
            return false;
        }
        // Whoever cannot reach it should not wait for this node to find that out too.
        self.outbox.news.add(update, sizing::settings(self.class).tell);
        let said = Said { down: update.clone(), until: self.now + ANSWER_WITHIN, next_ping: self.now };
        self.hearsay.0.insert(key, said);
        self.run_hearsay();
        true
    }

    /// Asks again, and believes what nobody has contradicted in time.
    pub(super) fn run_hearsay(&mut self) {
        let now = self.now;
        let over: Vec<u64> = self.hearsay.0.iter().filter(|(_, said)| said.until <= now).map(|(key, _)| *key).collect();
        for said in over.into_iter().filter_map(|key| self.hearsay.0.remove(&key)).collect::<Vec<_>>() {
            self.learn(vec![said.down], PassOn::No);
        }
        let due = self.hearsay.0.values_mut().filter(|said| said.next_ping <= now);
        let pings: Vec<Member<Identity>> = due
            .map(|said| {
                said.next_ping = now + ASK_EVERY;
                said.down.clone()
            })
            .collect();
        for down in pings {
            let id = down.id().clone();
            self.ping(&id, 0, Some(down));
        }
    }
}
