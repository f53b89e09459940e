//! One model's planner: looks once an interval and says what follows.
//!
//! A want must show in some looks in a row before it is met, and too much of it far longer before a worker goes; after every
//! change, whoever made it, nothing more is done for a while, and what was begun is waited for. A role's change must take away
//! a fifth of the pressure, by the least and by the most that came of late; it is preferred to another worker while it
//! suffices. Workers that the planner has not started count like all others. Nothing is decided on what is not
//! known. Pure. Bounds: [`Rules::down_looks`] looks remembered.

use std::{collections::VecDeque, time::Duration};

use starling_ids::{Incarnation, WorkerId};

use super::{
    fleet::{Fleet, Sides},
    need::{self, Need, Shape},
    predict::Predictor,
    rules::{Mode, Rules},
    window::{Observation, WorkerSeen},
    words::{Action, Decision, Figures, Outlook, rate},
};
use crate::route::split::Role;

/// Above it what is there does not suffice.
const PRESSED: f64 = 1.05;
/// What is left when a worker goes must not come above it.
const EASY: f64 = 0.85;
/// A change of role leaves at most so much of the pressure.
const WORTH: f64 = 0.8;
/// Between two tries of what starts and stops workers after a failure, in cool-downs; doubles each time up to the second one.
const RETRY: (u32, u32) = (1, 32);

/// A change of role that undoes the last one waits for so many cool-downs.
const UNDO: u32 = 3;

const ROLES: [Role; 3] = [Role::Both, Role::Prefill, Role::Decode];

/// Looks in a row in which a target must have been missed before that alone calls for a worker: what piled up before a change
/// is gone by then.
const LASTING: u32 = 8;

/// What one look came to.
#[derive(Debug, Clone, Copy)]
struct Past {
    /// All that is needed.
    sides: Sides,
    /// Without what has piled up.
    flow: Sides,
}

/// What was begun and is not seen yet.
#[derive(Debug, Clone, PartialEq)]
struct Pending {
    action: Action,
    since: Duration,
    /// Whoever starts and stops workers has done its part.
    told: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Plan {
    rules: Rules,
    predictor: Predictor,
    shape: Shape,
    /// What was needed, newest last.
    past: VecDeque<Past>,
    /// Looks in a row that missed a target, with the same workers.
    missed: u32,
    /// So many workers missed a target for long, at so many requests a second: whatever was reckoned, they are too few.
    too_few: Option<(u32, f64)>,
    /// Workers at the last look.
    fleet: Option<Fleet>,
    cool_until: Duration,
    pending: Option<Pending>,
    /// The last change of role, and when it was begun.
    switched: Option<(Role, Role, Duration)>,
    /// Workers that were drained to go, until they have gone, with the life that was.
    drained: Vec<(WorkerId, Incarnation)>,
    /// The life of the worker that is being drained.
    draining: Incarnation,
    failures: u32,
    retry_at: Duration,
}

impl Plan {
    /// One that has just taken over at `now`: what its predecessor did last is not known, so it waits as after a change.
    #[must_use]
    pub fn new(rules: Rules, now: Duration) -> Self {
        Self {
            rules,
            predictor: Predictor::new(rules.predictor),
            shape: Shape::default(),
            past: VecDeque::new(),
            missed: 0,
            too_few: None,
            fleet: None,
            cool_until: now + rules.cool(),
            pending: None,
            switched: None,
            drained: Vec::new(),
            draining: Incarnation(0),
            failures: 0,
            retry_at: Duration::ZERO,
        }
    }

