//! Which workers may be given a request at all, beside what the directory says: room, breakers, refusals.
//!
//! Called by [`super::desk`]. Columns beside those of the [`Fleet`], by the same slots. Without rooms nothing is held back:
//! simulations that compare policies alone choose among all. Pure. Bounds: one entry per worker in each column.

use std::time::Duration;

use starling_ids::WorkerId;

use super::{
    breaker::{Breaker, State},
    columns::larger,
    desk::{Ask, Ticket},
    fleet::{Fleet, Slot, Standing},
    queue::rooms::HeldBack,
};

/// How long a worker that failed a request is used only when there is no other.
pub const COOLING: Duration = Duration::from_millis(500);

/// How long a worker that refused for want of room counts as taken, if it does not report before.
const REFUSED: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Gate {
    breakers: Vec<Breaker>,
    /// Slots whose breaker is not closed, rising: seldom any, so that a decision looks at no breaker.
    turned: Vec<Slot>,
    /// The reservation that tries a worker whose breaker is half open.
    trying: Vec<Option<Ticket>>,
    refused: Vec<Duration>,
    /// When the last of those that refused counts as free again.
    refusals_end: Duration,
}

impl Gate {
    pub(super) fn widen(&mut self, width: usize) {
        self.breakers.resize(width, Breaker::default());
        self.trying.resize(width, None);
        self.refused.resize(width, Duration::ZERO);
    }

    /// A worker left, or began a new life, which nothing is held against.
    pub(super) fn wipe(&mut self, slot: Slot) {
        self.breakers[slot] = Breaker::default();
        self.note_turn(slot);
        self.trying[slot] = None;
        self.refused[slot] = Duration::ZERO;
    }

    /// What an ask tells of the workers that it met before: those that failed cool, those that refused count as taken.
    pub(super) fn learn(&mut self, ask: &Ask<'_>, fleet: &mut Fleet, now: Duration) {
        if let Some((rooms, _)) = fleet.rooms() {
            fleet.hold_back(rooms, ask.block_tokens);
        }
        if ask.told {
            return;
        }
        for worker in ask.failed {
            if let Some(slot) = fleet.slot(worker) {
                fleet.cool(slot, now + COOLING);
            }
        }
        let refused = |worker: &&WorkerId| !ask.failed.contains(worker) && ask.leaves != Some(*worker);
        for worker in ask.exclude.iter().filter(refused) {
            if let Some(slot) = fleet.slot(worker) {
                self.refused[slot] = now + REFUSED;
                self.refusals_end = now + REFUSED;
            }
        }
    }

    /// A worker told how busy it is.
    pub(super) fn heard(&mut self, slot: Slot) {
        self.refused[slot] = Duration::ZERO;
    }

    /// Slots that may be given a request, with room or without, into `eligible`: sound ones that neither cool nor are cut off,
    /// or as a last resort all that take anything.
    pub(super) fn list(&self, fleet: &Fleet, now: Duration, last_resort: bool, eligible: &mut Vec<Slot>) {
        eligible.clear();
        // Nearly always: then nobody is looked at one by one.
        if !last_resort && self.turned.is_empty() && fleet.all_sound(now) {
            eligible.extend(0..fleet.width());
            return;
        }
        let cut_off = |slot: Slot| !self.turned.is_empty() && !self.breakers[slot].allows(now);
        let sound = |slot: Slot| fleet.standing[slot] == Standing::Sound && !fleet.cools(slot, now) && !cut_off(slot);
        eligible
            .extend((0..fleet.width()).filter(|slot| if last_resort { present(fleet, *slot) } else { sound(*slot) }));
    }

    /// Keeps those of `eligible` that would take the request; none while all of them are taken.
    pub(super) fn keep_open(
        &self,
        ask: &Ask<'_>,
        (fleet, hits): (&Fleet, &[u32]),
        now: Duration,
        eligible: &mut Vec<Slot>,
    ) {
        if fleet.rooms().is_none() {
            return;
        }
        if !self.any_open(fleet, eligible, now) {
            return eligible.clear();
        }
        let sequences = ask.choices.max(1);
        let (tokens, block) = prompt(ask);
        let (columns, refusing) = (&fleet.columns, now < self.refusals_end);
        if !refusing && columns.all_take(sequences, tokens.max(1.0), block) {
            return;
        }
        eligible.retain(|slot| {
            let slot = *slot;
            // The last token is always computed, for what follows it.
            let missed = larger(tokens - f64::from(hits.get(slot).copied().unwrap_or(0)) * block, 1.0);
            // One that has waited long may wait for blocks where there are some.
            let fits = missed <= columns.left[slot] * block || ask.overdue && columns.open[slot];
            columns.room[slot] >= sequences && fits && !(refusing && self.refuses(slot, now))
        });
    }

