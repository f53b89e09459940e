//! The shard's queue on the virtual clock: the product's queue, room and turns, driven as the product's shard drives them.
//!
//! Who comes while others wait, or while every worker is taken, waits; whoever gives a reservation back hands it on, and every
//! [`LOOK`] the shard looks what reports have changed. Called by `routing` and `serving`. Bounds: the traffic.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use starling_actors::route::{
    desk::{Ask, Decision},
    queue::{
        Claim, Entry,
        rooms::HeldBack,
        turns::{self, Caches, Waits},
    },
};
use starling_ids::{BlockHash, RequestId, WorkerId};
use starling_kv::index::{Holder, Overlap, PrefixIndex};

use super::{Cluster, Event, Router};
use crate::setup::BLOCK;

/// How often the product's shard looks after those that wait.
const LOOK: Duration = Duration::from_millis(10);
/// Nobody's time is over: what is compared is how long each waits.
const PATIENT: Duration = Duration::from_secs(1_000_000);

/// A request in the queue.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) request: usize,
    pub(super) hashes: Arc<[BlockHash]>,
    pub(super) prompt: u32,
    pub(super) answer_max: u32,
}

impl Waits for Waiter {
    fn ask(&self) -> Ask<'_> {
        Ask {
            request: RequestId(self.request as u128),
            prompt_tokens: self.prompt,
            block_tokens: BLOCK,
            hashes: &self.hashes,
            answer_tokens_max: self.answer_max,
            ..Ask::default()
        }
    }

    fn is_gone(&self) -> bool {
        false
    }
}

/// What the shard knows of the caches.
pub(super) struct Known<'a>(pub(super) &'a PrefixIndex);

impl Caches for Known<'_> {
    fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap> {
        let mut overlaps = Vec::new();
        self.0.overlaps(chain, &mut overlaps);
        overlaps
    }

    fn who(&self, holder: Holder) -> Option<WorkerId> {
        self.0.who(holder).map(|(worker, ..)| worker)
    }

    /// All workers tell of their blocks.
    fn gave(&self, _: &Decision, _: &[BlockHash], _: u32) {}
}

impl Cluster<'_> {
    /// Nobody has room, or others wait already.
    pub(super) fn wait_in_line(&mut self, request: usize, at: usize) {
        let waiter = self.waiter(request);
        let Some(Some(desk)) = self.desks.get_mut(at) else { return };
        let held_back = if self.line.is_empty() { desk.held_back() } else { HeldBack::Turn };
        let known = Known(&self.index);
        let rights = Claim { weight: 1, deadline: self.now + PATIENT, ..Claim::default() };
        let overlaps = known.overlaps(&waiter.hashes);
        let claim = turns::claim(desk, &known, &waiter.ask(), &overlaps, rights);
        self.run.waited += 1;
        // One that is refused counts as failed: it never ends.
        self.line.offer_held_back(claim, held_back, waiter, self.now).ok();
        self.hand_out();
        self.look_later();
    }

    fn look_later(&mut self) {
        if !self.looks && !self.line.is_empty() {
            self.looks = true;
            self.after(LOOK, Event::Look);
        }
    }

    /// Looks after those that wait, while there are any.
    pub(super) fn look(&mut self) {
        self.looks = false;
        self.hand_out();
        self.look_later();
    }

    /// Room goes to those whose turn it is.
    pub(super) fn hand_out(&mut self) {
        if self.line.is_empty() {
            return;
        }
        let decides = |(router, state): (usize, &Router)| match state {
            Router::Decides(at) => Some((router, *at)),
            _ => None,
        };
        let Some((router, at)) = self.routers.iter().enumerate().find_map(decides) else { return };
        let Some(Some(desk)) = self.desks.get_mut(at) else { return };
        let began = Instant::now();
        let gone = turns::hand_out(&mut self.line, desk, &Known(&self.index), self.now);
        self.run.deciding += began.elapsed();
        for (Entry { payload: Waiter { request, .. }, .. }, decision) in gone {
            self.granted(request, at, &decision);
            self.send(request, if router == self.live[request].gateway { 1 } else { 2 });
        }
    }

    /// The owner died with all that waited there: their gateways ask the next in rank.
    pub(super) fn scatter(&mut self) {
        while let Some(place) = self.line.next(self.now) {
            let Some(entry) = self.line.take(place, self.now) else { return };
            self.after(self.setup.wire, Event::Ask { request: entry.payload.request, tried: 1 });
        }
    }
}
