//! The embedded engine: a Llama-architecture model on this machine's CPU.
//!
//! A file becomes repacked weights once (`gguf`, `hf`, `weights`, `repack`); every engine of the process shares them
//! and one pool of threads (`compute`). An engine computes batches over its own cache (`forward`, `pass`, `kv_store`)
//! with kernels that give the same bits on every CPU (`kernels`). Called by [`crate::loader::load`].

mod compute;
mod config;
mod forward;
mod gguf;
mod gguf_model;
mod hf;
mod kernels;
mod kv_store;
mod matmul;
mod pass;
mod quant;
mod repack;
#[cfg(test)]
mod tests;
mod tokenizer;
mod weights;

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use memmap2::Mmap;
use starling_ids::{ModelId, TokenId};
use starling_kv::{
    hash::{HashSeed, SeedParts},
    layout::KvLayout,
};
use twox_hash::XxHash3_64;

pub use self::kernels::speed::{Gain as KernelGain, gains as kernel_gains};
use self::{
    compute::Pool,
    config::LlamaConfig,
    forward::{CpuBackend, Model},
    gguf_model::GgufModel,
    kernels::Kernels,
    kv_store::{BLOCK_TOKENS, KvShape},
    tokenizer::GgufTokenizer,
    weights::Tensors,
};
use crate::{
    bundle::TokenizerBundle,
    contract::{Capabilities, Engine, EngineLimits, ModelCard},
    core::CoreEngine,
    loader::{LoadError, LoadedModel, ModelOptions, Progress},
};

/// Fewer blocks hold no conversation.
const KV_BLOCKS_MIN: usize = 16;

/// A file or folder, opened and understood, weights still inside.
struct Opened {
    config: LlamaConfig,
    bundle: TokenizerBundle,
    eos_ids: Vec<TokenId>,
    tensors: Box<dyn Tensors>,
}

/// Weights and tokenizer of one model.
#[derive(Debug)]
pub struct EmbeddedModel {
    model: Arc<Model>,
    card: ModelCard,
    bundle: TokenizerBundle,
    options: ModelOptions,
}

/// Maps a file into memory.
fn map(path: &Path) -> Result<Mmap, LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read only; a file that another process truncates meanwhile ends this one with SIGBUS, as
    // with every program that maps its input.
    unsafe { Mmap::map(&file) }.map_err(io)
}

fn open(path: &Path) -> Result<Opened, LoadError> {
    if !path.is_dir() {
        return open_gguf(path);
    }
    let hf::HfFolder { config, bundle, eos_ids, tensors } = hf::open(path)?;
    Ok(Opened { config, bundle, eos_ids, tensors: Box::new(tensors) })
}

fn open_gguf(path: &Path) -> Result<Opened, LoadError> {
    let malformed = |reason| LoadError::Malformed { path: path.to_owned(), reason };
    let file = GgufModel::open(map(path)?).map_err(malformed)?;
    if file.architecture() != "llama" {
        let architecture = file.architecture().to_owned();
        return Err(LoadError::Architecture { path: path.to_owned(), architecture });
    }
    let GgufTokenizer { bundle, eos_ids, vocab } = GgufTokenizer::build(file.header()).map_err(malformed)?;
    let config = file.config(vocab).map_err(malformed)?;
    Ok(Opened { config, bundle, eos_ids, tensors: Box::new(file) })
}

/// What an engine borrows of a real model whose weights it does not read.
pub(crate) struct Borrowed {
    pub(crate) bundle: TokenizerBundle,
    pub(crate) eos_ids: Vec<TokenId>,
    pub(crate) vocab_size: u32,
    pub(crate) context_length: u32,
}

/// The tokenizer of a model file or folder, without its weights.
pub(crate) fn bundle_from(path: &Path) -> Result<Borrowed, LoadError> {
    let Opened { config, bundle, eos_ids, .. } = open(path)?;
    let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    Ok(Borrowed { bundle, eos_ids, vocab_size: narrow(config.vocab), context_length: narrow(config.context) })
}

/// The tokenizer of a model of any architecture, which an engine elsewhere computes: weights are not looked at.
pub(crate) fn voice_from(path: &Path) -> Result<Borrowed, LoadError> {
    if path.is_dir() {
        return hf::voice(path);
    }
    let malformed = |reason| LoadError::Malformed { path: path.to_owned(), reason };
    let file = GgufModel::open(map(path)?).map_err(malformed)?;
    let GgufTokenizer { bundle, eos_ids, vocab } = GgufTokenizer::build(file.header()).map_err(malformed)?;
    let key = format!("{}.context_length", file.architecture());
    let context = file.header().unsigned(&key).ok_or_else(|| malformed(format!("metadata {key:?} is missing")))?;
    let (vocab_size, context_length) =
        (u32::try_from(vocab).unwrap_or(u32::MAX), u32::try_from(context).unwrap_or(u32::MAX));
    Ok(Borrowed { bundle, eos_ids, vocab_size, context_length })
}