    /// Looks at an interval; what follows from it and from those before.
    pub fn look(&mut self, observation: &Observation, now: Duration) -> Outlook {
        let fleet = Fleet::of(&observation.workers);
        self.notice(fleet, &observation.workers, now);
        let known = observation.missing.is_empty();
        if known {
            self.predictor.see(rate(observation));
            self.shape.learn(observation);
        }
        let forecast = self.predictor.next().max(rate(observation));
        let lasting = self.missed >= LASTING;
        let need = need::need(observation, &self.shape, forecast, fleet, (&self.rules, lasting));
        if known {
            self.missed = if need.ttft_missed || need.itl_missed { self.missed.saturating_add(1) } else { 0 };
            if lasting && self.missed > 0 {
                self.too_few = Some((fleet.total(), forecast));
            }
            self.past.push_back(Past { sides: need.sides, flow: need.flow });
            while self.past.len() > self.rules.down_looks.max(self.rules.up_looks).max(1) {
                self.past.pop_front();
            }
        }
        let decision = self.decide(observation, fleet, &need, now);
        self.begin(&decision.action, &observation.workers, now);
        Outlook {
            now: fleet,
            wanted: self.wanted(&decision.action, fleet),
            need: need.sides,
            pressure: finite(fleet.pressure(need.sides)),
            figures: Figures::of(observation, &self.shape, forecast, &need),
            cools: self.cool_until.saturating_sub(now),
            decision,
        }
    }

    /// Whether a decision is carried out rather than shown.
    #[must_use]
    pub fn carries_out(&self, action: &Action) -> bool {
        let able = match action {
            Action::Hold => false,
            Action::Switch { .. } => true,
            Action::Scale { .. } | Action::Drain { .. } => self.rules.scales,
        };
        able && self.rules.mode == Mode::Act
    }

    /// What was begun could not be done; it is tried again later, with longer and longer pauses.
    pub fn failed(&mut self, now: Duration) {
        self.pending = None;
        let pause = self.rules.cool() * RETRY.0.saturating_mul(1 << self.failures.min(16)).min(RETRY.1);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = now + pause;
        self.cool_until = self.cool_until.max(self.retry_at);
    }

    /// What was begun is done, as far as whoever did it can know.
    pub fn done(&mut self, now: Duration) {
        self.failures = 0;
        let Some(pending) = &mut self.pending else { return };
        pending.told = true;
        if let Action::Scale { remove, .. } = &pending.action {
            // They go now; whether they have gone nobody needs to wait for.
            let removed = remove.clone();
            self.drained.retain(|(worker, _)| !removed.contains(worker));
            if !removed.is_empty() {
                self.settle(now);
            }
        }
    }

    /// The worker that was to be drained has no request any more.
    pub fn emptied(&mut self, worker: &WorkerId) {
        let drains =
            |pending: &Pending| matches!(&pending.action, Action::Drain { worker: known, .. } if known == worker);
        if self.pending.as_ref().is_some_and(drains) {
            self.pending = None;
            self.drained.push((worker.clone(), self.draining));
        }
    }

    /// The worker that is being drained, if one is.
    #[must_use]
    pub fn draining(&self) -> Option<&WorkerId> {
        match &self.pending.as_ref()?.action {
            Action::Drain { worker, .. } => Some(worker),
            _ => None,
        }
    }

    /// Sees what changed since the last look, by this planner or by others.
    fn notice(&mut self, fleet: Fleet, workers: &[WorkerSeen], now: Duration) {
        // One that was started again takes requests again: that is a change as well.
        let drained = self.drained.len();
        self.drained.retain(|(gone, life)| workers.iter().all(|known| known.id != *gone || known.incarnation == *life));
        let before = self.fleet.replace(fleet);
        if before.is_some_and(|before| before != fleet) || self.drained.len() != drained {
            self.cool_until = self.cool_until.max(now + self.rules.cool());
            self.missed = 0;
        }
        let Some(pending) = &self.pending else { return };
        let arrived = match &pending.action {
            Action::Hold => true,
            Action::Switch { worker, to, .. } => {
                workers.iter().find(|known| known.id == *worker).is_none_or(|known| known.role == *to)
            }
            Action::Scale { wanted, .. } => {
                // Of another role than was wanted is there as well: roles can be changed.
                pending.told && Fleet::of_all(workers).total() >= wanted.total()
            }
            Action::Drain { .. } => false,
        };
        // A drain lasts as long as what runs there: it is not given up.
        let drains = matches!(pending.action, Action::Drain { .. });
        let expired = !drains && now.saturating_sub(pending.since) >= self.rules.expiry();
        if arrived || expired {
            self.settle(now);
        }
    }