    /// KV blocks that each of `eligible` would take for such a request, into its place in `left`: any number of one that is asked in any
    /// case, less than none where it would not be taken. Nobody takes anything while all are taken.
    pub(super) fn left(&self, ask: &Ask<'_>, (fleet, eligible): (&Fleet, &[Slot]), now: Duration, left: &mut Vec<f64>) {
        left.clear();
        left.resize(fleet.width(), -1.0);
        if fleet.rooms().is_some() && !self.any_open(fleet, eligible, now) {
            return;
        }
        let (columns, sequences) = (&fleet.columns, ask.choices.max(1));
        let refusing = fleet.rooms().is_some() && now < self.refusals_end;
        for slot in eligible.iter().copied().filter(|slot| !(refusing && self.refuses(*slot, now))) {
            if columns.room[slot] >= sequences || fleet.rooms().is_none() {
                let waits_there = ask.overdue && columns.open[slot];
                left[slot] = if waits_there { f64::INFINITY } else { columns.left[slot] };
            }
        }
    }

    /// Whether some worker has room for one more.
    pub(super) fn has_room(&self, fleet: &Fleet, now: Duration) -> bool {
        let open = |slot| present(fleet, slot) && self.is_open(fleet, slot, now);
        fleet.rooms().is_none() || fleet.columns.open_count > 0 && (0..fleet.width()).any(open)
    }

    /// What most workers lack, when none has room.
    pub(super) fn held_back(&self, fleet: &Fleet) -> Option<HeldBack> {
        let (rooms, block_tokens) = fleet.rooms()?;
        let mut counts = [(0usize, None); 3];
        for why in (0..fleet.width()).filter(|slot| present(fleet, *slot)) {
            let why = rooms.held_back(fleet, why, block_tokens)?;
            let at = match why {
                HeldBack::Batch => 0,
                HeldBack::Prompts => 1,
                _ => 2,
            };
            counts[at] = (counts[at].0 + 1, Some(why));
        }
        counts.into_iter().max_by_key(|(count, _)| *count).and_then(|(_, why)| why)
    }

    /// A request was given to a worker.
    pub(super) fn sent(&mut self, slot: Slot, ticket: Ticket, now: Duration) {
        if self.breakers[slot].sent(now) {
            self.trying[slot] = Some(ticket);
        }
    }

    /// A first token came from a worker. True when that closes its breaker.
    pub(super) fn worked(&mut self, slot: Slot) -> bool {
        self.trying[slot] = None;
        let closes = self.breakers[slot].worked();
        if closes {
            self.note_turn(slot);
        }
        closes
    }

    /// A worker failed a request. True when that opens its breaker.
    pub(super) fn failed(&mut self, slot: Slot, now: Duration) -> bool {
        let opens = self.breakers[slot].failed(now);
        if opens {
            self.trying[slot] = None;
            self.note_turn(slot);
        }
        opens
    }

    /// A reservation ended; if it was the one that tries, another may.
    pub(super) fn released(&mut self, slot: Slot, ticket: Ticket) {
        if self.trying[slot] == Some(ticket) {
            self.trying[slot] = None;
            self.breakers[slot].untried();
        }
    }

    /// Workers whose breaker is not closed.
    pub(super) fn cut_off(&self, now: Duration) -> impl Iterator<Item = (Slot, State)> + '_ {
        self.turned.iter().map(move |slot| (*slot, self.breakers[*slot].state(now)))
    }

    /// A breaker may have opened or closed.
    fn note_turn(&mut self, slot: Slot) {
        match (self.turned.binary_search(&slot), self.breakers[slot].is_closed()) {
            (Ok(at), true) => {
                self.turned.remove(at);
            }
            (Err(at), false) => self.turned.insert(at, slot),
            _ => {}
        }
    }

    fn refuses(&self, slot: Slot, now: Duration) -> bool {
        now < self.refusals_end && now < self.refused[slot]
    }

    fn is_open(&self, fleet: &Fleet, slot: Slot, now: Duration) -> bool {
        fleet.columns.open[slot] && !self.refuses(slot, now)
    }

    fn any_open(&self, fleet: &Fleet, slots: &[Slot], now: Duration) -> bool {
        fleet.columns.open_count > 0 && slots.iter().any(|slot| self.is_open(fleet, *slot, now))
    }
}

/// Tokens of the prompt and of a block.
fn prompt(ask: &Ask<'_>) -> (f64, f64) {
    (f64::from(ask.prompt_tokens), f64::from(ask.block_tokens.max(1)))
}

fn present(fleet: &Fleet, slot: Slot) -> bool {
    matches!(fleet.standing[slot], Standing::Sound | Standing::Doubtful)
}
