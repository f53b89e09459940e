//! SGLang: `/generate` with `input_ids`, answers with `output_ids`.
//!
//! Servers repeat the whole answer in each event, or give what is new (`--incremental-streaming-output`); the count of all tokens
//! tells which. A salt goes as `extra_key`. A priority is not sent: servers that do not schedule by it refuse it.

use serde_json::{Map, Value, json};
use starling_ids::TokenId;

use super::{Call, Chunk, End, Reader, Setting, count, draw_seed, fault, salt, token, tokens, tokens_min};
use crate::contract::{SampledToken, SequenceFault, SequenceRequest, TokenLogprob};

pub(super) fn write(request: &SequenceRequest, setting: &Setting<'_>) -> Call {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let mut wishes = json!({
        "max_new_tokens": stop.tokens_max,
        "min_new_tokens": tokens_min(request),
        "ignore_eos": stop.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": if sampling.top_k == 0 { -1 } else { i64::from(sampling.top_k) },
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "skip_special_tokens": false,
    });
    let mut more = Map::new();
    if !stop.token_ids.is_empty() {
        more.insert("stop_token_ids".to_owned(), json!(&stop.token_ids));
    }
    if let Some(seed) = draw_seed(request) {
        more.insert("sampling_seed".to_owned(), json!(seed));
    }
    if !sampling.logit_bias.is_empty() {
        let bias = sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)));
        more.insert("logit_bias".to_owned(), bias.collect::<Map<_, _>>().into());
    }
    if let Some(wishes) = wishes.as_object_mut() {
        wishes.extend(more);
    }
    let mut body = json!({"input_ids": &*request.prompt, "sampling_params": wishes, "stream": true});
    if let Some(top) = request.logprobs {
        body["return_logprob"] = json!(true);
        body["logprob_start_len"] = json!(-1);
        body["top_logprobs_num"] = json!(top);
    }
    if let Some(salt) = salt(request, setting.seed) {
        body["extra_key"] = json!(salt);
    }
    Call { path: "/generate", body }
}

/// Reads an answer.
#[derive(Debug)]
pub(super) struct Answer {
    said: usize,
    cached_told: bool,
    logprobs: Option<u8>,
}

impl Answer {
    pub(super) fn new(logprobs: Option<u8>) -> Self {
        Self { said: 0, cached_told: false, logprobs }
    }

    /// What is new, with its probabilities: the last tokens of the list, whether it is all of the answer or what is new.
    fn news(&mut self, data: &Value, total: usize) -> Result<Vec<SampledToken>, String> {
        let ids =
            tokens(&data["output_ids"]).map_err(|_| "output_ids are missing; a newer SGLang is needed".to_owned())?;
        let new = total.checked_sub(self.said).filter(|new| *new <= ids.len());
        let new = new.ok_or_else(|| {
            let (said, here) = (self.said, ids.len());
            format!("completion_tokens is {total} and {here} output_ids came, after {said} tokens")
        })?;
        self.said = total;
        let meta = &data["meta_info"];
        let last = |list: &Value| -> Vec<Value> {
            let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
            list[list.len().saturating_sub(new)..].to_vec()
        };
        let (own, top) = (last(&meta["output_token_logprobs"]), last(&meta["output_top_logprobs"]));
        let news = ids[ids.len() - new..].iter().enumerate();
        news.map(|(at, id)| self.sampled(*id, own.get(at), top.get(at))).collect()
    }

    fn sampled(&self, id: TokenId, own: Option<&Value>, top: Option<&Value>) -> Result<SampledToken, String> {
        if self.logprobs.is_none() {
            return Ok(SampledToken { id, logprob: None, top: Vec::new() });
        }
        let top = top.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let top = top.iter().map(likely).collect::<Result<_, _>>()?;
        Ok(SampledToken { id, logprob: own.map(likely).transpose()?.map(|own| own.logprob), top })
    }
}

impl Reader for Answer {
    fn read(&mut self, data: &Value) -> Result<Chunk, String> {
        if let Some(end) = fault(data) {
            return Ok(Chunk { end: Some(end), ..Chunk::default() });
        }
        let (meta, reason) = (&data["meta_info"], &data["meta_info"]["finish_reason"]);
        if reason["type"] == "abort" {
            return Ok(Chunk { end: Some(aborted(reason)), ..Chunk::default() });
        }
        let total = count(&meta["completion_tokens"]).ok_or_else(|| "completion_tokens is missing".to_owned())?;
        let mut tokens = self.news(data, total as usize)?;
        let cached = count(&meta["cached_tokens"]).filter(|_| !std::mem::replace(&mut self.cached_told, true));
        let end = match reason["type"].as_str() {
            None => None,
            Some("length") => Some(End::Length),
            Some("stop") => {
                // Some servers leave the token out that ended the answer.
                if let Ok(matched) = token(&reason["matched"])
                    && tokens.last().is_none_or(|last| last.id != matched)
                {
                    tokens.push(SampledToken { id: matched, logprob: None, top: Vec::new() });
                }
                Some(End::Stop { told: !tokens.is_empty() })
            }
            Some(other) => return Err(format!("the answer ended with finish_reason {other:?}")),
        };
        Ok(Chunk { tokens, cached, end })
    }

    fn close(&mut self) -> Chunk {
        Chunk::default()
    }
}

fn aborted(reason: &Value) -> End {
    let said: String = reason["message"].as_str().unwrap_or("the server gave up").chars().take(300).collect();
    End::Fault(match reason["status_code"].as_u64() {
        Some(400) => SequenceFault::Refused(said),
        Some(429 | 503) => SequenceFault::Busy(said),
        _ => SequenceFault::Gone(said),
    })
}

/// `[logarithm, id, text]`.
fn likely(entry: &Value) -> Result<TokenLogprob, String> {
    let logprob = entry[0].as_f64().unwrap_or(f64::NEG_INFINITY) as f32;
    Ok(TokenLogprob { id: token(&entry[1])?, logprob })
}
