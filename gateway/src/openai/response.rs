//! Replies and stream events, written into a buffer.
//!
//! A stream's events differ in a few bytes; the rest is made once per stream ([`ReplyWriter::new`]).

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use starling_actors::engine::{SampledToken, TokenLogprob};
use starling_ids::{RequestId, TokenId};

use crate::{
    openai::json,
    text::{Answer, Decoding, Finish, Piece, TokenEntry, Transcript, Usage},
};

/// Which of the two shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `chat.completion`.
    Chat,
    /// `text_completion`.
    Text,
}

/// What a reply says about itself.
#[derive(Debug, Clone)]
pub struct ReplyHead {
    /// The request; the reply's id is made of it.
    pub request: RequestId,
    /// Seconds since 1970.
    pub created_s: u64,
    /// The model, as served.
    pub model: String,
    /// Chat or raw.
    pub shape: Shape,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
    /// Names the tokens of log-probabilities.
    pub decoding: Arc<Decoding>,
}

/// Writes one reply, whole or as events.
#[derive(Debug)]
pub struct ReplyWriter {
    head: ReplyHead,
    /// From `{"id":` to `"choices":[`, for an event.
    event_head: Bytes,
    /// From `]` to the end of an event with choices.
    event_tail: &'static [u8],
    /// Choices whose role was told.
    opened: Vec<bool>,
}

impl ReplyWriter {
    /// The writer of one reply with `choices` answers. With `usage_follows`, events say that their usage is null.
    #[must_use]
    pub fn new(head: ReplyHead, choices: usize, usage_follows: bool) -> Self {
        let mut event_head = BytesMut::with_capacity(192);
        event_head.extend_from_slice(b"data: ");
        let object = match head.shape {
            Shape::Chat => "chat.completion.chunk",
            Shape::Text => "text_completion",
        };
        write_head(&mut event_head, &head, object);
        let event_tail: &[u8] = if usage_follows { b"}],\"usage\":null}\n\n" } else { b"}]}\n\n" };
        Self { head, event_head: event_head.freeze(), event_tail, opened: vec![false; choices] }
    }

