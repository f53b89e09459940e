//! What the queue asks a desk: whether there is room, why not, and what a waiting request would have to compute.
//!
//! Called by [`crate::route::queue::turns`] and the shard. Decides nothing and counts nothing. Pure.

use std::time::Duration;

use starling_ids::WorkerId;
use starling_kv::index::{Holder, Overlap};

use super::{
    super::{below::Below, fleet::Slot, policy::Question, queue::rooms::HeldBack},
    Ask, Desk, Ticket,
};

/// Who would take requests of one kind now: of those that may have them, how many KV blocks each would take; see
/// [`Desk::takers`]. Worked out once, as all workers are gone through for it.
#[derive(Debug, Default)]
pub struct Takers {
    /// By slot; less than none where none would be taken.
    left: Vec<f64>,
    /// The same of those alone that decode, where some do not.
    decode: Vec<f64>,
}

/// What workers hold of a prompt, as the prefix index said at one moment, in as few bytes as possible: one that waits keeps it for a
/// while.
#[derive(Debug, Default)]
pub struct Hits {
    /// Slot and leading blocks on its device.
    hits: Vec<(u32, u32)>,
    /// Slot and what it has on slower tiers.
    below: Vec<(u32, Below)>,
}

impl Hits {
    /// How many workers hold some of it.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.hits.len()
    }
}

impl Desk {
    /// Whether some worker has room for one more request. Always, without rooms.
    #[must_use]
    pub fn has_room(&self, now: Duration) -> bool {
        self.gate.has_room(&self.fleet, now)
    }

    /// Whether some worker that may have a request has room for it.
    pub fn has_room_for(&mut self, ask: &Ask<'_>, now: Duration) -> bool {
        self.list(ask, 0, now);
        !self.eligible.is_empty()
    }

    /// Whether some worker may have a request at all, with room or without: one that has not failed it.
    pub fn anyone_for(&mut self, ask: &Ask<'_>) -> bool {
        let Self { fleet, hits, below, policy, eligible, .. } = self;
        let ask = Ask { exclude: ask.failed, ..*ask };
        eligible.clear();
        eligible.extend((0..fleet.width()).filter(|slot| fleet.life(*slot).is_some()));
        policy.allow(&Question { ask: &ask, fleet, hits, below, draw: 0 }, eligible);
        !eligible.is_empty()
    }

    /// Why a request waits that was just refused a decision: what most workers lack when none has room for anybody.
    #[must_use]
    pub fn held_back(&self) -> HeldBack {
        self.gate.held_back(&self.fleet).unwrap_or(HeldBack::Elsewhere)
    }

    /// Who takes requests of this one's kind now.
    pub fn takers(&mut self, ask: &Ask<'_>, now: Duration) -> Takers {
        self.list_allowed(ask, 0, now);
        let mut takers = Takers::default();
        self.gate.left(ask, (&self.fleet, &self.eligible), now, &mut takers.left);
        if self.fleet.has_specialists() {
            let decodes = |slot: Slot| self.fleet.places[slot].role.decodes();
            let of = |(slot, left): (Slot, &f64)| if decodes(slot) { *left } else { -1.0 };
            takers.decode = takers.left.iter().enumerate().map(of).collect();
        }
        takers
    }

    /// What the prefix index says of a prompt, by worker.
    pub fn hits_of(&mut self, overlaps: &[Overlap], who: impl Fn(Holder) -> Option<WorkerId>) -> Hits {
        let found = self.found(overlaps, who);
        // Slots are far fewer.
        let short = |slot: Slot| u32::try_from(slot).unwrap_or(u32::MAX);
        let hits = found.iter().map(|(slot, depth)| (short(*slot), *depth)).collect();
        let below = self.below.drain(..).enumerate().filter(|(_, below)| below.any());
        let below = below.map(|(slot, below)| (short(slot), below)).collect();
        self.found = found;
        Hits { hits, below }
    }

    /// How long a request's prompt would be computed, or loaded, at the worker that has least to do for it among those that take it.
    /// `None` when there is none.
    pub fn prefill_among(&mut self, takers: &Takers, ask: &Ask<'_>, held: &Hits) -> Option<Duration> {
        let mut found = std::mem::take(&mut self.found);
        found.clear();
        found.extend(held.hits.iter().map(|(slot, depth)| (*slot as Slot, *depth)));
        if !held.below.is_empty() {
            self.below.resize(self.fleet.width(), Below::default());
            for (slot, below) in &held.below {
                if let Some(place) = self.below.get_mut(*slot as Slot) {
                    *place = *below;
                }
            }
        }
        self.note_hits(ask, &found);
        let question = Question { ask, fleet: &self.fleet, hits: &self.hits, below: &self.below, draw: 0 };
        let least = [&takers.decode, &takers.left].into_iter().find_map(|left| least(&question, left));
        self.forget_hits(&found);
        self.below.clear();
        self.found = found;
        Duration::try_from_secs_f64(least? / 1e3).ok()
    }

