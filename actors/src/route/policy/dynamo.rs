//! NVIDIA Dynamo's published cost (documentation of its KV router, release 1.x), for comparison and for people who want it.
//!
//! In blocks, lower is better, for prompts of `ISL` tokens in blocks of `B`:
//!
//! ```text
//! prefill = k_prefill * max(0, (A + ISL) / B - (w_overlap * decay) * cached)
//! cost    = prefill + D + w_req * N
//! ```
//!
//! A: prompt tokens booked on the worker and not prefilled yet; D: distinct KV blocks it would hold for live requests, this
//! one's included; N: its requests; decay = 1 / (1 + decay_k * ((A - A_min) / B) / R) with R the request's blocks.
//! Booked for a chosen worker: `ISL - cached * B` tokens until its first token, its prompt's blocks until it ends.
//! Bounds: a count for each block of each live request.

use std::collections::HashMap;

use starling_ids::{BlockHash, RequestId};

use super::{Params, PolicyError, Question, Scorer};
use crate::route::{desk::Ask, fleet::Slot};

/// The constants, with Dynamo's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamoWeights {
    /// Credit for a cached block, blocks; at least 0.
    pub overlap: f64,
    /// How fast that credit decays with a worker's surplus of booked prompt tokens; 0 for not at all.
    pub overlap_decay: f64,
    /// Weight of prefill against decode.
    pub prefill: f64,
    /// Blocks for each active request.
    pub request: f64,
}

impl Default for DynamoWeights {
    fn default() -> Self {
        Self { overlap: 1.0, overlap_decay: 0.0, prefill: 1.0, request: 0.0 }
    }
}

impl DynamoWeights {
    pub(super) fn read(params: &mut Params) -> Result<Self, PolicyError> {
        let Self { overlap, overlap_decay, prefill, request } = Self::default();
        Ok(Self {
            overlap: params.number("overlap", 0.0..=1e6, overlap)?,
            overlap_decay: params.number("overlap-decay", 0.0..=1e6, overlap_decay)?,
            prefill: params.number("prefill", 0.0..=1e6, prefill)?,
            request: params.number("request", 0.0..=1e6, request)?,
        })
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Row {
    prefill_tokens: u64,
    requests: u32,
    /// Distinct blocks of its live requests.
    blocks: u32,
    /// Those of them that the present prompt has too.
    shared: u32,
}

#[derive(Debug)]
struct Live {
    tokens: u64,
    blocks: Vec<BlockHash>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Dynamo {
    weights: DynamoWeights,
    rows: Vec<Row>,
    live: HashMap<(RequestId, Slot), Live>,
    /// Who holds a block for live requests, and for how many of them, by slot.
    holders: HashMap<BlockHash, Vec<(Slot, u32)>>,
    lowest: u64,
}

impl Dynamo {
    /// With these constants.
    #[must_use]
    pub fn new(weights: DynamoWeights) -> Self {
        Self { weights, ..Self::default() }
    }

    fn row(&mut self, slot: Slot) -> &mut Row {
        if slot >= self.rows.len() {
            self.rows.resize(slot + 1, Row::default());
        }
        &mut self.rows[slot]
    }

    /// A request that held these blocks ended there.
    fn let_go(&mut self, blocks: &[BlockHash], slot: Slot) {
        for hash in blocks {
            let Some(holders) = self.holders.get_mut(hash) else { continue };
            let Ok(at) = holders.binary_search_by_key(&slot, |(holder, _)| *holder) else { continue };
            holders[at].1 -= 1;
            if holders[at].1 == 0 {
                holders.remove(at);
                self.rows[slot].blocks -= 1;
            }
            if holders.is_empty() {
                self.holders.remove(hash);
            }
        }
    }
}

impl Scorer for Dynamo {
    fn name(&self) -> &'static str {
        "dynamo"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        let width = question.fleet.width();
        if self.rows.len() < width {
            self.rows.resize(width, Row::default());
        }
        let rows = || self.rows.iter().enumerate().filter(|(slot, _)| question.fleet.life(*slot).is_some());
        self.lowest = rows().map(|(_, row)| row.prefill_tokens).min().unwrap_or(0);
        self.rows.iter_mut().for_each(|row| row.shared = 0);
        for holders in question.ask.hashes.iter().filter_map(|hash| self.holders.get(hash)) {
            for (slot, _) in holders {
                self.rows[*slot].shared += 1;
            }
        }
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        let ask = question.ask;
        let block = f64::from(ask.block_tokens.max(1));
        let row = self.rows.get(slot).copied().unwrap_or_default();
        let request_blocks = f64::from(ask.prompt_tokens) / block;
        let surplus = row.prefill_tokens.saturating_sub(self.lowest) as f64 / block;
        let decay = 1.0 / (1.0 + self.weights.overlap_decay * surplus / request_blocks.ceil().max(1.0));
        let cached = f64::from(question.hits[slot]);
        let booked = (row.prefill_tokens as f64 + f64::from(ask.prompt_tokens)) / block;
        let prefill = self.weights.prefill * (booked - self.weights.overlap * decay * cached).max(0.0);
        let new = ask.hashes.len().saturating_sub(row.shared as usize);
        // The last, partial block of a prompt is nobody else's.
        let partial = usize::from(ask.prompt_tokens as usize > ask.hashes.len() * ask.block_tokens as usize);
        let decode = (row.blocks as usize + row.requests as usize + new + partial) as f64;
        prefill + decode + self.weights.request * f64::from(row.requests)
    }

    fn reserved(&mut self, ask: &Ask<'_>, slot: Slot, hit_blocks: u32) {
        let cached = u64::from(hit_blocks) * u64::from(ask.block_tokens);
        let tokens = u64::from(ask.prompt_tokens).saturating_sub(cached);
        let row = self.row(slot);
        row.prefill_tokens += tokens;
        row.requests += 1;
        for hash in ask.hashes {
            let holders = self.holders.entry(*hash).or_default();
            match holders.binary_search_by_key(&slot, |(holder, _)| *holder) {
                Ok(at) => holders[at].1 += 1,
                Err(at) => {
                    holders.insert(at, (slot, 1));
                    self.rows[slot].blocks += 1;
                }
            }
        }
        self.live.insert((ask.request, slot), Live { tokens, blocks: ask.hashes.to_vec() });
    }

    fn prefilled(&mut self, request: RequestId, slot: Slot) {
        let Some(live) = self.live.get_mut(&(request, slot)) else { return };
        let tokens = std::mem::take(&mut live.tokens);
        self.row(slot).prefill_tokens -= tokens;
    }

    fn released(&mut self, request: RequestId, slot: Slot) {
        let Some(live) = self.live.remove(&(request, slot)) else { return };
        let row = self.row(slot);
        row.prefill_tokens -= live.tokens;
        row.requests -= 1;
        self.let_go(&live.blocks, slot);
    }

    fn vacated(&mut self, slot: Slot) {
        let gone = self.live.extract_if(|(_, at), _| *at == slot);
        let blocks: Vec<BlockHash> = gone.flat_map(|(_, live)| live.blocks).collect();
        self.let_go(&blocks, slot);
        *self.row(slot) = Row::default();
    }
}
