//! The engine contract and the engines behind it.
//!
//! An engine turns prompts into tokens, one [`Engine::step`] at a time. It owns its scheduler, its block
//! pool and its KV memory; it owns no thread, no socket and no clock. The worker actor steps it, delivers
//! what a step returns and publishes its KV events. Two engines share one scheduler:
//! [`embedded`] computes a real model on the CPU, [`simulated`] predicts how long a step would take. [`sidecar`] fronts an
//! engine in another process, which has its own; it alone has a thread and sockets.

pub mod around;
pub mod backend;
pub mod bundle;
pub mod contract;
pub mod core;
pub mod embedded;
pub mod loader;
pub mod sampling;
pub mod scheduler;
pub mod sidecar;
pub mod simulated;

pub use bundle::TokenizerBundle;
pub use contract::{
    Capabilities, Engine, EngineError, EngineLimits, EngineLoad, FinishReason, Measured, ModelCard, SampledToken,
    SamplingParams, SequenceDelta, SequenceFault, SequenceId, SequenceRequest, StepOutput, StopParams, SubmitError,
    TokenLogprob, Waker,
};
pub use loader::{Activations, EngineKind, KernelChoice, LoadError, LoadedModel, ModelOptions, Progress, load};
