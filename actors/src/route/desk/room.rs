//! What the queue asks a desk: whether there is room, why not, and what a waiting request would have to compute.
//!
//! Called by [`crate::route::queue::turns`] and the shard. Decides nothing and counts nothing. Pure.

use std::time::Duration;

use starling_ids::WorkerId;
use starling_kv::index::{Holder, Overlap};

use super::{
    super::{fleet::Slot, policy::Question, queue::rooms::HeldBack},
    Ask, Desk, Ticket,
};

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

    /// How long a request's prompt would be computed, or loaded, at the worker that has least to do for it: with `now` among those that would take it
    /// now, otherwise among all. `None` when there is none.
    pub fn prefill_expected(
        &mut self,
        ask: &Ask<'_>,
        overlaps: &[Overlap],
        who: impl Fn(Holder) -> Option<WorkerId>,
        now: Option<Duration>,
    ) -> Option<Duration> {
        let found = self.found(overlaps, who);
        self.note_hits(ask, &found);
        match now {
            Some(now) => self.list(ask, 0, now),
            None => {
                self.eligible.clear();
                self.eligible.extend((0..self.fleet.width()).filter(|slot| self.fleet.life(*slot).is_some()));
            }
        }
        let question = Question { ask, fleet: &self.fleet, hits: &self.hits, below: &self.below, draw: 0 };
        let ms = |slot: &Slot| {
            let rate = self.fleet.rates[*slot].prefill_ms_per_token;
            f64::from(question.computed_tokens(*slot)) * rate + question.load(*slot).ms
        };
        let least = self.eligible.iter().map(ms).min_by(f64::total_cmp);
        self.forget_hits(&found);
        self.below.clear();
        self.found = found;
        Duration::try_from_secs_f64(least? / 1e3).ok()
    }

    /// How long the request waited in the queue before it was decided and what for, for its receipt.
    pub fn waited(&mut self, ticket: Ticket, time: Duration, held_back: HeldBack) {
        self.receipts.waited(ticket, time, held_back.label());
    }
}
