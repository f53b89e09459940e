//! How the driver finds out whether a member that does not answer is dead, and who is told.
//!
//! A check begins with a failed probe, a broken link, or a death nearby that makes it look around. The member is pinged again
//! and again, while others ask it too; its door is knocked at over TCP, and later it is visited. Any answer ends the
//! check and nobody ever hears of it. Without one the member is first suspected aloud, so that it can refute, and declared
//! down when the time of [`sizing::Class::suspicion`] since the first unanswered ping is over; sooner if its host says
//! that nobody listens there, and later, once, if it was heard meanwhile: it may only be slow.
//!
//! Who accuses must be well itself: unless somebody else has answered since the check began, and again and again for
//! [`WELL_FOR`], nothing is said aloud; a network that has just been mended carries one answer first. Until then a
//! node that still hears others (they do not hear it) waits, and one that hears nobody keeps its judgement to
//! itself and takes it back when it hears the member again. A visit costs processor time on both sides, so there is none
//! while this node's own timers run late: the others' do too, most likely.
//!
//! Called by the driver's tick and packets. Pure. Bounds: [`CHECKS_MAX`] checks, [`LOOKS_MAX`] looks around.

use std::{collections::BTreeMap, time::Duration};

use foca::{Member, State};
use rand::RngExt;
use starling_ids::{Incarnation, NodeId};

use super::{
    Driver, Effect, Look, Proof, VERIFY_MAX, effects::peer, learn::PassOn, lifeline::CONNECTED, probe::FAILED,
};
use crate::membership::{Identity, identity::NameKey, sizing};

/// Checks at a time. In the death of a whole rack the rest is found by later probes.
pub(super) const CHECKS_MAX: usize = 64;
/// Between two pings of a member under check: nine more tries in the shortest suspicion.
const PING_EVERY: Duration = Duration::from_millis(200);
/// A check that its host leaves unanswered is spoken of after this long.
const SPEAK_AFTER: Duration = Duration::from_secs(1);
/// A visit begins this long after the first unanswered ping: on busy machines answers are late, and visits keep them busy.
const VISIT_AFTER: Duration = Duration::from_millis(700);
/// So long this node must have had answers of others before it declares a member down aloud: as many pings as fit.
const WELL_FOR: Duration = Duration::from_secs(1);
/// The same before it suspects one aloud.
const WELL_TO_SPEAK: Duration = Duration::from_millis(300);
/// Who has heard others within this time is not cut off, only not heard: longer than the period in which
/// the others announce themselves to a member that they hold for down.
const AUDIBLE: Duration = Duration::from_secs(6);
/// Such a node looks again after this long.
const WAIT_ON: Duration = Duration::from_millis(500);
/// Members looked at beside foca's probe when several seem to die at once, in each [`LOOK_EVERY`].
const LOOK_AT: usize = 8;
const LOOK_EVERY: Duration = Duration::from_millis(250);
const LOOKS_MAX: usize = 32;
/// The same member is not checked again on a hint within this time.
const HINT_AGAIN: Duration = Duration::from_secs(1);
const HINTS_MAX: usize = 64;

/// One member under check.
#[derive(Debug)]
struct Check {
    id: Identity,
    swim: u16,
    begun: Duration,
    deadline: Duration,
    next_ping: Duration,
    /// When it is visited, and then when the answer is late.
    visit: Duration,
    visited: bool,
    proof: Option<Proof>,
    /// Since when others have answered this node without a long gap.
    well_since: Option<Duration>,
    spoken: bool,
    heard: bool,
    extended: bool,
}

/// A member that was pinged beside foca's probe.
#[derive(Debug)]
struct Glance {
    id: Identity,
    begun: Duration,
    repeated: bool,
}

/// All checks and looks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    of: BTreeMap<u64, Check>,
    looks: Vec<Glance>,
    next_look: Duration,
    hints: Vec<(u64, Duration)>,
}

impl Checks {
    pub(super) fn next(&self) -> Option<Duration> {
        let checks = self.of.values().map(|check| check.next_ping.min(check.deadline));
        let looks = self.looks.iter().map(|look| look.begun + if look.repeated { FAILED } else { FAILED / 2 });
        checks.chain(looks).min()
    }

    /// Since when a member is under check, if it is.
    pub(super) fn begun(&self, key: u64) -> Option<Duration> {
        self.of.get(&key).map(|check| check.begun)
    }

    /// This node stood still for a moment: the answers may be in its socket.
    pub(super) fn postpone(&mut self, by: Duration) {
        self.of.values_mut().for_each(|check| check.deadline += by);
        self.looks.clear();
    }

