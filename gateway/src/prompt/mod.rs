//! From messages to token ids. Pure but for `cache`, which loads a model's tokenizer once.

mod cache;
pub mod model;
pub mod python;
pub mod special;
pub mod template;
pub mod words;

use thiserror::Error;

pub(crate) use cache::PromptModels;
pub use model::PromptModel;

/// Why a prompt could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PromptError {
    /// A base model has no chat form.
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The model's template refuses these messages, or cannot show part of them.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// A message says something that the template would leave out.
    #[error("this model's chat template cannot show {field}")]
    NotShown {
        /// What.
        field: &'static str,
        /// In which field of the request.
        param: String,
    },
    /// Nothing is left to complete.
    #[error("the prompt is empty")]
    Empty,
    /// The tokenizer gives up on this text.
    #[error("the text cannot be tokenized: {0}")]
    Untokenizable(String),
    /// The model's own files are at fault, not the request.
    #[error("the model's {part} cannot be used: {reason}")]
    Model {
        /// `tokenizer` or `chat template`.
        part: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}
