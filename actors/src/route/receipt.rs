//! Why a request went where it went.
//!
//! Called by [`super::decide`]; read by the router shard when somebody asks. Bounds: the last
//! [`RECEIPTS_MAX`] decisions, each with at most [`CANDIDATES_MAX`] candidates.

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, ModelId, RequestId, WorkerId};

use super::score::Terms;

/// Decisions remembered.
pub const RECEIPTS_MAX: usize = 1_024;

/// Candidates written down per decision, the chosen one always among them.
pub const CANDIDATES_MAX: usize = 16;

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
    /// Its cost, term by term.
    pub terms: Terms,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// For which request.
    pub request: RequestId,
    /// For which model.
    pub model: ModelId,
    /// When, since the shard began.
    pub at: Duration,
    /// The candidates, cheapest first.
    pub candidates: Vec<Judged>,
    /// Index of the chosen one in `candidates`.
    pub chosen: usize,
    /// How many were nearly equal to the cheapest.
    pub near_equals: usize,
}

/// The last decisions.
#[derive(Debug, Default)]
pub struct Receipts {
    ring: VecDeque<Receipt>,
}

impl Receipts {
    /// Remembers a decision, forgetting the oldest when full.
    pub fn push(&mut self, mut receipt: Receipt) {
        if let Some(chosen) = receipt.candidates.get(receipt.chosen).cloned() {
            receipt.candidates.sort_by(|a, b| a.terms.total().total_cmp(&b.terms.total()));
            receipt.chosen = receipt.candidates.iter().position(|judged| *judged == chosen).unwrap_or_default();
            if receipt.chosen >= CANDIDATES_MAX {
                receipt.candidates.swap(receipt.chosen, CANDIDATES_MAX - 1);
                receipt.chosen = CANDIDATES_MAX - 1;
            }
            receipt.candidates.truncate(CANDIDATES_MAX);
        }
        if self.ring.len() == RECEIPTS_MAX {
            self.ring.pop_front();
        }
        self.ring.push_back(receipt);
    }

    /// The decisions about one request, oldest first.
    #[must_use]
    pub fn of(&self, request: RequestId) -> Vec<Receipt> {
        self.ring.iter().filter(|receipt| receipt.request == request).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    fn receipt(request: u128, candidates: usize, chosen: usize) -> Receipt {
        let judged = |at: usize| Judged {
            worker: WorkerId { node: NodeId::new("n").expect("name"), index: at as u16 },
            incarnation: Incarnation(1),
            hit_blocks: 0,
            in_flight: 0,
            terms: Terms { queue: (candidates - at) as f64, ..Terms::default() },
        };
        Receipt {
            request: RequestId(request),
            model: ModelId::new("m").expect("name"),
            at: Duration::ZERO,
            candidates: (0..candidates).map(judged).collect(),
            chosen,
            near_equals: 1,
        }
    }

    #[test]
    fn the_ring_is_bounded_and_forgets_the_oldest() {
        let mut receipts = Receipts::default();
        for at in 0..=RECEIPTS_MAX {
            receipts.push(receipt(at as u128, 2, 1));
        }
        assert_eq!(receipts.ring.len(), RECEIPTS_MAX);
        assert!(receipts.of(RequestId(0)).is_empty());
        assert_eq!(receipts.of(RequestId(1)).len(), 1);
    }

    #[test]
    fn the_chosen_one_stays_when_candidates_are_cut() {
        let mut receipts = Receipts::default();
        receipts.push(receipt(1, 40, 0));
        let kept = &receipts.of(RequestId(1))[0];
        assert_eq!(kept.candidates.len(), CANDIDATES_MAX);
        assert_eq!(kept.candidates[kept.chosen].worker.index, 0);
        assert_eq!(kept.candidates[0].worker.index, 39, "cheapest first");
    }
}
