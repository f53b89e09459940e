//! What a request may say, what a field's fault is called, and the limits, once.

use starling_actors::{
    engine::{ModelCard, SamplingParams, StopParams},
    generate::{GenerateError, GenerateSpec},
};
use starling_ids::TokenId;
use thiserror::Error;

use crate::openai::request::Params;

/// Most messages of one request.
pub const MESSAGES_MAX: usize = 4096;
/// Most prompts of one completions request.
pub const PROMPTS_MAX: usize = 128;
/// Most answers to one prompt.
pub const CHOICES_MAX: u32 = 16;
/// Most answers of one request, over all prompts.
pub const ANSWERS_MAX: usize = 256;
/// Most stop strings.
pub const STOPS_MAX: usize = 16;
/// Longest stop string in bytes.
pub const STOP_BYTES_MAX: usize = 1024;
/// Most stop token ids.
pub const STOP_TOKENS_MAX: usize = 64;
/// Most tokens with a bias.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Most likely tokens reported per position.
pub const TOP_LOGPROBS_MAX: u64 = 20;
/// Longest name, key or salt in bytes.
pub const NAME_BYTES_MAX: usize = 256;

/// Documented by OpenAI, or common elsewhere, and not offered here. A hint says which value would be.
pub const UNSUPPORTED: &[(&str, &str)] = &[
    ("tools", ": an empty list is"),
    ("tool_choice", ": only \"none\" is"),
    ("parallel_tool_calls", ""),
    ("functions", ""),
    ("function_call", ""),
    ("response_format", ": only {\"type\": \"text\"} is"),
    ("modalities", ": only [\"text\"] is"),
    ("audio", ""),
    ("prediction", ""),
    ("reasoning_effort", ""),
    ("verbosity", ""),
    ("web_search_options", ""),
    ("store", ": only false is"),
    ("service_tier", ": only \"auto\" and \"default\" are"),
    ("suffix", ""),
    ("guided_json", ""),
    ("guided_regex", ""),
    ("guided_choice", ""),
    ("guided_grammar", ""),
    ("structured_outputs", ""),
    ("chat_template", ""),
    ("chat_template_kwargs", ""),
    ("add_generation_prompt", ""),
    ("continue_final_message", ""),
    ("include_stop_str_in_output", ""),
    ("prompt_logprobs", ""),
    ("use_beam_search", ""),
    ("length_penalty", ""),
];

/// A field that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ValidateError {
    /// The body is not JSON, or nested too deep, or not UTF-8.
    #[error("the body is not valid JSON: {reason}")]
    Json {
        /// What the parser met, and where.
        reason: String,
        /// The field it was in, when there was one.
        param: Option<String>,
    },
    /// A field that must be there is not.
    #[error("`{0}` is required")]
    Missing(String),
    /// A value of another type.
    #[error("`{param}` must be {expected}, not {found}")]
    Type {
        /// The field.
        param: String,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// The right type, but not this value.
    #[error("`{param}` {rule}")]
    Value {
        /// The field.
        param: String,
        /// What it must be.
        rule: String,
    },
    /// A field that OpenAI knows and this server does not.
    #[error("`{param}` is not supported by this server{hint}")]
    Unsupported {
        /// The field.
        param: String,
        /// Which values would be fine; empty or starting with a colon.
        hint: &'static str,
    },
    /// A field that nobody knows.
    #[error("unknown field `{0}`")]
    Unknown(String),
    /// Prompt and answer do not fit together.
    #[error("this model's context length is {context} tokens; the prompt has {prompt} and `{param}` asks for {answer}")]
    Room {
        /// The field that asks for the answer.
        param: &'static str,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        answer: u32,
        /// The model's context length.
        context: usize,
    },
    /// The prompt alone leaves no room for a token.
    #[error("this model's context length is {context} tokens; the prompt has {prompt}")]
    Context {
        /// The field that holds the prompt.
        param: &'static str,
        /// Tokens of the prompt.
        prompt: usize,
        /// The model's context length.
        context: usize,
    },
}