/// The name a folder or file suggests: a file's stem without the suffix that tells the quantization.
pub(crate) fn suggested_name(path: &Path) -> Result<ModelId, LoadError> {
    // `.` has a name only once it is resolved; a link keeps its own, it may point at a hash.
    let resolved = if path.file_name().is_none() { path.canonicalize().ok() } else { None };
    let full = resolved.unwrap_or_else(|| path.to_owned());
    let part = if full.is_dir() { full.file_name() } else { full.file_stem() };
    let stem = part.unwrap_or(path.as_os_str()).to_string_lossy();
    let is_quantization = |suffix: &str| {
        let mut chars = suffix.chars();
        let first = chars.next().map(|c| c.to_ascii_uppercase());
        let digit = chars.next().is_some_and(|c| c.is_ascii_digit());
        matches!(first, Some('Q' | 'F')) && digit || suffix.eq_ignore_ascii_case("bf16")
    };
    let name = match stem.rsplit_once(['.', '-']) {
        Some((name, suffix)) if is_quantization(suffix) && !name.is_empty() => name,
        _ => &stem,
    };
    ModelId::new(name).map_err(|error| LoadError::Options(format!("{error}; give the model a name")))
}

impl EmbeddedModel {
    /// Opens, checks and repacks the model at `options.path`.
    ///
    /// # Errors
    /// Every [`LoadError`]; each names the file and what would be right.
    pub fn load(options: &ModelOptions, progress: &mut dyn FnMut(Progress)) -> Result<Self, LoadError> {
        let missing = || LoadError::Options("the embedded engine needs a model file".to_owned());
        let path: PathBuf = options.path.clone().ok_or_else(missing)?;
        progress(Progress { stage: "reading", share: 0.0 });
        let opened = open(&path)?;
        let kernels = Kernels::choose(options.kernel).map_err(LoadError::Options)?;
        let pool = Pool::new(options.threads);
        let mut heard = |share| progress(Progress { stage: "repacking", share });
        let weights = weights::load(&*opened.tensors, &opened.config, &pool.turn(), &mut heard)
            .map_err(|reason| LoadError::Malformed { path: path.clone(), reason })?;
        let id = options.served_name.clone().map_or_else(|| suggested_name(&path), Ok)?;
        let bundle_digest = opened.bundle.digest();
        let seed = SeedParts { model: id.as_str(), tokenizer_digest: &bundle_digest, ..SeedParts::default() };
        let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let card = ModelCard {
            hash_seed: HashSeed::new(seed),
            id,
            architecture: "llama".to_owned(),
            context_length: narrow(opened.config.context),
            vocab_size: narrow(opened.config.vocab),
            block_tokens: narrow(BLOCK_TOKENS),
            bundle_digest,
            eos_ids: opened.eos_ids,
        };
        tracing::info!(model = %card.id, kernels = kernels.name, threads = pool.width(), "model loaded");
        let model = Arc::new(Model { config: opened.config, weights, kernels, pool, activations: options.activations });
        progress(Progress { stage: "checking", share: 1.0 });
        Ok(Self { model, card, bundle: opened.bundle, options: options.clone() })
    }

    /// The kernels in use: `avx512`, `avx2` or `portable`.
    #[must_use]
    pub fn kernels(&self) -> &'static str {
        self.model.kernels.name
    }

    /// Threads that compute.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.model.pool.width()
    }

    /// Bytes of one KV block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        KvShape::of(&self.model.config).block_bytes()
    }

    /// A backend alone, without a scheduler, with the blocks that `kv_bytes` pays for, and their number.
    ///
    /// # Errors
    /// When the system has no address space for the cache.
    pub fn backend(&self) -> Result<(CpuBackend, u32), std::io::Error> {
        let blocks = (self.options.kv_bytes / self.block_bytes()).max(KV_BLOCKS_MIN).min(u32::MAX as usize);
        Ok((CpuBackend::new(Arc::clone(&self.model), blocks)?, blocks as u32))
    }

    /// Names all that a block's bytes depend on, except the weights, which the model's name stands for.
    fn layout_digest(&self) -> u64 {
        self.digest("layer, head, keys [dim][16], values [16][dim]; ")
    }

    fn digest(&self, order: &str) -> u64 {
        let c = &self.model.config;
        let angles: Vec<u8> = c.rotary.iter().flat_map(|angle| angle.to_le_bytes()).collect();
        let (bytes, angles) = (if cfg!(target_endian = "little") { "le" } else { "be" }, XxHash3_64::oneshot(&angles));
        let activations = self.options.activations;
        let text = format!(
            "embedded 1; f16 {bytes}; {order}{} layers, {} heads, {} dim; pairs {angles:016x}; {activations:?}",
            c.layers, c.kv_heads, c.head_dim
        );
        XxHash3_64::oneshot(text.as_bytes())
    }
}

impl LoadedModel for EmbeddedModel {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn layout(&self) -> Option<KvLayout> {
        Some(KvShape::of(&self.model.config).layout())
    }

    fn numbers(&self) -> u64 {
        self.digest("")
    }

    fn bundle(&self) -> &TokenizerBundle {
        &self.bundle
    }

    fn engine(&self) -> Box<dyn Engine> {
        let (backend, kv_blocks) = self.backend().unwrap_or_else(|error| {
            tracing::error!(%error, "no memory for keys and values: the engine will refuse every prompt");
            (CpuBackend::without_cache(Arc::clone(&self.model)), 0)
        });
        let limits = EngineLimits {
            sequences_max: self.options.sequences_max,
            waiting_max: self.options.waiting_max,
            batch_tokens_max: self.options.batch_tokens_max,
            kv_blocks,
        };
        let capabilities = Capabilities { card: self.card.clone(), layout_digest: self.layout_digest(), limits };
        Box::new(CoreEngine::new(backend, capabilities))
    }
}
