//! From the queue to the workers: whoever is next goes where it is best for it now, while some worker has room.
//!
//! Called by the router shard under its lock, and by the cluster simulator, whenever a reservation is given back, an account came or
//! somebody came to wait. A request is bound to a worker here and not when it came: what the caches hold by then is known, and
//! so is who else was given what. Pure. Bounds: in one go [`PASSED_MAX`] of a tenant are passed over and [`PASSED_ALL`] of all, beside
//! those that wish for taken workers, of [`KINDS_MAX`] kinds of a tenant and twice [`KINDS_ALL`] of all; a tenant beyond its bound is set
//! aside and the others go on. As many are looked up as [`super::order`] says for each that goes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use starling_ids::{BlockHash, WorkerId};
use starling_kv::index::{Holder, Overlap};

use super::{
    Claim, Entry, Place, Queue,
    order::{FRONT, MORE},
};
use crate::route::desk::{Ask, Decision, Desk, Takers};

/// How long a request waits for a worker with KV blocks for all of its prompt.
pub const KV_PATIENCE: Duration = Duration::from_secs(2);

/// Waiting requests of one tenant passed over in one go because no worker with room may have them.
const PASSED_MAX: u32 = 8;
/// The same of all tenants; then the go is over.
const PASSED_ALL: u32 = 32;
/// Kinds of one tenant's wishes for workers which are taken, of which one request is asked about in one go; all like it are
/// passed over with it.
const KINDS_MAX: usize = 64;
/// The same of all tenants; beyond it, as many again of tenants that have none yet.
const KINDS_ALL: usize = 128;

/// With more workers than this fewer are looked at again, as each look runs down all of them; and fewer than [`FRONT`] kinds, as for
/// each it is gone through them which of them take it.
const WIDTH: usize = 1_024;

/// With fewer workers than this turns are few, and each goes by what the caches hold at that moment.
const REMEMBERS: usize = 64;

/// A request that can wait.
pub trait Waits {
    /// What it asks for.
    fn ask(&self) -> Ask<'_>;
    /// Nobody waits for the answer any more.
    fn is_gone(&self) -> bool;
}

/// What is known of the workers' caches.
pub trait Caches {
    /// Who holds leading blocks of a chain, and how many.
    fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap>;
    /// Whose an overlap is; none when it left since.
    fn who(&self, holder: Holder) -> Option<WorkerId>;
    /// A prompt was given to a worker whose pool has so many blocks.
    fn gave(&self, decision: &Decision, chain: &[BlockHash], blocks_max: u32);
}

