//! What a program needs to serve a language model of its own behind the cluster's gateways.
//!
//! A model is a [`Backend`] that computes batches: scheduling, paged cache, prefix reuse, streaming and cancellation are
//! the engine's. [`TextModel`] adds a tokenizer with one token a byte, so that a made-up model needs no file; a real one
//! implements [`LoadedModel`] with its own tokenizer. [`Node::start`] makes it a worker that routers find.

pub use starling_actors::{
    route::split::Role,
    tree::{Node, NodeError, NodeOptions, WorkerRole},
};
pub use starling_engine::{
    Capabilities, Engine, EngineError, EngineKind, EngineLimits, LoadError, LoadedModel, ModelCard, ModelOptions,
    TokenizerBundle,
    backend::{Backend, Batch, BatchItem, BlockSlot, Computed, Row},
    core::CoreEngine,
};
pub use starling_ids::TokenId;

use starling_engine::{KernelChoice, simulated::SimulatedModel};
use starling_ids::ModelId;

/// Cache that each engine of a [`TextModel`] is given, bytes.
const KV_BYTES: usize = 64 << 20;
/// Sequences computed in one step by each.
const SEQUENCES_MAX: u32 = 64;
/// Sequences queued at each.
const WAITING_MAX: u32 = 256;
/// Tokens computed in one step by each.
const BATCH_TOKENS_MAX: u32 = 2_048;

/// A model over bytes, whose next byte a [`Backend`] chooses. 32,768 tokens of context, a chat template included.
pub struct TextModel {
    card: ModelCard,
    bundle: TokenizerBundle,
    make: Box<dyn Fn() -> Box<dyn Engine> + Send + Sync>,
}

impl std::fmt::Debug for TextModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TextModel({})", self.card.id)
    }
}

impl TextModel {
    /// The token that ends an answer.
    pub const END: TokenId = 257;

    /// A model served as `name`; `make` builds the backend of each engine.
    ///
    /// # Errors
    /// [`LoadError::Options`] when the name cannot be one.
    pub fn new<B>(name: &str, make: impl Fn() -> B + Send + Sync + 'static) -> Result<Self, LoadError>
    where
        B: Backend + 'static,
    {
        let id = ModelId::new(name).map_err(|error| LoadError::Options(error.to_string()))?;
        let base = SimulatedModel::load(&ModelOptions {
            kind: EngineKind::Simulated,
            path: None,
            served_name: Some(id),
            threads: 1,
            kv_bytes: KV_BYTES,
            sequences_max: SEQUENCES_MAX,
            waiting_max: WAITING_MAX,
            batch_tokens_max: BATCH_TOKENS_MAX,
            kernel: KernelChoice::Auto,
            activations: starling_engine::Activations::default(),
        })?;
        let mut capabilities = base.engine().capabilities().clone();
        "custom".clone_into(&mut capabilities.card.architecture);
        let (card, bundle) = (capabilities.card.clone(), base.bundle().clone());
        let make = Box::new(move || Box::new(CoreEngine::new(make(), capabilities.clone())) as Box<dyn Engine>);
        Ok(Self { card, bundle, make })
    }

    /// The token of a byte.
    #[must_use]
    pub fn token(byte: u8) -> TokenId {
        TokenId::from(order().0[usize::from(byte)])
    }

    /// The byte of a token; `None` for those that begin and end messages.
    #[must_use]
    pub fn byte(token: TokenId) -> Option<u8> {
        order().1.get(usize::try_from(token).ok()?).copied()
    }
}

/// Token of each byte and byte of each token: visible Latin-1 first, as byte-level tokenizers number them.
fn order() -> &'static ([u8; 256], [u8; 256]) {
    static ORDER: std::sync::OnceLock<([u8; 256], [u8; 256])> = std::sync::OnceLock::new();
    ORDER.get_or_init(|| {
        let visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let all = || 0..=u8::MAX;
        let (mut tokens, mut bytes) = ([0; 256], [0; 256]);
        let numbered = (0..=u8::MAX).zip(all().filter(visible).chain(all().filter(|byte| !visible(byte))));
        for (token, byte) in numbered {
            tokens[usize::from(byte)] = token;
            bytes[usize::from(token)] = byte;
        }
        (tokens, bytes)
    })
}

impl LoadedModel for TextModel {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn bundle(&self) -> &TokenizerBundle {
        &self.bundle
    }

    fn engine(&self) -> Box<dyn Engine> {
        (self.make)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Silent;

    impl Backend for Silent {
        fn forward(&mut self, _batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
            Err(EngineError::Step("says nothing".to_owned()))
        }

        fn read_block(&self, _slot: BlockSlot) -> Vec<u8> {
            Vec::new()
        }

        fn write_block(&mut self, _slot: BlockSlot, _bytes: &[u8]) -> Result<(), EngineError> {
            Ok(())
        }
    }

    #[test]
    fn tokens_are_those_of_the_tokenizer_that_gateways_get() {
        let model = TextModel::new("silent", || Silent).unwrap();
        assert_eq!(model.card().eos_ids, [TextModel::END]);
        let bundle: serde_json::Value = serde_json::from_str(&model.bundle().tokenizer_json).unwrap();
        for byte in b'!'..=b'~' {
            assert_eq!(bundle["model"]["vocab"][char::from(byte).to_string()], TextModel::token(byte));
        }
        assert_eq!(bundle["model"]["vocab"]["\u{120}"], TextModel::token(b' '), "a space is written as U+0120");
        for byte in 0..=u8::MAX {
            assert_eq!(TextModel::byte(TextModel::token(byte)), Some(byte));
        }
        assert_eq!(TextModel::byte(TextModel::END), None);
        assert_eq!(model.engine().capabilities().card.id, ModelId::new("silent").unwrap());
    }
}
