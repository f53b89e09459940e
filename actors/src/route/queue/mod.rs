//! Who goes next when every worker is taken, and who is not let in at all.
//!
//! Called by the router shard under its lock, one queue a model. Classes go by priority, lower numbers first. Inside a class
//! tenants take turns by tokens ([`lane`]), inside a tenant the earliest deadline goes first, or what is cached now, or the smallest
//! miss ([`order`]). [`turns`] gives those whose turn it is to workers. Who has waited too long goes next once in a while, whatever its class. Room is judged by [`rooms`], time by what [`drain`]
//! has measured. Pure: time is an argument, `T` is whatever the caller wants back. Every step is O(log n) in what waits.
//! Bounds: [`QueueConfig::places`] entries, [`QueueConfig::tenant_places`] of one tenant; those that had begun before come on top.

mod drain;
mod entry;
mod lane;
pub mod order;
mod places;
pub mod rooms;
#[cfg(test)]
mod tests;
pub mod turns;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use drain::Drain;
pub use entry::{Claim, Entry, Offered, Place, Reason, Refusal};
use lane::Lane;
pub use order::Order;
use places::Holding;
use rooms::{HeldBack, Rooms};

/// Every so many turns one goes to who has waited too long.
pub const OVERDUE_TURN: u32 = 8;

/// Bounds of what a refused client is told to wait, whatever was measured.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Settings of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Requests of one model that may wait; 0 refuses at once when all workers are taken.
    pub places: usize,
    /// Of these, for one named tenant. Requests without a tenant may take all.
    pub tenant_places: usize,
    /// Milliseconds that a request waits at most, if its own deadline is not earlier.
    pub wait_ms_max: u64,
    /// Milliseconds after which a waiting request takes every [`OVERDUE_TURN`]th turn, oldest first.
    pub overdue_ms: u64,
    /// What goes first inside a tenant.
    pub order: Order,
    /// Of [`Order::Cached`]: milliseconds of patience for each millisecond of prefill that a request still needs. No
    /// setting: what it may do at most is [`Self::passed_ms_max`], which is one.
    pub patience: u32,
    /// Of [`Order::Cached`]: nobody goes before another one of its tenant and class whose deadline is earlier by more than so
    /// many milliseconds.
    pub passed_ms_max: u64,
    /// When a worker counts as taken.
    pub rooms: Rooms,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            places: 1_024,
            tenant_places: 512,
            wait_ms_max: 60_000,
            overdue_ms: 5_000,
            order: Order::Cached,
            patience: 10,
            passed_ms_max: 10_000,
            rooms: Rooms::default(),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Queue<T> {
    config: QueueConfig,
    entries: HashMap<Place, Entry<T>>,
    lanes: BTreeMap<i32, Lane>,
    /// Since when, of those that are not parked.
    ages: BTreeSet<(Duration, Place)>,
    deadlines: BTreeSet<(Duration, Place)>,
    tenants: HashMap<Arc<str>, Holding>,
    sizes: BTreeSet<(u64, Arc<str>)>,
    parked: Vec<Place>,
    drain: Drain,
    next: u64,
    /// Turns since one went to an overdue request.
    turns: u32,
    /// Tenants passed over for now, each in a class.
    aside: Vec<(i32, Arc<str>)>,
}