    /// The events of one piece of one answer: the role when it is the first, the text, the end.
    pub fn piece(&mut self, out: &mut BytesMut, choice: u32, piece: &Piece) {
        if let Some(opened) = self.opened.get_mut(choice as usize)
            && !*opened
        {
            *opened = true;
            if self.head.shape == Shape::Chat {
                self.event(out, choice, None, |out| {
                    out.extend_from_slice(br#""delta":{"role":"assistant","content":""},"logprobs":null"#)
                });
            }
        }
        if !piece.text.is_empty() || !piece.entries.is_empty() {
            self.event(out, choice, None, |out| self.delta(out, &piece.text, &piece.entries));
        }
        if let Some(finish) = piece.finish {
            self.event(out, choice, Some(finish), |out| match self.head.shape {
                Shape::Chat => out.extend_from_slice(br#""delta":{},"logprobs":null"#),
                Shape::Text => out.extend_from_slice(br#""text":"","logprobs":null"#),
            });
        }
    }

    /// The event that carries the usage.
    pub fn usage_event(&self, out: &mut BytesMut, usage: &Usage) {
        out.extend_from_slice(&self.event_head);
        out.extend_from_slice(b"],\"usage\":");
        write_usage(out, usage);
        out.extend_from_slice(b"}\n\n");
    }

    /// The whole reply.
    pub fn unary(&self, out: &mut BytesMut, transcript: &Transcript, usage: &Usage) {
        let object = match self.head.shape {
            Shape::Chat => "chat.completion",
            Shape::Text => "text_completion",
        };
        write_head(out, &self.head, object);
        for (index, answer) in transcript.answers.iter().enumerate() {
            if index > 0 {
                out.extend_from_slice(b",");
            }
            self.choice(out, index as u64, answer);
        }
        out.extend_from_slice(b"],\"usage\":");
        write_usage(out, usage);
        out.extend_from_slice(b"}");
    }

    fn choice(&self, out: &mut BytesMut, index: u64, answer: &Answer) {
        out.extend_from_slice(b"{\"index\":");
        json::integer(out, index);
        match self.head.shape {
            Shape::Chat => {
                out.extend_from_slice(br#","message":{"role":"assistant","content":"#);
                json::string(out, &answer.text);
                out.extend_from_slice(b",\"refusal\":null}");
            }
            Shape::Text => {
                out.extend_from_slice(b",\"text\":");
                json::string(out, &answer.text);
            }
        }
        out.extend_from_slice(b",\"logprobs\":");
        self.logprobs(out, &answer.entries);
        write_finish(out, answer.finish);
        out.extend_from_slice(b"}");
    }

    fn event(&self, out: &mut BytesMut, choice: u32, finish: Option<Finish>, body: impl FnOnce(&mut BytesMut)) {
        out.reserve(self.event_head.len() + 160);
        out.extend_from_slice(&self.event_head);
        out.extend_from_slice(b"{\"index\":");
        json::integer(out, u64::from(choice));
        out.extend_from_slice(b",");
        body(out);
        write_finish(out, finish);
        out.extend_from_slice(self.event_tail);
    }

    fn delta(&self, out: &mut BytesMut, text: &str, entries: &[TokenEntry]) {
        match self.head.shape {
            Shape::Chat => {
                out.extend_from_slice(br#""delta":{"content":"#);
                json::string(out, text);
                out.extend_from_slice(b"}");
            }
            Shape::Text => {
                out.extend_from_slice(br#""text":"#);
                json::string(out, text);
            }
        }
        out.extend_from_slice(b",\"logprobs\":");
        self.logprobs(out, entries);
    }

    fn logprobs(&self, out: &mut BytesMut, entries: &[TokenEntry]) {
        match self.head.shape {
            _ if !self.head.logprobs => out.extend_from_slice(b"null"),
            Shape::Chat => self.chat_logprobs(out, entries),
            Shape::Text => self.text_logprobs(out, entries),
        }
    }

    fn chat_logprobs(&self, out: &mut BytesMut, entries: &[TokenEntry]) {
        out.extend_from_slice(b"{\"content\":[");
        separated(out, entries, |out, entry| {
            self.token(out, entry.token.id, chosen(&entry.token));
            out.extend_from_slice(b",\"top_logprobs\":[");
            separated(out, &entry.token.top, |out, top: &TokenLogprob| {
                self.token(out, top.id, top.logprob);
                out.extend_from_slice(b"}");
            });
            out.extend_from_slice(b"]}");
        });
        out.extend_from_slice(b"],\"refusal\":null}");
    }

    /// A token's object, left open.
    fn token(&self, out: &mut BytesMut, id: TokenId, value: f32) {
        let bytes = self.head.decoding.token_bytes(id);
        out.extend_from_slice(b"{\"token\":");
        json::string(out, &String::from_utf8_lossy(&bytes));
        out.extend_from_slice(b",\"logprob\":");
        json::logprob(out, value);
        out.extend_from_slice(b",\"bytes\":[");
        separated(out, &bytes, |out, byte| json::integer(out, u64::from(*byte)));
        out.extend_from_slice(b"]");
    }

    /// The likeliest tokens, and the chosen one when it is not among them. A name appears once: the likeliest wins.
    fn text_top(&self, out: &mut BytesMut, token: &SampledToken) {
        let mut names: Vec<(String, f32)> = Vec::with_capacity(token.top.len() + 1);
        let own = (token.id, chosen(token));
        for (id, logprob) in token.top.iter().map(|top| (top.id, top.logprob)).chain([own]) {
            let name = self.text_name(id);
            if names.iter().all(|(other, _)| *other != name) {
                names.push((name, logprob));
            }
        }
        out.extend_from_slice(b"{");
        separated(out, &names, |out, (name, logprob)| {
            json::string(out, name);
            out.extend_from_slice(b":");
            json::logprob(out, *logprob);
        });
        out.extend_from_slice(b"}");
    }

    fn text_name(&self, id: TokenId) -> String {
        String::from_utf8(self.head.decoding.token_bytes(id)).unwrap_or_else(|error| bytes_name(error.as_bytes()))
    }

    fn text_logprobs(&self, out: &mut BytesMut, entries: &[TokenEntry]) {
        let name = |out: &mut BytesMut, id: TokenId| json::string(out, &self.text_name(id));
        out.extend_from_slice(b"{\"tokens\":[");
        separated(out, entries, |out, entry| name(out, entry.token.id));
        out.extend_from_slice(b"],\"token_logprobs\":[");
        separated(out, entries, |out, entry| json::logprob(out, chosen(&entry.token)));
        out.extend_from_slice(b"],\"top_logprobs\":[");
        separated(out, entries, |out, entry| {
            self.text_top(out, &entry.token);
        });
        out.extend_from_slice(b"],\"text_offset\":[");
        separated(out, entries, |out, entry| json::integer(out, entry.char_offset as u64));
        out.extend_from_slice(b"]}");
    }
}

/// Bytes that are no text, as OpenAI names them: `bytes:\xe2\x80`.
fn bytes_name(bytes: &[u8]) -> String {
    bytes.iter().fold("bytes:".to_owned(), |name, byte| name + &format!("\\x{byte:02x}"))
}

/// The chosen token's own log-probability; an engine that was asked always reports it.
fn chosen(token: &SampledToken) -> f32 {
    token.logprob.unwrap_or(f32::NEG_INFINITY)
}

fn separated<T>(out: &mut BytesMut, items: &[T], each: impl Fn(&mut BytesMut, &T)) {
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.extend_from_slice(b",");
        }
        each(out, item);
    }
}

fn write_head(out: &mut BytesMut, head: &ReplyHead, object: &str) {
    let prefix = match head.shape {
        Shape::Chat => "chatcmpl-",
        Shape::Text => "cmpl-",
    };
    out.extend_from_slice(b"{\"id\":");
    json::string(out, &format!("{prefix}{}", head.request));
    out.extend_from_slice(b",\"object\":");
    json::string(out, object);
    out.extend_from_slice(b",\"created\":");
    json::integer(out, head.created_s);
    out.extend_from_slice(b",\"model\":");
    json::string(out, &head.model);
    out.extend_from_slice(b",\"choices\":[");
}

fn write_finish(out: &mut BytesMut, finish: Option<Finish>) {
    out.extend_from_slice(b",\"finish_reason\":");
    match finish {
        Some(finish) => json::string(out, finish.as_str()),
        None => out.extend_from_slice(b"null"),
    }
}

fn write_usage(out: &mut BytesMut, usage: &Usage) {
    out.extend_from_slice(b"{\"prompt_tokens\":");
    json::integer(out, usage.prompt_tokens);
    out.extend_from_slice(b",\"completion_tokens\":");
    json::integer(out, usage.completion_tokens);
    out.extend_from_slice(b",\"total_tokens\":");
    json::integer(out, usage.total_tokens());
    out.extend_from_slice(b",\"prompt_tokens_details\":{\"cached_tokens\":");
    json::integer(out, usage.cached_tokens);
    out.extend_from_slice(b"}}");
}
