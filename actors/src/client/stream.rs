//! The frames of one request, with all that it holds.
//!
//! Called by whoever asked. Dropping it cancels the worker's sequences and gives the reservation back; so does its
//! end. A worker that is lost mid-answer is replaced; the frames go on where they stopped. Never: ends without saying why.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use starling_cluster::stream::{Opened, StreamError, StreamRx};
use starling_ids::{Incarnation, WorkerId};
use tokio::time::Instant;

use super::{
    journey::Journey,
    outcome::{is_fault, lost},
    route::{Hold, Routed},
};
use crate::{
    generate::{GenerateError, GenerateFrame, RouteNote},
    route::receipt::Outcome,
};

/// Frames in order; ends after the last answer's finish. After an error there is nothing more.
pub struct GenerateStream {
    /// Who began to compute it.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// Prefix blocks the router expected in its cache.
    pub hit_blocks: u32,
    frames: BoxStream<'static, Result<GenerateFrame, GenerateError>>,
}

impl std::fmt::Debug for GenerateStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GenerateStream(from {})", self.worker)
    }
}

impl Stream for GenerateStream {
    type Item = Result<GenerateFrame, GenerateError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.frames.poll_next_unpin(cx)
    }
}

impl GenerateStream {
    pub(super) fn new(opened: Opened, routed: Routed, journey: Journey) -> Self {
        let (worker, incarnation, hit_blocks) = (routed.worker.clone(), routed.incarnation, routed.hit_blocks);
        let unfinished = journey.spec.choices;
        let told = vec![false; unfinished as usize];
        let reader = Reader {
            leg: Leg::new(opened, routed),
            journey,
            unfinished,
            told,
            outcome: Outcome::default(),
            over: false,
        };
        let frames = stream::unfold(reader, |mut reader| async move {
            let item = reader.next().await?;
            Some((item, reader))
        });
        Self { worker, incarnation, hit_blocks, frames: frames.boxed() }
    }
}

/// The part of the way that one worker goes.
struct Leg {
    rx: StreamRx,
    worker: WorkerId,
    incarnation: Incarnation,
    hold: Option<Hold>,
    /// Its first token came.
    spoke: bool,
}

impl Leg {
    fn new(opened: Opened, routed: Routed) -> Self {
        let Opened { tx, rx, .. } = opened;
        // The request was in the first body; nothing more is sent.
        tx.end();
        let Routed { worker, incarnation, hold, .. } = routed;
        Self { rx, worker, incarnation, hold: Some(hold), spoke: false }
    }
}

impl Drop for Reader {
    /// An answer that is wanted no longer ends here too: a gateway that found a stop text needs no more of it.
    fn drop(&mut self) {
        if self.outcome.answer_tokens > 0 {
            self.conclude();
        }
    }
}

struct Reader {
    leg: Leg,
    journey: Journey,
    unfinished: u32,
    /// Answers whose cached tokens the client was told.
    told: Vec<bool>,
    outcome: Outcome,
    over: bool,
}

impl Reader {
    async fn next(&mut self) -> Option<Result<GenerateFrame, GenerateError>> {
        while !self.over {
            let item = match self.leg.rx.recv().await {
                // The worker shows that it is alive.
                Some(Ok(bytes)) if bytes.is_empty() => continue,
                Some(Ok(bytes)) => self.frame(&bytes),
                // Every answer was whole when the worker was lost.
                Some(Err(_)) if self.unfinished == 0 => break,
                Some(Err(error)) => match self.go_on(error).await {
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
                None if self.unfinished == 0 => break,
                None => Err(self.lost("the stream ended before every answer did")),
            };
            if item.is_err() {
                self.over = true;
                self.leg.hold = None;
            }
            return Some(item);
        }
        None
    }

    /// To another worker; the error is the client's when there is none.
    async fn go_on(&mut self, error: StreamError) -> Result<(), GenerateError> {
        if !self.leg.spoke && is_fault(&error) && Instant::now() < self.journey.deadline {
            self.journey.fault_of(&self.leg.worker, self.leg.incarnation, self.leg.hold.as_ref());
        }
        // What the lost worker held goes back before the next decision.
        self.leg.hold = None;
        match self.journey.resume(&self.leg.worker, &error).await {
            Some((opened, routed)) => {
                self.leg = Leg::new(opened, routed);
                Ok(())
            }
            None => Err(lost(&self.leg.worker, error)),
        }
    }

    fn frame(&mut self, bytes: &[u8]) -> Result<GenerateFrame, GenerateError> {
        let mut frame: GenerateFrame =
            rmp_serde::from_slice(bytes).map_err(|error| self.lost(&format!("a frame cannot be read: {error}")))?;
        self.journey.said(&frame);
        // Only the first worker's word counts: what a later one found cached is this request's own.
        if let Some(told) = self.told.get_mut(frame.choice as usize)
            && std::mem::replace(told, *told || frame.cached_tokens.is_some())
        {
            frame.cached_tokens = None;
        }
        self.take_note(&frame);
        if frame.finish.is_some() {
            self.unfinished = self.unfinished.saturating_sub(1);
            if self.unfinished == 0 {
                // Nothing runs there any more; the next decision shall see it.
                self.conclude();
            }
        }
        Ok(frame)
    }

    /// Adds to what came of the request; the shard hears of its first token.
    fn take_note(&mut self, frame: &GenerateFrame) {
        if self.outcome.answer_tokens == 0 && !frame.tokens.is_empty() {
            self.outcome.ttft_ms = ms(self.journey.begun);
        }
        if !self.leg.spoke && !frame.tokens.is_empty() {
            self.leg.spoke = true;
            self.leg.hold.iter().for_each(|hold| hold.note(RouteNote::Prefilled));
            self.journey.inner.failures.worked(&self.leg.worker, self.leg.incarnation);
        }
        self.outcome.cached_tokens += frame.cached_tokens.unwrap_or(0);
        self.outcome.answer_tokens += u32::try_from(frame.tokens.len()).unwrap_or(u32::MAX);
    }

    /// Gives the reservation back with what came of it.
    fn conclude(&mut self) {
        if let Some(hold) = self.leg.hold.take() {
            let (total_ms, resumed) = (ms(self.journey.begun), self.journey.losses);
            let outcome = Outcome { total_ms, resumed, ..self.outcome };
            hold.note(RouteNote::Ended(outcome));
            self.journey.slip.iter().for_each(|slip| slip.ended(outcome));
        }
    }

    fn lost(&self, reason: &str) -> GenerateError {
        GenerateError::WorkerLost { worker: self.leg.worker.clone(), reason: reason.to_owned() }
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
