//! The streams of one link by id: at which stage each is, and where its frames go.
//!
//! Lies under the one lock of [`super::mux`]. Never waits. Bounds: [`limits::STREAMS_PER_LINK_MAX`] streams (held by
//! who inserts), and [`limits::LINK_UNREAD_BYTES`] unread in all of them together ([`Table::largest_unread`]).

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hasher},
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{
    incoming::Violation,
    mux::{Ended, OpenError},
    outgoing::Outgoing,
};
use crate::{
    stream::{
        Context, Opened,
        inbox::{Delivery, Inbox},
        lane::Lane,
    },
    wire::{Closing, StreamId, limits},
};

pub(super) type Answer = oneshot::Sender<Result<Opened, OpenError>>;
pub(super) type Deadline = Option<tokio::time::Instant>;

/// Unread bytes are counted anew each time this many have arrived, so they stay below the limit in between.
const COUNT_EVERY: usize = limits::LINK_UNREAD_BYTES / 4;

/// How far a stream has come.
pub(super) enum Stage {
    /// Opened by this side, not answered.
    Asking(Box<Asking>),
    /// Opened by the other side, not answered.
    Asked,
    Open,
}

/// What an opener has waiting.
pub(super) struct Asking {
    pub(super) answer: Answer,
    pub(super) context: Context,
    pub(super) deadline: Deadline,
}

pub(super) struct Entry {
    pub(super) stage: Stage,
    /// The reader's queue; none once that direction is over.
    pub(super) inbox: Option<Arc<Inbox>>,
    /// The sender's credits; none once that direction is over.
    pub(super) lane: Option<Arc<Lane>>,
}

impl Entry {
    pub(super) fn new(stage: Stage) -> Self {
        Self { stage, inbox: None, lane: None }
    }

    fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Open) && self.inbox.is_none() && self.lane.is_none()
    }
}

pub(super) struct Table {
    pub(super) streams: HashMap<StreamId, Entry, StreamHashes>,
    pub(super) next: StreamId,
    pub(super) ended: Option<Ended>,
    /// Close with this reason as soon as there are no streams.
    pub(super) retiring: Option<Closing>,
    pub(super) empty_since: Instant,
    /// Payload bytes that arrived since unread ones were counted.
    arrived: usize,
}

impl Table {
    /// For a link whose own opens begin with the id `next`.
    pub(super) fn new(next: StreamId, now: Instant) -> Self {
        let streams = HashMap::with_hasher(StreamHashes(rand::random()));
        Self { streams, next, ended: None, retiring: None, empty_since: now, arrived: 0 }
    }

    /// Hands a frame to its reader. True when unread bytes should be counted.
    pub(super) fn deliver(&mut self, stream: StreamId, payload: Bytes) -> Result<bool, Violation> {
        let Some(entry) = self.streams.get(&stream) else { return Ok(false) };
        let Some(inbox) = &entry.inbox else {
            // A reader that has gone has sent its cancel.
            return if matches!(entry.stage, Stage::Open) {
                Ok(false)
            } else {
                Err(Violation("data before an accept"))
            };
        };
        let len = payload.len();
        if inbox.deliver(payload) == Delivery::Over {
            return Err(Violation("more data than the window allows"));
        }
        self.arrived += len;
        Ok(self.arrived > COUNT_EVERY)
    }

    /// The reader of the other side gave credits back.
    pub(super) fn credit(&self, stream: StreamId, amount: u32) {
        if let Some(lane) = self.streams.get(&stream).and_then(|entry| entry.lane.as_ref()) {
            lane.grant(amount);
        }
    }

    /// Counts what lies unread. When that is near the link's limit: the streams that hold the most, as many as it takes
    /// to be well below it again.
    pub(super) fn largest_unread(&mut self) -> Vec<StreamId> {
        self.arrived = 0;
        let held = |(stream, entry): (&StreamId, &Entry)| entry.inbox.as_ref().map(|inbox| (inbox.held(), *stream));
        let mut held: Vec<(usize, StreamId)> = self.streams.iter().filter_map(held).collect();
        let mut total: usize = held.iter().map(|(bytes, _)| bytes).sum();
        held.sort_unstable_by(|a, b| b.cmp(a));
        // Until the next count a portion may arrive, and the frame that completes it.
        let keep = limits::LINK_UNREAD_BYTES - COUNT_EVERY - limits::FRAME_PAYLOAD_MAX;
        let mut too_much = Vec::new();
        for (bytes, stream) in held {
            if total <= keep {
                break;
            }
            total -= bytes;
            too_much.push(stream);
        }
        too_much
    }

    pub(super) fn drop_if_over(&mut self, stream: StreamId, out: &Outgoing) {
        if self.streams.get(&stream).is_some_and(Entry::is_over) {
            self.streams.remove(&stream);
            self.note_empty(out);
        }
    }

    pub(super) fn note_empty(&mut self, out: &Outgoing) {
        if self.streams.is_empty() {
            self.empty_since = Instant::now();
            if let (None, Some(why)) = (&self.ended, self.retiring.clone()) {
                self.say_goodbye(why, out);
            }
        }
    }

    pub(super) fn say_goodbye(&mut self, why: Closing, out: &Outgoing) {
        self.ended = Some(Ended { reason: format!("closed by this side: {why:?}").into(), orderly: true });
        out.goodbye(why);
    }
}

/// Hashes stream ids with one multiplication and a key of this link, so that a peer cannot choose ids that collide.
#[derive(Clone, Copy)]
pub(super) struct StreamHashes(u64);

pub(super) struct StreamHash {
    key: u64,
    hash: u64,
}

impl BuildHasher for StreamHashes {
    type Hasher = StreamHash;

    fn build_hasher(&self) -> StreamHash {
        StreamHash { key: self.0, hash: 0 }
    }
}

impl Hasher for StreamHash {
    fn finish(&self) -> u64 {
        self.hash
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, id: u32) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.key ^ self.hash.rotate_left(32) ^ u64::from(id)) * u128::from(ODD);
        #[allow(clippy::cast_possible_truncation)] // both halves are folded
        let folded = product as u64 ^ (product >> 64) as u64;
        self.hash = folded;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_a_row_spread_over_all_bits_of_their_hashes() {
        for key in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            let hashes = StreamHashes(key);
            let seen: std::collections::HashSet<(u64, u64)> =
                (0..4096u32).map(|n| hashes.hash_one(2 * n + 1)).map(|hash| (hash >> 57, hash & 0xfff)).collect();
            assert!(seen.len() > 3800, "{key}: {}", seen.len());
        }
    }
}
