//! Blocks on their way between an engine and transfers: guards, and what the engine thread does with them.
//!
//! Called by the engine thread between two steps and by the transfer agent. A block that is lent or reserved lies in a
//! [`Blocks`], whose drop gives it back: whoever is aborted, wherever, leaks none. Never: waits.
//! Bounds: the engine lends at most half of its pool; one watch per open ticket.

use std::sync::{Arc, mpsc::SyncSender};

use starling_engine::{Engine, Waker, backend::BlockSlot};
use starling_ids::{BlockHash, TokenId};
use starling_kv::{hash::HashSeed, pool::ReturnBin};
use tokio::sync::{mpsc, oneshot};

use super::{
    ledger::RequestKey,
    port::{Command, Submission},
};

/// Blocks that nobody holds any more, on their way back to the engine.
#[derive(Debug)]
pub(crate) struct Returns {
    bin: ReturnBin,
    wake: SyncSender<Command>,
}

impl Returns {
    pub(crate) fn new(wake: SyncSender<Command>) -> Arc<Self> {
        Arc::new(Self { bin: ReturnBin::default(), wake })
    }

    /// Gives blocks back at the engine's next turn.
    pub(crate) fn push(&self, slots: &[BlockSlot]) {
        // A full channel wakes the thread as well; a closed one has no pool any more.
        self.bin.push(slots, || drop(self.wake.try_send(Command::Wake)));
    }

    /// What wakes the thread for news of its engine.
    pub(crate) fn waker(&self) -> Waker {
        let wake = self.wake.clone();
        // A full channel wakes the thread as well.
        Arc::new(move || drop(wake.try_send(Command::Wake)))
    }

    /// All since the last call. Cheap when there are none.
    pub(crate) fn take(&self) -> Vec<BlockSlot> {
        self.bin.take()
    }
}

/// Lent or reserved blocks; dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Blocks {
    slots: Vec<BlockSlot>,
    returns: Arc<Returns>,
}

impl Blocks {
    pub(crate) fn new(slots: Vec<BlockSlot>, returns: &Arc<Returns>) -> Self {
        Self { slots, returns: returns.clone() }
    }

    pub(crate) fn slots(&self) -> &[BlockSlot] {
        &self.slots
    }

    /// The first so many of them, as a guard of their own.
    pub(crate) fn split_front(&mut self, count: usize) -> Self {
        let rest = self.slots.split_off(count.min(self.slots.len()));
        Self::new(std::mem::replace(&mut self.slots, rest), &self.returns)
    }

    /// Hands them to somebody who gives them back otherwise.
    pub(crate) fn take(mut self) -> Vec<BlockSlot> {
        std::mem::take(&mut self.slots)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.returns.push(&self.slots);
    }
}

/// A chain whose blocks are lent as they become ready.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Of the full blocks of `tokens` that are wanted.
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) tokens: Arc<[TokenId]>,
    /// The request that computes them; without one only what is here is lent.
    pub(crate) work: Option<RequestKey>,
    /// Holds a message for each block.
    pub(crate) lent: mpsc::Sender<Lent>,
    /// Blocks lent so far.
    pub(crate) count: usize,
}

/// The next blocks of a chain.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) pins: Blocks,
    /// No more will come.
    pub(crate) sealed: bool,
}

/// A chain of which a part is to come from elsewhere.
#[derive(Debug)]
pub(crate) struct RoomAsk {
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) tokens: Arc<[TokenId]>,
    /// Room beside that of the chain.
    pub(crate) extra: usize,
    pub(crate) reply: oneshot::Sender<Option<Room>>,
}

/// What is here of it, pinned, and room for the rest.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) here: Blocks,
    pub(crate) room: Blocks,
}

/// Blocks that came from elsewhere, and what to do then.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// Those before them.
    pub(crate) here: Option<Blocks>,
    /// Place of the first one in the chain of `tokens`.
    pub(crate) first: usize,
    pub(crate) ready: Option<Blocks>,
    pub(crate) seed: HashSeed,
    pub(crate) tokens: Arc<[TokenId]>,
    pub(crate) then: Option<Box<Submission>>,
}

/// The chains that are being lent; owned by the engine thread.
#[derive(Debug)]
pub(crate) struct Lending {
    returns: Arc<Returns>,
    watches: Vec<Watch>,
}

impl Lending {
    pub(crate) fn new(returns: Arc<Returns>) -> Self {
        Self { returns, watches: Vec::new() }
    }

    /// Takes returned blocks back.
    pub(crate) fn collect(&self, engine: &mut dyn Engine) {
        let given = self.returns.take();
        if !given.is_empty() {
            engine.give_back(&given);
        }
    }

    /// Begins to lend a chain.
    pub(crate) fn watch(&mut self, watch: Watch) {
        self.watches.push(watch);
    }

    /// Lends what became ready. `live` says whether a request still computes.
    pub(crate) fn serve(&mut self, engine: &mut dyn Engine, live: impl Fn(RequestKey) -> bool) {
        let returns = &self.returns;
        self.watches.retain_mut(|watch| {
            if watch.lent.is_closed() {
                return false;
            }
            let slots = engine.lend(&watch.hashes, &watch.tokens, watch.count);
            watch.count += slots.len();
            let sealed = watch.count == watch.hashes.len() || !watch.work.is_some_and(&live);
            if slots.is_empty() && !sealed {
                return true;
            }
            // It has room for a message a block; one that is closed gives the pins back.
            watch.lent.try_send(Lent { pins: Blocks::new(slots, returns), sealed }).is_ok() && !sealed
        });
    }

    /// Pins the beginning of a chain that is here and reserves room for the rest of it.
    pub(crate) fn room(&self, engine: &mut dyn Engine, ask: RoomAsk) {
        let here = Blocks::new(engine.lend(&ask.hashes, &ask.tokens, 0), &self.returns);
        let lacking = ask.hashes.len() - here.slots().len();
        let room = engine.reserve(lacking + ask.extra).map(|slots| Blocks::new(slots, &self.returns));
        // An asker that has gone gives both back.
        ask.reply.send(room.map(|room| Room { here, room })).ok();
    }

    /// Makes blocks that came known.
    pub(crate) fn adopt(&self, engine: &mut dyn Engine, arrived: &mut Arrived) {
        if let Some(ready) = arrived.ready.take() {
            let slots = ready.take();
            // One that is filled in part is of no use without the rest of its request.
            let full = arrived.tokens.len() / (engine.capabilities().card.block_tokens as usize).max(1);
            let (whole, part) = slots.split_at(slots.len().min(full.saturating_sub(arrived.first)));
            engine.adopt(arrived.seed, &arrived.tokens, arrived.first, whole);
            engine.give_back(part);
        }
        if let Some(here) = arrived.here.take() {
            engine.give_back(&here.take());
        }
    }
}
