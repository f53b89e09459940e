//! The answers of one HTTP request while they grow. It owns the workers' streams, the deadline and the ticket.
//!
//! Dropping a [`Run`] drops the streams, which cancels the work: a handler or a body that goes away because
//! its client left needs no other signal. The ticket tells afterwards that nobody had settled it.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures::future::try_join_all;
use starling_actors::{
    client::Slip,
    generate::{GenerateError, GenerateSpec},
};
use tokio::time::Sleep;

use crate::{
    Backend, Call, Generation,
    admission::Ticket,
    caller::Who,
    context::Names,
    error::Fault,
    manner::Manner,
    metrics::Outcome,
    openai::validate::{PromptOrigin, name_field},
    text::{Answers, Piece, TextRules, Transcript, Usage},
};

/// One prompt and its answers.
struct Part {
    /// Gone when all its answers have ended.
    generation: Option<Generation>,
    answers: Answers,
    prompt_tokens: u64,
}

/// The answers of one HTTP request.
pub(crate) struct Run {
    parts: Vec<Part>,
    choices_per_part: u32,
    /// Which part is asked first next time, so that none starves the others.
    next: usize,
    deadline: Pin<Box<Sleep>>,
    ticket: Ticket,
    last_token: Option<Instant>,
    /// One for each prompt, when the client wants to know how they were routed.
    slips: Vec<Slip>,
}

/// What a run is started with.
pub(crate) struct Start<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) names: &'a Names,
    pub(crate) who: Who,
    pub(crate) manner: Manner,
    pub(crate) origin: PromptOrigin,
    pub(crate) rules: Arc<TextRules>,
    pub(crate) time: Duration,
}

impl Run {
    /// Sends every prompt out. Resolves when each was accepted by a worker; one refusal refuses all.
    pub(crate) async fn start(ticket: Ticket, start: Start<'_>, specs: Vec<GenerateSpec>) -> Result<Self, RunFault> {
        let choices_per_part = specs.first().map_or(1, |spec| spec.choices);
        let deadline = tokio::time::Instant::from_std(ticket.since()) + start.time;
        let prompt_tokens: Vec<u64> = specs.iter().map(|spec| spec.prompt.len() as u64).collect();
        let slips = specs.iter().filter(|_| start.manner.wishes.receipt).map(|_| Slip::default());
        let slips: Vec<Slip> = slips.collect();
        let calls = specs.into_iter().enumerate().map(|(index, spec)| {
            let spec = GenerateSpec { adapter: start.manner.adapter.clone(), ..spec };
            start.backend.generate(Call {
                request: start.names.request,
                spec,
                deadline: deadline.saturating_duration_since(tokio::time::Instant::now()),
                trace_parent: start.names.trace_parent.clone(),
                baggage: start.names.baggage.clone(),
                who: start.who.clone(),
                session: start.manner.session.clone(),
                wishes: start.manner.wishes.clone(),
                slip: slips.get(index).cloned(),
            })
        });
        let accepted = match tokio::time::timeout_at(deadline, try_join_all(calls)).await {
            Ok(Ok(generations)) => generations,
            Ok(Err(error)) => {
                let fault = name_field(error, start.origin).map_or_else(Fault::Generate, Fault::Validate);
                return Err(RunFault { fault, ticket });
            }
            Err(_) => return Err(RunFault { fault: Fault::Generate(GenerateError::Deadline), ticket }),
        };
        let part = |(generation, prompt_tokens)| Part {
            generation: Some(generation),
            answers: Answers::new(&start.rules, choices_per_part),
            prompt_tokens,
        };
        Ok(Self {
            parts: accepted.into_iter().zip(prompt_tokens).map(part).collect(),
            choices_per_part,
            next: 0,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            ticket,
            last_token: None,
            slips,
        })
    }

    /// How the prompts were routed as one line of JSON, when the client wants to know; at most so many candidates each.
    pub(crate) fn receipts(&self, candidates: usize) -> Option<String> {
        if self.slips.is_empty() {
            return None;
        }
        let receipts = self.slips.iter().flat_map(Slip::receipts).map(|receipt| receipt.brief(candidates));
        serde_json::to_string(&receipts.collect::<Vec<_>>())
            .inspect_err(|error| tracing::warn!(%error, "a receipt cannot be written"))
            .ok()
    }

