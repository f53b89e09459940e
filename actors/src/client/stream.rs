//! The frames of one request, with all that it holds.
//!
//! Called by whoever asked. Dropping it cancels the worker's sequences and gives the reservation back; so does its
//! end. Never: ends without saying why: a stream without every answer's finish is a lost worker.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use starling_cluster::stream::{Opened, StreamRx};
use starling_ids::{Incarnation, WorkerId};

use super::{
    outcome::lost,
    route::{Hold, Routed},
};
use crate::generate::{GenerateError, GenerateFrame};

/// Frames in order; ends after the last answer's finish. After an error there is nothing more.
pub struct GenerateStream {
    /// Who computes it.
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
    pub(super) fn new(opened: Opened, routed: Routed, choices: u32) -> Self {
        let Opened { tx, rx, .. } = opened;
        // The request was in the first body; nothing more is sent.
        tx.end();
        let Routed { worker, incarnation, hit_blocks, hold } = routed;
        let reader = Reader { rx, worker: worker.clone(), unfinished: choices, hold: Some(hold), over: false };
        let frames = stream::unfold(reader, |mut reader| async move {
            let item = reader.next().await?;
            Some((item, reader))
        });
        Self { worker, incarnation, hit_blocks, frames: frames.boxed() }
    }
}

struct Reader {
    rx: StreamRx,
    worker: WorkerId,
    unfinished: u32,
    hold: Option<Hold>,
    over: bool,
}

impl Reader {
    async fn next(&mut self) -> Option<Result<GenerateFrame, GenerateError>> {
        while !self.over {
            let item = match self.rx.recv().await {
                // The worker shows that it is alive.
                Some(Ok(bytes)) if bytes.is_empty() => continue,
                Some(Ok(bytes)) => self.frame(&bytes),
                Some(Err(error)) => Err(lost(&self.worker, error)),
                None if self.unfinished == 0 => break,
                None => Err(self.lost("the stream ended before every answer did")),
            };
            if item.is_err() {
                self.over = true;
                self.hold = None;
            }
            return Some(item);
        }
        None
    }

    fn frame(&mut self, bytes: &[u8]) -> Result<GenerateFrame, GenerateError> {
        let frame: GenerateFrame =
            rmp_serde::from_slice(bytes).map_err(|error| self.lost(&format!("a frame cannot be read: {error}")))?;
        if frame.finish.is_some() {
            self.unfinished = self.unfinished.saturating_sub(1);
            if self.unfinished == 0 {
                // Nothing runs there any more; the next decision shall see it.
                self.hold = None;
            }
        }
        Ok(frame)
    }

    fn lost(&self, reason: &str) -> GenerateError {
        GenerateError::WorkerLost { worker: self.worker.clone(), reason: reason.to_owned() }
    }
}
