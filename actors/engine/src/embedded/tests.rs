//! Tests of the embedded engine as a whole: over a tiny made-up model, and over the default one.

mod continued;
mod exact;
mod files;
mod real_model;
mod tiny;

use starling_ids::TokenId;

use crate::backend::{Backend, Batch, BatchItem, BlockSlot, Row};

/// Feeds `tokens` in chunks of `chunk`, starting at position `start`; returns the logits after the last one.
fn feed(backend: &mut impl Backend, blocks: &[BlockSlot], tokens: &[TokenId], start: usize, chunk: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for (index, tokens) in tokens.chunks(chunk).enumerate() {
        let item = BatchItem { tokens, start: start + index * chunk, blocks, wants_logits: true };
        let computed = backend.forward(&Batch { items: vec![item] }).unwrap();
        logits = dense(computed.rows[0]);
    }
    logits
}

fn dense(row: Row<'_>) -> Vec<f32> {
    let Row::Dense(logits) = row else { panic!("a model that computes gives logits") };
    logits.to_vec()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

fn slots(from: u32, count: u32) -> Vec<BlockSlot> {
    (from..from + count).map(BlockSlot).collect()
}
