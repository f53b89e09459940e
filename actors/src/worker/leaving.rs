//! Live requests that leave this worker: which there are, their blocks while they go on, and the hand-over itself.
//!
//! Called by the engine thread between two steps, and by the streams and tickets of a request. The blocks of a request that
//! leaves are lent as they become full, while it goes on; its taker says when it has caught up, and then the request ends
//! here between two steps: every token that it has goes to its client first, its last blocks go to the taker.
//! Never: hands a request over twice. Bounds: one entry a request, one watch a ticket; [`TOGETHER_MAX`] for others to go with.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use starling_engine::{Engine, contract::HandedOver};
use starling_ids::{AttemptId, RequestId, TokenId};
use tokio::sync::mpsc;

use super::{
    blocks::{Blocks, Returns},
    ledger::{Ledger, RequestKey},
    port::{Delivery, Submission},
};

/// The live requests of one life of a worker by what others call them.
#[derive(Debug, Default)]
pub(crate) struct Lives(Mutex<HashMap<(RequestId, AttemptId), RequestKey>>);

impl Lives {
    fn lock(&self) -> MutexGuard<'_, HashMap<(RequestId, AttemptId), RequestKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters one until the entry is dropped.
    pub(crate) fn enter(self: &Arc<Self>, name: (RequestId, AttemptId), key: RequestKey) -> LiveEntry {
        self.lock().insert(name, key);
        LiveEntry { lives: self.clone(), name, key }
    }

    /// Which one is meant.
    pub(crate) fn find(&self, name: (RequestId, AttemptId)) -> Option<RequestKey> {
        self.lock().get(&name).copied()
    }
}

/// Strikes a request out when dropped.
#[derive(Debug)]
pub(crate) struct LiveEntry {
    lives: Arc<Lives>,
    name: (RequestId, AttemptId),
    key: RequestKey,
}

impl Drop for LiveEntry {
    fn drop(&mut self) {
        let mut lives = self.lives.lock();
        if lives.get(&self.name) == Some(&self.key) {
            lives.remove(&self.name);
        }
    }
}

/// A request whose blocks are lent until it is handed over.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) key: RequestKey,
    /// Which answer of it.
    pub(crate) choice: u32,
    /// Leading blocks that the taker has: its own first, then those lent.
    pub(crate) count: usize,
    /// Blocks that the taker has room for; a request that would outgrow it is handed over first.
    pub(crate) room: usize,
    /// The taker has what was lent first: hand over at the next chance. `None` for one that was begun here for its taker: it
    /// is handed over with its first token.
    pub(crate) cut: Option<Arc<AtomicBool>>,
    /// Holds a message for each block, and two.
    pub(crate) lent: mpsc::Sender<LentLive>,
    /// What was full at the beginning is lent.
    pub(crate) begun: bool,
}

/// News of a request that leaves.
#[derive(Debug)]
pub(crate) enum LentLive {
    /// Its next full blocks; with `first`, all that were full when this began.
    Full { pins: Blocks, first: bool },
    /// The rest of its blocks; it has ended here.
    Last {
        pins: Blocks,
        tokens: Vec<TokenId>,
        computed: usize,
        /// When its last step here ended.
        left: Instant,
    },
    /// This answer ended here by itself, while others of its request go on.
    Over,
}

/// The blocks of one answer that comes.
#[derive(Debug)]
pub(crate) struct Luggage {
    /// Its first blocks, which were here.
    pub(crate) here: Blocks,
    /// Those that came.
    pub(crate) ready: Option<Blocks>,
    /// So many of its tokens lie in them.
    pub(crate) computed: usize,
}

/// A request that comes from another worker.
#[derive(Debug)]
pub(crate) struct TakenOver {
    pub(crate) submission: Submission,
    /// What each of its answers brings, in their order.
    pub(crate) luggage: Vec<Luggage>,
    /// When it ended there, by this clock, at the earliest; not told of one that was only begun there.
    pub(crate) paused: Option<Instant>,
    /// It is expected until these are dropped.
    pub(crate) coming: Vec<Coming>,
}

/// Running requests on their way to this worker.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(Mutex<Expected>);

#[derive(Debug, Default)]
struct Expected {
    /// Told to leave their worker, and not here yet.
    coming: usize,
    /// Since when one of them runs nowhere.
    since: Option<Instant>,
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, Expected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when the next step waits for them, if any runs nowhere.
    pub(crate) fn until(&self, patience: Duration) -> Option<Instant> {
        let mut expected = self.lock();
        if expected.coming == 0 {
            expected.since = None;
        }
        expected.since.map(|since| since + patience)
    }

    /// The step waits no longer, until another one has left its worker.
    pub(crate) fn lapse(&self) {
        self.lock().since = None;
    }
}

