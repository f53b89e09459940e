//! What is said to a server and what it answers, for each kind of server. Pure.
//!
//! [`write()`] makes the one HTTP call of a sequence, a [`Reader`] reads the events of its answer. What a server cannot be given is
//! named by [`unsupported`] and refused before anything is sent. Called by `engine` and `call`. Never: leaves out a wish silently.
//!
//! A continued answer is sent as a longer prompt with less budget. No server knows which part of a prompt was an answer, so what
//! looks back over the answer begins anew there: presence and frequency penalties (llama.cpp's count the prompt, too), and the
//! draws of a seed. Repetition penalties, greedy answers and answers without penalties go on exactly. `tokens_min` is lessened.

mod llama_cpp;
mod openai;
mod sglang;
mod vllm;

use std::sync::Arc;

use serde_json::{Value, json};
use starling_ids::TokenId;
use starling_kv::hash::HashSeed;

use super::{Dialect, words::Words};
use crate::contract::{SampledToken, SequenceFault, SequenceRequest};

/// One HTTP call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    /// Below the server's address.
    pub(super) path: &'static str,
    /// What is posted.
    pub(super) body: Value,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// By an end token. `told` says that it is the last token of the chunk.
    Stop {
        /// See the variant.
        told: bool,
    },
    /// Its budget or the context is used up.
    Length,
    /// Not as it should.
    Fault(SequenceFault),
}

/// News of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Chunk {
    /// New tokens.
    pub(super) tokens: Vec<SampledToken>,
    /// Prompt tokens that the server had cached.
    pub(super) cached: Option<u32>,
    /// Set on the last one.
    pub(super) end: Option<End>,
}

/// Reads one answer.
pub(super) trait Reader: Send {
    /// The data of one event. An error says what is wrong with it.
    fn read(&mut self, data: &Value) -> Result<Chunk, String>;
    /// The server said that nothing more comes, or closed the stream.
    fn close(&mut self) -> Chunk;
}

/// What a call needs to know beside its sequence.
pub(super) struct Setting<'a> {
    /// What the server calls its model, where it must be said.
    pub(super) model: Option<&'a str>,
    /// The tokenizer.
    pub(super) words: &'a Arc<Words>,
    /// The model's own seed; a sequence with another one has a cache of its own.
    pub(super) seed: HashSeed,
}

/// The name of what a sequence asks for and this server cannot be given.
pub(super) fn unsupported(dialect: Dialect, request: &SequenceRequest, seed: HashSeed) -> Option<&'static str> {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let salted = request.hash_seed != seed;
    let asks: &[(bool, &'static str)] = match dialect {
        Dialect::Vllm | Dialect::Sglang => &[],
        Dialect::LlamaCpp => &[(salted, "cache_salt"), (stop.tokens_min > 0, "min_tokens")],
        Dialect::OpenAi => &[
            (salted, "cache_salt"),
            (stop.tokens_min > 0, "min_tokens"),
            (stop.ignore_eos, "ignore_eos"),
            (!stop.token_ids.is_empty(), "stop_token_ids"),
            (!sampling.logit_bias.is_empty(), "logit_bias"),
            (sampling.top_k > 0, "top_k"),
            (sampling.min_p > 0.0, "min_p"),
            (sampling.repetition_penalty != 1.0, "repetition_penalty"),
            (request.logprobs.is_some(), "logprobs"),
        ],
    };
    asks.iter().find(|(asked, _)| *asked).map(|(_, name)| *name)
}

/// The call of a sequence.
///
/// # Errors
/// The prompt cannot be written as text, where it must be.
pub(super) fn write(dialect: Dialect, request: &SequenceRequest, setting: &Setting<'_>) -> Result<Call, String> {
    Ok(match dialect {
        Dialect::Vllm => vllm::write(request, setting),
        Dialect::Sglang => sglang::write(request, setting),
        Dialect::LlamaCpp => llama_cpp::write(request),
        Dialect::OpenAi => openai::write(request, setting)?,
    })
}

