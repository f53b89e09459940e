//! From a path to engines: one loaded model feeds every worker of its process.

use std::{path::PathBuf, sync::Arc};

use starling_ids::ModelId;
use starling_kv::layout::KvLayout;
use thiserror::Error;

use crate::{
    bundle::TokenizerBundle,
    contract::{Engine, ModelCard},
    embedded::EmbeddedModel,
    sidecar::Dialect,
    simulated::SimulatedModel,
};

/// Which engine computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// A real model on this machine's CPU.
    Embedded,
    /// A timing model; answers are made up.
    Simulated,
    /// A server in another process, which speaks this dialect.
    Sidecar(Dialect),
}

/// Which version of the embedded engine's inner loops runs. All give the same bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KernelChoice {
    /// The fastest that this CPU has and that passes its self-check.
    #[default]
    Auto,
    /// AVX-512 with VNNI.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain Rust, for any CPU; slow.
    Portable,
}

/// How the embedded engine rounds activations before it multiplies them with weights, per block of 32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activations {
    /// Eight bits, as llama.cpp does: faster, and answers turn where two tokens are about equally likely.
    Int8,
    /// Sixteen bits: answers are those of unrounded activations, but for near-ties of less than 0.05.
    #[default]
    Int16,
}

/// What to load and how large its engines are.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// Which engine.
    pub kind: EngineKind,
    /// A GGUF file or a Hugging Face folder. `None` is allowed for the simulated engine only.
    pub path: Option<PathBuf>,
    /// The name to serve it under; `None` derives it from the file.
    pub served_name: Option<ModelId>,
    /// Threads that compute, shared by all engines of this model; 0 means one per core.
    pub threads: usize,
    /// KV memory of each engine, bytes.
    pub kv_bytes: usize,
    /// Sequences decoded in one step by each engine.
    pub sequences_max: u32,
    /// Sequences queued at each engine.
    pub waiting_max: u32,
    /// Tokens computed in one step by each engine.
    pub batch_tokens_max: u32,
    /// Inner loops of the embedded engine; anything but `Auto` is for tests and measurements.
    pub kernel: KernelChoice,
    /// Precision of the embedded engine's inputs to products.
    pub activations: Activations,
}

/// What loading is doing, for a person who waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// `reading`, `repacking`, `checking`.
    pub stage: &'static str,
    /// Work done, 0 to 1.
    pub share: f32,
}

/// Why a model cannot be served. Each names the file and what would be right.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No such file, or it cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A model of another family.
    #[error("{path}: architecture {architecture:?} is not supported; supported: llama")]
    Architecture {
        /// The file.
        path: PathBuf,
        /// What it says it is.
        architecture: String,
    },
    /// Options that cannot work together.
    #[error("{0}")]
    Options(String),
}

/// Weights and tokenizer in memory, shared; cheap to clone.
pub trait LoadedModel: Send + Sync {
    /// The model.
    fn card(&self) -> &ModelCard;
    /// Its tokenizer and template.
    fn bundle(&self) -> &TokenizerBundle;
    /// A new engine with its own KV pool.
    fn engine(&self) -> Box<dyn Engine>;
    /// How its engines lay out a KV block, as far as that can be said; a worker that is refused blocks learns what differs.
    fn layout(&self) -> Option<KvLayout> {
        None
    }
    /// Names all that the numbers in its blocks depend on besides the weights and the order in which they lie: engines of equal
    /// ones compute the same numbers. 0 when that cannot be said; then its blocks are for engines of its own kind.
    fn numbers(&self) -> u64 {
        0
    }
}

/// Loads what `options` name. `progress` hears from it while it works; the call blocks for about a second per GB.
///
/// # Errors
/// Every [`LoadError`].
pub fn load(options: &ModelOptions, progress: &mut dyn FnMut(Progress)) -> Result<Arc<dyn LoadedModel>, LoadError> {
    match options.kind {
        EngineKind::Embedded => Ok(Arc::new(EmbeddedModel::load(options, progress)?)),
        EngineKind::Simulated => Ok(Arc::new(SimulatedModel::load(options)?)),
        EngineKind::Sidecar(dialect) => {
            Err(LoadError::Options(format!("{dialect}: the address of a server is needed, see SidecarModel::load")))
        }
    }
}