    pub(super) fn hear(&mut self, key: u64) {
        if let Some(check) = self.of.get_mut(&key) {
            check.heard = true;
        }
    }

    pub(super) fn answered(&mut self, id: &Identity) {
        self.looks.retain(|look| look.id != *id);
        if self.of.get(&id.key()).is_some_and(|check| check.id == *id) {
            self.of.remove(&id.key());
        }
    }

    /// Other news about the member than a suspicion: it is down, lives anew, or has refuted.
    pub(super) fn overtaken(&mut self, update: &Member<Identity>) {
        let id = update.id();
        let over =
            |check: &Check| check.id != *id || update.state() == State::Down || update.incarnation() > check.swim;
        if self.of.get(&id.key()).is_some_and(over) {
            self.of.remove(&id.key());
        }
    }
}

impl Driver {
    /// Something else than gossip has reason to doubt this member (a broken link, a failed dial): it is checked now.
    pub fn suspect_hint(&mut self, node: &NodeId, incarnation: Incarnation, now: Duration) {
        self.observe(now);
        let key = NameKey::of(node).number();
        let again = self.checks.hints.iter().any(|(hinted, at)| *hinted == key && now.saturating_sub(*at) < HINT_AGAIN);
        let doubted = self.find(key).map(|member| member.id().clone()).filter(|id| id.incarnation == incarnation);
        if let Some(id) = doubted.filter(|_| !again) {
            self.checks.hints.retain(|(_, at)| now.saturating_sub(*at) < HINT_AGAIN);
            if self.checks.hints.len() < HINTS_MAX {
                self.checks.hints.push((key, now));
            }
            self.begin_check(id, self.now);
            self.run_checks();
        }
        self.settle();
    }

    /// The answer to [`Effect::Verify`].
    pub fn verified(&mut self, node: &NodeId, incarnation: Incarnation, proof: Proof, now: Duration) {
        self.observe(now);
        let key = NameKey::of(node).number();
        if let Some(check) = self.checks.of.get_mut(&key).filter(|check| check.id.incarnation == incarnation) {
            check.proof = Some(proof);
            if proof == Proof::Alive {
                let id = check.id.clone();
                self.answered(&id);
            }
        }
        self.run_checks();
        self.settle();
    }

    /// Looks closely at a member that gave no answer since `begun`.
    pub(super) fn begin_check(&mut self, id: Identity, begun: Duration) {
        let key = id.key();
        let Some(known) = self.index.get(key).filter(|known| known.is(&id) && known.is_active()) else { return };
        if self.checks.of.contains_key(&key) || self.checks.of.len() >= CHECKS_MAX {
            return;
        }
        let suspicion = self.lifeline.stretched(sizing::settings(self.class).suspicion);
        if !self.is_late() {
            self.effects.extend(peer(&id).map(|peer| Effect::Verify(peer, Look::Knock)));
        }
        let check = Check {
            swim: known.swim,
            begun,
            deadline: begun + suspicion,
            next_ping: self.now,
            visit: begun + VISIT_AFTER,
            visited: false,
            proof: None,
            well_since: None,
            spoken: known.state() == State::Suspect,
            heard: false,
            extended: false,
            id,
        };
        self.checks.of.insert(key, check);
    }

    /// After a pause nothing that was waited for counts; who was in doubt is in doubt again from now on.
    pub(super) fn restart_checks(&mut self) {
        self.checks.looks.clear();
        let doubted: Vec<Identity> = std::mem::take(&mut self.checks.of).into_values().map(|check| check.id).collect();
        doubted.into_iter().for_each(|id| self.begin_check(id, self.now));
    }

    pub(super) fn run_checks(&mut self) {
        let due: Vec<u64> = self.checks.of.keys().copied().collect();
        for key in due {
            self.run_check(key);
        }
        self.run_looks();
    }