    fn settle(&mut self, now: Duration) {
        self.pending = None;
        self.cool_until = self.cool_until.max(now + self.rules.cool());
    }

    fn begin(&mut self, action: &Action, workers: &[WorkerSeen], now: Duration) {
        if self.carries_out(action) {
            if let Action::Drain { worker, .. } = action {
                let known = workers.iter().find(|known| known.id == *worker);
                self.draining = known.map_or(Incarnation(0), |known| known.incarnation);
            }
            if let Action::Switch { from, to, .. } = action {
                self.switched = Some((*from, *to, now));
            }
            self.pending = Some(Pending { action: action.clone(), since: now, told: false });
        }
    }

    fn wanted(&self, action: &Action, now: Fleet) -> Fleet {
        let of = |action: &Action| match action {
            Action::Hold => None,
            Action::Switch { from, to, .. } => now.without(*from).map(|fleet| fleet.with(*to)),
            Action::Scale { wanted, .. } => Some(*wanted),
            Action::Drain { role, .. } => now.without(*role),
        };
        // What was begun is still wanted while nothing new is.
        of(action).or_else(|| of(&self.pending.as_ref()?.action)).unwrap_or(now)
    }

    fn decide(&self, observation: &Observation, fleet: Fleet, need: &Need, now: Duration) -> Decision {
        if let Some(missing) = observation.missing.first() {
            return Decision::hold(missing.clone());
        }
        if let Some(pending) = &self.pending {
            let secs = now.saturating_sub(pending.since).as_secs();
            return Decision::hold(format!("{} was begun {secs} s ago and is not seen yet", pending.action));
        }
        if !self.drained.is_empty() && now >= self.retry_at {
            let reason = "what ran there goes on elsewhere, so it can be stopped".to_owned();
            let wanted = Fleet::of_all(&observation.workers);
            let remove = self.drained.iter().map(|(worker, _)| worker.clone()).collect();
            return Decision { action: Action::Scale { wanted, remove }, reason };
        }
        if now < self.cool_until {
            let secs = (self.cool_until - now).as_secs_f64().ceil();
            return Decision::hold(format!("waits {secs} s after a change before the next one"));
        }
        if self.past.len() < self.rules.up_looks {
            return Decision::hold("has not looked often enough yet");
        }
        let floor = self.lacks(fleet);
        let least = self.recent(self.rules.up_looks, |past| past.sides, Sides::least);
        if floor.is_some() || fleet.pressure(least) > PRESSED {
            return self.more((observation, now), (fleet, floor), need, least);
        }
        self.less(observation, fleet)
    }

    /// Of the last looks.
    fn recent(&self, looks: usize, what: fn(&Past) -> Sides, of: fn(Sides, Sides) -> Sides) -> Sides {
        self.past.iter().rev().take(looks.max(1)).map(what).reduce(of).unwrap_or_default()
    }

    /// A role of which there are fewer workers than there must be.
    fn lacks(&self, fleet: Fleet) -> Option<Role> {
        let (min, split) = (self.rules.min.max(1), fleet.has_specialists());
        match (fleet.decode + fleet.both < min, fleet.prefill + fleet.both < min) {
            // Those of one role alone do both: nothing is lacking but workers.
            (true, _) if fleet.prefill == fleet.total() && fleet.total() >= min => None,
            (_, true) if fleet.decode == fleet.total() && fleet.total() >= min => None,
            (true, _) => Some(if split { Role::Decode } else { Role::Both }),
            (_, true) => Some(if split { Role::Prefill } else { Role::Both }),
            _ => None,
        }
    }

