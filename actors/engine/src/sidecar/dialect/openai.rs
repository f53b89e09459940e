//! Any server with `/v1/completions` that gives text alone.
//!
//! The prompt goes out as its text, and the tokens of the answer are those that the model's own tokenizer makes of each piece of
//! text. So the text is right, while tokens and their number may differ from the server's, a special token in the prompt is one
//! only if the server reads it as one, and budgets are counted by the server. The token that ended the answer never comes.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Call, Chunk, End, Reader, Setting, count, draw_seed, fault, plain};
use crate::{contract::SequenceRequest, sidecar::words::Words};

pub(super) fn write(request: &SequenceRequest, setting: &Setting<'_>) -> Result<Call, String> {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let mut body = json!({
        "prompt": setting.words.text(&request.prompt)?,
        "max_tokens": stop.tokens_max,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stream": true,
    });
    if let Some(model) = setting.model {
        body["model"] = json!(model);
    }
    if let Some(seed) = draw_seed(request) {
        body["seed"] = json!(seed);
    }
    Ok(Call { path: "/v1/completions", body })
}

/// Reads an answer.
pub(super) struct Answer {
    words: Arc<Words>,
}

impl Answer {
    pub(super) fn new(words: Arc<Words>) -> Self {
        Self { words }
    }
}

impl Reader for Answer {
    fn read(&mut self, data: &Value) -> Result<Chunk, String> {
        if let Some(end) = fault(data) {
            return Ok(Chunk { end: Some(end), ..Chunk::default() });
        }
        let cached = count(&data["usage"]["prompt_tokens_details"]["cached_tokens"]);
        let Some(choice) = data["choices"].get(0) else { return Ok(Chunk { cached, ..Chunk::default() }) };
        let text = choice["text"].as_str().unwrap_or_default();
        let tokens = if text.is_empty() { Vec::new() } else { plain(&self.words.tokens(text)?) };
        let end = match choice["finish_reason"].as_str() {
            None | Some("") => None,
            Some("stop") => Some(End::Stop { told: false }),
            Some("length") => Some(End::Length),
            Some(other) => return Err(format!("the answer ended with finish_reason {other:?}")),
        };
        Ok(Chunk { tokens, cached, end })
    }

    fn close(&mut self) -> Chunk {
        Chunk::default()
    }
}
