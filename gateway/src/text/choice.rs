//! One answer: its tokens in, its text, log-probabilities and end out.

use std::{collections::VecDeque, sync::Arc};

use starling_actors::engine::{FinishReason, SampledToken};

use crate::text::{Decoding, Detokenizer, stop::StopMatcher};

/// What all answers of one request share.
#[derive(Debug)]
pub struct TextRules {
    /// How tokens become bytes.
    pub decoding: Arc<Decoding>,
    /// Texts that end an answer; not shown. None of them empty.
    pub stops: Arc<[String]>,
    /// Stop texts are looked for only behind this many tokens.
    pub tokens_min: u32,
    /// Leave control tokens out of the text.
    pub skip_special: bool,
    /// Keep an entry per token.
    pub logprobs: bool,
}

/// Why an answer ended, as the client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token, a stop token or a stop text.
    Stop,
    /// The token budget or the context is used up.
    Length,
}

impl Finish {
    /// The word on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A token of the answer and where its text begins.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEntry {
    /// The token with its log-probabilities.
    pub token: SampledToken,
    /// Characters of the answer before it.
    pub char_offset: usize,
}

/// What some tokens added to an answer.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// New text, possibly none.
    pub text: String,
    /// Entries of the tokens whose text is out, in order; empty unless asked for.
    pub entries: Vec<TokenEntry>,
    /// Set once, with the answer's last text.
    pub finish: Option<Finish>,
}

impl Piece {
    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.text.clear();
        self.entries.clear();
        self.finish = None;
    }

    /// Nothing a client would want to see.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.entries.is_empty() && self.finish.is_none()
    }
}

/// An entry whose text is not out yet.
#[derive(Debug)]
struct Waiting {
    entry: TokenEntry,
    /// Where its text begins, in bytes of the decoded answer.
    start: usize,
}

/// The state of one answer.
#[derive(Debug)]
pub struct ChoiceText {
    rules: Arc<TextRules>,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// Bytes and characters decoded, held-back ones included.
    decoded: usize,
    decoded_chars: usize,
    /// Bytes handed out.
    released: usize,
    waiting: VecDeque<Waiting>,
    scratch: String,
    tokens: u64,
    finish: Option<Finish>,
}

impl ChoiceText {
    /// An answer without tokens.
    #[must_use]
    pub fn new(rules: Arc<TextRules>) -> Self {
        Self {
            detokenizer: Detokenizer::new(rules.decoding.clone(), rules.skip_special),
            stop: StopMatcher::new(rules.stops.clone()),
            decoded: 0,
            decoded_chars: 0,
            released: 0,
            waiting: VecDeque::new(),
            scratch: String::new(),
            tokens: 0,
            finish: None,
            rules,
        }
    }

    /// Tokens so far, up to and including the one that ended the answer.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Set when the answer is over.
    #[must_use]
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Takes new tokens and appends what they show to `out`. After the end, does nothing.
    ///
    /// With [`FinishReason::Stop`] the last token is the one that ended the answer: counted, never shown.
    pub fn push(&mut self, tokens: &[SampledToken], finish: Option<FinishReason>, out: &mut Piece) {
        for (index, token) in tokens.iter().enumerate() {
            if self.finish.is_some() {
                return;
            }
            self.tokens += 1;
            if finish == Some(FinishReason::Stop) && index + 1 == tokens.len() {
                break;
            }
            self.push_token(token, out);
        }
        if self.finish.is_some() {
            return;
        }
        match finish {
            Some(FinishReason::Stop) => self.end(Finish::Stop, out),
            Some(FinishReason::Length) => self.end(Finish::Length, out),
            // The caller turns these into errors before they come here.
            Some(FinishReason::Cancelled | FinishReason::Error) | None => {}
        }
    }

    fn push_token(&mut self, token: &SampledToken, out: &mut Piece) {
        if self.rules.logprobs {
            let entry = TokenEntry { token: token.clone(), char_offset: self.decoded_chars };
            self.waiting.push_back(Waiting { entry, start: self.decoded });
        }
        self.scratch.clear();
        self.detokenizer.push(token.id, &mut self.scratch);
        if self.release(out) {
            // Tokens that begin at or behind the cut show nothing of themselves.
            self.release_entries(self.released, out);
            self.waiting.clear();
            self.finish = Some(Finish::Stop);
            out.finish = self.finish;
        } else {
            self.release_entries(self.released, out);
        }
    }

    /// Sends `scratch` through the stop search. True when a stop is complete.
    fn release(&mut self, out: &mut Piece) -> bool {
        self.decoded += self.scratch.len();
        if self.rules.logprobs {
            self.decoded_chars += self.scratch.chars().count();
        }
        let before = out.text.len();
        let searched = self.tokens > u64::from(self.rules.tokens_min);
        let stopped = if searched {
            self.stop.push(&self.scratch, &mut out.text)
        } else {
            out.text.push_str(&self.scratch);
            false
        };
        self.released += out.text.len() - before;
        stopped
    }

    fn release_entries(&mut self, end: usize, out: &mut Piece) {
        while let Some(first) = self.waiting.front()
            && first.start < end
        {
            out.entries.extend(self.waiting.pop_front().map(|waiting| waiting.entry));
        }
    }

    fn end(&mut self, finish: Finish, out: &mut Piece) {
        self.scratch.clear();
        self.detokenizer.finish(&mut self.scratch);
        if self.release(out) {
            self.release_entries(self.released, out);
            self.waiting.clear();
        } else {
            self.stop.finish(&mut out.text);
            self.release_entries(usize::MAX, out);
        }
        self.finish = Some(finish);
        out.finish = self.finish;
    }
}
