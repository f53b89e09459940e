//! The two completion requests, read into types. Every field is used, or refused by its name.

use serde_json::Value;
use starling_ids::TokenId;

use crate::caller::{PRIORITY_MAX, PRIORITY_MIN};
use crate::openai::{
    fields::{Fields, integer_of, number_of, wrong},
    messages::{self, short_string},
    validate::{
        ANSWERS_MAX, CHOICES_MAX, LOGIT_BIAS_MAX, PROMPTS_MAX, STOP_BYTES_MAX, STOP_TOKENS_MAX, STOPS_MAX,
        TOP_LOGPROBS_MAX, UNSUPPORTED, ValidateError,
    },
};

/// Most tokens a budget may ask for; a model's context is smaller.
const BUDGET_MAX: i64 = 100_000_000;

/// A token budget and the field that set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// At least 1.
    pub tokens: u32,
    /// `max_tokens` or `max_completion_tokens`.
    pub param: &'static str,
}

/// How a reply is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// One JSON document.
    Unary,
    /// Server-sent events, closed by the usage when asked for.
    Stream {
        /// Send the usage before the end.
        include_usage: bool,
    },
}

/// What both kinds of request share.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    /// As the client wrote it; not empty.
    pub model: String,
    /// `None`: the room that is left.
    pub tokens_max: Option<Budget>,
    /// No end before this many tokens.
    pub tokens_min: u32,
    /// 0 to 2.
    pub temperature: f32,
    /// Above 0, to 1.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 to 1.
    pub min_p: f32,
    /// Chosen by the gateway when absent.
    pub seed: Option<u64>,
    /// Above 0, to 2.
    pub repetition_penalty: f32,
    /// -2 to 2.
    pub presence_penalty: f32,
    /// -2 to 2.
    pub frequency_penalty: f32,
    /// Token and bias, -100 to 100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// Tokens that end an answer.
    pub stop_token_ids: Vec<TokenId>,
    /// Go on past the model's own end.
    pub ignore_eos: bool,
    /// Leave control tokens out of the text.
    pub skip_special: bool,
    /// Answers per prompt.
    pub choices: u32,
    /// Log-probabilities, and of how many likeliest tokens.
    pub logprobs: Option<u8>,
    /// How to answer.
    pub delivery: Delivery,
    /// Requests of different salts share no cache.
    pub cache_salt: Option<String>,
    /// How urgent it is; lower goes first.
    pub priority: Option<i32>,
}

/// `POST /v1/chat/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The turns, as templates read them.
    pub messages: Vec<Value>,
    /// The rest.
    pub params: Params,
}

/// One prompt of a completions request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    /// To be tokenized.
    Text(String),
    /// Already tokenized; not empty.
    Tokens(Vec<TokenId>),
}

/// `POST /v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// One or more; the answers come in their order.
    pub prompts: Vec<PromptInput>,
    /// Begin each answer with its prompt.
    pub echo: bool,
    /// The rest.
    pub params: Params,
}

impl ChatRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ValidateError> {
        let mut fields = Fields::parse(body)?;
        let model = model(&mut fields)?;
        let turns = messages::read(fields.take("messages"))?;
        let budget = budget(&mut fields, "max_tokens")?;
        // The newer name wins when both are there.
        let budget = self::budget(&mut fields, "max_completion_tokens")?.or(budget);
        let wanted = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX as i64)?;
        if top.is_some() && !wanted {
            return Err(ValidateError::value("top_logprobs", "needs `logprobs` to be true"));
        }
        let logprobs = wanted.then_some(top.unwrap_or(0) as u8);
        chat_only(&mut fields)?;
        let params = shared(&mut fields, model, budget, logprobs)?;
        fields.finish(UNSUPPORTED)?;
        Ok(Self { messages: turns, params })
    }
}