impl ValidateError {
    /// A value that breaks a rule. The rule reads on from the field's name: `must be …`.
    #[must_use]
    pub fn value(param: impl Into<String>, rule: impl Into<String>) -> Self {
        Self::Value { param: param.into(), rule: rule.into() }
    }

    /// For programs.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Json { .. } => "invalid_json",
            Self::Missing(_) => "missing_required_parameter",
            Self::Type { .. } => "invalid_type",
            Self::Value { .. } => "invalid_value",
            Self::Unsupported { .. } => "unsupported_parameter",
            Self::Unknown(_) => "unknown_parameter",
            Self::Room { .. } | Self::Context { .. } => "context_length_exceeded",
        }
    }

    /// The field at fault.
    #[must_use]
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Json { param, .. } => param.as_deref(),
            Self::Missing(param) | Self::Unknown(param) => Some(param),
            Self::Type { param, .. } | Self::Value { param, .. } | Self::Unsupported { param, .. } => Some(param),
            Self::Room { param, .. } | Self::Context { param, .. } => Some(param),
        }
    }
}

/// Where a prompt came from, so that its faults name the field.
#[derive(Debug, Clone, Copy)]
pub struct PromptOrigin {
    /// `messages` or `prompt`.
    pub param: &'static str,
}

/// Joins a checked request and its prompt to what a worker is asked. `seed` is used when the client gave none.
pub fn spec(
    params: &Params,
    card: &ModelCard,
    prompt: Vec<TokenId>,
    origin: PromptOrigin,
    seed: u64,
) -> Result<GenerateSpec, ValidateError> {
    let context = card.context_length as usize;
    let room = context.saturating_sub(prompt.len());
    if room == 0 {
        return Err(ValidateError::Context { param: origin.param, prompt: prompt.len(), context });
    }
    known_tokens(origin.param, &prompt, card.vocab_size)?;
    known_tokens("stop_token_ids", &params.stop_token_ids, card.vocab_size)?;
    for (id, _) in &params.logit_bias {
        known_tokens("logit_bias", &[*id], card.vocab_size)?;
    }
    let tokens_max = match params.tokens_max {
        // No budget means the room that is left.
        None => u32::try_from(room).unwrap_or(u32::MAX),
        Some(budget) if budget.tokens as usize > room => {
            return Err(ValidateError::Room {
                param: budget.param,
                prompt: prompt.len(),
                answer: budget.tokens,
                context,
            });
        }
        Some(budget) => budget.tokens,
    };
    if params.tokens_min > tokens_max {
        return Err(ValidateError::value("min_tokens", format!("must be at most {tokens_max}, the token budget")));
    }
    Ok(GenerateSpec {
        so_far: Vec::new(),
        adapter: None,
        model: card.id.clone(),
        prompt,
        choices: params.choices,
        sampling: SamplingParams {
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            min_p: params.min_p,
            seed: params.seed.unwrap_or(seed),
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params.logit_bias.clone(),
        },
        stop: StopParams {
            tokens_max,
            tokens_min: params.tokens_min,
            token_ids: params.stop_token_ids.clone(),
            ignore_eos: params.ignore_eos,
        },
        logprobs: params.logprobs,
        cache_salt: params.cache_salt.clone(),
    })
}

fn known_tokens(param: &str, ids: &[TokenId], vocab: u32) -> Result<(), ValidateError> {
    match ids.iter().find(|id| **id >= vocab) {
        None => Ok(()),
        Some(id) => {
            Err(ValidateError::value(param, format!("holds token {id}; this model has tokens 0 to {}", vocab - 1)))
        }
    }
}

/// A worker's refusal of the prompt, with the field that the worker could not know.
pub fn name_field(error: GenerateError, origin: PromptOrigin) -> Result<ValidateError, GenerateError> {
    match error {
        GenerateError::ContextLength { prompt, context } => {
            Ok(ValidateError::Context { param: origin.param, prompt, context })
        }
        other => Err(other),
    }
}