/// One decision. `None` when no worker is left, or all are taken.
pub fn decide(
    desk: &mut Desk,
    caches: &impl Caches,
    (ask, waited): (Ask<'_>, Duration),
    overlaps: &[Overlap],
    now: Duration,
) -> Option<Decision> {
    let ask = Ask { overdue: waited >= KV_PATIENCE, ..ask };
    let decision = desk.decide_over(&ask, overlaps, |holder| caches.who(holder), now)?;
    let blocks_max = desk.fleet().slot(&decision.worker).map_or(0, |slot| desk.fleet().places[slot].blocks);
    caches.gave(&decision, ask.hashes, blocks_max);
    Some(decision)
}

/// What a request brings to the queue beside `rights`, its tenant and class: at best the worker that holds most of it computes
/// the rest.
pub fn claim(desk: &mut Desk, caches: &impl Caches, ask: &Ask<'_>, overlaps: &[Overlap], rights: Claim) -> Claim {
    let hit = overlaps.iter().map(|overlap| overlap.device).max().unwrap_or(0);
    let hit_tokens = u64::from(hit) * u64::from(ask.block_tokens);
    let miss_tokens = u64::from(ask.prompt_tokens).saturating_sub(hit_tokens).max(1);
    let expected = desk.answer_expected(ask.answer_tokens_max).ceil() as u64 * u64::from(ask.choices.max(1));
    let prefill = desk.prefill_expected(ask, overlaps, |holder| caches.who(holder));
    Claim {
        miss_tokens,
        prefill: prefill.unwrap_or_default(),
        cost_tokens: miss_tokens + expected.min(u64::from(ask.answer_tokens_max.max(1))),
        ..rights
    }
}

/// What was passed over in one go.
#[derive(Debug, Default)]
struct Passed {
    /// One of each kind of wishes that only taken workers fulfil.
    kinds: Vec<Place>,
    /// Kinds and other requests, by tenant.
    tenants: HashMap<Arc<str>, (usize, u32)>,
    /// Other requests of all tenants.
    others: u32,
}

impl Passed {
    fn of(&self, tenant: &Arc<str>) -> (usize, u32) {
        self.tenants.get(tenant).copied().unwrap_or_default()
    }

    /// Whether it may be asked for one more kind of wishes of this tenant.
    fn may_ask(&self, tenant: &Arc<str>) -> bool {
        let (own, all) = (self.of(tenant).0, self.kinds.len());
        own < KINDS_MAX && all < KINDS_ALL || own == 0 && all < 2 * KINDS_ALL
    }

    fn kind(&mut self, tenant: &Arc<str>, place: Place) {
        self.kinds.push(place);
        self.tenants.entry(tenant.clone()).or_default().0 += 1;
    }

    /// One that no worker with room may have. True when its tenant has had as many as it may.
    fn other(&mut self, tenant: &Arc<str>) -> bool {
        self.others += 1;
        let own = &mut self.tenants.entry(tenant.clone()).or_default().1;
        *own += 1;
        *own >= PASSED_MAX
    }
}

/// Gives what is free to those whose turn it is, until nothing is. Each that went comes back with its decision.
pub fn hand_out<T: Waits>(
    queue: &mut Queue<T>,
    desk: &mut Desk,
    caches: &impl Caches,
    now: Duration,
) -> Vec<(Entry<T>, Decision)> {
    let mut gone = Vec::new();
    let mut passed = Passed::default();
    // Once for each that goes, however many are passed over.
    let mut look = true;
    while !queue.is_empty() && passed.others < PASSED_ALL && desk.has_room(now) {
        if std::mem::take(&mut look) {
            look_again(queue, desk, caches, now);
        }
        let Some(place) = queue.next(now) else { break };
        if pass_over(queue, desk, (place, now), &mut passed) {
            continue;
        }
        let Some(entry) = queue.get(place) else { break };
        let ask = Ask { told: true, ..entry.payload.ask() };
        let waited = now.saturating_sub(entry.since);
        let overlaps = caches.overlaps(ask.hashes);
        let Some(decision) = decide(desk, caches, (ask, waited), &overlaps, now) else {
            let tenant = entry.claim.tenant.clone();
            if passed.other(&tenant) {
                queue.set_aside(place);
            }
            queue.park(place);
            continue;
        };
        let Some(entry) = queue.take_for(place, decision.computed_tokens, now) else { break };
        desk.waited(decision.ticket, waited, entry.held_back);
        gone.push((entry, decision));
        look = true;
    }
    queue.unpark();
    gone
}

/// Passes over one whose turn it is, when it left, or wishes for workers that are taken, or its tenant was set aside.
fn pass_over<T: Waits>(
    queue: &mut Queue<T>,
    desk: &mut Desk,
    (place, now): (Place, Duration),
    passed: &mut Passed,
) -> bool {
    let Some(entry) = queue.get(place) else { return false };
    if entry.payload.is_gone() {
        queue.remove(place, now);
        return true;
    }
    let tenant = entry.claim.tenant.clone();
    // Set aside in another class, or its turn is for its age.
    if passed.of(&tenant).1 >= PASSED_MAX {
        queue.set_aside(place);
        queue.park(place);
        return true;
    }
    let ask = Ask { told: true, overdue: true, ..entry.payload.ask() };
    if !ask.wishes.is_some_and(|wishes| wishes.limit()) {
        return false;
    }
    // Room only shrinks in here: where there was none for one, there is none for those like it.
    let known = passed.kinds.iter().filter_map(|place| queue.get(*place)).any(|one| alike(&one.payload.ask(), &ask));
    if !known && passed.may_ask(&tenant) {
        if desk.has_room_for(&ask, now) {
            return false;
        }
        passed.kind(&tenant, place);
    } else if !known {
        queue.set_aside(place);
    }
    queue.park(place);
    true
}

/// Whether two may have the same workers.
fn alike(one: &Ask<'_>, other: &Ask<'_>) -> bool {
    one.wishes == other.wishes
        && (one.choices, one.exclude, one.leaves) == (other.choices, other.exclude, other.leaves)
        && one.origin == other.origin
}

/// Puts those that may be next in order by what the caches hold now.
fn look_again<T: Waits>(queue: &mut Queue<T>, desk: &mut Desk, caches: &impl Caches, now: Duration) {
    let Some(turn) = queue.next(now) else { return };
    let width = desk.fleet().width().max(1);
    let most = (FRONT + MORE) * WIDTH / width.max(WIDTH);
    // Who takes them is the same for all that are alike, nearly always for all.
    let mut kinds: Vec<(Place, bool, Takers)> = Vec::new();
    for place in queue.reconsidered(turn, most) {
        let Some(entry) = queue.get(place) else { continue };
        let ask = Ask { overdue: now.saturating_sub(entry.since) >= KV_PATIENCE, ..entry.payload.ask() };
        let of_kind = |(one, overdue, _): &(Place, bool, Takers)| {
            *overdue == ask.overdue && queue.get(*one).is_some_and(|one| alike(&one.payload.ask(), &ask))
        };
        let known = kinds.iter().position(of_kind);
        if known.is_none() && kinds.len() >= (FRONT * WIDTH / width).max(1) {
            continue;
        }
        let at = known.unwrap_or_else(|| {
            kinds.push((place, ask.overdue, desk.takers(&ask, now)));
            kinds.len() - 1
        });
        let fresh = width < REMEMBERS || queue.seen(place, now).is_none();
        let hits = fresh.then(|| desk.hits_of(&caches.overlaps(ask.hashes), |holder| caches.who(holder)));
        let known = hits.as_ref().or_else(|| queue.seen(place, now));
        let prefill = known.and_then(|hits| desk.prefill_among(&kinds[at].2, &ask, hits));
        if let Some(hits) = hits {
            queue.see(place, hits, now);
        }
        if let Some(prefill) = prefill {
            queue.judge(place, prefill);
        }
    }
}

#[cfg(test)]
mod tests;