impl CompletionRequest {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, ValidateError> {
        let mut fields = Fields::parse(body)?;
        let model = model(&mut fields)?;
        let prompts = prompts(fields.take("prompt"))?;
        let budget = budget(&mut fields, "max_tokens")?;
        let logprobs = fields.integer("logprobs", 0, TOP_LOGPROBS_MAX as i64)?.map(|count| count as u8);
        let echo = fields.boolean("echo")?.unwrap_or(false);
        if echo && logprobs.is_some() {
            return Err(ValidateError::value("echo", "cannot be combined with `logprobs` on this server"));
        }
        let params = shared(&mut fields, model, budget, logprobs)?;
        if prompts.len() * params.choices as usize > ANSWERS_MAX {
            return Err(ValidateError::value(
                "n",
                format!("asks for more than {ANSWERS_MAX} answers over all prompts"),
            ));
        }
        fields.finish(UNSUPPORTED)?;
        Ok(Self { prompts, echo, params })
    }
}

fn model(fields: &mut Fields) -> Result<String, ValidateError> {
    match fields.string("model")? {
        None => Err(ValidateError::Missing("model".into())),
        Some(name) if name.is_empty() => Err(ValidateError::value("model", "must not be empty")),
        Some(name) => Ok(name),
    }
}

fn budget(fields: &mut Fields, param: &'static str) -> Result<Option<Budget>, ValidateError> {
    let tokens = fields.integer(param, 1, BUDGET_MAX)?;
    Ok(tokens.map(|tokens| Budget { tokens: tokens as u32, param }))
}

/// Fields whose one harmless value is accepted, and any other refused.
fn chat_only(fields: &mut Fields) -> Result<(), ValidateError> {
    let mut only = |field: &'static str, harmless: &dyn Fn(&Value) -> bool| match fields.take(field) {
        None => Ok(()),
        Some(value) if harmless(&value) => Ok(()),
        Some(_) => {
            let hint = UNSUPPORTED.iter().find(|(name, _)| *name == field).map_or("", |(_, hint)| hint);
            Err(ValidateError::Unsupported { param: field.into(), hint })
        }
    };
    only("tools", &|value| value.as_array().is_some_and(Vec::is_empty))?;
    only("functions", &|value| value.as_array().is_some_and(Vec::is_empty))?;
    only("tool_choice", &|value| value == "none")?;
    only("function_call", &|value| value == "none")?;
    only("response_format", &|value| *value == serde_json::json!({"type": "text"}))?;
    only("modalities", &|value| *value == serde_json::json!(["text"]))?;
    only("store", &|value| *value == Value::Bool(false))?;
    only("service_tier", &|value| value == "auto" || value == "default")
}

fn shared(
    fields: &mut Fields,
    model: String,
    tokens_max: Option<Budget>,
    logprobs: Option<u8>,
) -> Result<Params, ValidateError> {
    identities(fields)?;
    let best_of = fields.integer("best_of", 1, i64::from(CHOICES_MAX))?;
    let choices = fields.integer("n", 1, i64::from(CHOICES_MAX))?.unwrap_or(1);
    if best_of.is_some_and(|count| count != choices) {
        return Err(ValidateError::Unsupported { param: "best_of".into(), hint: ": only the value of `n` is" });
    }
    Ok(Params {
        model,
        tokens_max,
        tokens_min: fields.integer("min_tokens", 0, BUDGET_MAX)?.unwrap_or(0) as u32,
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
        top_p: fields.positive("top_p", 1.0)?.unwrap_or(1.0),
        // -1 is another server's word for off.
        top_k: fields.integer("top_k", -1, BUDGET_MAX)?.unwrap_or(0).max(0) as u32,
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
        seed: fields.integer("seed", i64::MIN, i64::MAX)?.map(i64::cast_unsigned),
        repetition_penalty: fields.positive("repetition_penalty", 2.0)?.unwrap_or(1.0),
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(fields)?,
        stops: stops(fields)?,
        stop_token_ids: token_list(fields, "stop_token_ids", STOP_TOKENS_MAX)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        skip_special: fields.boolean("skip_special_tokens")?.unwrap_or(true),
        choices: choices as u32,
        logprobs,
        delivery: delivery(fields)?,
        cache_salt: short_string(fields, "cache_salt")?,
        priority: fields.integer("priority", i64::from(PRIORITY_MIN), i64::from(PRIORITY_MAX))?.map(|p| p as i32),
    })
}

/// Fields that say who asks. They are checked and have no bearing on the answer; prefixes are cached
/// whether or not a cache key is given.
fn identities(fields: &mut Fields) -> Result<(), ValidateError> {
    for field in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(field)?;
    }
    match fields.take("metadata") {
        None | Some(Value::Object(_)) => Ok(()),
        Some(other) => Err(wrong("metadata", "an object", &other)),
    }
}

