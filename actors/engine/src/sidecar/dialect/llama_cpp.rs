//! llama.cpp's server: `/completion` with a prompt of token ids, answers with `tokens`.
//!
//! A character that is written in several tokens comes with the last of them alone; the others are found again by the model's own
//! tokenizer. They are right when the model wrote the character as the tokenizer does, and always spell the same text. Those of a
//! character that the budget cut off are lost. A token that ends an answer is kept back until the server says why it ended.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Call, Chunk, End, Reader, count, draw_seed, fault, plain, token, tokens};
use crate::{
    contract::{SampledToken, SequenceRequest, TokenLogprob},
    sidecar::words::Words,
};

pub(super) fn write(request: &SequenceRequest) -> Call {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let bias: Vec<Value> = sampling.logit_bias.iter().map(|(id, bias)| json!([id, bias])).collect();
    let mut body = json!({
        "prompt": &*request.prompt,
        "n_predict": stop.tokens_max,
        "ignore_eos": stop.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        // All of it: newer servers take no word for that.
        "repeat_last_n": request.prompt.len() + stop.tokens_max as usize,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": bias,
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        "cache_prompt": true,
        "stream": true,
        "return_tokens": true,
        "timings_per_token": true,
    });
    if let Some(seed) = draw_seed(request) {
        // 32 bits, of which the highest value means a seed by chance.
        body["seed"] = json!((seed ^ (seed >> 32)) % u64::from(u32::MAX));
    }
    if let Some(top) = request.logprobs {
        body["n_probs"] = json!(top.max(1));
    }
    Call { path: "/completion", body }
}

/// Reads an answer.
pub(super) struct Answer {
    words: Arc<Words>,
    logprobs: Option<u8>,
    said: u32,
    cached_told: bool,
    /// A token that seems to end the answer.
    held: Option<SampledToken>,
}

impl Answer {
    pub(super) fn new(words: Arc<Words>, logprobs: Option<u8>) -> Self {
        Self { words, logprobs, said: 0, cached_told: false, held: None }
    }

    /// The tokens of an event; with those before them that did not come.
    fn news(&mut self, data: &Value) -> Result<Vec<SampledToken>, String> {
        let ids = tokens(&data["tokens"])?;
        let text = data["content"].as_str().unwrap_or_default();
        let Some(total) = count(&data["tokens_predicted"]) else {
            return Err("tokens_predicted is missing".to_owned());
        };
        let lacking = total.saturating_sub(self.said) as usize;
        self.said = total;
        if ids.len() < lacking && !text.is_empty() {
            return Ok(plain(&self.words.tokens(text)?));
        }
        let told = |at: usize| self.logprobs.and(data["completion_probabilities"].get(at));
        ids.iter().enumerate().map(|(at, id)| sampled(*id, told(at), self.logprobs)).collect()
    }
}

fn sampled(id: u32, told: Option<&Value>, wanted: Option<u8>) -> Result<SampledToken, String> {
    let logprob = |value: &Value| value["logprob"].as_f64().unwrap_or(f64::NEG_INFINITY) as f32;
    let top = told.and_then(|told| told["top_logprobs"].as_array()).map(Vec::as_slice).unwrap_or_default();
    let likely = |entry: &Value| token(&entry["id"]).map(|id| TokenLogprob { id, logprob: logprob(entry) });
    let top = top.iter().take(wanted.unwrap_or(0).into()).map(likely).collect::<Result<_, _>>()?;
    Ok(SampledToken { id, logprob: told.map(logprob), top })
}

impl Reader for Answer {
    fn read(&mut self, data: &Value) -> Result<Chunk, String> {
        if let Some(end) = fault(data) {
            return Ok(Chunk { end: Some(end), ..Chunk::default() });
        }
        let cached = count(&data["timings"]["cache_n"]).filter(|_| !std::mem::replace(&mut self.cached_told, true));
        let mut tokens: Vec<SampledToken> = self.held.take().into_iter().collect();
        if data["stop"].as_bool() == Some(true) {
            let end = match data["stop_type"].as_str() {
                Some("eos" | "word") => End::Stop { told: !tokens.is_empty() },
                Some("limit") => End::Length,
                other => return Err(format!("the answer ended with stop_type {other:?}")),
            };
            return Ok(Chunk { tokens, cached, end: Some(end) });
        }
        let silent = data["content"].as_str().is_none_or(str::is_empty);
        tokens.extend(self.news(data)?);
        if silent || tokens.last().is_some_and(|last| self.words.eos.contains(&last.id)) {
            self.held = tokens.pop();
        }
        Ok(Chunk { tokens, cached, end: None })
    }

    fn close(&mut self) -> Chunk {
        Chunk::default()
    }
}