/// What reads the answer to it.
pub(super) fn reader(dialect: Dialect, request: &SequenceRequest, words: &Arc<Words>) -> Box<dyn Reader> {
    match dialect {
        Dialect::Vllm => Box::new(vllm::Answer::default()),
        Dialect::Sglang => Box::new(sglang::Answer::new(request.logprobs)),
        Dialect::LlamaCpp => Box::new(llama_cpp::Answer::new(words.clone(), request.logprobs)),
        Dialect::OpenAi => Box::new(openai::Answer::new(words.clone())),
    }
}

/// Where a server says how it cuts text into tokens, and with which body; `None` for one that does not.
pub(super) fn tokenize(dialect: Dialect, model: Option<&str>, text: &str) -> Option<Call> {
    let body = match dialect {
        Dialect::Vllm => json!({"model": model, "prompt": text, "add_special_tokens": false}),
        Dialect::Sglang => json!({"prompt": text, "add_special_tokens": false}),
        Dialect::LlamaCpp => json!({"content": text, "add_special": false}),
        Dialect::OpenAi => return None,
    };
    Some(Call { path: "/tokenize", body })
}

/// The salt by which a server keeps the cache of one seed apart. It names the seed, so that the server's events can be read.
pub(super) fn salt(request: &SequenceRequest, seed: HashSeed) -> Option<String> {
    (request.hash_seed != seed).then(|| format!("{SALT}{:032x}", request.hash_seed.0))
}

const SALT: &str = "starling-";

/// The seed that a salt of ours names.
pub(super) fn seed_of(salt: &str) -> Option<HashSeed> {
    let digits = salt.strip_prefix(SALT).filter(|digits| digits.len() == 32)?;
    u128::from_str_radix(digits, 16).ok().map(HashSeed)
}

/// `tokens_min` counts the answer from its beginning, of which some may be in the prompt.
fn tokens_min(request: &SequenceRequest) -> u32 {
    request.stop.tokens_min.saturating_sub(request.answered).min(request.stop.tokens_max)
}

/// A seed that a server takes: 63 bits, none for a greedy answer, which draws nothing.
fn draw_seed(request: &SequenceRequest) -> Option<u64> {
    // A continued answer must not draw again what its beginning drew.
    let seed = request.sampling.seed.wrapping_add(u64::from(request.answered).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (request.sampling.temperature > 0.0).then_some(seed & (u64::MAX >> 1))
}

/// A token id.
fn token(value: &Value) -> Result<TokenId, String> {
    let id = value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    id.ok_or_else(|| format!("{value} is no token id"))
}

/// A list of token ids.
fn tokens(value: &Value) -> Result<Vec<TokenId>, String> {
    let list = value.as_array().ok_or_else(|| "a list of token ids is missing".to_owned())?;
    list.iter().map(token).collect()
}

fn plain(ids: &[TokenId]) -> Vec<SampledToken> {
    ids.iter().map(|id| SampledToken { id: *id, logprob: None, top: Vec::new() }).collect()
}

/// A count.
fn count(value: &Value) -> Option<u32> {
    value.as_u64().map(|count| u32::try_from(count).unwrap_or(u32::MAX))
}

/// What a server says of a fault, however it wraps it; at most 300 characters.
pub(super) fn message(value: &Value) -> Option<String> {
    let error = &value["error"];
    let text = [&error["message"], error, &value["message"], &value["detail"]].into_iter().find_map(Value::as_str);
    let text = text.map(str::to_owned).or_else(|| value["detail"].is_array().then(|| value["detail"].to_string()));
    text.map(|text| text.chars().take(300).collect())
}

/// An event that says that the answer failed.
fn fault(value: &Value) -> Option<End> {
    let error = value.get("error").filter(|error| !error.is_null())?;
    let said = message(value).unwrap_or_else(|| "the server failed".to_owned());
    let code = error["code"].as_u64().or_else(|| value["code"].as_u64());
    Some(End::Fault(match code {
        Some(400 | 413 | 422) => SequenceFault::Refused(said),
        Some(429 | 503) => SequenceFault::Busy(said),
        _ => SequenceFault::Gone(said),
    }))
}

#[cfg(test)]
mod tests;
