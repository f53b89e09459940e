//! When a worker counts as taken.
//!
//! Called by [`crate::route::desk`]. Two bounds: while some worker is below the first one, requests go out at once; when none is, they
//! wait in the queue, where they are still ordered by right and bound to no worker. The second one is the worker's own: beyond
//! it it would refuse. Both are judged by the worker's report and by what was given to it since. Pure.

use serde::{Deserialize, Serialize};

use crate::route::fleet::{Fleet, Slot};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rooms {
    /// Sequences handed to a worker ahead of a free place in its batch, in percent of the batch; at least one. They keep it
    /// busy while the next one is on its way.
    pub ahead_percent: u32,
    /// Prompt tokens handed to a worker ahead, in steps of its engine; 0 for any number. A prompt of any length is
    /// given to a worker that is below.
    pub prefill_steps: u32,
}

impl Default for Rooms {
    fn default() -> Self {
        Self { ahead_percent: 25, prefill_steps: 8 }
    }
}

impl Rooms {
    /// Whether a worker should be given one more request now, of however many answers.
    #[must_use]
    pub fn open(&self, fleet: &Fleet, slot: Slot) -> bool {
        let places = fleet.places[slot];
        if places.sequences == 0 {
            return true;
        }
        let ahead = (places.sequences.saturating_mul(self.ahead_percent) / 100).max(1).min(places.waiting);
        let tokens = u64::from(self.prefill_steps) * u64::from(places.step_tokens);
        fleet.in_flight(slot) < places.sequences.saturating_add(ahead)
            && (tokens == 0 || fleet.queued_tokens(slot) < tokens)
    }

    /// Whether a worker would take so many more sequences. One that has nothing to do is asked in any case.
    #[must_use]
    pub fn fits(&self, fleet: &Fleet, slot: Slot, sequences: u32) -> bool {
        let places = fleet.places[slot];
        let in_flight = fleet.in_flight(slot);
        places.sequences == 0
            || in_flight == 0
            || in_flight.saturating_add(sequences) <= places.sequences.saturating_add(places.waiting)
    }
}
