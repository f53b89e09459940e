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

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, RequestId};

use super::{Question, Scorer};
use crate::route::{desk::Ask, fleet::Slot};

/// The constants, with Dynamo's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
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

#[derive(Debug, Default)]
struct Row {
    prefill_tokens: u64,
    requests: u32,
    blocks: HashMap<BlockHash, u32>,
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
            self.rows.resize_with(slot + 1, Row::default);
        }
        &mut self.rows[slot]
    }
}

impl Scorer for Dynamo {
    fn name(&self) -> &'static str {
        "dynamo"
    }

    fn prepare(&mut self, question: &Question<'_>) {
        let booked = question.fleet.workers().map(|(_, slot)| self.rows.get(slot).map_or(0, |row| row.prefill_tokens));
        self.lowest = booked.min().unwrap_or(0);
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        let ask = question.ask;
        let block = f64::from(ask.block_tokens.max(1));
        let empty = Row::default();
        let row = self.rows.get(slot).unwrap_or(&empty);
        let request_blocks = f64::from(ask.prompt_tokens) / block;
        let surplus = row.prefill_tokens.saturating_sub(self.lowest) as f64 / block;
        let decay = 1.0 / (1.0 + self.weights.overlap_decay * surplus / request_blocks.ceil().max(1.0));
        let cached = f64::from(question.hits[slot]);
        let booked = (row.prefill_tokens as f64 + f64::from(ask.prompt_tokens)) / block;
        let prefill = self.weights.prefill * (booked - self.weights.overlap * decay * cached).max(0.0);
        let new = ask.hashes.iter().filter(|hash| !row.blocks.contains_key(hash)).count();
        // The last, partial block of a prompt is nobody else's.
        let partial = usize::from(ask.prompt_tokens as usize > ask.hashes.len() * ask.block_tokens as usize);
        let decode = (row.blocks.len() + row.requests as usize + new + partial) as f64;
        prefill + decode + self.weights.request * f64::from(row.requests)
    }

    fn reserved(&mut self, ask: &Ask<'_>, slot: Slot, hit_blocks: u32) {
        let cached = u64::from(hit_blocks) * u64::from(ask.block_tokens);
        let tokens = u64::from(ask.prompt_tokens).saturating_sub(cached);
        let row = self.row(slot);
        row.prefill_tokens += tokens;
        row.requests += 1;
        for hash in ask.hashes {
            *row.blocks.entry(*hash).or_insert(0) += 1;
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
        for hash in live.blocks {
            if let Some(count) = row.blocks.get_mut(&hash) {
                *count -= 1;
                if *count == 0 {
                    row.blocks.remove(&hash);
                }
            }
        }
    }

    fn vacated(&mut self, slot: Slot) {
        self.live.retain(|(_, at), _| *at != slot);
        *self.row(slot) = Row::default();
    }
}
