//! The frames of one request, with all that it holds.
//!
//! Called by whoever asked. Dropping it cancels the worker's sequences and gives the reservation back; so does its
//! end. A worker that is lost mid-answer is replaced; the frames go on where they stopped. One that asks its client to leave
//! is left when another one has taken over. Never: ends without saying why.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use starling_cluster::stream::{FaultKind, Opened, StreamError, StreamRx};
use starling_ids::{AttemptId, Incarnation, Metric, WorkerId};
use tokio::time::Instant;

use super::{
    journey::Journey,
    moving::{Next, begins_at, count},
    outcome::{is_fault, lost},
    route::{Hold, Routed},
};
use crate::{
    generate::{GenerateError, GenerateFrame, RouteNote, Said, WayNote},
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
            leg: Leg::new(opened, routed, journey.attempt()),
            next: Next::Nobody,
            pause: Pause::default(),
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
pub(super) struct Leg {
    pub(super) rx: StreamRx,
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    /// Which attempt of the request it is.
    pub(super) attempt: AttemptId,
    hold: Option<Hold>,
    /// Its first token came.
    spoke: bool,
}

impl Leg {
    pub(super) fn new(opened: Opened, routed: Routed, attempt: AttemptId) -> Self {
        let Opened { tx, rx, .. } = opened;
        // The request was in the first body; nothing more is sent.
        tx.end();
        let Routed { worker, incarnation, hold, .. } = routed;
        Self { rx, worker, incarnation, attempt, hold: Some(hold), spoke: false }
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

/// From the last token of a worker that was left to the first of the next one.
#[derive(Debug, Default)]
struct Pause {
    last_token: Option<Instant>,
    /// The request has moved and its next token has not come.
    moved: bool,
}

struct Reader {
    leg: Leg,
    /// Who is to go on.
    next: Next,
    pause: Pause,
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
            let heard = tokio::select! {
                biased;
                heard = self.leg.rx.recv() => heard,
                () = self.next.turn() => continue,
                () = asked(&mut self.leg.hold) => {
                    if self.unfinished > 0 && self.leg.spoke {
                        self.next.seek(&mut self.journey, &self.leg);
                    }
                    continue;
                }
            };
            let item = match heard {
                // The worker shows that it is alive.
                Some(Ok(bytes)) if bytes.is_empty() => continue,
                Some(Ok(bytes)) => match self.hear(&bytes).await {
                    Some(item) => item,
                    None => continue,
                },
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

    /// Takes what the worker says. `None` when it is nothing for the client.
    async fn hear(&mut self, bytes: &[u8]) -> Option<Result<GenerateFrame, GenerateError>> {
        let unreadable = |error| self.lost(&format!("a frame cannot be read: {error}"));
        match Said::read(bytes).map_err(unreadable) {
            Err(error) => Some(Err(error)),
            Ok(Said::Frame(frame)) => Some(Ok(self.frame(frame))),
            Ok(Said::Way(WayNote::Leave)) => {
                if self.unfinished > 0 {
                    self.next.seek(&mut self.journey, &self.leg);
                }
                None
            }
            Ok(Said::Way(WayNote::Moved)) => {
                let arrived = self.next.arrive().await;
                self.arrive(arrived, StreamError::Broken("it had left for another worker".to_owned()))
                    .await
                    .err()
                    .map(Err)
            }
            Ok(Said::Way(WayNote::From(_))) => None,
        }
    }

    /// To the worker that took the request over; without one, or when it begins elsewhere than here, to any other.
    async fn arrive(&mut self, next: Option<(Leg, Bytes)>, error: StreamError) -> Result<(), GenerateError> {
        let answered = self.journey.answered();
        match next.filter(|(_, bytes)| begins_at(bytes) == Some(answered)) {
            Some((leg, _)) => {
                count("moved");
                tracing::debug!(from = %self.leg.worker, to = %leg.worker, answered, "a request goes on elsewhere");
                self.leg = leg;
                self.pause.moved = true;
                Ok(())
            }
            None => {
                count("lost");
                self.go_on(error).await
            }
        }
    }

    /// To another worker; the error is the client's when there is none.
    async fn go_on(&mut self, error: StreamError) -> Result<(), GenerateError> {
        // An engine in another process may find the request wrong only after its worker took it: no other would do better.
        if let StreamError::Failed(fault) = &error
            && fault.kind == FaultKind::Invalid
        {
            return Err(GenerateError::Invalid { message: fault.message.clone(), param: fault.param.clone() });
        }
        if !self.leg.spoke && is_fault(&error) && Instant::now() < self.journey.deadline {
            self.journey.fault_of(&self.leg.worker, self.leg.incarnation, self.leg.hold.as_ref());
        }
        // What the lost worker held goes back before the next decision.
        self.leg.hold = None;
        if let Some((leg, _)) = self.next.rescue(self.journey.answered()) {
            count("moved");
            self.leg = leg;
            return Ok(());
        }
        match self.journey.resume(&self.leg.worker, &error).await {
            Some((opened, routed)) => {
                self.leg = Leg::new(opened, routed, self.journey.attempt());
                Ok(())
            }
            None => Err(lost(&self.leg.worker, error)),
        }
    }

    fn frame(&mut self, mut frame: GenerateFrame) -> GenerateFrame {
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
        frame
    }

    /// Adds to what came of the request; the shard hears of its first token.
    fn take_note(&mut self, frame: &GenerateFrame) {
        if !frame.tokens.is_empty() {
            let before = self.pause.last_token.replace(Instant::now());
            if std::mem::take(&mut self.pause.moved)
                && let Some(before) = before
            {
                metrics::histogram!(Metric::GatewayMoveSeconds.name()).record(before.elapsed().as_secs_f64());
            }
        }
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
        self.next = Next::Nobody;
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

/// Waits until the shard wishes that the request goes on elsewhere.
async fn asked(hold: &mut Option<Hold>) {
    match hold {
        Some(hold) => hold.asked().await,
        None => std::future::pending().await,
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