impl<T> Queue<T> {
    /// An empty one.
    #[must_use]
    pub fn new(config: QueueConfig) -> Self {
        Self {
            config,
            entries: HashMap::new(),
            lanes: BTreeMap::new(),
            ages: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            tenants: HashMap::new(),
            sizes: BTreeSet::new(),
            parked: Vec::new(),
            drain: Drain::default(),
            next: 0,
            turns: 0,
            aside: Vec::new(),
        }
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none does.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A waiting request.
    #[must_use]
    pub fn get(&self, place: Place) -> Option<&Entry<T>> {
        self.entries.get(&place)
    }

    /// Lets a request in, or says why not. Whoever had to make way for it comes back with it.
    ///
    /// # Errors
    /// The refusal, and the payload.
    pub fn offer(&mut self, claim: Claim, payload: T, now: Duration) -> Offered<T> {
        self.offer_held_back(claim, HeldBack::Turn, payload, now)
    }

    /// As [`Self::offer`], of one of which it is known why it waits.
    ///
    /// # Errors
    /// The refusal, and the payload.
    pub fn offer_held_back(&mut self, claim: Claim, held_back: HeldBack, payload: T, now: Duration) -> Offered<T> {
        if !claim.begun && self.hopeless(&claim, now) {
            let late = self.wait(&claim).saturating_sub(self.patience(&claim, now));
            return Err((Refusal { reason: Reason::Hopeless, retry_after: bounded(late) }, payload));
        }
        let victim = match self.make_way(&claim) {
            Ok(victim) => victim,
            Err(reason) => return Err((Refusal { reason, retry_after: self.retry_after(&claim) }, payload)),
        };
        let displaced = victim.and_then(|place| self.remove(place, now));
        Ok((self.insert(claim, (held_back, payload), now), displaced))
    }

    /// Whose turn it is; parked ones have none.
    #[must_use]
    pub fn next(&self, now: Duration) -> Option<Place> {
        let regular = self.lanes.values().find_map(Lane::next)?;
        if self.turns + 1 < OVERDUE_TURN {
            return Some(regular);
        }
        Some(self.overdue(now).unwrap_or(regular))
    }

    /// Takes out the request whose turn it is, and charges its tenant what was expected when it came.
    pub fn take(&mut self, place: Place, now: Duration) -> Option<Entry<T>> {
        let computed = self.entries.get(&place)?.claim.miss_tokens;
        self.take_for(place, computed, now)
    }

    /// The same when it is known how many prompt tokens have to be computed for it: what is cached changes while it waits, and
    /// tenants share what is really computed.
    pub fn take_for(&mut self, place: Place, computed_tokens: u64, now: Duration) -> Option<Entry<T>> {
        let by_age = self.overdue(now);
        self.turns = match by_age {
            Some(oldest) if oldest == place => 0,
            Some(_) => self.turns.saturating_add(1),
            None => 0,
        };
        let entry = self.entries.get(&place)?;
        let (class, claim) = (class_of(&entry.claim), entry.claim.clone());
        if let Some(lane) = self.lanes.get_mut(&class) {
            lane.charge(&claim, claim.cost_tokens.saturating_sub(claim.miss_tokens) + computed_tokens);
        }
        // Who waits is counted by what was expected, so the pace is, too.
        self.drain.note(claim.cost_tokens, now);
        self.remove(place, now)
    }

    /// Takes out a request that wants nothing any more. `None` when it is not there.
    pub fn remove(&mut self, place: Place, now: Duration) -> Option<Entry<T>> {
        let entry = self.entries.remove(&place)?;
        let class = class_of(&entry.claim);
        if let Some(lane) = self.lanes.get_mut(&class) {
            lane.remove(&entry.claim, entry.key, place, entry.parked);
            if lane.is_empty() {
                self.lanes.remove(&class);
            }
        }
        self.ages.remove(&(entry.since, place));
        self.deadlines.remove(&(self.limit(&entry.claim, entry.since), place));
        self.count(&entry.claim, false);
        if entry.parked {
            self.parked.retain(|parked| *parked != place);
        }
        if self.entries.is_empty() {
            self.drain.pause(now);
        }
        Some(entry)
    }

    /// Passes over a request until [`Queue::unpark`]: no worker with room may have it.
    pub fn park(&mut self, place: Place) {
        let Some(entry) = self.entries.get_mut(&place).filter(|entry| !entry.parked) else { return };
        entry.parked = true;
        self.ages.remove(&(entry.since, place));
        if let Some(lane) = self.lanes.get_mut(&class_of(&entry.claim)) {
            lane.park(&entry.claim, entry.key, place);
        }
        self.parked.push(place);
    }

    /// Passes over all that this one's tenant has in its class until [`Queue::unpark`], but for who has waited too long.
    pub fn set_aside(&mut self, place: Place) {
        let Some(claim) = self.entries.get(&place).map(|entry| &entry.claim) else { return };
        let class = class_of(claim);
        if let Some(lane) = self.lanes.get_mut(&class) {
            lane.set_aside(&claim.tenant, true);
            self.aside.push((class, claim.tenant.clone()));
        }
    }

    /// Lets those that were passed over wait for their turn again.
    pub fn unpark(&mut self) {
        for (class, tenant) in std::mem::take(&mut self.aside) {
            if let Some(lane) = self.lanes.get_mut(&class) {
                lane.set_aside(&tenant, false);
            }
        }
        for place in std::mem::take(&mut self.parked) {
            let Some(entry) = self.entries.get_mut(&place) else { continue };
            entry.parked = false;
            self.ages.insert((entry.since, place));
            if let Some(lane) = self.lanes.get_mut(&class_of(&entry.claim)) {
                lane.unpark(&entry.claim, entry.key, place);
            }
        }
    }

    /// Takes out those whose time is over, each with why.
    pub fn expire(&mut self, now: Duration) -> Vec<(Entry<T>, Refusal)> {
        let mut gone = Vec::new();
        while let Some((limit, place)) = self.deadlines.first().copied().filter(|(limit, _)| *limit <= now) {
            let Some(entry) = self.remove(place, now) else {
                self.deadlines.remove(&(limit, place));
                continue;
            };
            let reason = if entry.claim.deadline <= now { Reason::Deadline } else { Reason::Waited };
            let retry_after = self.retry_after(&entry.claim);
            gone.push((entry, Refusal { reason, retry_after }));
        }
        gone
    }

    /// When a refused request of this kind may try again, from the measured pace.
    #[must_use]
    pub fn retry_after(&self, claim: &Claim) -> Duration {
        bounded(self.wait(claim))
    }

    /// How long a request of this kind would wait for its turn; zero while nothing was measured.
    #[must_use]
    pub fn wait(&self, claim: &Claim) -> Duration {
        let class = class_of(claim);
        let before: u64 = self.lanes.range(..class).map(|(_, lane)| lane.tokens()).sum();
        let beside = self.lanes.get(&class).map_or(0, |lane| lane.tokens_before(claim));
        self.drain.time_for(before + beside)
    }

    fn patience(&self, claim: &Claim, now: Duration) -> Duration {
        self.limit(claim, now).saturating_sub(now)
    }

    fn hopeless(&self, claim: &Claim, now: Duration) -> bool {
        self.wait(claim) > self.patience(claim, now)
    }

    /// When it is taken out at the latest.
    fn limit(&self, claim: &Claim, since: Duration) -> Duration {
        self.config.limit(claim, since)
    }

    /// The oldest that is not parked, if it has waited too long.
    fn overdue(&self, now: Duration) -> Option<Place> {
        let long = Duration::from_millis(self.config.overdue_ms);
        let oldest = self.ages.first().filter(|(since, _)| now.saturating_sub(*since) >= long);
        oldest.map(|(_, place)| *place)
    }

    fn insert(&mut self, claim: Claim, (held_back, payload): (HeldBack, T), now: Duration) -> Place {
        let place = Place(self.next);
        self.next += 1;
        let key = self.config.key(&claim, now);
        self.drain.resume(now);
        self.lanes.entry(class_of(&claim)).or_default().insert(&claim, key, place);
        self.ages.insert((now, place));
        self.deadlines.insert((self.limit(&claim, now), place));
        self.count(&claim, true);
        self.entries.insert(place, Entry { claim, since: now, held_back, payload, key, parked: false, seen: None });
        place
    }
}

fn class_of(claim: &Claim) -> i32 {
    if claim.begun { i32::MIN } else { claim.priority }
}

fn bounded(wait: Duration) -> Duration {
    wait.clamp(RETRY_MIN, RETRY_MAX)
}
