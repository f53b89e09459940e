//! The engine over a backend that gives logits, some of them broken.

use std::sync::Arc;

use starling_ids::{ModelId, TokenId};
use starling_kv::hash::HashSeed;

use super::*;
use crate::{
    backend::BlockSlot,
    contract::{EngineLimits, FinishReason, ModelCard, SamplingParams, StopParams},
};

const VOCAB: usize = 64;
/// After this token the logits are not numbers.
const POISON: TokenId = 63;

/// Logits depend on the last token and its position; the likeliest is the last token plus one.
#[derive(Debug, Default)]
struct Dense {
    logits: Vec<f32>,
    rows_missing: bool,
}

impl Backend for Dense {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        self.logits.clear();
        for item in batch.items.iter().filter(|item| item.wants_logits) {
            let last = item.tokens.last().copied().unwrap_or(0);
            let poisoned = if last == POISON { f32::NAN } else { 0.0 };
            let near = |id: usize| -((id as f32 - last as f32 - 1.0).abs()) + poisoned;
            self.logits.extend((0..VOCAB).map(near));
        }
        let keep = self.logits.len() / VOCAB - usize::from(self.rows_missing);
        let rows = self.logits.chunks_exact(VOCAB).take(keep).map(Row::Dense).collect();
        Ok(Computed { rows, takes: Duration::ZERO })
    }

    fn read_block(&self, _: BlockSlot) -> Vec<u8> {
        vec![1]
    }

    fn write_block(&mut self, _: BlockSlot, bytes: &[u8]) -> Result<(), EngineError> {
        if bytes == [1] { Ok(()) } else { Err(EngineError::Block("not one byte".into())) }
    }
}

fn engine(backend: Dense) -> CoreEngine<Dense> {
    let card = ModelCard {
        id: ModelId::new("m").expect("name"),
        architecture: "test".into(),
        context_length: 100,
        vocab_size: VOCAB as u32,
        block_tokens: 4,
        bundle_digest: String::new(),
        eos_ids: vec![40],
        hash_seed: HashSeed(1),
    };
    let limits = EngineLimits { sequences_max: 4, waiting_max: 4, batch_tokens_max: 16, kv_blocks: 64 };
    CoreEngine::new(backend, Capabilities { card, layout_digest: 5, limits })
}

fn request(id: u64, prompt: &[TokenId], tokens_max: u32) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(id),
        prompt: Arc::from(prompt),
        answered: 0,
        hash_seed: HashSeed(1),
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max, tokens_min: 0, token_ids: vec![], ignore_eos: false },
        logprobs: None,
        priority: 0,
    }
}

fn finish(engine: &mut CoreEngine<Dense>) -> Vec<SequenceDelta> {
    let mut deltas = Vec::new();
    loop {
        let output = engine.step().expect("step");
        if output.idle {
            return deltas;
        }
        deltas.extend(output.deltas);
    }
}

fn ids(deltas: &[SequenceDelta], id: u64) -> Vec<TokenId> {
    deltas.iter().filter(|delta| delta.id.0 == id).flat_map(|delta| delta.tokens.iter().map(|token| token.id)).collect()
}

#[test]
fn broken_logits_end_their_own_sequence_with_an_error() {
    let mut engine = engine(Dense::default());
    engine.submit(request(1, &[10, 11, 12, 13, 14], 3)).expect("room");
    engine.submit(request(2, &[20, 21, 22, 23, POISON], 3)).expect("room");
    let deltas = finish(&mut engine);
    assert_eq!(ids(&deltas, 1), [15, 16, 17]);
    let broken: Vec<_> = deltas.iter().filter(|delta| delta.id.0 == 2).collect();
    assert_eq!((broken.len(), broken[0].tokens.len(), broken[0].finish), (1, 0, Some(FinishReason::Error)));
    assert_eq!(engine.inventory().len(), 1, "the block of the other one only");
    assert!(engine.choosers.is_empty());
}

#[test]
fn the_token_that_ends_an_answer_is_reported_with_it() {
    let mut engine = engine(Dense::default());
    engine.submit(request(1, &[38], 9)).expect("room");
    engine.submit(request(2, &[38], 1)).expect("room");
    let mut beyond = request(3, &[38], 4);
    (beyond.stop.ignore_eos, beyond.stop.token_ids) = (true, vec![41]);
    engine.submit(beyond).expect("room");
    let deltas = finish(&mut engine);
    let ends: Vec<_> = deltas.iter().filter_map(|delta| Some((delta.id.0, delta.finish?))).collect();
    assert_eq!(ends, [(2, FinishReason::Length), (1, FinishReason::Stop), (3, FinishReason::Stop)]);
    assert_eq!((ids(&deltas, 1), ids(&deltas, 2), ids(&deltas, 3)), (vec![39, 40], vec![39], vec![39, 40, 41]));
    assert!(deltas.iter().take(3).all(|delta| delta.cached_tokens == Some(0)));
}

#[test]
fn sampling_is_the_same_in_a_batch_and_continued() {
    let sampled = |id: u64, prompt: &[TokenId], tokens_max: u32| {
        let sampling = SamplingParams { temperature: 1.0, top_p: 0.95, seed: 7, ..SamplingParams::greedy() };
        let mut request = SequenceRequest { sampling, ..request(id, prompt, tokens_max) };
        request.stop.ignore_eos = true;
        request
    };
    let mut alone = engine(Dense::default());
    alone.submit(sampled(1, &[5, 6], 20)).expect("room");
    let whole = ids(&finish(&mut alone), 1);
    if whole.contains(&POISON) {
        panic!("choose another seed");
    }
    let mut batch = engine(Dense::default());
    batch.submit(request(2, &[1; 30], 9)).expect("room");
    batch.submit(sampled(1, &[5, 6], 20)).expect("room");
    assert_eq!(ids(&finish(&mut batch), 1), whole);
    batch.submit(sampled(3, &[&[5, 6], &whole[..8]].concat(), 12)).expect("room");
    assert_eq!(ids(&finish(&mut batch), 3), whole[8..]);
}

#[test]
fn a_backend_that_loses_a_row_is_a_fault() {
    let mut engine = engine(Dense { rows_missing: true, ..Dense::default() });
    engine.submit(request(1, &[1], 1)).expect("room");
    assert!(matches!(engine.step(), Err(EngineError::Step(_))));
}

#[test]
fn an_idle_engine_says_so() {
    let mut engine = engine(Dense::default());
    assert!(engine.step().expect("step").idle);
    assert!(!engine.cancel(SequenceId(9)));
    assert_eq!(engine.load(), EngineLoad { blocks_total: 64, ..EngineLoad::default() });
}
