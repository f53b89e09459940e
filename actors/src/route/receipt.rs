//! Why a request went where it went, and what came of it.
//!
//! Written by [`super::desk`]; read when somebody asks (`starling why`). They cross nodes as MessagePack. Bounds: the last
//! [`RECEIPTS_MAX`] decisions of a desk, each with at most [`CANDIDATES_MAX`] candidates.

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, RequestId, WorkerId};

use super::desk::Ticket;
use crate::generate::KvSource;

/// Decisions remembered.
pub const RECEIPTS_MAX: usize = 1_024;

/// Candidates written down per decision, the chosen one always among them.
pub const CANDIDATES_MAX: usize = 8;

/// One candidate as it was judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// Who.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Prefix blocks expected in its cache.
    pub hit_blocks: u32,
    /// Sequences in flight there.
    pub in_flight: u32,
    /// Prompt tokens queued there.
    pub queued_tokens: u64,
    /// Its cost, in the unit of the policy (milliseconds for `starling`).
    pub cost: f64,
    /// The cost by its terms.
    pub terms: Vec<(String, f64)>,
}

/// What came of a decision, as the client of the worker saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Prompt tokens taken from the cache.
    pub cached_tokens: u32,
    /// Tokens in the answer, all choices together.
    pub answer_tokens: u32,
    /// From the question to its first token, milliseconds.
    pub ttft_ms: f64,
    /// From the question to its end, milliseconds.
    pub total_ms: f64,
    /// How often it had to go on elsewhere.
    pub resumed: u32,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// For which request.
    pub request: RequestId,
    /// By which policy.
    pub policy: String,
    /// When, since the shard's node began to decide.
    pub at: Duration,
    /// Workers of the model.
    pub workers: u32,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// The cheapest candidates, cheapest first.
    pub candidates: Vec<Judged>,
    /// Index of the chosen one in `candidates`.
    pub chosen: usize,
    /// How many were as good as the cheapest.
    pub near_equals: usize,
    /// What came of it; `None` while it runs, or when it was refused or lost.
    pub outcome: Option<Outcome>,
    /// Workers passed over because they keep failing, each with `open` or `half-open`.
    #[serde(default)]
    pub cut_off: Vec<(WorkerId, String)>,
    /// How long the request waited for a worker with room, milliseconds.
    #[serde(default)]
    pub waited_ms: f64,
    /// Who answers and where its first blocks come from, when that is another worker.
    #[serde(default)]
    pub source: Option<(WorkerId, KvSource)>,
}

/// The last decisions.
#[derive(Debug, Default)]
pub struct Receipts {
    ring: VecDeque<(Ticket, Receipt)>,
}

impl Receipts {
    /// Remembers a decision, forgetting the oldest when full.
    pub fn push(&mut self, ticket: Ticket, receipt: Receipt) {
        if self.ring.len() == RECEIPTS_MAX {
            self.ring.pop_front();
        }
        self.ring.push_back((ticket, receipt));
    }

    /// Adds what came of a decision, if it is still remembered.
    pub fn ended(&mut self, ticket: Ticket, outcome: Outcome) {
        // Tickets rise, so the ring is sorted by them.
        if let Ok(at) = self.ring.binary_search_by(|(known, _)| known.cmp(&ticket)) {
            self.ring[at].1.outcome = Some(outcome);
        }
    }

    /// Adds how long a request waited before its decision.
    pub fn waited(&mut self, ticket: Ticket, time: Duration) {
        if let Ok(at) = self.ring.binary_search_by(|(known, _)| known.cmp(&ticket)) {
            self.ring[at].1.waited_ms = time.as_secs_f64() * 1e3;
        }
    }

    /// The decisions about one request, oldest first.
    #[must_use]
    pub fn of(&self, request: RequestId) -> Vec<Receipt> {
        self.ring.iter().map(|(_, receipt)| receipt).filter(|receipt| receipt.request == request).cloned().collect()
    }
}
