//! What a worker says about its blocks, and in which order a reader may believe it.
//!
//! [`EventCursor`] is called by the indexer with each batch of one worker as it comes; it decides what may be applied
//! now. Never: applies an event twice, skips one, or goes back. Bounds: [`HELD_MAX`] batches held while one is missing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, Incarnation, WorkerId};

use crate::index::Tier;

/// One change of a worker's sets of blocks: of those ready on its device, or of those on a tier below it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// Blocks became ready for reuse: a chain, each the child of the one before it.
    Stored {
        /// The block before the first one, `None` when that is a first block.
        parent: Option<BlockHash>,
        /// The chain.
        blocks: Vec<BlockHash>,
    },
    /// Blocks are gone. Order does not matter; children of a removed block may stay for a while.
    Removed {
        /// Which.
        blocks: Vec<BlockHash>,
    },
    /// All blocks are gone.
    Cleared,
    /// Blocks were stored on a lower tier: a chain, as with [`KvEvent::Stored`], whose beginning may lie elsewhere.
    StoredBelow {
        /// Which tier.
        tier: Tier,
        /// The block before the first one, `None` when that is a first block.
        parent: Option<BlockHash>,
        /// The chain.
        blocks: Vec<BlockHash>,
    },
    /// Blocks are gone from a lower tier.
    RemovedBelow {
        /// Which tier.
        tier: Tier,
        /// Which.
        blocks: Vec<BlockHash>,
    },
    /// All blocks are gone from a lower tier.
    ClearedBelow {
        /// Which tier.
        tier: Tier,
    },
}

/// Events of one worker, numbered. `seq` is the number of the first event; the next batch starts at `seq + events.len()`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventBatch {
    /// Whose.
    pub worker: WorkerId,
    /// In which life; batches of an earlier one are refused.
    pub incarnation: Incarnation,
    /// Number of the first event.
    pub seq: u64,
    /// The events.
    pub events: Vec<KvEvent>,
}

/// Batches held back for one worker while an earlier one is missing; more are dropped, the resync makes up for them.
pub const HELD_MAX: usize = 64;

/// What to do after a batch or an inventory came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ready {
    /// Events to apply now, in order.
    pub events: Vec<KvEvent>,
    /// Events missing: ask the worker for its inventory. True once per gap.
    pub resync: bool,
    /// Events that were known already.
    pub duplicates: usize,
}

/// Why a batch or an inventory is not for this cursor; nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("events of incarnation {given}, the cursor is in {current}")]
pub struct WrongIncarnation {
    /// The life it comes from.
    pub given: Incarnation,
    /// The life the cursor reads.
    pub current: Incarnation,
}

/// How far a reader has come in the events of one life of one worker.
#[derive(Debug, Clone)]
pub struct EventCursor {
    incarnation: Incarnation,
    /// Number of the event that comes next.
    next: u64,
    /// Batches after a gap, by number.
    held: BTreeMap<u64, Vec<KvEvent>>,
    /// An inventory has been asked for and has not come.
    resyncing: bool,
}

impl EventCursor {
    /// Nothing read yet: the first event is number 0.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, next: 0, held: BTreeMap::new(), resyncing: false }
    }

    /// Number of the event that comes next: the worker's own numbering, never another.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// True while events are missing. The caller asks again when the answer does not come in its time.
    #[must_use]
    pub fn has_gap(&self) -> bool {
        !self.held.is_empty() || self.resyncing
    }

    /// Takes a batch in.
    pub fn accept(&mut self, batch: EventBatch) -> Result<Ready, WrongIncarnation> {
        self.check(batch.incarnation)?;
        let mut ready = Ready::default();
        let end = batch.seq.saturating_add(batch.events.len() as u64);
        if end <= self.next {
            ready.duplicates = batch.events.len();
            return Ok(ready);
        }
        if batch.seq > self.next {
            ready.resync = !std::mem::replace(&mut self.resyncing, true);
            let longer = self.held.get(&batch.seq).is_none_or(|held| held.len() < batch.events.len());
            if longer && (self.held.len() < HELD_MAX || self.held.contains_key(&batch.seq)) {
                self.held.insert(batch.seq, batch.events);
            }
            return Ok(ready);
        }
        self.take(batch.seq, batch.events, &mut ready);
        self.drain(&mut ready);
        // The missing one was only late: the inventory, when it comes, has nothing new.
        self.resyncing &= !self.held.is_empty();
        Ok(ready)
    }

    /// An inventory came that holds all events before `next`. `None` when the reader is further than that already and must
    /// not apply it; else it replaces what the reader has, and the returned events follow it.
    pub fn resynced(&mut self, incarnation: Incarnation, next: u64) -> Result<Option<Ready>, WrongIncarnation> {
        self.check(incarnation)?;
        if next < self.next {
            return Ok(None);
        }
        self.next = next;
        let mut ready = Ready::default();
        self.drain(&mut ready);
        // What is held still waits for something that the inventory had not seen.
        self.resyncing = !self.held.is_empty();
        ready.resync = self.resyncing;
        Ok(Some(ready))
    }

    fn check(&self, given: Incarnation) -> Result<(), WrongIncarnation> {
        let current = self.incarnation;
        if given == current { Ok(()) } else { Err(WrongIncarnation { given, current }) }
    }

    /// Applies what is held and no longer waits.
    fn drain(&mut self, ready: &mut Ready) {
        while let Some(entry) = self.held.first_entry() {
            if *entry.key() > self.next {
                break;
            }
            let (seq, events) = entry.remove_entry();
            self.take(seq, events, ready);
        }
    }

    /// Events that begin at or before `next`: those known already are skipped.
    fn take(&mut self, seq: u64, mut events: Vec<KvEvent>, ready: &mut Ready) {
        let known = usize::try_from(self.next.saturating_sub(seq)).unwrap_or(usize::MAX).min(events.len());
        ready.duplicates += known;
        self.next += (events.len() - known) as u64;
        ready.events.extend(events.drain(known..));
    }
}
