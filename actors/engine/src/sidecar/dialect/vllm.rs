//! vLLM: `/v1/completions` with a prompt of token ids and `return_token_ids` (0.10.2 and later).
//!
//! How many prompt tokens were cached comes with the usage at the end, from a server with `--enable-prompt-tokens-details`.
//! A priority is not sent: servers that do not schedule by it refuse it.

use serde_json::{Map, Value, json};
use starling_ids::TokenId;

use super::{Call, Chunk, End, Reader, Setting, count, draw_seed, fault, salt, token, tokens, tokens_min};
use crate::contract::{SampledToken, SequenceRequest, TokenLogprob};

pub(super) fn write(request: &SequenceRequest, setting: &Setting<'_>) -> Call {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let mut body = json!({
        "prompt": &*request.prompt,
        "max_tokens": stop.tokens_max,
        "min_tokens": tokens_min(request),
        "stop_token_ids": &stop.token_ids,
        "ignore_eos": stop.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stream": true,
        "stream_options": {"include_usage": true},
        "return_token_ids": true,
        "skip_special_tokens": false,
        "add_special_tokens": false,
    });
    let mut more = Map::new();
    if let Some(model) = setting.model {
        more.insert("model".to_owned(), json!(model));
    }
    if let Some(seed) = draw_seed(request) {
        more.insert("seed".to_owned(), json!(seed));
    }
    if let Some(salt) = salt(request, setting.seed) {
        more.insert("cache_salt".to_owned(), json!(salt));
    }
    if let Some(top) = request.logprobs {
        more.insert("logprobs".to_owned(), json!(top));
        // Else tokens that are written alike could not be told apart.
        more.insert("return_tokens_as_token_ids".to_owned(), json!(true));
    }
    if !sampling.logit_bias.is_empty() {
        let bias = sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)));
        more.insert("logit_bias".to_owned(), bias.collect::<Map<_, _>>().into());
    }
    if let Some(body) = body.as_object_mut() {
        body.extend(more);
    }
    Call { path: "/v1/completions", body }
}

/// Reads an answer. Its last chunk is kept until the usage has come.
#[derive(Debug, Default)]
pub(super) struct Answer {
    last: Option<Chunk>,
    cached: Option<u32>,
}

impl Reader for Answer {
    fn read(&mut self, data: &Value) -> Result<Chunk, String> {
        if let Some(end) = fault(data) {
            return Ok(Chunk { end: Some(end), ..Chunk::default() });
        }
        self.cached = count(&data["usage"]["prompt_tokens_details"]["cached_tokens"]).or(self.cached);
        let Some(choice) = data["choices"].get(0) else { return Ok(Chunk::default()) };
        let ids = &choice["token_ids"];
        if ids.is_null() && choice["text"].as_str().is_some_and(|text| !text.is_empty()) {
            return Err("text came without token_ids: vLLM 0.10.2 or later is needed".to_owned());
        }
        let ids = if ids.is_null() { Vec::new() } else { tokens(ids)? };
        let sampled = sampled(&ids, &choice["logprobs"])?;
        let end = match choice["finish_reason"].as_str() {
            None => return Ok(Chunk { tokens: sampled, ..Chunk::default() }),
            Some("stop") => End::Stop { told: !sampled.is_empty() },
            Some("length") => End::Length,
            Some(other) => return Err(format!("the answer ended with finish_reason {other:?}")),
        };
        self.last = Some(Chunk { tokens: sampled, cached: None, end: Some(end) });
        Ok(Chunk::default())
    }

    fn close(&mut self) -> Chunk {
        let last = self.last.take().unwrap_or_default();
        Chunk { cached: self.cached, ..last }
    }
}

/// Tokens with what is told of their probabilities.
fn sampled(ids: &[TokenId], told: &Value) -> Result<Vec<SampledToken>, String> {
    let logprobs = told["token_logprobs"].as_array();
    let one = |(at, id): (usize, &TokenId)| {
        let logprob = logprobs.and_then(|list| list.get(at)?.as_f64()).map(|value| value as f32);
        let top = told["top_logprobs"].get(at).and_then(Value::as_object);
        let mut top = top.map_or(Ok(Vec::new()), |top| top.iter().map(likely).collect::<Result<Vec<_>, _>>())?;
        top.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        Ok(SampledToken { id: *id, logprob, top })
    };
    ids.iter().enumerate().map(one).collect()
}

/// `token_id:17` and its logarithm.
fn likely((name, logprob): (&String, &Value)) -> Result<TokenLogprob, String> {
    let id = name.strip_prefix("token_id:").and_then(|id| id.parse::<u64>().ok());
    let id = token(&id.map_or(Value::Null, Value::from)).map_err(|_| format!("{name:?} names no token"))?;
    Ok(TokenLogprob { id, logprob: logprob.as_f64().unwrap_or(f64::NEG_INFINITY) as f32 })
}
