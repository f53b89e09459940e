//! An engine's messages in their order, over a socket that loses some.
//!
//! The engine's PUB socket drops what a slow reader does not take, and everything before it is there; its replay socket sends again
//! what it still has. [`Feed`] finds the gap, says from where to ask, holds what came after, and when the replay cannot close it
//! forgets what it knew: a router that expects too little loses a little time, one that expects blocks that are gone loses more.
//! Bounds: [`HELD_MESSAGES_MAX`] messages while one is missing.

use std::collections::BTreeMap;

use super::{Adapter, BlockTokensDiffer, EngineEvent};
use crate::events::KvEvent;

/// Messages held while an earlier one is missing; with more the gap is given up.
pub const HELD_MESSAGES_MAX: usize = 4096;

/// By which socket a message came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// By the one that publishes. There numbers only go back when the engine was started again.
    Live,
    /// By the one that repeats.
    Replayed,
}

/// What follows from a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Events in our words, in order.
    pub events: Vec<KvEvent>,
    /// Messages are missing: ask for all from this number on. Set once per gap.
    pub replay_from: Option<u64>,
}

/// See the module.
#[derive(Debug)]
pub struct Feed {
    adapter: Adapter,
    /// Number of the message that comes next.
    next: u64,
    held: BTreeMap<u64, Vec<EngineEvent>>,
    asked: bool,
    gaps: u64,
}

impl Feed {
    /// Nothing read: the engine's first message is number 0, and is asked for when a later one comes first.
    #[must_use]
    pub fn new(adapter: Adapter) -> Self {
        Self { adapter, next: 0, held: BTreeMap::new(), asked: false, gaps: 0 }
    }

    /// What is known.
    #[must_use]
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// Gaps that no replay closed: each time everything known before was forgotten.
    #[must_use]
    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    /// A message came. One that was read already changes nothing.
    ///
    /// # Errors
    /// The engine's blocks do not fit; the message is skipped.
    pub fn message(&mut self, seq: u64, events: Vec<EngineEvent>, by: Arrival) -> Result<Step, BlockTokensDiffer> {
        let mut step = Step::default();
        if seq < self.next {
            if by == Arrival::Replayed {
                return Ok(step);
            }
            // Started again, with an empty cache.
            self.adapter.clear(&mut step.events);
            self.held.clear();
            (self.next, self.asked) = (0, false);
        }
        self.held.entry(seq).or_insert(events);
        self.drain(&mut step.events)?;
        if self.held.is_empty() {
            self.asked = false;
        } else if self.held.len() > HELD_MESSAGES_MAX {
            self.give_up(&mut step.events)?;
        } else if !std::mem::replace(&mut self.asked, true) {
            step.replay_from = Some(self.next);
        }
        Ok(step)
    }

    /// The replay is over, or there is none: what is still missing is lost.
    ///
    /// # Errors
    /// As with [`Self::message`].
    pub fn replay_ended(&mut self) -> Result<Step, BlockTokensDiffer> {
        let mut step = Step::default();
        self.give_up(&mut step.events)?;
        Ok(step)
    }

    fn give_up(&mut self, out: &mut Vec<KvEvent>) -> Result<(), BlockTokensDiffer> {
        while let Some(first) = self.held.keys().next().copied() {
            self.gaps += 1;
            self.adapter.clear(out);
            self.next = first;
            self.drain(out)?;
        }
        self.asked = false;
        Ok(())
    }

    /// Applies what is held and no longer waits.
    fn drain(&mut self, out: &mut Vec<KvEvent>) -> Result<(), BlockTokensDiffer> {
        while let Some(events) = self.held.remove(&self.next) {
            self.next += 1;
            for event in &events {
                self.adapter.apply(event, out)?;
            }
        }
        Ok(())
    }
}