    fn run_check(&mut self, key: u64) {
        let well = self.well_for(key);
        let audible = self.lifeline.heard_beside(key).is_some_and(|at| at + AUDIBLE > self.now);
        let suspicion = sizing::settings(self.class).suspicion;
        let (now, late) = (self.now, self.is_late());
        let Some(check) = self.checks.of.get_mut(&key) else { return };
        if check.proof == Some(Proof::Refused) && now >= check.begun + FAILED {
            // The refusal itself came over the network: this node is connected. But a firewall refuses too, so the member has
            // the time to answer a ping.
            return self.declare_down(key, true);
        }
        if now >= check.deadline {
            if check.heard && !check.extended {
                check.extended = true;
                check.deadline = now + suspicion;
            } else if well.is_some_and(|well| well >= WELL_FOR) {
                return self.declare_down(key, true);
            } else if well.is_none() && !audible && !check.heard {
                return self.declare_down(key, false);
            } else {
                check.deadline = now + WAIT_ON;
            }
        }
        if now >= check.visit && !check.visited && !late {
            (check.visited, check.visit) = (true, now + VERIFY_MAX);
            self.effects.extend(peer(&check.id).map(|peer| Effect::Verify(peer, Look::Visit)));
        }
        let silent = check.proof == Some(Proof::Silent) || (check.visited && now >= check.visit);
        let speak = well.is_some_and(|well| well >= WELL_TO_SPEAK) && !check.spoken;
        if speak && (silent || now >= check.begun + SPEAK_AFTER) {
            self.speak_of(key);
        }
        if let Some(check) = self.checks.of.get_mut(&key).filter(|check| check.next_ping <= now) {
            check.next_ping = now + PING_EVERY;
            let (id, swim, spoken) = (check.id.clone(), check.swim, check.spoken);
            self.ping(&id, 0, spoken.then(|| Member::new(id.clone(), swim, State::Suspect)));
        }
    }

    /// How long others have answered this node since the check of `key` began; `None`: nobody has of late. Earlier answers
    /// say nothing about a node that was cut off since.
    fn well_for(&mut self, key: u64) -> Option<Duration> {
        let answered = self.lifeline.answered_beside(key);
        let check = self.checks.of.get_mut(&key)?;
        let well = answered.is_some_and(|at| at > check.begun && at + CONNECTED >= self.now);
        check.well_since = check.well_since.or(answered).filter(|_| well);
        check.well_since.map(|since| self.now.saturating_sub(since))
    }

    fn speak_of(&mut self, key: u64) {
        let Some(check) = self.checks.of.get_mut(&key) else { return };
        check.spoken = true;
        // At once: what it answers next should be a refutation.
        check.next_ping = self.now;
        let suspect = Member::new(check.id.clone(), check.swim, State::Suspect);
        self.learn(vec![suspect], PassOn::Yes);
    }

    /// The end of a check without an answer.
    fn declare_down(&mut self, key: u64, aloud: bool) {
        let Some(check) = self.checks.of.remove(&key) else { return };
        self.lifeline.death(self.now);
        let down = Member::new(check.id.clone(), check.swim, State::Down);
        let pass_on = if aloud { PassOn::Yes } else { PassOn::No };
        self.learn(vec![down.clone()], pass_on);
        if !aloud {
            self.unshared.insert(key);
        } else if check.proof != Some(Proof::Refused) {
            // Should it live after all, it rejoins the sooner.
            self.ping(&check.id, 0, Some(down));
        }
        self.next_gossip = self.now;
    }

    /// When one probe at a time would take too long: several members seem to be dying, or nobody answers.
    fn must_look_around(&self) -> bool {
        let doubted = self.checks.of.len();
        let dying = doubted + self.lifeline.deaths(self.now) >= 2;
        dying || (doubted > 0 && !self.lifeline.is_connected(self.now))
    }

    fn run_looks(&mut self) {
        let due: Vec<Glance> = {
            let now = self.now;
            self.checks
                .looks
                .extract_if(.., |look| now >= look.begun + if look.repeated { FAILED } else { FAILED / 2 })
                .collect()
        };
        for look in due {
            if look.repeated {
                self.begin_check(look.id, look.begun);
            } else {
                self.ping(&look.id, 0, None);
                self.checks.looks.push(Glance { repeated: true, ..look });
            }
        }
        if self.now < self.checks.next_look || !self.must_look_around() {
            return;
        }
        self.checks.next_look = self.now + LOOK_EVERY;
        for id in self.some_members(LOOK_AT) {
            let known = self.checks.of.contains_key(&id.key()) || self.checks.looks.iter().any(|look| look.id == id);
            if !known && self.checks.looks.len() < LOOKS_MAX {
                self.ping(&id, 0, None);
                self.checks.looks.push(Glance { id, begun: self.now, repeated: false });
            }
        }
    }

    /// Members that are not down, drawn at random, those under check last.
    pub(super) fn some_members(&mut self, wanted: usize) -> Vec<Identity> {
        let mut drawn: Vec<Identity> = Vec::with_capacity(wanted);
        let mut seen = 0;
        for member in self.foca.iter_members() {
            if self.checks.of.contains_key(&member.id().key()) {
                continue;
            }
            seen += 1;
            if drawn.len() < wanted {
                drawn.push(member.id().clone());
            } else {
                let at = self.rng.random_range(0..seen);
                if at < wanted {
                    drawn[at] = member.id().clone();
                }
            }
        }
        drawn
    }
}