    /// What is there does not suffice.
    fn more(
        &self,
        (observation, now): (&Observation, Duration),
        (fleet, floor): (Fleet, Option<Role>),
        need: &Need,
        least: Sides,
    ) -> Decision {
        let why = || because(fleet, least, need, floor, &self.rules);
        let switch = self.switch((observation, now), fleet);
        let there = Fleet::of_all(&observation.workers);
        let room = self.rules.max.saturating_sub(there.total());
        let enough = |after: Fleet| after.pressure(least) <= 1.0 && floor.is_none_or(|_| self.lacks(after).is_none());
        let can_grow = room > 0 && (self.rules.scales || self.rules.mode == Mode::Advise);
        match switch {
            Some((after, action)) if enough(after) || !can_grow => {
                let reason = format!("{}; of the others it is the least busy", why());
                Decision { action, reason }
            }
            _ if room == 0 => {
                Decision::hold(format!("{}; {} workers are as many as there may be", why(), self.rules.max))
            }
            _ => {
                // Those that are silent run as well, for whoever counts processes.
                let silent = observation.workers.iter().filter(|worker| !worker.sound);
                let grown = self.grown(fleet, floor, least, room);
                let wanted = silent.fold(grown, |wanted, worker| wanted.with(worker.role));
                Decision { action: Action::Scale { wanted, remove: Vec::new() }, reason: why() }
            }
        }
    }

    /// So many more that they suffice, or as many as one step may add.
    fn grown(&self, mut fleet: Fleet, floor: Option<Role>, least: Sides, room: u32) -> Fleet {
        let step = fleet.total().clamp(1, self.rules.step_max.max(1)).min(room);
        if let Some(role) = floor {
            return fleet.with(role);
        }
        for _ in 0..step {
            if fleet.pressure(least) <= 1.0 {
                break;
            }
            let shares = fleet.shares(least);
            let role = if !fleet.has_specialists() {
                Role::Both
            } else if least.prefill * shares.decode > least.decode * shares.prefill {
                Role::Prefill
            } else {
                Role::Decode
            };
            fleet = fleet.with(role);
        }
        fleet
    }

    /// The change of role that takes most of the pressure away, if one takes enough. By what comes: what has piled up is on the
    /// side that starved, and would call for the other way round as soon as that one does not.
    fn switch(&self, (observation, at): (&Observation, Duration), fleet: Fleet) -> Option<(Fleet, Action)> {
        // One whose load is not known might be the one that is needed.
        if !fleet.has_specialists() || observation.workers.iter().any(|worker| !worker.sound) {
            return None;
        }
        let least = self.recent(self.rules.up_looks, |past| past.flow, Sides::least);
        let most = self.recent(self.rules.up_looks, |past| past.flow, Sides::most);
        let undoes = |from: Role, to: Role| {
            let last = self.switched.filter(|(before, then, _)| (*then, *before) == (from, to));
            last.is_some_and(|(.., begun)| at.saturating_sub(begun) < self.rules.cool() * UNDO)
        };
        let worth = |from: Role, to: Role| {
            let after = fleet.without(from)?.with(to);
            // With nobody for one side, the workers of the other do both, and pressure does not see what that costs.
            let good = after.keeps(self.rules.min.max(1))
                && after.pressure(least) <= fleet.pressure(least) * WORTH
                && after.pressure(most) <= fleet.pressure(most) * WORTH
                && !undoes(from, to);
            good.then_some((after, from, to))
        };
        let own = [(Role::Decode, Role::Prefill), (Role::Prefill, Role::Decode)];
        // A worker for both is always at least as good and keeps the sides apart less, so it is the second choice.
        let shared = [(Role::Decode, Role::Both), (Role::Prefill, Role::Both)];
        let best = |moves: [(Role, Role); 2]| {
            let good = moves.into_iter().filter_map(|(from, to)| worth(from, to));
            good.min_by(|a, b| a.0.pressure(least).total_cmp(&b.0.pressure(least)))
        };
        let (after, from, to) = best(own).or_else(|| best(shared))?;
        let worker = idlest(&observation.workers, from, false)?.id.clone();
        Some((after, Action::Switch { worker, from, to }))
    }