    /// Answers of all prompts together.
    pub(crate) fn choices(&self) -> usize {
        self.parts.len() * self.choices_per_part as usize
    }

    /// What it cost so far.
    pub(crate) fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for part in &self.parts {
            usage.prompt_tokens += part.prompt_tokens;
            usage.cached_tokens += part.answers.cached_tokens();
            usage.completion_tokens += part.answers.completion_tokens();
        }
        usage
    }

    /// The next news: the number of an answer with `piece` filled, or `None` when all have ended.
    pub(crate) fn poll_piece(&mut self, cx: &mut Context<'_>, piece: &mut Piece) -> Poll<Result<Option<u32>, Fault>> {
        piece.clear();
        let parts = self.parts.len();
        for step in 0..parts {
            let index = (self.next + step) % parts;
            match self.poll_part(index, cx, piece) {
                Poll::Ready(Ok(Some(choice))) => {
                    self.next = (index + 1) % parts;
                    return Poll::Ready(Ok(Some(choice)));
                }
                Poll::Ready(Err(fault)) => return Poll::Ready(Err(fault)),
                Poll::Ready(Ok(None)) | Poll::Pending => {}
            }
        }
        if self.parts.iter().all(|part| part.generation.is_none()) {
            return Poll::Ready(Ok(None));
        }
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(Fault::Generate(GenerateError::Deadline)));
        }
        Poll::Pending
    }

    fn poll_part(&mut self, index: usize, cx: &mut Context<'_>, piece: &mut Piece) -> Poll<Result<Option<u32>, Fault>> {
        let base = index as u32 * self.choices_per_part;
        let part = &mut self.parts[index];
        while let Some(generation) = &mut part.generation {
            let frame = match generation.as_mut().poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Fault::Generate(error))),
                Poll::Ready(None) => {
                    let message = "the worker's stream ended before the answer did".to_owned();
                    return Poll::Ready(Err(Fault::Generate(GenerateError::Internal(message))));
                }
            };
            part.answers.absorb(&frame, piece)?;
            if !frame.tokens.is_empty() {
                measure(&mut self.last_token, &self.ticket);
            }
            if part.answers.done() {
                // Nothing more is wanted, whether or not the worker knows: a stop text ends it here.
                part.generation = None;
            }
            if !piece.is_empty() {
                return Poll::Ready(Ok(Some(base + frame.choice)));
            }
        }
        Poll::Ready(Ok(None))
    }

    /// Follows all answers to their end and folds them.
    pub(crate) async fn collect(mut self) -> Result<Collected, RunFault> {
        let mut transcript = Transcript::new(self.choices());
        let mut piece = Piece::default();
        loop {
            match std::future::poll_fn(|cx| self.poll_piece(cx, &mut piece)).await {
                Ok(Some(choice)) => transcript.absorb(choice as usize, &mut piece),
                Ok(None) => {
                    let (usage, receipts) = (self.usage(), self.receipts(RECEIPT_CANDIDATES));
                    return Ok(Collected { transcript, usage, receipts, ticket: self.ticket });
                }
                Err(fault) => return Err(RunFault { fault, ticket: self.ticket }),
            }
        }
    }

    /// Ends the work and says how it went. The ticket stays until the run is dropped.
    pub(crate) fn settle(&mut self, outcome: Outcome) {
        for part in &mut self.parts {
            part.generation = None;
        }
        self.ticket.settle(outcome);
    }
}

/// Candidates in a receipt that travels as a header: proxies take headers of some kilobytes.
const RECEIPT_CANDIDATES: usize = 3;

/// All answers, whole.
pub(crate) struct Collected {
    pub(crate) transcript: Transcript,
    pub(crate) usage: Usage,
    /// See [`Run::receipts`].
    pub(crate) receipts: Option<String>,
    pub(crate) ticket: Ticket,
}

/// A fault and the ticket of the request it ends.
pub(crate) struct RunFault {
    pub(crate) fault: Fault,
    pub(crate) ticket: Ticket,
}

/// Time to the first token, then between tokens.
fn measure(last_token: &mut Option<Instant>, ticket: &Ticket) {
    let now = Instant::now();
    match last_token.replace(now) {
        None => ticket.metrics().ttft_s.record((now - ticket.since()).as_secs_f64()),
        Some(before) => ticket.metrics().itl_s.record((now - before).as_secs_f64()),
    }
}