fn delivery(fields: &mut Fields) -> Result<Delivery, ValidateError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(if stream { Delivery::Stream { include_usage: false } } else { Delivery::Unary });
    };
    if !stream {
        return Err(ValidateError::value("stream_options", "needs `stream` to be true"));
    }
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    // Padding against traffic analysis is not sent; asking for none is what there is.
    if options.boolean("include_obfuscation")? == Some(true) {
        return Err(ValidateError::Unsupported {
            param: "stream_options.include_obfuscation".into(),
            hint: ": only false is",
        });
    }
    options.finish(&[("continuous_usage_stats", "")])?;
    Ok(Delivery::Stream { include_usage })
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ValidateError> {
    let items = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(text @ Value::String(_)) => vec![text],
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong("stop", "a string or a list of strings", &other)),
    };
    if items.len() > STOPS_MAX {
        return Err(ValidateError::value("stop", format!("may hold at most {STOPS_MAX} strings, not {}", items.len())));
    }
    let one = |(index, item): (usize, Value)| match item {
        Value::String(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => Ok(text),
        Value::String(text) => {
            let rule = format!("strings must have 1 to {STOP_BYTES_MAX} bytes, not {}", text.len());
            Err(ValidateError::value("stop", rule))
        }
        other => Err(wrong(&format!("stop[{index}]"), "a string", &other)),
    };
    items.into_iter().enumerate().map(one).collect()
}

fn logit_bias(fields: &mut Fields) -> Result<Vec<(TokenId, f32)>, ValidateError> {
    let map = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong("logit_bias", "an object of token ids and biases", &other)),
    };
    if map.len() > LOGIT_BIAS_MAX {
        return Err(ValidateError::value("logit_bias", format!("may hold at most {LOGIT_BIAS_MAX} tokens")));
    }
    let one = |(key, value): (&String, &Value)| {
        let id = key.parse::<TokenId>().map_err(|_| {
            let shown: String = key.chars().take(40).collect();
            ValidateError::value("logit_bias", format!("keys must be token ids, not {shown:?}"))
        })?;
        Ok((id, number_of("logit_bias", value, -100.0, 100.0)?))
    };
    map.iter().map(one).collect()
}

fn token_list(fields: &mut Fields, field: &str, max: usize) -> Result<Vec<TokenId>, ValidateError> {
    let items = fields.list(field)?.unwrap_or_default();
    if items.len() > max {
        return Err(ValidateError::value(field, format!("may hold at most {max} tokens, not {}", items.len())));
    }
    tokens(field, &items)
}

fn tokens(param: &str, items: &[Value]) -> Result<Vec<TokenId>, ValidateError> {
    items.iter().map(|item| integer_of(param, item, 0, i64::from(u32::MAX)).map(|id| id as TokenId)).collect()
}

fn prompts(value: Option<Value>) -> Result<Vec<PromptInput>, ValidateError> {
    let items = match value {
        None => return Err(ValidateError::Missing("prompt".into())),
        Some(Value::String(text)) => return Ok(vec![PromptInput::Text(text)]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong("prompt", "a string, a list of strings, or token ids", &other)),
    };
    match items.first() {
        None => return Err(ValidateError::value("prompt", "must not be an empty list")),
        Some(Value::Number(_)) => return Ok(vec![PromptInput::Tokens(tokens("prompt", &items)?)]),
        Some(_) if items.len() > PROMPTS_MAX => {
            return Err(ValidateError::value("prompt", format!("may hold at most {PROMPTS_MAX} prompts")));
        }
        Some(_) => {}
    }
    let one = |(index, item): (usize, Value)| match item {
        Value::String(text) => Ok(PromptInput::Text(text)),
        Value::Array(ids) if !ids.is_empty() => Ok(PromptInput::Tokens(tokens(&format!("prompt[{index}]"), &ids)?)),
        Value::Array(_) => Err(ValidateError::value(format!("prompt[{index}]"), "must not be an empty list")),
        other => Err(wrong(&format!("prompt[{index}]"), "a string or a list of token ids", &other)),
    };
    items.into_iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests;
