//! The machine of a transfer: tickets on both sides, what each event does to them, who is served next. Pure.
//!
//! The side that has the blocks pins them under a [`HolderTicket`] ([`holder`]); the side that wants them reserves room
//! under a [`TakerTicket`] ([`taker`]) and pulls in turns that are fair between requests ([`fair`]). Called by the transfer
//! agent, which performs the effects. Never: I/O, a clock; time is an argument. Bounds: [`Limits`].
//!
//! Two rules carry the rest. Every ticket ends, by its lease if by nothing else, and its end gives every block back: pins
//! there, room here. And room that a transport may still write to is given back only when the transport has let go of it.

pub mod fair;
pub mod holder;
pub mod taker;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, WorkerId};
use starling_kv::pool::BlockSlot;

/// Names a ticket at the side that has the blocks. A different type than [`TakerTicket`], so that the two are never mixed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HolderTicket(pub u64);

/// Names a ticket at the side that wants the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TakerTicket(pub u64);

/// One life of one worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Party {
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
}

/// A block that is pinned for a ticket until the ticket ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// Its place in the chain that was asked for, from 0.
    pub index: u32,
    /// Where it lies in its holder's memory.
    pub slot: BlockSlot,
    /// xxh3-64 of its bytes.
    pub checksum: u64,
    /// Which of the ticket's grants covers it, counted from 0.
    pub wave: u32,
}

/// How a ticket ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum End {
    /// All that was wanted came.
    Complete,
    /// One side gave it up.
    Aborted,
    /// Its lease ran out.
    Expired,
    /// The other side is gone.
    PeerGone,
    /// A later attempt took its place.
    Superseded,
    /// A block's bytes were not those that were granted.
    Corrupt,
    /// A transport could not bring a block.
    Broken,
    /// By now it had been computed.
    Late,
}

impl End {
    /// One word, for metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Aborted => "aborted",
            Self::Expired => "expired",
            Self::PeerGone => "peer_gone",
            Self::Superseded => "superseded",
            Self::Corrupt => "corrupt",
            Self::Broken => "broken",
            Self::Late => "late",
        }
    }
}

/// Bounds of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long a ticket lasts after the last sign of life of the other side.
    pub lease: Duration,
    /// Tickets open at one time.
    pub tickets: usize,
    /// Tickets of one other worker.
    pub tickets_per_peer: usize,
    /// Transfers under way from one other worker.
    pub flights_per_peer: usize,
    /// Bytes of one transfer: what one request may have before it is the next one's turn.
    pub quantum: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(2),
            tickets: 1_024,
            tickets_per_peer: 128,
            flights_per_peer: 2,
            quantum: 8 << 20,
        }
    }
}

/// A message about a ticket that is not open, or of another attempt; it changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ticket is not open, or a later attempt took its place")]
pub struct NotOpen;