    /// The same among all workers, whether they would take it or not.
    pub fn prefill_expected(
        &mut self,
        ask: &Ask<'_>,
        overlaps: &[Overlap],
        who: impl Fn(Holder) -> Option<WorkerId>,
    ) -> Option<Duration> {
        let there = |slot| if self.fleet.life(slot).is_some() { f64::INFINITY } else { -1.0 };
        let left = (0..self.fleet.width()).map(there).collect();
        let held = self.hits_of(overlaps, who);
        self.prefill_among(&Takers { left, decode: Vec::new() }, ask, &held)
    }

    /// How long the request waited in the queue before it was decided and what for, for its receipt.
    pub fn waited(&mut self, ticket: Ticket, time: Duration, held_back: HeldBack) {
        self.receipts.waited(ticket, time, held_back.label());
    }
}

/// Milliseconds until what the least burdened worker lacks of a prompt is there, among those with so many blocks left for it.
fn least(question: &Question<'_>, left: &[f64]) -> Option<f64> {
    let Question { ask, fleet, hits, below, .. } = question;
    let (tokens, block) = (f64::from(ask.prompt_tokens), f64::from(ask.block_tokens));
    let computed = fleet.columns.least(left, hits, (tokens, block));
    // Loading only ever saves, so the few that would load something are looked at besides.
    let loads = |(slot, below): (Slot, &Below)| {
        let fits = below.any() && f64::from(question.missed_tokens(slot)) <= left.get(slot)? * block;
        let rate = fleet.rates[slot].prefill_ms_per_token;
        fits.then(|| f64::from(question.computed_tokens(slot)) * rate + question.load(slot).ms)
    };
    let least = below.iter().enumerate().filter_map(loads).fold(computed, f64::min);
    least.is_finite().then_some(least)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use starling_ids::{Incarnation, NodeId};

    use super::*;
    use crate::route::{
        below::TierRates,
        fleet::{Heard, Places, Standing},
        policy::PolicyConfig,
        queue::rooms::Rooms,
        rates::Rates,
        split::Role,
    };

    const NOW: Duration = Duration::from_secs(9);

    /// A worker's batch, queue, free blocks, what it is for, its speed, and the prompt's blocks on its device and in its host's memory.
    type Made = (u32, u64, u32, u8, u32, u32, u32);

    fn desk(made: &[Made]) -> Desk {
        let mut desk = Desk::new(PolicyConfig::default().build().expect("composed"), 1).with_rooms(Rooms::default());
        for (at, (running, queued, free, role, speed, ..)) in made.iter().enumerate() {
            let worker = WorkerId { node: NodeId::new("n").expect("name"), index: at as u16 };
            let role = [Role::Both, Role::Both, Role::Decode, Role::Prefill][usize::from(*role)];
            let places = Places { sequences: 8, waiting: 4, step_tokens: 512, blocks: 1_000, role };
            desk.seat(&worker, Incarnation(1), places, Standing::Sound);
            let heard = Heard {
                running: *running,
                prefill_tokens: *queued,
                blocks_pinned: 1_089 - free,
                rates: Some(Rates { prefill_ms_per_token: f64::from(*speed), ..Rates::default() }),
                tiers: Some(TierRates { host_ms: 1.0, disk_ms: 1.0, ..TierRates::default() }),
                ..Heard::default()
            };
            desk.hear(&worker, Incarnation(1), heard);
        }
        desk
    }

    /// Worker by worker, with the list of a decision.
    fn plainly(desk: &mut Desk, ask: &Ask<'_>) -> Option<f64> {
        desk.list(ask, 0, NOW);
        let question = Question { ask, fleet: &desk.fleet, hits: &desk.hits, below: &desk.below, draw: 0 };
        let ms = |slot: &Slot| {
            let rate = desk.fleet.rates[*slot].prefill_ms_per_token;
            f64::from(question.computed_tokens(*slot)) * rate + question.load(*slot).ms
        };
        desk.eligible.iter().map(ms).min_by(f64::total_cmp)
    }

    proptest! {
        #[test]
        fn the_least_to_do_is_that_of_those_that_a_decision_would_list(
            made in prop::collection::vec(
                (0u32..14, 0u64..2_000, 0u32..120, 0u8..4, 1u32..4, 0u32..60, 0u32..60), 1..40),
            (prompt_tokens, choices, overdue) in (1u32..1_500, 1u32..3, any::<bool>()),
        ) {
            let mut desk = desk(&made);
            let hits: Vec<(Slot, u32)> = made.iter().enumerate().map(|(at, made)| (at, made.5)).collect();
            let ask = Ask { prompt_tokens, choices, overdue, ..Ask::default() };
            desk.note_hits(&ask, &hits);
            desk.below = made.iter().map(|made| Below { device: made.5, host: made.6, disk: 0 }).collect();
            let expected = plainly(&mut desk, &ask);
            let takers = desk.takers(&ask, NOW);
            let question = Question { ask: &ask, fleet: &desk.fleet, hits: &desk.hits, below: &desk.below, draw: 0 };
            let got = [&takers.decode, &takers.left].into_iter().find_map(|left| least(&question, left));
            match (got, expected) {
                (Some(got), Some(expected)) => prop_assert!((got - expected).abs() < 1e-6, "{got} or {expected}"),
                other => prop_assert!(other.0.is_none() && other.1.is_none(), "{other:?}"),
            }
        }
    }
}