    /// Whether a worker is too many.
    fn less(&self, observation: &Observation, fleet: Fleet) -> Decision {
        let most = self.recent(self.rules.down_looks, |past| past.sides, Sides::most);
        let smaller = |role: Role| {
            let after = fleet.without(role)?;
            let enough = after.total() >= self.rules.min.max(1)
                && (after.keeps(self.rules.min.max(1)) || (!fleet.keeps(self.rules.min.max(1)) && after.total() > 0))
                && after.pressure(most) <= EASY;
            enough.then_some((after, role))
        };
        let best =
            ROLES.into_iter().filter_map(smaller).min_by(|a, b| a.0.pressure(most).total_cmp(&b.0.pressure(most)));
        let Some((after, role)) = best else {
            return Decision::hold("the workers suffice and none is too many");
        };
        if let Some((few, rate)) = self.too_few
            && after.total() <= few
            && self.predictor.next() > rate * EASY
        {
            return Decision::hold(format!("{few} workers missed a target at {rate:.1} requests a second"));
        }
        if self.past.len() < self.rules.down_looks {
            return Decision::hold(format!("one {role} worker may be too many; it is not known for long enough"));
        }
        if observation.workers.iter().any(|worker| !worker.sound) {
            return Decision::hold("one worker may be too many, and another one is silent");
        }
        let why = format!(
            "in the last {} looks prompts needed {:.1} and answers {:.1} workers at most, of {fleet}",
            self.past.len(),
            most.prefill,
            most.decode
        );
        if !(self.rules.mode == Mode::Act && self.rules.scales) {
            return Decision { action: Action::Scale { wanted: after, remove: Vec::new() }, reason: why };
        }
        match idlest(&observation.workers, role, true) {
            Some(worker) => Decision { action: Action::Drain { worker: worker.id.clone(), role }, reason: why },
            None => Decision::hold(format!("{why}; none of them has a process of its own that could be stopped")),
        }
    }
}

/// The least busy worker of a role, of those with a process of their own if it must be.
fn idlest(workers: &[WorkerSeen], role: Role, removable: bool) -> Option<&WorkerSeen> {
    let of_role =
        workers.iter().filter(|worker| worker.role == role && worker.sound && (worker.removable || !removable));
    of_role.min_by_key(|worker| (worker.running + worker.waiting, worker.queued_tokens, worker.id.clone()))
}

/// Why more is needed, in words.
fn because(fleet: Fleet, least: Sides, need: &Need, floor: Option<Role>, rules: &Rules) -> String {
    if floor.is_some() {
        return format!("fewer than {} workers can do one side's work, of {fleet}", rules.min.max(1));
    }
    let missed = match (need.ttft_missed, need.itl_missed) {
        (true, true) => "first tokens and tokens come later than the targets: ",
        (true, false) => "first tokens come later than the target: ",
        (false, true) => "tokens come slower than the target: ",
        (false, false) => "",
    };
    let (prefill, decode) = (least.prefill, least.decode);
    if fleet.has_specialists() {
        let shares = fleet.shares(least);
        let (p, d) = (shares.prefill, shares.decode);
        return format!(
            "{missed}prompts need {prefill:.1} workers and have {p:.1}, answers need {decode:.1} and have {d:.1}"
        );
    }
    format!("{missed}prompts need {prefill:.1} and answers {decode:.1} workers, of {fleet}")
}

/// A pressure that can be written down.
fn finite(pressure: f64) -> f64 {
    if pressure.is_finite() { pressure } else { 1e9 }
}
