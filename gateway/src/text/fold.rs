//! All answers of one prompt, and the fold that turns their pieces into a whole reply.
//!
//! A streamed reply writes the pieces, a unary reply folds them: there is no second way to an answer.

use std::sync::Arc;

use starling_actors::{engine::FinishReason, generate::GenerateFrame};
use thiserror::Error;

use crate::text::{ChoiceText, Finish, Piece, TextRules, TokenEntry};

/// A frame that is not part of a good answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FrameFault {
    /// More answers than were asked for.
    #[error("the worker sent answer {0}, which was not asked for")]
    UnknownChoice(u32),
    /// The engine gave up on the request.
    #[error("the engine failed on this request")]
    EngineFailed,
    /// The worker cancelled it without being asked.
    #[error("the worker cancelled this request")]
    Cancelled,
}

/// The answers to one prompt while they grow. Each has its own state; they share nothing that changes.
#[derive(Debug)]
pub struct Answers {
    choices: Vec<ChoiceText>,
    open: usize,
    cached_tokens: Option<u32>,
}

impl Answers {
    /// `choices` answers without tokens.
    #[must_use]
    pub fn new(rules: &Arc<TextRules>, choices: u32) -> Self {
        let choices: Vec<_> = (0..choices).map(|_| ChoiceText::new(rules.clone())).collect();
        Self { open: choices.len(), choices, cached_tokens: None }
    }

    /// Takes a frame and appends what it shows to `out`, which belongs to answer `frame.choice`.
    pub fn absorb(&mut self, frame: &GenerateFrame, out: &mut Piece) -> Result<(), FrameFault> {
        match frame.finish {
            Some(FinishReason::Error) => return Err(FrameFault::EngineFailed),
            Some(FinishReason::Cancelled) => return Err(FrameFault::Cancelled),
            Some(FinishReason::Stop | FinishReason::Length) | None => {}
        }
        let choice = self.choices.get_mut(frame.choice as usize).ok_or(FrameFault::UnknownChoice(frame.choice))?;
        // Later answers find the prompt cached by the first, so only the first tells what the prompt cost.
        if frame.choice == 0 && self.cached_tokens.is_none() {
            self.cached_tokens = frame.cached_tokens;
        }
        let was_open = choice.finish().is_none();
        choice.push(&frame.tokens, frame.finish, out);
        if was_open && choice.finish().is_some() {
            self.open -= 1;
        }
        Ok(())
    }

    /// True when every answer has ended.
    #[must_use]
    pub fn done(&self) -> bool {
        self.open == 0
    }

    /// Prompt tokens that came from a cache.
    #[must_use]
    pub fn cached_tokens(&self) -> u64 {
        u64::from(self.cached_tokens.unwrap_or(0))
    }

    /// Tokens of all answers.
    #[must_use]
    pub fn completion_tokens(&self) -> u64 {
        self.choices.iter().map(ChoiceText::tokens).sum()
    }
}

/// One whole answer.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its tokens, when log-probabilities were asked for.
    pub entries: Vec<TokenEntry>,
    /// Why it ended.
    pub finish: Option<Finish>,
}

/// The fold of a stream: one [`Answer`] per choice, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Transcript {
    /// The answers.
    pub answers: Vec<Answer>,
}

impl Transcript {
    /// `choices` empty answers.
    #[must_use]
    pub fn new(choices: usize) -> Self {
        Self { answers: vec![Answer::default(); choices] }
    }

    /// Appends a piece to its answer.
    pub fn absorb(&mut self, choice: usize, piece: &mut Piece) {
        let Some(answer) = self.answers.get_mut(choice) else { return };
        answer.text.push_str(&piece.text);
        answer.entries.append(&mut piece.entries);
        answer.finish = answer.finish.or(piece.finish);
    }
}

#[cfg(test)]
mod tests;