/// One of them, from the word that it shall leave until it is here or given up.
#[derive(Debug)]
pub(crate) struct Coming(Arc<Arrivals>);

impl Coming {
    pub(crate) fn new(arrivals: &Arc<Arrivals>) -> Self {
        arrivals.lock().coming += 1;
        Self(arrivals.clone())
    }

    /// It has left its worker.
    pub(crate) fn left(&self) {
        self.0.lock().since.get_or_insert_with(Instant::now);
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        let mut expected = self.0.lock();
        expected.coming = expected.coming.saturating_sub(1);
    }
}

/// The requests that leave; owned by the engine thread.
#[derive(Debug)]
pub(crate) struct Departures {
    returns: Arc<Returns>,
    leaving: Vec<Leaving>,
    /// Since when one is cut and waits for the others.
    gathers: Option<Instant>,
}

/// How long one that may go waits for others that are about to.
const TOGETHER_MAX: Duration = Duration::from_millis(250);

impl Departures {
    pub(crate) fn new(returns: Arc<Returns>) -> Self {
        Self { returns, leaving: Vec::new(), gathers: None }
    }

    /// Whether those that may go do so now. Together, they miss no step of each other at the next worker: one that comes
    /// there while another one's step is computed stands still for the length of it.
    fn together(&mut self, now: Instant) -> bool {
        let asked =
            || self.leaving.iter().filter_map(|leaving| leaving.cut.as_ref()).map(|cut| cut.load(Ordering::Acquire));
        if asked().all(|cut| !cut) {
            self.gathers = None;
            return false;
        }
        let since = *self.gathers.get_or_insert(now);
        let go = asked().all(|cut| cut) || now.saturating_duration_since(since) >= TOGETHER_MAX;
        if go {
            self.gathers = None;
        }
        go
    }

    pub(crate) fn begin(&mut self, leaving: Leaving) {
        self.leaving.push(leaving);
    }

    /// Requests of which every answer that still runs may go.
    fn whole(&self, ledger: &Ledger<mpsc::Sender<Delivery>>) -> Vec<RequestKey> {
        let cut = |leaving: &&Leaving| leaving.cut.as_ref().is_some_and(|cut| cut.load(Ordering::Acquire));
        let may = |key: RequestKey| self.leaving.iter().filter(cut).filter(move |leaving| leaving.key == key);
        let live = |leaving: &&Leaving| ledger.sequence(leaving.key, leaving.choice).is_some();
        let keys = self.leaving.iter().filter(cut).map(|leaving| leaving.key);
        keys.filter(|key| may(*key).filter(live).count() == ledger.live(*key)).collect()
    }

    /// Lends what became full, and hands over whoever is to go now. Called when every token of the last step is delivered.
    /// That step ended at `left`.
    pub(crate) fn serve(
        &mut self,
        engine: &mut dyn Engine,
        ledger: &mut Ledger<mpsc::Sender<Delivery>>,
        left: Instant,
    ) {
        let go = if self.together(left) { self.whole(ledger) } else { Vec::new() };
        let returns = &self.returns;
        self.leaving.retain_mut(|leaving| {
            // Dropping the watch says that nothing more comes: the request has ended, or its taker is gone.
            if leaving.lent.is_closed() {
                return false;
            }
            let key = leaving.key;
            let Some(id) = ledger.sequence(key, leaving.choice) else {
                if ledger.outbox(key).is_some() {
                    // A taker that has gone needs no news.
                    leaving.lent.try_send(LentLive::Over).ok();
                }
                return false;
            };
            let outgrown = leaving.count + 1 >= leaving.room;
            let goes = match &leaving.cut {
                Some(_) => go.contains(&key) || (outgrown && ledger.live(key) == 1),
                None => ledger.said(key) > 0,
            };
            if outgrown && !goes && leaving.cut.is_some() {
                // The others of its request have not caught up: it stays, and is asked again.
                return false;
            }
            if goes {
                let Some(gone) = engine.hand_over(id, leaving.count) else { return false };
                if let Some(outbox) = ledger.leave(key, id) {
                    // A client that has gone needs no news.
                    outbox.try_send(Delivery::Moved).ok();
                }
                let HandedOver { slots, tokens, computed } = gone;
                let last = LentLive::Last { pins: Blocks::new(slots, returns), tokens, computed, left };
                // A taker that has gone gives the pins back; the client asks for the request anew.
                leaving.lent.try_send(last).ok();
                return false;
            }
            let Some(slots) = engine.lend_live(id, leaving.count) else { return false };
            leaving.count += slots.len();
            let first = !std::mem::replace(&mut leaving.begun, true);
            if slots.is_empty() && !first {
                return true;
            }
            leaving.lent.try_send(LentLive::Full { pins: Blocks::new(slots, returns), first }).is_ok()
        });
    }
}
